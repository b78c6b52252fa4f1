"""What a plan may spend: the tiers' limits less what is not for a sequence's pages.

All of it follows from page tables and limits alone, so that it does not depend on how far moves are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from policies.base import Format, Tier

if TYPE_CHECKING:
    from testbed.cache.paged import PagedCache


def device_slack_bytes(cache: PagedCache) -> int:
    """Bytes of free slots in the blocks that the device's pages fill; what a budget must leave room for.

    From the page table alone, so that it does not depend on how far moves are.
    """
    slack = 0
    tier, fmt = cache.state["tier"], cache.state["format"]
    grid = (int(cache.arena.max()) + 1, len(Format), len(Tier))
    key = cache.arena.to(torch.int16).unsqueeze(1) * (grid[1] * grid[2]) + (fmt * grid[2] + tier)
    counts = torch.bincount(key.flatten(), minlength=math.prod(grid)).view(grid)
    for arena, code in torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).tolist():
        pool = cache.pools.level_1(Format(code))
        pages = int(counts[arena, code, Tier.L1])
        slack += -pages % pool.slots.block_pages(arena) * pool.fmt.page_bytes
    for slots, pool in (
        (cache.approximations.slot, cache.pools.prototypes),
        (cache.approximations.background_slot, cache.pools.background),
    ):
        slack += -int((slots >= 0).sum()) % pool.slab_pages * pool.fmt.page_bytes
    return slack


def reserved_device_bytes(cache: PagedCache) -> int:
    """Bytes on the device that are not for this sequence's pages: slack, and what the others sharing it hold."""
    return device_slack_bytes(cache) + cache.pools.others_bytes(cache, (Tier.L0, Tier.L1))


def host_slack_bytes(cache: PagedCache, pages: Mapping[Format, int]) -> int:
    """Bytes of free slots in the slabs that so many pages of each format fill in L2."""
    return sum(-count % cache.config.slab_pages * cache.formats[code].page_bytes for code, count in pages.items())


def host_budget_bytes(cache: PagedCache) -> int | None:
    """Most bytes that pages may take in L2; None = no limit."""
    limit = cache.pools.limits.l2_bytes
    if limit is None:
        return None
    pages = {code: len(cache.slots_in(Tier.L2, code)) for code in Format}
    taken = cache.host_table_bytes + host_slack_bytes(cache, pages) + cache.pools.others_bytes(cache, (Tier.L2,))
    return max(0, limit - taken)


def archive_budget_bytes(cache: PagedCache) -> int | None:
    """Most bytes that pages may take in L3; None = no limit, 0 once it is switched off."""
    if cache.pools.archive_off:
        return 0
    limit = cache.pools.limits.l3_bytes
    return None if limit is None else max(0, limit - cache.pools.others_bytes(cache, (Tier.L3,)))
