"""A second sequence from a first: pages shared by reference, or copied into pools of their own."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from policies.base import Format, Tier
from testbed.cache.archive import ArchiveError, CorruptPages
from testbed.cache.flights import Flights, LostPages
from testbed.cache.moves import groups
from testbed.cache.pool import PoolFull
from testbed.cache.pools import Pools
from testbed.cache.relocate import READ_BLOCK_PAGES, place
from testbed.cache.sizes import Capacities
from testbed.cache.traffic import Traffic

if TYPE_CHECKING:
    from testbed.cache.paged import PagedCache


def fork(cache: PagedCache, own_pools: bool = False) -> PagedCache:
    """An independent sequence that goes on from here.

    Args:
        cache: the first sequence; its moves are ended.
        own_pools: a whole copy with memory, limits and page file of its own; else pages are shared until one of
            the two lets go of them, and the limits bind both together.

    Raises:
        LostPages: pages to be copied can't be had from the archive; nothing has changed.
        PoolFull: cache.l1_bytes has no room for the recent window of one more; nothing has changed.
    """
    cache.flights.drain()
    other = copy.copy(cache)
    if own_pools:
        place_of_file = cache.config.archive_folder()
        folder = place_of_file if place_of_file.is_dir() else place_of_file.parent
        other.config = replace(cache.config, l3_path=str(folder))
    other.state = {name: value.clone() for name, value in cache.state.items()}
    pools = Pools(cache.shape, other.config, cache.device) if own_pools else cache.pools
    limits = pools.limits
    if own_pools:  # what was held within the limits is taken over as it is, though tables have grown since
        pools.limits = Capacities()
    other.metadata, other.flights, other.traffic = cache.metadata.clone(), Flights(other), Traffic()
    other._join(pools)
    try:
        other.approximations = cache.approximations.fork(other.pools.prototypes, other.pools.background)
        _take_pages(other, cache, limits)
    except BaseException:
        other.pools.stores[Tier.L0, Format.COMPUTE].free(other.hot_slots)
        other.pools.leave(other)
        raise
    other.prefetches = cache.prefetches.clone(other.traffic)
    other.flights.grow(cache.state["mode"].shape[1])
    other.kernel_calls = Counter()
    other._bounds = None if cache._bounds is None else cache._bounds.clone()
    other.first_position = cache.first_position.clone()
    other._rebuild()
    pools.limits = limits
    return other


def _take_pages(cache: PagedCache, parent: PagedCache, limits: Capacities) -> None:
    """The parent's pages as our own: the ring as a copy, what can't change by reference or as a copy."""
    state = cache.state
    ring = (Tier.L0, Format.COMPUTE)
    cache.pools.stores[ring].write(cache.hot_slots, parent.pools.stores[ring].read(parent.hot_slots))
    for tier, code, group in groups((state["tier"] != Tier.DROPPED).nonzero(), state["tier"], state["format"]):
        slots = state["slot"][group[:, 0], group[:, 1]].long()
        mine, theirs = cache.pools.stores[tier, code], parent.pools.stores[tier, code]
        if tier == Tier.L0:
            state["slot"][group[:, 0], group[:, 1]] += cache._hot_base - parent._hot_base
        elif mine is theirs:
            mine.share(slots)
        else:
            for arena, part in cache.by_arena(group, tier):
                for block in part.split(READ_BLOCK_PAGES):
                    _copy_pages(cache, parent, (tier, code), arena, block, limits)


def _copy_pages(
    cache: PagedCache, parent: PagedCache, where: tuple[Tier, Format], arena: int, at: Tensor, limits: Capacities
) -> None:
    """Pages at [M, 2] of the parent into pools of our own; a disk without room costs them their place there."""
    store, slots = cache.pools.stores[where], cache.state["slot"][at[:, 0], at[:, 1]].long()
    try:
        blobs = parent.pools.stores[where].read(slots)
    except CorruptPages as error:
        raise LostPages(at[torch.isin(slots, error.slots)], str(error)) from error
    except ArchiveError as error:
        raise LostPages(at, str(error)) from error
    try:
        fresh = store.allocate(len(at), arena)
    except PoolFull as full:
        if where[0] != Tier.L3:
            raise
        cache.traffic.warn(f"L3 full: {len(at)} pages of a fork find no room there ({full})")
        _place_within(cache, limits, at, where[1], blobs)
        return
    cache.state["slot"][at[:, 0], at[:, 1]] = fresh.int()
    try:
        store.write(fresh, blobs)
    except ArchiveError as error:
        store.free(fresh)
        cache.flights.note_failure("write", error)
        _place_within(cache, limits, at, where[1], blobs)


def _place_within(cache: PagedCache, limits: Capacities, at: Tensor, code: Format, blobs: Tensor) -> None:
    """Pages at [M, 2] into L2 or nowhere, by the limits that hold when nothing is taken over."""
    lifted, cache.pools.limits = cache.pools.limits, limits
    place(cache, at, code, blobs, (Tier.L2,), cache.state)
    cache.pools.limits = lifted
