"""What attention reads: pools of pages, and for each stream the table of the pages it attends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kernels.pages import PageFormat


@dataclass(frozen=True)
class Pool:
    """Pages of one format; slot -> slabs[slot // slab_pages][slot % slab_pages].

    Attributes:
        fmt: their format.
        slabs: [slab_pages, page_bytes] uint8 each, contiguous, all the same size and on one device.
    """

    fmt: PageFormat
    slabs: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        """Checks the slabs, once, so that no call need."""
        for slab in self.slabs:
            if slab.dtype != torch.uint8 or slab.dim() != 2 or slab.shape[1] != self.fmt.page_bytes:
                raise ValueError(f"slab {slab.dtype} {tuple(slab.shape)}: must be uint8 [pages, {self.fmt.page_bytes}]")
            if slab.shape != self.slabs[0].shape or not slab.is_contiguous() or slab.device != self.slabs[0].device:
                raise ValueError("slabs: must be contiguous, of one size and on one device")

    @property
    def slab_pages(self) -> int:
        """Pages a slab holds."""
        return self.slabs[0].shape[0] if self.slabs else 0

    @cached_property
    def pages(self) -> int:
        """Pages all slabs hold."""
        return self.slab_pages * len(self.slabs)

    @cached_property
    def device(self) -> torch.device:
        """Where the slabs are; the host for a pool without slabs."""
        return self.slabs[0].device if self.slabs else torch.device("cpu")

    @cached_property
    def slab_pointers(self) -> Tensor:
        """[slabs] int64 addresses, on the slabs' device; made once, so the slabs must stay where they are."""
        return torch.tensor([slab.data_ptr() for slab in self.slabs], dtype=torch.int64, device=self.device)

    @cached_property
    def native(self) -> tuple[int, ...]:
        """The pool as native code reads it: format, rows, pages a slab, slabs' addresses, page bytes, pages."""
        fmt = self.fmt
        return fmt.format_id, fmt.rows, self.slab_pages, self.slab_pointers.data_ptr(), fmt.page_bytes, self.pages


@dataclass(frozen=True)
class PageTable:
    """What each stream attends; rows are compact from the left, entries beyond `count` are never read.

    Attributes:
        pool: [S, N] int8, which of the call's pools.
        slot: [S, N] int32, where in the pool.
        page: [S, N] int32, logical page: its token i is at position page * P + i.
        count: [S] int32, entries of each stream.
    """

    pool: Tensor
    slot: Tensor
    page: Tensor
    count: Tensor

    def __post_init__(self) -> None:
        """Checks types, shapes and devices."""
        shape = self.pool.shape
        for key, dtype in (("pool", torch.int8), ("slot", torch.int32), ("page", torch.int32)):
            value = getattr(self, key)
            if value.dtype != dtype or value.dim() != 2 or value.shape != shape:
                raise ValueError(f"table.{key} {value.dtype} {tuple(value.shape)}: must be {dtype} [S, N]")
        if self.count.dtype != torch.int32 or self.count.shape != shape[:1]:
            raise ValueError(f"table.count {self.count.dtype} {tuple(self.count.shape)}: must be torch.int32 [S]")
        for key in ("slot", "page", "count"):
            device = getattr(self, key).device
            if device != self.pool.device:
                raise ValueError(f"table.{key} on {device}: must be on table.pool's device, {self.pool.device}")

    def listed(self) -> Tensor:
        """[S, N] bool: the entries that count."""
        return torch.arange(self.pool.shape[1], device=self.pool.device) < self.count[:, None]

    def check(self, pools: Sequence[Pool]) -> None:
        """Refuses entries that point outside the pools; costs a pass over the table, so only in debug mode.

        Raises:
            ValueError: naming the stream, the entry and what is allowed.
        """
        width = self.pool.shape[1]
        inside = self.listed()
        held = torch.tensor([pool.pages for pool in pools] or [0], device=self.pool.device)
        known = (self.pool >= 0) & (self.pool < len(pools))
        most = held[torch.where(known, self.pool, 0).long()]
        faults = {
            "count": ((self.count < 0) | (self.count > width))[:, None] & torch.ones_like(inside[:, :1]),
            "pool": inside & ~known,
            "slot": inside & known & ((self.slot < 0) | (self.slot >= most)),
            "page": inside & (self.page < 0),
        }
        allowed = {"count": f"0 to {width}", "pool": f"0 to {len(pools) - 1}", "page": "0 or more"}
        for key, bad in faults.items():
            if bool(bad.any()):
                s, n = (int(x) for x in bad.nonzero()[0])
                value = int(self.count[s]) if key == "count" else int(getattr(self, key)[s, n])
                if key == "slot" and not int(most[s, n]):
                    number = int(self.pool[s, n])
                    raise ValueError(f"table lists pages of pool {number} ({pools[number].fmt.name}), which holds none")
                limit = f"0 to {int(most[s, n]) - 1}" if key == "slot" else allowed[key]
                raise ValueError(f"table.{key}={value} of stream {s}, entry {n}: must be {limit}")
