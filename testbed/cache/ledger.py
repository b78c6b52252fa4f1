"""Two ledgers that must agree with reality: bytes by tier and format, and which positions exist.

Bytes are counted from the page table, independently of the pools, and then compared with what the pools hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from policies.base import Format, Mode, Tier
from testbed.cache.layout import TABLE_BYTES_PER_PAGE

if TYPE_CHECKING:
    from testbed.cache.paged import PagedCache


@dataclass(frozen=True)
class Ledger:
    """Bytes of one cache at one moment.

    Attributes:
        pages: (tier, format) -> pages, from the page table; L0 counts the whole reserved ring.
        used_bytes: "L0/compute", ..., "L1/prototype", "L1/background", "L1/tables", "L1/bounds" -> bytes by the
            page table.
        held_bytes: tier -> bytes the allocators hold, slack of begun slabs included.
    """

    pages: Mapping[tuple[Tier, Format], int]
    used_bytes: Mapping[str, int]
    held_bytes: Mapping[str, int]

    @staticmethod
    def of(cache: PagedCache) -> Ledger:
        """Counts a cache."""
        state = cache.state
        key = state["tier"].long() * len(Format) + state["format"]
        values, counts = key.unique(return_counts=True)
        pages = {
            (Tier(value // len(Format)), Format(value % len(Format))): count
            for value, count in zip(values.tolist(), counts.tolist(), strict=True)
            if value // len(Format) not in (Tier.L0, Tier.DROPPED)
        }
        pages[Tier.L0, Format.COMPUTE] = cache.streams * cache.hot.stream_pages
        used = {
            f"{tier.name}/{code.name.lower()}": count * cache.formats[code].page_bytes
            for (tier, code), count in pages.items()
        }
        clusters = int((state["mode"] == Mode.CLUSTER).sum())
        used["L1/prototype"] = clusters * cache.approximations.prototypes.fmt.page_bytes
        used["L1/background"] = (
            cache.approximations.background.used_pages * cache.approximations.background.fmt.page_bytes
        )
        used["L1/tables"] = state["mode"].numel() * TABLE_BYTES_PER_PAGE
        used["L1/bounds"] = cache.bounds_bytes
        used["L2/background_sums"] = cache.approximations.sums_bytes
        held = {tier.name: 0 for tier in Tier if tier != Tier.DROPPED}
        for (tier, _), pool in cache.pools.items():
            held[tier.name] += pool.held_bytes
        held["L1"] += cache.approximations.prototypes.held_bytes + cache.approximations.background.held_bytes
        held["L1"] += used["L1/tables"] + used["L1/bounds"]
        held["L2"] += used["L2/background_sums"]
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


def positions(cache: PagedCache) -> torch.Tensor:
    """The position ledger: [L, Hk, T] bool, which positions of which stream still exist.

    A page holds positions page * P to page * P + P - 1 for ever, so keys are never rotated again.
    """
    alive = cache.state["tier"] != Tier.DROPPED
    each = alive.repeat_interleave(cache.config.page_tokens, dim=1)[:, : cache.length_tokens]
    return each.view(cache.layers, cache.kv_heads, cache.length_tokens)


def facts(cache: PagedCache) -> dict[str, dict[str, int]]:
    """What a decision log says of a cache: pages by mode, what a step reads by tier and format, bytes by tier."""
    state = cache.state
    mode, fmt, tier = state["mode"], state["format"], state["tier"]
    pages = {m.name.lower(): int((mode == m).sum()) for m in Mode}
    exact = mode == Mode.EXACT
    read_bytes = {"L0": 0, "L1": 0}
    read_tokens: dict[str, int] = {}
    for place in (Tier.L0, Tier.L1):
        for code, page_format in cache.formats.items():
            count = int((exact & (tier == place) & (fmt == code)).sum())
            read_bytes[place.name] += count * page_format.page_bytes
            name = code.name.lower()
            read_tokens[name] = read_tokens.get(name, 0) + count * cache.config.page_tokens
    clusters = pages["cluster"]
    backgrounds = int((mode == Mode.BACKGROUND).any(1).sum())
    read_bytes["L1"] += (
        clusters * cache.approximations.prototypes.fmt.page_bytes
        + backgrounds * cache.approximations.background.fmt.page_bytes
    )
    read_tokens |= {"prototype": clusters * cache.config.prototypes, "background": backgrounds}
    held = Ledger.of(cache).held_bytes
    return {"pages": pages, "read_bytes": read_bytes, "read_tokens": read_tokens, "held_bytes": dict(held)}
