"""What every attention backend offers, and the choice of backend.

A stream is one (sequence, layer, KV head) with its own page table, so streams differ in length, format and
pages; the G query heads that share the KV head are rows of one call. Nothing is padded to a common length and
K, V are never repeated.

    part = attend(q, table, pools, first_position, scale=D**-0.5)     # -> Partial(out, lse, mass)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from kernels.pages import PageFormat
from kernels.state import Partial

NATIVE_MAX_DIM = 1024
BACKENDS = ("cpu", "torch", "reference")


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
    def slab_pointers(self) -> Tensor:
        """[slabs] int64 addresses, for native code; made once, so the slabs must stay where they are."""
        return torch.tensor([slab.data_ptr() for slab in self.slabs], dtype=torch.int64)

    @cached_property
    def native(self) -> tuple[int, ...]:
        """The pool as native code reads it: format, rows, pages a slab, address of `slab_pointers`, page bytes."""
        fmt = self.fmt
        return fmt.format_id, fmt.rows, self.slab_pages, self.slab_pointers.data_ptr(), fmt.page_bytes


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
        """Checks types and shapes."""
        shape = self.pool.shape
        for key, dtype in (("pool", torch.int8), ("slot", torch.int32), ("page", torch.int32)):
            value = getattr(self, key)
            if value.dtype != dtype or value.dim() != 2 or value.shape != shape:
                raise ValueError(f"table.{key} {value.dtype} {tuple(value.shape)}: must be {dtype} [S, N]")
        if self.count.dtype != torch.int32 or self.count.shape != shape[:1]:
            raise ValueError(f"table.count {self.count.dtype} {tuple(self.count.shape)}: must be torch.int32 [S]")


def attend(
    q: Tensor,
    table: PageTable,
    pools: Sequence[Pool],
    first_position: Tensor,
    *,
    scale: float,
    window_tokens: int = 0,
    slopes: Tensor | None = None,
    want_mass: bool = False,
    backend: str | None = None,
) -> Partial:
    """Attention of T new queries a stream over the pages its table lists.

    Row t of a stream is at position first_position + t and sees key positions up to its own (and above its
    own minus window_tokens). That also hides unwritten slots of the last page, which may hold anything, NaN
    included. A "proto" entry is always visible; log2 of its count is added to its base-2 logit. No row
    depends on the other streams.

    Args:
        q: [S, G, T, D] float.
        table: the pages of each stream.
        pools: what table.pool counts; one page size and head size, formats may differ.
        first_position: [S] int32.
        scale: factor of the logits.
        window_tokens: keys each row sees at most, itself included; 0 for no limit.
        slopes: [S, G] float32, ALiBi: logit += slope * key position (a proto page counts at its centre).
        want_mass: whether to return the softmax mass of each entry.
        backend: "cpu", "torch", "reference", or None for the fastest there is.

    Returns:
        `Partial`; out 0 and lse -inf for a row that sees nothing.

    Raises:
        ValueError: shapes that don't match, an unknown backend.
    """
    _check(q, table, pools, first_position, slopes)
    name = choose_backend(backend)
    if name == "cpu" and q.device.type == "cpu" and q.shape[3] <= NATIVE_MAX_DIM:
        from kernels.cpu.backend import attend as run
    elif name == "reference":
        from kernels.reference import attend as run
    else:
        from kernels.torch_backend import attend as run
    return run(q, table, pools, first_position, scale, window_tokens, slopes, want_mass)


def append(k: Tensor, v: Tensor, table_slot: Tensor, offset: Tensor, pool: Pool, backend: str | None = None) -> None:
    """Writes new tokens into float pages in place: token t of stream s to row offset[t] of its slot.

    Args:
        k: [S, T, D] float keys.
        v: [S, T, D] float values.
        table_slot: [S, T] int32.
        offset: [T] int32, 0 to P - 1.
        pool: of a float format.
        backend: as in `attend`.

    Raises:
        ValueError: a pool whose pages can't be written token by token, shapes that don't match.
    """
    if not pool.fmt.is_float:
        raise ValueError(f"append to format {pool.fmt.name!r}: must be fp32, bf16 or fp16")
    if k.shape != v.shape or k.dim() != 3 or k.shape[:2] != table_slot.shape or offset.shape != k.shape[1:2]:
        raise ValueError(
            f"append k {tuple(k.shape)}, v {tuple(v.shape)}, table_slot {tuple(table_slot.shape)}, "
            f"offset {tuple(offset.shape)}: must be [S, T, D], [S, T, D], [S, T], [T]"
        )
    if choose_backend(backend) == "cpu" and k.device.type == "cpu":
        from kernels.cpu.backend import append as run
    else:
        from kernels.torch_backend import append as run
    run(k, v, table_slot, offset, pool)


def gather(pool: Pool, slots: Tensor, backend: str | None = None) -> Tensor:
    """Copies pages out of a pool.

    Args:
        pool: of any format.
        slots: [M] int64, each below `pool.pages`, on the device the result is wanted on.
        backend: as in `attend`.

    Returns:
        [M, page_bytes] uint8.

    Raises:
        ValueError: a slot outside the pool.
    """
    _check_slots(pool, slots)
    if choose_backend(backend) == "cpu" and slots.device.type == "cpu" and _on_host(pool):
        from kernels.cpu.backend import gather as run
    else:
        from kernels.torch_backend import gather as run
    return run(pool, slots)


def scatter(pool: Pool, slots: Tensor, blobs: Tensor, backend: str | None = None) -> None:
    """Copies pages [M, page_bytes] uint8 into slots [M] of a pool; the inverse of `gather`.

    Raises:
        ValueError: a slot outside the pool, blobs of another size.
    """
    _check_slots(pool, slots)
    if blobs.dtype != torch.uint8 or blobs.shape != (len(slots), pool.fmt.page_bytes):
        raise ValueError(
            f"blobs {blobs.dtype} {tuple(blobs.shape)}: must be uint8 [{len(slots)}, {pool.fmt.page_bytes}]"
        )
    if choose_backend(backend) == "cpu" and blobs.device.type == "cpu" and _on_host(pool):
        from kernels.cpu.backend import scatter as run
    else:
        from kernels.torch_backend import scatter as run
    run(pool, slots, blobs)


def _on_host(pool: Pool) -> bool:
    return all(slab.device.type == "cpu" for slab in pool.slabs[:1])


def _check_slots(pool: Pool, slots: Tensor) -> None:
    """Native code would read or write anywhere."""
    if slots.dim() != 1 or slots.dtype != torch.int64:
        raise ValueError(f"slots {slots.dtype} {tuple(slots.shape)}: must be torch.int64 [M]")
    if len(slots) and slots.device.type == "cpu":
        low, high = (int(x) for x in slots.aminmax())
        if low < 0 or high >= pool.pages:
            raise ValueError(f"slots {low} to {high}: must be 0 to {pool.pages - 1}")


@cache
def choose_backend(name: str | None = None) -> str:
    """The backend to use: the one named, or "cpu" where a C++ compiler is there, else "torch" with a notice.

    Raises:
        ValueError: an unknown name.
        RuntimeError: "cpu" was asked for by name and there is no compiler, or it failed.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend={name!r}: must be one of {', '.join(BACKENDS)}, or None")
    if name in ("torch", "reference"):
        return name
    from kernels.cpu.build import BuildError, library

    try:
        library()
    except BuildError as error:
        if name == "cpu":
            raise RuntimeError(f"backend='cpu': {error}") from error
        print(f"testbed: native attention not available, using torch ({error})", file=sys.stderr)
        return "torch"
    return "cpu"


def _check(q: Tensor, table: PageTable, pools: Sequence[Pool], first_position: Tensor, slopes: Tensor | None) -> None:
    """Refuses what no backend could answer."""
    if q.dim() != 4 or q.shape[0] != table.count.shape[0] or first_position.shape != table.count.shape:
        raise ValueError(
            f"q {tuple(q.shape)}, first_position {tuple(first_position.shape)}: must be [S, G, T, D] and [S] "
            f"with S={table.count.shape[0]}"
        )
    for pool in pools:
        if pool.fmt.head_dim != q.shape[3] or pool.fmt.page_tokens != pools[0].fmt.page_tokens:
            raise ValueError(
                f"pool of D={pool.fmt.head_dim}, P={pool.fmt.page_tokens}: must have D={q.shape[3]} like q "
                f"and P={pools[0].fmt.page_tokens} like the first pool"
            )
    if slopes is not None and slopes.shape != q.shape[:2]:
        raise ValueError(f"slopes {tuple(slopes.shape)}: must be [S, G] = {tuple(q.shape[:2])}")
