"""A small fixed trace of signals, and the executor's side of the contract, for the tests of policies.

The numbers come from integer arithmetic, so that the golden decisions depend on no random generator but the one
that a part itself is handed a seed for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from torch import Tensor

from policies.base import SLOTS, Head, PageBytes, Phase, Plan, Policy, Signals

CONF = Path(__file__).parents[2] / "conf"
NAMED = sorted(path.stem for path in (CONF / "policy").glob("*.yaml"))
PARTS = sorted((slot, path.stem) for slot in SLOTS for path in (CONF / "policy" / slot).glob("*.yaml"))
POLICIES = [*NAMED, "redknot+elastic", "redknot+quest"]

LAYERS, KV_HEADS, PAGES, PAGE_TOKENS = 3, 2, 24, 16
PAGE_BYTES = PageBytes(compute=4096, int8=2304, int4=1280, prototype=320, background=384, metadata=64)
# Phase, decode steps so far, pages so far, tokens in the newest page.
MOMENTS = (
    (Phase.COMPRESS, 0, PAGES, 16),
    (Phase.TURN, 0, PAGES, 16),
    (Phase.DECODE, 1, PAGES + 1, 5),
    (Phase.DECODE, 12, PAGES + 1, 16),
    (Phase.DECODE, 40, PAGES + 3, 12),
)


def scrambled(shape: tuple[int, ...], salt: int) -> Tensor:
    """Numbers in [0, 1) that look random and are the same everywhere."""
    count = 1
    for length in shape:
        count *= length
    index = torch.arange(count, dtype=torch.int64) + 7919 * salt
    mixed = (index * 2654435761 + 40503) % 2**32
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) % 2**32
    return ((mixed ^ (mixed >> 13)) % 2**20).float().div(2**20).reshape(shape)


def is_about_heads(name: str) -> bool:
    """Whether a signal is [L, Hk]; its YAML says by its source."""
    source = yaml.safe_load((CONF / "signal" / f"{name}.yaml").read_text())["_target_"]
    return source.startswith(("testbed.engine.signals.heads.", "testbed.engine.signals.monitor."))


def values_for(needs: frozenset[str], pages: int, moment: int) -> dict[str, Tensor]:
    """What an executor would compute: only what was declared."""
    values: dict[str, Tensor] = {}
    for salt, name in enumerate(sorted(needs)):
        if is_about_heads(name):
            values[name] = scrambled((LAYERS, KV_HEADS), salt)
        else:
            values[name] = scrambled((LAYERS, KV_HEADS, pages), 100 * moment + salt)
    if "retrieval" in values:  # one for all streams, and silent until a turn is known
        values["retrieval"] = scrambled((pages,), 3) * (moment > 0)
    if "role" in values:  # no conversation
        values["role"] = torch.full((pages,), -1, dtype=torch.int8)
    for name in values.keys() & {"tool_call", "locked"}:  # no call, nothing locked
        values[name] = torch.zeros(pages)
    if "head_imported" in values:  # a class each
        values["head_imported"] = (values["head_imported"] * len(Head)).floor()
    if "window_mass" in values:  # pages after the prefill have none
        values["window_mass"] = values["window_mass"].clone()
        values["window_mass"][..., PAGES:] = -1.0
    if "last_access" in values:
        values["last_access"] = (values["last_access"] * 12).floor() - 1
    return values


def full_bytes(pages: int = PAGES) -> int:
    """Bytes of the whole cache in compute dtype."""
    return LAYERS * KV_HEADS * pages * PAGE_BYTES.compute


def hot_pages(pages: int) -> Tensor:
    """One page of sinks and two of recent tokens."""
    hot = torch.zeros(pages, dtype=torch.bool)
    hot[0] = True
    hot[-2:] = True
    return hot


def grown(plan: Plan, pages: int) -> Plan:
    """The plan with new pages as dense."""
    new = Plan.dense(LAYERS, KV_HEADS, pages - plan.mode.shape[2])
    mode, fmt, tier = (torch.cat([getattr(plan, k), getattr(new, k)], -1) for k in ("mode", "format", "tier"))
    return Plan(mode, fmt, tier)


def first_signals(needs: frozenset[str], budget_bytes: int | None = None) -> Signals:
    """The first moment, with every kind of head among the classes."""
    phase, step, pages, _ = MOMENTS[0]
    classes = torch.tensor([h % len(Head) for h in range(LAYERS * KV_HEADS)], dtype=torch.int8)
    return Signals(
        phase=phase,
        step=step,
        length_tokens=pages * PAGE_TOKENS,
        page_tokens=PAGE_TOKENS,
        hot=hot_pages(pages),
        held=Plan.dense(LAYERS, KV_HEADS, pages),
        page_bytes=PAGE_BYTES,
        device_budget_bytes=budget_bytes,
        classes=classes.reshape(LAYERS, KV_HEADS),
        values=values_for(needs, pages, 0),
        seed=11,
    )


def walk(policy: Policy, budget_bytes: int | None) -> Iterator[tuple[Signals, Plan]]:
    """The moments of the trace, each with the plan that the policy answers."""
    signals = replace(first_signals(policy.needs, budget_bytes), classes=None)
    signals = replace(signals, classes=policy.classifier.classify(signals))
    plan = signals.held
    for moment, (phase, step, pages, newest_tokens) in enumerate(MOMENTS):
        signals = replace(
            signals,
            phase=phase,
            step=step,
            length_tokens=(pages - 1) * PAGE_TOKENS + newest_tokens,
            hot=hot_pages(pages),
            held=grown(plan, pages),
            values=values_for(policy.needs, pages, moment),
        )
        plan = policy.plan(signals)
        yield signals, plan


def device_bytes(signals: Signals, plan: Plan) -> int:
    """Bytes on the device under a plan, counted page by page."""
    costs = signals.page_bytes
    size = (costs.compute, costs.int8, costs.int4)
    total = 0
    for modes, formats, tiers in zip(
        plan.mode.flatten(0, 1).tolist(),
        plan.format.flatten(0, 1).tolist(),
        plan.tier.flatten(0, 1).tolist(),
        strict=True,
    ):
        total += sum(size[f] for f, t in zip(formats, tiers, strict=True) if t in (0, 1))
        total += modes.count(2) * costs.prototype + (3 in modes) * costs.background
        total += len(modes) * costs.metadata
    return total
