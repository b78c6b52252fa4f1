"""All pools of one device, its host memory and its archive: what the caches of one or several sequences share.

Limits hold here, for all sequences together, because memory is shared whatever a page table says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.api import Pool
from kernels.pages import PageFormat
from policies.base import Format, Head, PoolLayout, Tier
from testbed.cache.archive import ArchiveAbout, FilePool, PageFile
from testbed.cache.archive.io import make_engine
from testbed.cache.archive.page_file import EngineMaker
from testbed.cache.layout import CacheConfig, Hot
from testbed.cache.mover import Mover
from testbed.cache.pool import CacheError, PageStore, PoolFull, SlabPool

if TYPE_CHECKING:
    from testbed.cache.paged import PagedCache


@dataclass(frozen=True)
class Shape:
    """What a cache must know of its model.

    Attributes:
        layers, kv_heads, head_dim: L, Hk, D.
        model: the model's name and version as page files note it; "" = any.
    """

    layers: int
    kv_heads: int
    head_dim: int
    model: str = ""

    @property
    def streams(self) -> int:
        """S = L * Hk, of one sequence."""
        return self.layers * self.kv_heads


class Pools:
    """Pools by (tier, format), prototypes and backgrounds, the page file, and the mover between them.

    Args:
        shape: of the model.
        config: page size, dtype, limits, archive.
        device: of L0 and L1; L2 is host memory (pinned beside a GPU), L3 a file.
        make: gives the engine that reads and writes the page file.

    Attributes:
        stores: (tier, format) -> pages. L0 has one slab a sequence.
        prototypes, background: what stands for pages that are not read token by token, in L1.
        users: sequences that use these pools; the last one to leave closes them.
        archive_off: why L3 takes no more pages, "" while it does.
        laid_out: whether a plan has said which arena a stream's pages go to; else all are in one.
    """

    def __init__(
        self,
        shape: Shape,
        config: CacheConfig,
        device: torch.device | str = "cpu",
        make: EngineMaker = make_engine,
    ) -> None:
        self.shape, self.config, self.device = shape, config, torch.device(device)
        self.limits = config.capacities(self.device)
        self.hot = Hot(config.page_tokens, config.sink_tokens, config.hot_tokens)
        self.formats: Mapping[Format, PageFormat] = config.formats(shape.head_dim)
        self.users: list[PagedCache] = []
        self.archive_off = "" if self.limits.l3_bytes != 0 else "cache.l3_bytes=0"
        self.laid_out = False
        self._failures = 0
        about = ArchiveAbout(
            model=shape.model,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            page_tokens=config.page_tokens,
            formats={fmt.name: fmt.page_bytes for fmt in self.formats.values()},
        )
        self.file = PageFile.open(
            config.archive_folder(), about, self.limits.l3_bytes, config.l3_io, config.l3_direct, make
        )
        compute = self.formats[Format.COMPUTE]
        stores: dict[tuple[Tier, Format], PageStore] = {
            (Tier.L0, Format.COMPUTE): SlabPool(
                compute, shape.streams * self.hot.stream_pages, self.device, room=self.device_room
            )
        }
        for code, fmt in self.formats.items():
            stores[Tier.L1, code] = self._slabs(fmt)
            stores[Tier.L2, code] = self._slabs(fmt, Tier.L2)
            stores[Tier.L3, code] = FilePool(fmt, self.file, self.device)
        self.stores = stores
        self.prototypes = self._slabs(config.prototype_format(shape.head_dim))
        self.background = self._slabs(config.background_format(shape.head_dim))
        self.mover = Mover(self.device, overlap=config.overlap)

    def _slabs(self, fmt: PageFormat, tier: Tier = Tier.L1) -> SlabPool:
        if tier == Tier.L2:
            return SlabPool(fmt, self.config.slab_pages, torch.device("cpu"), self.device, self.host_room)
        return SlabPool(fmt, self.config.slab_pages, self.device, room=self.device_room)

    # --- what is held and what may still come ------------------------------------------------------------------

    def kernel_pools(self) -> tuple[Pool, ...]:
        """The device's pools as kernels take and number them: L0, L1 by format, prototypes, background."""
        level_1 = [self.stores[Tier.L1, code] for code in Format]
        every = (self.stores[Tier.L0, Format.COMPUTE], *level_1, self.prototypes, self.background)
        return tuple(pool.kernel_view() for pool in every if isinstance(pool, SlabPool))

    def held_bytes(self, tier: Tier) -> int:
        """Bytes that a tier's allocators hold; what page tables take is on top."""
        held = sum(pool.held_bytes for (place, _), pool in self.stores.items() if place == tier)
        return held + (self.prototypes.held_bytes + self.background.held_bytes if tier == Tier.L1 else 0)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, page tables and key bounds of all sequences included."""
        tables = sum(cache.device_table_bytes for cache in self.users)
        return self.held_bytes(Tier.L0) + self.held_bytes(Tier.L1) + tables

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, page metadata included."""
        return self.held_bytes(Tier.L2) + sum(cache.host_table_bytes for cache in self.users)

    def device_room(self) -> int | None:
        """Bytes that L0 and L1 may still grow by; None = no limit."""
        limit = self.limits.l1_bytes
        return None if limit is None else limit - self.device_bytes

    def host_room(self) -> int | None:
        """Bytes that L2 may still grow by; None = no limit."""
        limit = self.limits.l2_bytes
        return None if limit is None else limit - self.host_bytes

    def level_1(self, code: Format) -> SlabPool:
        """The device's pool of a format."""
        pool = self.stores[Tier.L1, code]
        assert isinstance(pool, SlabPool)
        return pool

    def archive(self, code: Format) -> FilePool:
        """The page file's pool of a format."""
        pool = self.stores[Tier.L3, code]
        assert isinstance(pool, FilePool)
        return pool

    def others_bytes(self, cache: PagedCache, tiers: tuple[Tier, ...]) -> int:
        """Bytes of the plans of the other sequences in some tiers, pages shared with this one left out."""
        if len(self.users) == 1:
            return 0
        others = [user for user in self.users if user is not cache]
        total = 0
        for (tier, code), store in self.stores.items():
            if tier not in tiers or tier == Tier.L0:
                continue
            slots = [user.slots_in(tier, code) for user in others]
            theirs = torch.cat(slots).unique()
            total += int((~torch.isin(theirs, cache.slots_in(tier, code))).sum()) * store.fmt.page_bytes
        if Tier.L1 in tiers:
            ring = self.shape.streams * self.hot.stream_pages * self.formats[Format.COMPUTE].page_bytes
            total += sum(ring + user.device_table_bytes + user.approximations.held_bytes for user in others)
        if Tier.L2 in tiers:
            total += sum(user.host_table_bytes for user in others)
        return total

    # --- layout ------------------------------------------------------------------------------------------------

    def lay_out(self, layout: PoolLayout) -> None:
        """Sets the block size of each arena in all L1 pools; blocks that are there stay as they are."""
        self.laid_out = True
        for code in Format:
            pool = self.level_1(code)
            for arena, pages in enumerate(layout.block_pages):
                pool.slots.block_slabs[arena] = -(-pages // self.config.slab_pages)

    def arenas(self) -> dict[str, dict[str, int]]:
        """Use of the device's pools by "format/arena": pages a block, pages used and held, slack bytes."""
        rows = {}
        for code in Format:
            pool = self.level_1(code)
            for arena in pool.slots.arenas():
                used, held = pool.slots.used_by(arena), pool.slots.held_by(arena)
                name = Head(arena).name.lower() if self.laid_out else "all heads"
                rows[f"{code.name.lower()}/{name}"] = {
                    "block_pages": pool.slots.block_pages(arena),
                    "used_pages": used,
                    "held_pages": held,
                    "slack_bytes": (held - used) * pool.fmt.page_bytes,
                }
        return rows

    # --- the archive's circuit breaker -------------------------------------------------------------------------

    def archive_failed(self, reason: str) -> bool:
        """Counts a failed read or write; True when this one switches L3 off."""
        self._failures += 1
        if self.archive_off or self._failures < self.config.l3_failures:
            return False
        self.archive_off = reason
        return True

    def archive_worked(self) -> None:
        """A read or write succeeded: failures in a row start anew."""
        self._failures = 0

    # --- life --------------------------------------------------------------------------------------------------

    def join(self, cache: PagedCache) -> Tensor:
        """A sequence begins to use the pools: its L0 slots [S * pages] int64."""
        if cache.shape != self.shape or cache.config != self.config or cache.device != self.device:
            raise CacheError(f"a cache of {cache.shape} and {cache.config} can't share pools of {self.shape}")
        try:
            slots = self.stores[Tier.L0, Format.COMPUTE].allocate(self.shape.streams * self.hot.stream_pages)
        except PoolFull as full:
            size, count = self.config.l1_bytes, len(self.users) + 1
            raise PoolFull(
                f"cache.l1_bytes={size!r}: no room for sinks and recent window of {count} sequences: {full}"
            ) from full
        self.users.append(cache)
        return slots

    def leave(self, cache: PagedCache) -> None:
        """A sequence has freed its pages; the last one closes everything."""
        self.users.remove(cache)
        if not self.users:
            self.close()

    def close(self) -> None:
        """Stops moves, frees memory, closes the page file."""
        self.mover.close()
        for pool in (*self.stores.values(), self.prototypes, self.background):
            pool.close()
        self.file.close()
