"""Filling a cache from a prefilled context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from policies.base import Format, Plan, Tier
from testbed.cache.limits import reserve
from testbed.cache.moves import count
from testbed.cache.plans import NAMES, check, flatten
from testbed.cache.pool import CacheError
from testbed.cache.relocate import fill
from testbed.cache.table import build_tables
from testbed.decisions import Move

if TYPE_CHECKING:
    from testbed.cache.paged import PagedCache


def load(
    cache: PagedCache, keys: list[Tensor], values: list[Tensor], plan: Plan, free_source: bool = False
) -> list[Move]:
    """Places a prefilled context as the plan says, layer by layer.

    keys, values: per layer [Hk, T, D] in cache dtype. With `free_source` each layer's entry is emptied once
    placed, so that memory peaks at the context plus one layer.
    """
    if cache.length_tokens:
        raise CacheError("load fills an empty cache only")
    cache.length_tokens = keys[0].shape[1]
    cache._grow(cache.pages)
    target = flatten(cache, plan)
    check(cache, target, cache.length_tokens)
    cache._lay_out(plan.pools)
    cache.metadata.note_scores(plan.score)
    slots = cache.state["slot"].long()
    outside = (target["tier"] != Tier.L0) & (target["tier"] != Tier.DROPPED)
    reserve(cache, outside.nonzero(), target, slots)
    refused = 0
    for layer in range(cache.layers):
        k, v = (_paged(cache, side[layer]) for side in (keys, values))
        rows = slice(layer * cache.kv_heads, (layer + 1) * cache.kv_heads)
        if cache._bounds is not None:
            _set_bounds(cache, rows, keys[layer])
        at = (target["tier"][rows] != Tier.DROPPED).nonzero()
        at[:, 0] += rows.start
        flat_k, flat_v = k[at[:, 0] - rows.start, at[:, 1]], v[at[:, 0] - rows.start, at[:, 1]]
        fill(cache, at, flat_k, flat_v, target, slots)
        refused += cache.approximations.update(at, flat_k, flat_v, target["mode"], torch.zeros_like(target["mode"]))
        if free_source:
            keys[layer] = values[layer] = torch.empty(0)
    for name in NAMES:
        cache.state[name] = target[name]
    cache._settle_approximations(target, refused)
    cache.metadata.note_access(target["mode"])
    cache.tables = build_tables(cache)
    return _moves_of_load(cache, target)


def _paged(cache: PagedCache, x: Tensor) -> Tensor:
    """[Hk, T, D] -> [Hk, N, P, D], the last page padded with zeros."""
    pad = cache.pages * cache.config.page_tokens - x.shape[1]
    return torch.nn.functional.pad(x, (0, 0, 0, pad)).unflatten(1, (cache.pages, cache.config.page_tokens))


def _set_bounds(cache: PagedCache, rows: slice, k: Tensor) -> None:
    assert cache._bounds is not None
    pad = cache.pages * cache.config.page_tokens - k.shape[1]
    shape = (cache.pages, cache.config.page_tokens)
    # The last page repeats its last key, so that padding moves no bound.
    padded = torch.cat((k, k[:, -1:].expand(-1, pad, -1)), dim=1).unflatten(1, shape)
    cache._bounds[0, rows], cache._bounds[1, rows] = padded.amin(2), padded.amax(2)


def _moves_of_load(cache: PagedCache, target: dict[str, Tensor]) -> list[Move]:
    zero = torch.zeros_like(target["tier"])
    source = {"tier": zero + int(Tier.L1), "format": zero + int(Format.COMPUTE)}
    return count(source, target, cache.formats)
