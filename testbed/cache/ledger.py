"""Two ledgers that must agree with reality: bytes by tier and format, and which positions exist.

Bytes are counted from the page table, independently of the pools, and then compared with what the pools hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from policies.base import Format, Mode, Tier
from testbed.cache.budgets import device_slack_bytes, host_slack_bytes
from testbed.cache.layout import TABLE_BYTES_PER_PAGE

if TYPE_CHECKING:
    from testbed.cache.paged import PagedCache


@dataclass(frozen=True)
class Ledger:
    """Bytes of one cache at one moment.

    Attributes:
        pages: (tier, format) -> pages, from the page table; L0 counts the whole reserved ring.
        used_bytes: "L0/compute", ..., "L1/prototype", "L1/background", "L1/tables", "L1/bounds", "L2/metadata",
            "L2/background_sums" -> bytes by the page table; "L1/in_flight", "L2/in_flight", ...: slots that pages have
            left and that are kept until the copies are done.
        held_bytes: tier -> bytes the allocators hold, slack of begun slabs included. Where sequences share the pools:
            what this one would hold alone, its pages rounded up to whole blocks.
    """

    pages: Mapping[tuple[Tier, Format], int]
    used_bytes: Mapping[str, int]
    held_bytes: Mapping[str, int]

    @staticmethod
    def of(cache: PagedCache) -> Ledger:
        """Counts a cache."""
        pages = _pages(cache, histogram(cache))
        used = _planned(cache, pages)
        for tier, count in cache.flights.source_bytes().items():
            used[f"{tier.name}/in_flight"] = count
        held = _held(cache) if len(cache.pools.users) == 1 else _alone(cache, pages, used)
        return Ledger(pages, {name: count for name, count in used.items() if count}, held)

    @property
    def device_bytes(self) -> int:
        """What L0 and L1 hold."""
        return self.held_bytes["L0"] + self.held_bytes["L1"]

    @property
    def total_bytes(self) -> int:
        """What all tiers hold."""
        return sum(self.held_bytes.values())

    @property
    def used_device_bytes(self) -> int:
        """Bytes of L0 and L1 by the page table: what budgets are compared with."""
        return sum(count for name, count in self.used_bytes.items() if name[:2] in ("L0", "L1"))


def histogram(cache: PagedCache) -> Tensor:
    """Pages by [mode, format, tier], int64: one pass over the page table, from which every count follows."""
    state = cache.state
    shape = (len(Mode), len(Format), len(Tier))
    key = (state["mode"] * shape[1] + state["format"]) * shape[2] + state["tier"]  # below 64, so int8 holds it
    return torch.bincount(key.flatten(), minlength=math.prod(shape)).view(shape)


def _pages(cache: PagedCache, counts: Tensor) -> dict[tuple[Tier, Format], int]:
    """(tier, format) -> pages by the page table; the ring of L0 whole."""
    by_format = counts.sum(0)
    pages = {
        (tier, code): int(by_format[code, tier])
        for tier in (Tier.L1, Tier.L2, Tier.L3)
        for code in Format
        if by_format[code, tier]
    }
    pages[Tier.L0, Format.COMPUTE] = cache.streams * cache.hot.stream_pages
    return pages


def _planned(cache: PagedCache, pages: Mapping[tuple[Tier, Format], int]) -> dict[str, int]:
    """Bytes by place and kind, however far moves are."""
    parts = cache.approximations
    return {
        f"{tier.name}/{code.name.lower()}": count * cache.formats[code].page_bytes
        for (tier, code), count in pages.items()
    } | {
        "L1/prototype": int((parts.slot >= 0).sum()) * parts.prototypes.fmt.page_bytes,
        "L1/background": int((parts.background_slot >= 0).sum()) * parts.background.fmt.page_bytes,
        "L1/tables": cache.state["mode"].numel() * TABLE_BYTES_PER_PAGE,
        "L1/bounds": cache.bounds_bytes,
        "L2/background_sums": parts.sums_bytes,
        "L2/metadata": cache.metadata.host_bytes,
    }


def _held(cache: PagedCache) -> dict[str, int]:
    """What the allocators hold, for a cache with pools of its own."""
    pools = cache.pools
    held = {tier.name: pools.held_bytes(tier) for tier in Tier if tier != Tier.DROPPED}
    held["L1"] += cache.device_table_bytes
    held["L2"] += cache.metadata.host_bytes + cache.approximations.sums_bytes  # what is there, nothing set aside
    return held


def _alone(cache: PagedCache, pages: Mapping[tuple[Tier, Format], int], used: Mapping[str, int]) -> dict[str, int]:
    """What the allocators hold for the used bytes, were the sequence alone: whole blocks."""
    held = {tier.name: 0 for tier in Tier if tier != Tier.DROPPED}
    for name, count in used.items():
        held[name.split("/")[0]] += count
    held["L1"] += device_slack_bytes(cache)
    held["L2"] += host_slack_bytes(cache, {code: pages.get((Tier.L2, code), 0) for code in Format})
    return held


def positions(cache: PagedCache) -> Tensor:
    """The position ledger: [L, Hk, T] bool, which positions of which stream still exist.

    A page holds positions page * P to page * P + P - 1 for ever, so keys are never rotated again.
    """
    alive = cache.state["tier"] != Tier.DROPPED
    each = alive.repeat_interleave(cache.config.page_tokens, dim=1)[:, : cache.length_tokens]
    return each.view(cache.layers, cache.kv_heads, cache.length_tokens)


def facts(cache: PagedCache) -> dict[str, dict[str, int]]:
    """What a decision log says of a cache: pages by mode, what a step reads by tier and format, bytes by tier."""
    counts = histogram(cache)
    pages = {m.name.lower(): int(counts[m].sum()) for m in Mode}
    read_bytes = {"L0": 0, "L1": 0}
    read_tokens: dict[str, int] = {}
    for place in (Tier.L0, Tier.L1):
        for code, page_format in cache.formats.items():
            count = int(counts[Mode.EXACT, code, place])
            read_bytes[place.name] += count * page_format.page_bytes
            name = code.name.lower()
            read_tokens[name] = read_tokens.get(name, 0) + count * cache.config.page_tokens
    clusters = pages["cluster"]
    backgrounds = int((cache.state["mode"] == Mode.BACKGROUND).any(1).sum()) if pages["background"] else 0
    read_bytes["L1"] += (
        clusters * cache.approximations.prototypes.fmt.page_bytes
        + backgrounds * cache.approximations.background.fmt.page_bytes
    )
    read_tokens |= {"prototype": clusters * cache.config.prototypes, "background": backgrounds}
    table = _pages(cache, counts)
    held = _alone(cache, table, _planned(cache, table))  # of the plan, so that a log does not depend on timing
    return {"pages": pages, "read_bytes": read_bytes, "read_tokens": read_tokens, "held_bytes": held}
