"""Pools of pages: fixed-size blobs in slabs, one pool per (tier, format).

A page is one run of bytes (`kernels.pages`), so every pool looks alike: take slots, write blobs, read blobs, give
slots back. Slabs are allocated one by one and never copied on growth; a slab whose pages are all free is returned.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.api import Pool, gather, scatter
from kernels.pages import PageFormat


class CacheError(RuntimeError):
    """A cache was asked for something it can't hold or doesn't have."""


class PageStore(Protocol):
    """What every tier offers for one page format."""

    fmt: PageFormat

    def allocate(self, pages: int) -> Tensor:
        """Slots [pages] int64, lowest free first."""
        ...

    def free(self, slots: Tensor) -> None:
        """Gives slots back; their bytes are free at once."""
        ...

    def write(self, slots: Tensor, blobs: Tensor) -> None:
        """Copies blobs [M, page_bytes] uint8 into slots [M]."""
        ...

    def read(self, slots: Tensor) -> Tensor:
        """Copy of the blobs at slots [M], on the compute device: [M, page_bytes] uint8."""
        ...

    def clone(self) -> PageStore:
        """An independent copy with the same slots taken."""
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


class SlotMap:
    """Which slots of a growing range are free. Lowest first, so that packing and logs are deterministic."""

    def __init__(self) -> None:
        self.free = torch.zeros(0, dtype=torch.bool)
        self._free_pages = 0

    @property
    def capacity(self) -> int:
        """Slots in the range."""
        return len(self.free)

    @property
    def used(self) -> int:
        """Slots taken."""
        return self.capacity - self._free_pages

    def grow(self, pages: int) -> None:
        """Adds free slots at the end."""
        self.free = torch.cat((self.free, torch.ones(pages, dtype=torch.bool)))
        self._free_pages += pages

    def take(self, pages: int) -> Tensor:
        """The lowest free slots [pages] int64; the caller has grown the range before."""
        slots = self.free.nonzero().flatten()[:pages]
        if len(slots) < pages:
            raise CacheError(f"{pages} slots wanted, {len(slots)} of {self.capacity} are free")
        self.free[slots] = False
        self._free_pages -= pages
        return slots

    def give(self, slots: Tensor) -> None:
        """Frees slots that are taken."""
        if bool(self.free[slots].any()):
            raise CacheError("a slot was freed twice")
        self.free[slots] = True
        self._free_pages += len(slots)

    def clone(self) -> SlotMap:
        """An independent copy."""
        other = SlotMap()
        other.free, other._free_pages = self.free.clone(), self._free_pages
        return other


class SlabPool:
    """Pages in memory, on the device or the host.

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
    ) -> None:
        self.fmt = fmt
        self.slab_pages = slab_pages
        self.device = device
        self.compute_device = compute_device or device
        self.slabs: list[Tensor] = []
        self.slots = SlotMap()
        self._view: Pool | None = None  # made when asked for, forgotten when a slab comes or goes

    @property
    def used_pages(self) -> int:
        """Slots taken."""
        return self.slots.used

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self.slabs)

    @property
    def slack_bytes(self) -> int:
        """Bytes of free slots in slabs that are held."""
        return self.held_bytes - self.used_pages * self.fmt.page_bytes

    def allocate(self, pages: int) -> Tensor:
        """Slots [pages] int64, lowest free first; grows by whole slabs."""
        missing = pages - (self.slots.capacity - self.slots.used)
        for _ in range(-(-missing // self.slab_pages) if missing > 0 else 0):
            self.slabs.append(torch.empty(0, dtype=torch.uint8))
            self.slots.grow(self.slab_pages)
        slots = self.slots.take(pages)
        for index in (slots // self.slab_pages).unique().tolist():
            if not self.slabs[index].numel():
                self.slabs[index] = self._slab()
                self._view = None
        return slots

    def _slab(self) -> Tensor:
        shape = (self.slab_pages, self.fmt.page_bytes)
        pinned = self.device.type == "cpu" and self.compute_device.type == "cuda"
        return torch.empty(shape, dtype=torch.uint8, device=self.device, pin_memory=pinned)

    def free(self, slots: Tensor) -> None:
        """Gives slots back; slabs left without a page are returned to the allocator."""
        self.slots.give(slots)
        touched = (slots // self.slab_pages).unique()
        empty = self.slots.free.view(-1, self.slab_pages)[touched].all(1)
        for index in touched[empty].tolist():
            self.slabs[index] = torch.empty(0, dtype=torch.uint8)
            self._view = None

    def write(self, slots: Tensor, blobs: Tensor) -> None:
        """Copies blobs [M, page_bytes] uint8 into slots [M]."""
        scatter(self.kernel_view(), slots, blobs.to(self.device))

    def read(self, slots: Tensor) -> Tensor:
        """Copy of the blobs at slots [M], on the compute device: [M, page_bytes] uint8."""
        return gather(self.kernel_view(), slots.to(self.device)).to(self.compute_device)

    def kernel_view(self) -> Pool:
        """The slabs as kernels take them; a returned slab, which no page points into, is stood for by another."""
        if self._view is None:
            some = next((slab for slab in self.slabs if slab.numel()), None)
            slabs = () if some is None else tuple(slab if slab.numel() else some for slab in self.slabs)
            self._view = Pool(self.fmt, slabs)
        return self._view

    def clone(self) -> SlabPool:
        """An independent copy with the same slots taken."""
        other = SlabPool(self.fmt, self.slab_pages, self.device, self.compute_device)
        other.slabs = [slab.clone() for slab in self.slabs]
        other.slots = self.slots.clone()
        return other

    def close(self) -> None:
        """Lets go of all slabs."""
        self.slabs, self.slots, self._view = [], SlotMap(), None
