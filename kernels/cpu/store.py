"""The native CPU backend: writing pages (store.cpp), moving them (copy.cpp), scores of pages (score.cpp)."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from kernels.cpu.build import library
from kernels.pages import FLOAT_DTYPES, FORMAT_IDS
from kernels.table import PageTable, Pool
from kernels.upkeep import Upkeep, check_places

SOURCE_IDS = {dtype: FORMAT_IDS[name] for name, dtype in FLOAT_DTYPES.items()}
# Structures of eight-byte fields, in the order store.cpp, copy.cpp and score.cpp declare them; packed, which takes a
# third of the time that filling a ctypes array does.
APPEND = struct.Struct("48q").pack
COPY = struct.Struct("12q").pack
SCORES = struct.Struct("16q").pack
NO_BOUNDS = (0,) * 10
NO_COPIES = (0,) * 8
# Fewer elements than this are written sooner than a second thread wakes.
THREADED_ELEMENTS = 1 << 16
# Copies of at least this many bytes go past the cache, which could not hold them.
PAST_CACHE_BYTES = 1 << 20


def append(k: Tensor, v: Tensor, table_slot: Tensor, offset: Tensor, pool: Pool, upkeep: Upkeep | None = None) -> None:
    """As `kernels.api.append`, in one native call."""
    if k.dtype != v.dtype or k.dtype not in SOURCE_IDS:
        k, v = k.float(), v.float()
    k, v, table_slot, offset = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v, table_slot, offset))
    extra, held = _upkeep(upkeep)
    call = APPEND(
        k.data_ptr(),
        v.data_ptr(),
        SOURCE_IDS[k.dtype],
        *k.stride()[:2],
        *v.stride()[:2],
        *k.shape,
        pool.fmt.page_tokens,
        table_slot.data_ptr(),
        offset.data_ptr(),
        table_slot.stride(0),
        offset.stride(0) if offset.dim() == 2 else 0,
        *pool.native,
        *extra,
        torch.get_num_threads() if k.numel() >= THREADED_ELEMENTS else 1,
    )
    fault = library().testbed_append(call)
    del held  # only now: the call holds addresses
    if fault:
        _refuse_append(fault, table_slot, offset, pool, upkeep)


def _upkeep(upkeep: Upkeep | None) -> tuple[tuple[int, ...], list[Tensor]]:
    """Bounds and copies as store.cpp takes them, and the tensors whose addresses are among them."""
    if upkeep is None:
        return NO_BOUNDS + NO_COPIES + NO_COPIES, []
    held: list[Tensor] = []

    def rows(x: Tensor) -> tuple[int, int]:
        """Address, and elements from one stream to the next; 0 where all streams share one row."""
        held.append(x if x.stride(-1) == 1 else x.contiguous())
        return held[-1].data_ptr(), held[-1].stride(0) if x.dim() == 2 else 0

    numbers = NO_BOUNDS
    low, high = upkeep.lowest, upkeep.highest
    if low is not None and high is not None:
        places = (*rows(upkeep.page), low.data_ptr(), high.data_ptr(), SOURCE_IDS[low.dtype], low.shape[1])
        numbers = (*places, *low.stride()[:2], *high.stride()[:2])
    for target, slot in ((upkeep.sealed, upkeep.sealed_slot), (upkeep.prototypes, upkeep.prototype_slot)):
        if target is None or slot is None:
            numbers += NO_COPIES
        else:
            numbers += (*rows(slot), *target.native)
    return numbers, held


def _refuse_append(fault: int, table_slot: Tensor, offset: Tensor, pool: Pool, upkeep: Upkeep | None) -> None:
    """Says what store.cpp found out of range."""
    check_places(table_slot, offset, pool, upkeep)
    raise AssertionError(f"store.cpp refused argument {fault} of an append that is in range")


def gather(pool: Pool, slots: Tensor, threads: int | None = None) -> Tensor:
    """As `kernels.api.gather`."""
    slots = slots.contiguous()
    out = torch.empty(len(slots), pool.fmt.page_bytes, dtype=torch.uint8)
    start = ctypes.c_int64(out.data_ptr())
    if _copy(pool, _side(pool, slots), _run(start, len(slots)), len(slots), False, threads):
        _refuse_slots(slots=(pool, slots))
    return out


def scatter(pool: Pool, slots: Tensor, blobs: Tensor, threads: int | None = None) -> None:
    """As `kernels.api.scatter`."""
    slots, blobs = slots.contiguous(), blobs.contiguous()
    start = ctypes.c_int64(blobs.data_ptr())
    if _copy(pool, _run(start, len(slots)), _side(pool, slots), len(slots), True, threads):
        _refuse_slots(slots=(pool, slots))


def copy_pages(
    source: Pool, source_slots: Tensor, target: Pool, target_slots: Tensor, threads: int | None = None
) -> None:
    """As `kernels.api.copy_pages`."""
    slots, places = source_slots.contiguous(), target_slots.contiguous()
    if _copy(source, _side(source, slots), _side(target, places), len(slots), True, threads):
        _refuse_slots(source_slots=(source, slots), target_slots=(target, places))


Side = tuple[int, int, int, int]


def _side(pool: Pool, slots: Tensor) -> Side:
    """Pages of a pool as copy.cpp takes them."""
    _, _, slab_pages, slabs, _, pages = pool.native
    return slabs, slab_pages, pages, slots.data_ptr()


def _run(start: ctypes.c_int64, pages: int) -> Side:
    """Pages one after the other from an address, which must stay where it is until the call is done."""
    return ctypes.addressof(start), pages, pages, 0


def _copy(pool: Pool, source: Side, target: Side, count: int, once: bool, threads: int | None) -> int:
    """Copies pages of the pool's format; `once`: they aren't read again soon. Returns what copy.cpp does."""
    if not count:
        return 0
    page_bytes = pool.fmt.page_bytes
    past_cache = once and count * page_bytes >= PAST_CACHE_BYTES
    call = COPY(*source, *target, page_bytes, count, past_cache, threads or torch.get_num_threads())
    return library().testbed_copy(call)


def _refuse_slots(**given: tuple[Pool, Tensor]) -> None:
    """Says what copy.cpp found out of range."""
    from kernels.api import check_slots

    for name, (pool, slots) in given.items():
        check_slots(pool, slots, name)
    raise AssertionError("copy.cpp refused slots that are in range")


def page_scores(q: Tensor, high: Tensor, low: Tensor | None, count: Tensor | None, each_row: bool = False) -> Tensor:
    """As `kernels.scoring.query_bound`, or without `low` as `mean_key_score`."""
    streams, group, tokens, head_dim = q.shape
    rows = q.float().contiguous()
    high = high if high.stride(2) == 1 else high.contiguous()
    low = low if low is None or low.stride(2) == 1 else low.contiguous()
    count = None if count is None else count.contiguous()
    out = torch.empty(streams, *((group * tokens,) if each_row else ()), high.shape[1])
    call = SCORES(
        rows.data_ptr(),
        high.data_ptr(),
        0 if low is None else low.data_ptr(),
        *high.stride()[:2],
        *((0, 0) if low is None else low.stride()[:2]),
        SOURCE_IDS[high.dtype],
        streams,
        group * tokens,
        head_dim,
        high.shape[1],
        0 if count is None else count.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
        each_row,
    )
    if library().testbed_score(call):
        raise ValueError(f"count {count}: must be 0 to {high.shape[1]}")
    return out


def top_pages(score: Tensor, count: Tensor, k: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """As `kernels.scoring.top_pages`."""
    streams, total = score.shape
    score = score if score.stride(1) == 1 else score.contiguous()
    count, k = count.contiguous(), k.contiguous()
    columns = torch.empty(streams, width, dtype=torch.int32)
    number = torch.empty(streams, dtype=torch.int32)
    pointers = (x.data_ptr() for x in (score, count, k, columns, number))
    sizes = (streams, total, score.stride(0), width, torch.get_num_threads())
    fault = library().testbed_top_pages(*pointers, *sizes)
    if fault:
        name, value, most = ("count", count, total) if fault == 1 else ("k", k, width)
        raise ValueError(f"{name} {int(value.min())} to {int(value.max())}: must be 0 to {most}")
    return columns, number


def narrow(table: PageTable, columns: Tensor, number: Tensor) -> PageTable:
    """As `kernels.scoring.narrow`."""
    streams, width = columns.shape
    pool, slot, page = (x if x.stride(1) == 1 else x.contiguous() for x in (table.pool, table.slot, table.page))
    columns, number = columns.contiguous(), number.contiguous()
    new_pool, new_slot, new_page = out = tuple(torch.empty(streams, width, dtype=x.dtype) for x in (pool, slot, page))
    strides = (ctypes.c_int64 * 3)(pool.stride(0), slot.stride(0), page.stride(0))
    pointers = (pool.data_ptr(), slot.data_ptr(), page.data_ptr(), strides, columns.data_ptr(), number.data_ptr())
    sizes = (streams, pool.shape[1], width)
    fault = library().testbed_narrow(*pointers, *sizes, *(x.data_ptr() for x in out))
    if fault:
        name, value, most = ("columns", columns, pool.shape[1] - 1) if fault == 1 else ("number", number, width)
        raise ValueError(f"narrow {name} {int(value.min())} to {int(value.max())}: must be 0 to {most}")
    return PageTable(new_pool, new_slot, new_page, number)
