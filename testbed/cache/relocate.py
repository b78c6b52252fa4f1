"""Moving pages: at once where the next step reads them, by a flight where they come from or go to L2 or L3."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.pages import encode, transcode
from policies.base import Format, Mode, Tier
from testbed.cache.archive import ArchiveError
from testbed.cache.flights import Flight, Staged
from testbed.cache.limits import reserve
from testbed.cache.mover import Job, Priority
from testbed.cache.moves import groups
from testbed.cache.pool import PoolFull, SlabPool

if TYPE_CHECKING:
    from testbed.cache.paged import PagedCache

READ_BLOCK_PAGES = 8192  # bounds what a conversion holds beside the pools


def relocate(cache: PagedCache, at: Tensor, target: dict[str, Tensor]) -> None:
    """Moves live pages at [M, 2]; slots are reserved for all of them first, and the target edited where none are left.

    L0 to L1 and conversions within L1 are done on return; the rest is in flight, the page state already changed.
    """
    if not len(at):
        return
    state = cache.state
    slots = torch.full(state["slot"].shape, -1, dtype=torch.int64)
    reserve(cache, at, target, slots)
    at = at[slots[at[:, 0], at[:, 1]] >= 0]
    now = (target["tier"][at[:, 0], at[:, 1]] <= Tier.L1) & (state["tier"][at[:, 0], at[:, 1]] <= Tier.L1)
    _at_once(cache, at[now], target, slots)
    _take_off(cache, at[~now], target, slots)
    for name in ("mode", "format", "tier"):
        state[name][at[:, 0], at[:, 1]] = target[name][at[:, 0], at[:, 1]]
    state["slot"][at[:, 0], at[:, 1]] = slots[at[:, 0], at[:, 1]].int()


def _at_once(cache: PagedCache, at: Tensor, target: dict[str, Tensor], slots: Tensor) -> None:
    """Copies or converts pages on the device; a page whose format stays is copied byte by byte."""
    state, stores = cache.state, cache.pools.stores
    for tier, code, group in groups(at, state["tier"], state["format"]):
        for new_tier, new_code, part in groups(group, target["tier"], target["format"]):
            for block in part.split(READ_BLOCK_PAGES):
                old = state["slot"][block[:, 0], block[:, 1]].long()
                blobs = stores[tier, code].read(old)
                blobs = transcode(cache.formats[code], blobs, cache.formats[new_code])
                stores[new_tier, new_code].write(slots[block[:, 0], block[:, 1]], blobs)
                if tier != Tier.L0:
                    stores[tier, code].free(old)


def _take_off(cache: PagedCache, at: Tensor, target: dict[str, Tensor], slots: Tensor) -> None:
    """Starts flights: promotions by layer, since each layer waits for its own, demotions in one piece."""
    state, stores = cache.state, cache.pools.stores
    arrives = target["tier"][at[:, 0], at[:, 1]] == Tier.L1
    wanted = arrives & (target["mode"][at[:, 0], at[:, 1]] == Mode.EXACT)
    kinds = (
        (Priority.DEMAND, wanted, True),
        (Priority.DEMOTE, ~arrives, False),
        (Priority.PREFETCH, arrives & ~wanted, True),
    )
    for priority, which, by_layer in kinds:
        for source_tier, source_code, group in groups(at[which], state["tier"], state["format"]):
            for tier, code, pages in groups(group, target["tier"], target["format"]):
                for part in _by_layer(pages, cache.kv_heads) if by_layer else (pages,):
                    old = state["slot"][part[:, 0], part[:, 1]].long()
                    source, staged = stores[source_tier, source_code], source_tier == Tier.L0
                    if staged:
                        source, old = Staged(source, source.read(old)), torch.arange(len(part))
                    job = Job(
                        priority=priority,
                        layer=int(part[0, 0]) // cache.kv_heads,
                        source=source,
                        source_slots=old,
                        target=stores[tier, code],
                        target_slots=slots[part[:, 0], part[:, 1]],
                    )
                    cache.flights.launch(Flight(job, part, (source_tier, source_code), (tier, code), staged))


def _by_layer(at: Tensor, kv_heads: int) -> tuple[Tensor, ...]:
    """Pages [M, 2], ordered by stream, split by layer."""
    _, counts = (at[:, 0] // kv_heads).unique_consecutive(return_counts=True)
    return at.split(counts.tolist())


def fill(cache: PagedCache, at: Tensor, k: Tensor, v: Tensor, target: dict[str, Tensor], slots: Tensor) -> None:
    """Encodes new pages at [M, 2], k and v [M, P, D], into the slots that are reserved for them.

    A page file that can't be written costs its pages their place there: they go to L2, or are dropped.
    """
    index = torch.full(cache.state["slot"].shape, -1)
    index[at[:, 0], at[:, 1]] = torch.arange(len(at))
    for tier, code, group in groups(at, target["tier"], target["format"]):
        if tier == Tier.DROPPED:
            continue
        rows = index[group[:, 0], group[:, 1]]
        blobs = encode(cache.formats[code], k[rows], v[rows])
        where = slots[group[:, 0], group[:, 1]]
        try:
            cache.pools.stores[tier, code].write(where, blobs)
        except ArchiveError as error:
            cache.pools.stores[tier, code].free(where)
            cache.flights.note_failure("write", error)
            place(cache, group, code, blobs, (Tier.L2,), target)
        else:
            cache.state["slot"][group[:, 0], group[:, 1]] = where.int()


def place(
    cache: PagedCache, at: Tensor, code: Format, blobs: Tensor, tiers: tuple[Tier, ...], target: dict[str, Tensor]
) -> None:
    """Puts blobs of pages at [M, 2] into the first of the tiers with room, else the pages are dropped."""
    row, page = at[:, 0], at[:, 1]
    for tier in tiers:
        pool = cache.pools.stores[tier, code]
        try:
            slots = pool.allocate(len(at))
        except PoolFull:
            continue
        pool.write(slots, blobs)
        target["tier"][row, page] = int(tier)
        target["format"][row, page] = int(code)
        cache.state["slot"][row, page] = slots.int()
        return
    target["tier"][row, page] = int(Tier.DROPPED)
    target["mode"][row, page] = int(Mode.SKIP)
    cache.traffic.warn(f"{len(at)} pages dropped: no tier has room for what the archive did not take")


def compact(cache: PagedCache) -> None:
    """Closes holes: where an arena has more than a block of free slots its last pages move into the first holes.

    Pages that come and go leave slabs half empty, and a budget binds what is held. Pages in flight and pages that a
    fork shares stay where they are.
    """
    state = cache.state
    for (tier, code), pool in cache.pools.stores.items():
        if tier not in (Tier.L1, Tier.L2) or not isinstance(pool, SlabPool):
            continue
        for arena in pool.slots.arenas():
            held, used = pool.slots.held_by(arena), pool.slots.used_by(arena)
            if held - used <= pool.slots.block_pages(arena):
                continue
            beyond = (state["tier"] == tier) & (state["format"] == code) & (cache.flights.pending == 0)
            beyond &= state["slot"] >= pool.slots.packed_end(arena)
            at = beyond.nonzero()
            slots = state["slot"][at[:, 0], at[:, 1]].long()
            own = (pool.slots.references[slots] == 1) & (pool.slots.owner[slots // pool.slab_pages] == arena)
            at, slots = at[own], slots[own]
            if len(at):
                blobs = pool.read(slots)
                pool.free(slots)
                fresh = pool.allocate(len(at), arena)
                pool.write(fresh, blobs)
                state["slot"][at[:, 0], at[:, 1]] = fresh.int()
