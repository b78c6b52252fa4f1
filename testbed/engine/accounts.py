"""What a session's bytes may be, and the head of its decision log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from testbed.cache.budgets import device_slack_bytes, reserved_device_bytes
from testbed.cache.layout import device_budget
from testbed.decisions import Header, ModelShape

if TYPE_CHECKING:
    from testbed.engine.session import Session


def full_bytes(session: Session, length_tokens: int) -> int:
    """Everything in bf16: what budgets are fractions of."""
    return length_tokens * session.decoder.geometry.token_bytes(torch.bfloat16)


def device_budget_bytes(session: Session, length_tokens: int) -> int | None:
    """Most bytes on the device at that length."""
    full, config = full_bytes(session, length_tokens), session.config
    return device_budget(config.cache, config.budget_fraction, full, session.decoder.device)


def free_device_bytes(session: Session, length_tokens: int) -> int | None:
    """What pages may take of the device budget: of a share what slack leaves, of the memory what others leave too.

    A share is this sequence's own, so that decisions are the same alone and in a batch.
    """
    full, config = full_bytes(session, length_tokens), session.config.cache
    share = device_budget_bytes(session, length_tokens)
    memory = device_budget(config, None, full, session.decoder.device)
    left = [] if share is None else [share - device_slack_bytes(session.cache)]
    if memory is not None:
        left.append(memory - reserved_device_bytes(session.cache))
    return min(left, default=None)


def planned_device_bytes(session: Session) -> int:
    """What L0 and L1 hold by the plan in force, however far moves are."""
    held = session.cache.facts()["held_bytes"]
    return held["L0"] + held["L1"]


def log_header(session: Session) -> Header:
    """What the twin must know of the model, the cache and the policy."""
    geometry, decoder, cache = session.decoder.geometry, session.decoder, session.config.cache
    shape = ModelShape(
        decoder.name,
        geometry.layers,
        geometry.query_heads,
        geometry.kv_heads,
        geometry.head_dim,
        weights_bytes=decoder.weights_bytes,
        flops_per_token=2 * decoder.weights,
    )
    full, value_bytes = geometry.token_bytes(cache.torch_dtype), cache.torch_dtype.itemsize
    return Header(shape, cache.page_tokens, session.policy.name, full, value_bytes)
