"""A plan as the cache takes it: tensors of its own over [S, N], and what no plan may ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from policies.base import Format, Mode, Plan, Tier
from testbed.cache.pool import CacheError

if TYPE_CHECKING:
    from testbed.cache.paged import PagedCache

NAMES = ("mode", "format", "tier")


def flatten(cache: PagedCache, plan: Plan) -> dict[str, Tensor]:
    """The plan as [S, N] tensors of our own.

    Raises:
        CacheError: another shape than the cache's, or codes that mean nothing.
    """
    shape, out = (cache.layers, cache.kv_heads, cache.state["mode"].shape[1]), {}
    for name, codes in (("mode", Mode), ("format", Format), ("tier", Tier), ("score", None)):
        value = getattr(plan, name)
        if value is None:
            continue
        if tuple(value.shape) != shape:
            raise CacheError(f"plan.{name} has shape {tuple(value.shape)}, the cache has {shape}: layers, heads, pages")
        if codes is None:
            continue
        if value.numel() and not 0 <= value.min() <= value.max() < len(codes):
            known = ", ".join(f"{code.value} {code.name}" for code in codes)
            raise CacheError(f"plan.{name} has codes of {value.min()} to {value.max()}: must be of {known}")
        out[name] = value.reshape(cache.streams, shape[2]).to("cpu", torch.int8).clone()
    if plan.pools is not None and tuple(plan.pools.arena.shape) != shape[:2]:
        raise CacheError(f"plan.pools.arena has shape {tuple(plan.pools.arena.shape)}, the cache has {shape[:2]}")
    gone = out["tier"] == Tier.DROPPED  # a dropped page keeps no format, so that nothing counts as a change
    out["format"][gone] = cache.state["format"][gone]
    return out


def check(cache: PagedCache, target: dict[str, Tensor], length_tokens: int) -> None:
    """Refuses impossible plans before anything is touched."""
    tier, state = target["tier"], cache.state
    alive, hot = tier != Tier.DROPPED, cache.hot.mask(length_tokens)
    faults = {
        "revives a dropped page": alive & (state["tier"] == Tier.DROPPED),
        "raises the precision of a page": alive & (target["format"] < state["format"]),
        "attends exactly a page that is not on the device": (target["mode"] == Mode.EXACT) & (tier > Tier.L1),
        "attends a dropped page": ~alive & (target["mode"] != Mode.SKIP),
        "stores a hot page in another format than compute": (tier == Tier.L0) & (target["format"] != 0),
        "has a page in L0 that is not hot": (tier == Tier.L0) & ~hot,
        "has a hot page outside L0": (tier != Tier.L0) & hot & (state["tier"] != Tier.DROPPED),
    }
    for what, where in faults.items():
        if bool(where.any()):
            stream, page = where.nonzero()[0].tolist()
            layer, head = divmod(stream, cache.kv_heads)
            raise CacheError(f"the plan {what}: layer {layer}, head {head}, page {page}")


def keep_dropped(cache: PagedCache, target: dict[str, Tensor]) -> None:
    """Pages dropped since the policy looked, as a move failed and had nowhere to go back to, stay so."""
    gone = cache.state["tier"] == Tier.DROPPED
    target["tier"][gone], target["mode"][gone] = int(Tier.DROPPED), int(Mode.SKIP)
    target["format"][gone] = cache.state["format"][gone]
