"""What happens when a tier has no room: the pages of least worth go one tier further, the last ones are dropped.

A page that the archive refuses stays in L2 or goes there, if there is room.

Policies know the budgets and plan within them, so this is for what they can't know: slack of begun slabs, other
sequences in the same memory, a full disk, an allocator that fails. Everything is reserved before anything is copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from policies.base import Format, Mode, Tier
from testbed.cache.moves import groups
from testbed.cache.pool import PoolFull

if TYPE_CHECKING:
    from testbed.cache.paged import PagedCache


def reserve(cache: PagedCache, at: Tensor, target: dict[str, Tensor], slots: Tensor) -> None:
    """Takes target slots for pages that move to L1, L2 or L3; edits the target where a tier is full.

    Args:
        cache: whose state says where the pages are now.
        at: [M, 2] stream and page, all to be moved.
        target: mode, format, tier [S, N]; a page that finds no room stays where it is, if that is further from the
            device, or goes to the next tier with room, or is DROPPED.
        slots: [S, N] int64, filled in for the pages that got a slot.
    """
    for tier in (Tier.L1, Tier.L2, Tier.L3):
        row, page = at[:, 0], at[:, 1]
        # What another tier refused may stay where it is, and is not moved then.
        here = at[(target["tier"][row, page] == tier) & cache.changed(target)[row, page]]
        for _, code, group in groups(here, target["tier"], target["format"]):
            for arena, part in cache.by_arena(group, tier):
                _take(cache, tier, code, arena, part, target, slots)


def _take(
    cache: PagedCache, tier: Tier, code: Format, arena: int, at: Tensor, target: dict[str, Tensor], slots: Tensor
) -> None:
    """Slots for one group; what finds none goes on."""
    store = cache.pools.stores[tier, code]
    try:
        if tier == Tier.L3 and cache.pools.archive_off:
            raise PoolFull(cache.pools.archive_off)
        slots[at[:, 0], at[:, 1]] = store.allocate(len(at), arena)
        return
    except PoolFull as full:
        reason = full
    # Slots that are only kept until copies out of this tier are done may be all that is missing.
    if cache.flights.source_bytes().get(tier, 0):
        cache.flights.free_sources()
    worth = cache.metadata.score[at[:, 0], at[:, 1]]
    worth = worth.masked_fill(worth.isnan(), -torch.inf)  # what is not a number sorts before all others
    at = at[worth.argsort(descending=True, stable=True)]
    taken = _as_many(cache, tier, code, arena, len(at))
    slots[at[: len(taken), 0], at[: len(taken), 1]] = taken
    if len(taken) < len(at):
        _send_on(cache, tier, code, at[len(taken) :], target, slots, reason)


def _as_many(cache: PagedCache, tier: Tier, code: Format, arena: int, pages: int) -> Tensor:
    """As many slots [m] int64 as there are, by halves where only trying tells."""
    taken = [torch.zeros(0, dtype=torch.int64)]
    step = 0 if tier == Tier.L3 and cache.pools.archive_off else pages
    while step and sum(map(len, taken)) < pages:
        try:
            taken.append(cache.pools.stores[tier, code].allocate(min(step, pages - sum(map(len, taken))), arena))
        except PoolFull:
            step //= 2
    return torch.cat(taken)


def _send_on(
    cache: PagedCache,
    tier: Tier,
    code: Format,
    at: Tensor,
    target: dict[str, Tensor],
    slots: Tensor,
    reason: PoolFull,
) -> None:
    """Pages [M, 2] that found no room in a tier: they stay further out, or go to the next tier."""
    row, page = at[:, 0], at[:, 1]
    place = cache.state["tier"][row, page]
    stays = (place >= tier) | ((place == Tier.L2) & (tier == Tier.L3))
    for name in ("tier", "format"):
        target[name][row[stays], page[stays]] = cache.state[name][row[stays], page[stays]]
    onward = at[~stays]
    back = 0
    if tier == Tier.L3:
        taken = _as_many(cache, Tier.L2, code, 0, len(onward))
        back = len(taken)
        slots[onward[:back, 0], onward[:back, 1]] = taken
        target["tier"][onward[:back, 0], onward[:back, 1]] = int(Tier.L2)
    target["tier"][onward[back:, 0], onward[back:, 1]] = int(tier) + 1  # L3 + 1 is DROPPED
    mode, to = target["mode"][row, page], target["tier"][row, page]
    exact_elsewhere = (to > Tier.L1) & (mode == Mode.EXACT)
    target["mode"][row, page] = mode.masked_fill(exact_elsewhere | (to == Tier.DROPPED), int(Mode.SKIP))
    what = {
        "stay where they are": int(stays.sum()),
        "go to L2": back,
        "are dropped" if tier == Tier.L3 else f"go on to L{int(tier) + 1}": len(onward) - back,
    }
    told = ", ".join(f"{count} {verb}" for verb, count in what.items() if count)
    cache.traffic.warn(f"{tier.name} full: of {len(at)} pages {told} ({reason})")
