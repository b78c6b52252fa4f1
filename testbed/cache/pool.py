"""Pools of pages: fixed-size blobs in slabs, one pool per (tier, format).

A page is one run of bytes (`kernels.pages`), so every pool looks alike: take slots, write blobs, read blobs, give
slots back. Slabs are allocated one by one and never copied on growth; a block of slabs whose pages are all free is
returned (`testbed.cache.slots`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kernels.api import Pool, gather, scatter
from kernels.pages import PageFormat
from testbed.cache.slots import SlotMap


class CacheError(RuntimeError):
    """A cache was asked for something it can't hold or doesn't have."""


class PoolFull(CacheError):
    """A tier has no room for more pages, by its limit or because the memory or the disk is full; nothing was taken."""


class PageStore(Protocol):
    """What every tier offers for one page format. Slots are taken and given back by one thread only."""

    fmt: PageFormat

    def allocate(self, pages: int, arena: int = 0) -> Tensor:
        """Slots [pages] int64 with one reference each, lowest free first.

        Raises:
            PoolFull: there is no room for all of them.
        """
        ...

    def share(self, slots: Tensor) -> None:
        """One more reference for each slot."""
        ...

    def free(self, slots: Tensor) -> None:
        """One reference less; the bytes of a slot without any are free at once."""
        ...

    def write(self, slots: Tensor, blobs: Tensor) -> None:
        """Copies blobs [M, page_bytes] uint8 into slots [M]; from any thread."""
        ...

    def read(self, slots: Tensor) -> Tensor:
        """Copy of the blobs at slots [M]: [M, page_bytes] uint8; from any thread."""
        ...

    @property
    def used_pages(self) -> int:
        """Slots taken."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes the allocator holds, free slots included."""
        ...

    def close(self) -> None:
        """Lets go of everything held."""
        ...


def no_limit() -> int | None:
    """Room of a tier that has no limit."""
    return None


class SlabPool:
    """Pages in memory, on the device or the host.

    Args:
        fmt: of the pages.
        slab_pages: pages a slab, the grain in which the pool grows and shrinks.
        device: where the slabs are.
        compute_device: where `read` delivers; a host pool beside a GPU is pinned.
        room: bytes that the tier may still grow by, None = no limit.

    Attributes:
        slabs: uint8 [slab_pages, page_bytes] each; slot s is slabs[s // slab_pages][s % slab_pages]. A slab that
            was returned is an empty tensor until it is needed again.
    """

    def __init__(
        self,
        fmt: PageFormat,
        slab_pages: int,
        device: torch.device,
        compute_device: torch.device | None = None,
        room: Callable[[], int | None] = no_limit,
    ) -> None:
        self.fmt = fmt
        self.slab_pages = slab_pages
        self.device = device
        self.compute_device = compute_device or device
        self.room = room
        self.slabs: list[Tensor] = []
        self.slots = SlotMap(slab_pages)
        self._version = 0
        self._view: tuple[int, Pool] | None = None  # of a version; a worker thread may ask while another slab comes

    @property
    def slab_bytes(self) -> int:
        """Bytes of one slab."""
        return self.slab_pages * self.fmt.page_bytes

    @property
    def used_pages(self) -> int:
        """Slots taken."""
        return self.slots.used

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs."""
        return self.slots.held * self.fmt.page_bytes

    def allocate(self, pages: int, arena: int = 0) -> Tensor:
        """Slots [pages] int64, lowest free first; grows by whole blocks of the arena's size.

        Raises:
            PoolFull: the tier's limit, or the memory; nothing is taken then.
        """
        blocks = self.slots.missing_blocks(pages, arena)
        if blocks:
            self._grow(blocks, arena)
        return self.slots.take(pages, arena)

    def _grow(self, blocks: int, arena: int) -> None:
        count = blocks * self.slots.block_slabs.get(arena, 1)
        room, wanted = self.room(), count * self.slab_bytes
        if room is not None and wanted > room:
            raise PoolFull(f"{wanted} bytes more of {self.fmt.name} pages, the tier has room for {max(0, room)}")
        try:
            fresh = [self._slab() for _ in range(count)]
        except RuntimeError as error:  # torch.OutOfMemoryError is one; a CPU's allocator raises no other type
            if "alloc" not in str(error) and "memory" not in str(error):
                raise
            reason = str(error).splitlines()[0]
            raise PoolFull(f"{wanted} bytes more of {self.fmt.name} pages on {self.device}: {reason}") from error
        where = self.slots.claim(blocks, arena)
        self.slabs += [torch.empty(0, dtype=torch.uint8)] * (self.slots.slabs - len(self.slabs))
        for index, slab in zip(where.tolist(), fresh, strict=True):
            self.slabs[index] = slab
        self._version += 1

    def _slab(self) -> Tensor:
        shape = (self.slab_pages, self.fmt.page_bytes)
        pinned = self.device.type == "cpu" and self.compute_device.type == "cuda"
        return torch.empty(shape, dtype=torch.uint8, device=self.device, pin_memory=pinned)

    def share(self, slots: Tensor) -> None:
        """One more reference for each slot."""
        self.slots.share(slots)

    def free(self, slots: Tensor) -> None:
        """One reference less; blocks of slabs left without a page are returned to the allocator."""
        _, empty = self.slots.give(slots)
        for index in empty.tolist():
            self.slabs[index] = torch.empty(0, dtype=torch.uint8)
        self._version += len(empty) > 0

    def write(self, slots: Tensor, blobs: Tensor) -> None:
        """Copies blobs [M, page_bytes] uint8 into slots [M]."""
        scatter(self.kernel_view(), slots, blobs.to(self.device))

    def read(self, slots: Tensor) -> Tensor:
        """Copy of the blobs at slots [M], on the compute device: [M, page_bytes] uint8."""
        return gather(self.kernel_view(), slots.to(self.device)).to(self.compute_device)

    def kernel_view(self) -> Pool:
        """The slabs as kernels take them; a returned slab, which no page points into, is stood for by another."""
        version, view = self._version, self._view
        if view is None or view[0] != version:
            some = next((slab for slab in self.slabs if slab.numel()), None)
            slabs = () if some is None else tuple(slab if slab.numel() else some for slab in self.slabs)
            view = (version, Pool(self.fmt, slabs))
            self._view = view
        return view[1]

    def close(self) -> None:
        """Lets go of all slabs."""
        self.slabs, self.slots = [], SlotMap(self.slab_pages)
        self._version += 1
