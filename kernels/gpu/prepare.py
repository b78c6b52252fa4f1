"""What the attention kernel reads instead of a page table: entries by kind of page, and a list of work.

Kernels want long loops over pages of one format, absolute addresses without a division, and no program without work
among those that have some. Two launches build that on the device, without waiting for it and with static shapes, so
they can be captured in a CUDA graph: a counting sort of each stream's entries by format, and a prefix sum over streams
that lists the (stream, chunk) pairs there are. A plan stays as it is for many layers and steps, so the result is kept.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# Launches pass plain numbers for constexpr, and options of the launch beside the arguments.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.spec import Spec, Variant
from kernels.table import PageTable, Pool

# Pages of kinds are numbered as kernels.pages.FORMAT_IDS does; entries beyond a stream's count are of no kind.
KINDS = 6
NO_KIND = 7
# A prototype page is read by a few of its rows only; this many cost about as much as a page of tokens.
PROTO_SHARE = 4
# `origin` keeps an entry's column and the rows of its page in one number.
COLUMN_BITS = 24
SORT_BLOCK = 512
# Twice the entries a warp spill, with one release of Triton or another.
SORT_WARPS = 8
ADDRESS_ALIGN_BYTES = 16


@dataclass(frozen=True)
class Prepared:
    """A page table as the attention kernel reads it; made by `prepare`. Entries are sorted by kind of page.

    Attributes:
        base: a slab; every address counts from its first byte.
        address: [S, N] int64, bytes from `base` to the page.
        page: [S, N] int32, logical page.
        origin: [S, N] int32, column in the table + 2^24 times (rows of the page - 1).
        segment: [S, 8] int32, where each kind of page begins in the row; entry 6 and 7 are the count.
        item_start: [S + 1] int32, first work item of each stream, and how many there are.
        item_stream: [items] int32, stream of each work item; as long as there may be items.
        chunk_entries: token pages that a work item covers, or 4 times as many of prototypes.
    """

    base: Tensor
    address: Tensor
    page: Tensor
    origin: Tensor
    segment: Tensor
    item_start: Tensor
    item_stream: Tensor
    chunk_entries: int


# Compiled once, not for every alignment and length: it takes seconds.
@triton.jit(
    do_not_specialize=["pool_stride", "slot_stride", "page_stride", "entries"],
    do_not_specialize_on_alignment=["pool", "slot", "page", "count"],
)
def sort_kernel(
    pool,
    slot,
    page,
    count,
    pool_stride,
    slot_stride,
    page_stride,
    entries,
    pool_facts,
    slab_address,
    out_address,
    out_page,
    out_origin,
    out_segment,
    BLOCK: tl.constexpr,
    COLUMN_BITS: tl.constexpr,
):
    """Program (s, b) places entries b * BLOCK and on of stream s; each counts the kinds of all that come before.

    pool_facts: [pools, 4] int64: kind, rows and bytes of a page with kind + 8 * rows in one, pages a slab, first slab,
    page bytes.
    """
    stream = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    held = tl.load(count + stream)
    kinds = tl.arange(0, 8)
    before = tl.zeros([8], tl.int32)
    total = tl.zeros([8], tl.int32)
    for start in tl.range(0, held, BLOCK):
        n = start + tl.arange(0, BLOCK)
        inside = n < held
        p = tl.load(pool + stream * pool_stride + n, mask=inside, other=0).to(tl.int64)
        kind = tl.load(pool_facts + p * 4, mask=inside, other=7).to(tl.int32) & 7
        found = tl.sum((kind[None, :] == kinds[:, None]).to(tl.int32), 1)
        total += found
        before += tl.where(start < block * BLOCK, found, 0)
    total = tl.where(kinds < 6, total, 0)
    first = tl.cumsum(total, 0) - total
    if block == 0:
        tl.store(out_segment + stream * 8 + kinds, first)
    n = block * BLOCK + tl.arange(0, BLOCK)
    inside = n < held
    p = tl.load(pool + stream * pool_stride + n, mask=inside, other=0).to(tl.int64)
    at = tl.load(slot + stream * slot_stride + n, mask=inside, other=0)
    logical = tl.load(page + stream * page_stride + n, mask=inside, other=0)
    kind_rows = tl.load(pool_facts + p * 4, mask=inside, other=7).to(tl.int32)
    slab_pages = tl.load(pool_facts + p * 4 + 1, mask=inside, other=1).to(tl.int32)
    first_slab = tl.load(pool_facts + p * 4 + 2, mask=inside, other=0)
    page_bytes = tl.load(pool_facts + p * 4 + 3, mask=inside, other=0)
    slab = tl.load(slab_address + first_slab + at // slab_pages, mask=inside, other=0)
    same = ((kind_rows & 7)[None, :] == kinds[:, None]).to(tl.int32)
    # Where the first of its kind goes, and how many of its kind this block has up to it.
    place = tl.sum(same * ((first + before)[:, None] + tl.cumsum(same, 1)), 0) - 1
    row = stream * entries + place
    tl.store(out_address + row, slab + (at % slab_pages).to(tl.int64) * page_bytes, mask=inside)
    tl.store(out_page + row, logical, mask=inside)
    tl.store(out_origin + row, n + (((kind_rows >> 3) - 1) << COLUMN_BITS), mask=inside)


# Compiled once, not for every alignment and length: it takes seconds.
@triton.jit(
    do_not_specialize=["streams", "chunk_entries"],
    do_not_specialize_on_alignment=[],
)
def list_kernel(segment, item_start, item_stream, streams, chunk_entries, BLOCK: tl.constexpr, SHARE: tl.constexpr):
    """Program s writes where the work items of stream s begin, after all of the streams before it."""
    stream = tl.program_id(0)
    begin = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, stream, BLOCK):
        s = start + tl.arange(0, BLOCK)
        earlier = s < stream
        exact = tl.load(segment + s * 8 + 5, mask=earlier, other=0)
        every = tl.load(segment + s * 8 + 6, mask=earlier, other=0)
        begin += (SHARE * exact + (every - exact) + SHARE * chunk_entries - 1) // (SHARE * chunk_entries)
    own = tl.sum(begin, 0)
    exact = tl.load(segment + stream * 8 + 5)
    every = tl.load(segment + stream * 8 + 6)
    items = (SHARE * exact + (every - exact) + SHARE * chunk_entries - 1) // (SHARE * chunk_entries)
    tl.store(item_start + stream, own)
    if stream == streams - 1:
        tl.store(item_start + streams, own + items)
    for start in tl.range(0, items, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(item_stream + own + i, tl.zeros([BLOCK], tl.int32) + stream, mask=i < items)


def prepare(
    table: PageTable,
    pools: Sequence[Pool],
    split_tokens: int,
    most_entries: int | None = None,
    out: Prepared | None = None,
) -> Prepared:
    """Sorts a table for `kernels.gpu.attend.attend` and lists its work; two launches, no wait for the device.

    Args:
        table: [S, N].
        pools: at least one with slabs; slabs are aligned to 16 bytes.
        split_tokens: keys that a work item covers.
        most_entries: a bound on the sum of all counts, if the host knows one; without it buffers and the launch are
            sized for N entries in each stream.
        out: a result for the same shapes to write into, so that a captured graph finds new plans at old addresses.

    Raises:
        ValueError: a table or slabs beyond what addresses hold, `out` of other shapes.
    """
    streams, entries = table.pool.shape
    if entries >= 1 << COLUMN_BITS:
        raise ValueError(f"table of {entries} entries a stream: must be fewer than {1 << COLUMN_BITS}")
    for name, value in (("pool", table.pool), ("slot", table.slot), ("page", table.page)):
        if value.stride(1) != 1 and entries > 1:
            raise ValueError(f"table.{name} of strides {value.stride()}: rows must be contiguous")
    base = next(pool.slabs[0] for pool in pools if pool.slabs)
    page_tokens = pools[0].fmt.page_tokens
    chunk_entries = split_tokens // page_tokens
    prepared = out or _allocate(base, streams, entries, chunk_entries, most_entries)
    if prepared.address.shape != table.pool.shape or prepared.chunk_entries != chunk_entries:
        raise ValueError(
            f"out for a table of {tuple(prepared.address.shape)} in chunks of {prepared.chunk_entries} pages: must be "
            f"for {tuple(table.pool.shape)} in chunks of {chunk_entries}"
        )
    facts, slabs = _describe(_layout(pools, prepared.base.data_ptr()), base.device)
    sort_kernel[(streams, triton.cdiv(entries, SORT_BLOCK))](
        table.pool,
        table.slot,
        table.page,
        table.count,
        table.pool.stride(0),
        table.slot.stride(0),
        table.page.stride(0),
        entries,
        facts,
        slabs,
        prepared.address,
        prepared.page,
        prepared.origin,
        prepared.segment,
        BLOCK=SORT_BLOCK,
        COLUMN_BITS=COLUMN_BITS,
        num_warps=SORT_WARPS,
    )
    list_kernel[(streams,)](
        prepared.segment,
        prepared.item_start,
        prepared.item_stream,
        streams,
        chunk_entries,
        BLOCK=SORT_BLOCK,
        SHARE=PROTO_SHARE,
    )
    return prepared


def prepared_for(table: PageTable, pools: Sequence[Pool], split_tokens: int) -> Prepared:
    """As `prepare`, kept with the table until one of its tensors is written to through torch.

    While a CUDA graph is captured nothing kept is used, so that a replay sorts the table as it then is. Writes that
    torch does not see (through `.data`, or by a kernel) need a new table, or `prepare`.
    """
    base = next(pool.slabs[0] for pool in pools if pool.slabs)
    tensors = (table.pool, table.slot, table.page, table.count)
    if any(x.is_inference() for x in tensors) or (base.is_cuda and torch.cuda.is_current_stream_capturing()):
        return prepare(table, pools, split_tokens)
    key = (split_tokens, _layout(pools, base.data_ptr()), *(x._version for x in tensors))
    kept: tuple[object, Prepared] | None = vars(table).get("_gpu_prepared")
    if kept is None or kept[0] != key:
        kept = (key, prepare(table, pools, split_tokens))
        vars(table)["_gpu_prepared"] = kept  # in the table itself, so that it goes when the table goes
    return kept[1]


def _allocate(base: Tensor, streams: int, entries: int, chunk_entries: int, most_entries: int | None) -> Prepared:
    device = base.device
    items = streams * -(-entries // chunk_entries)
    if most_entries is not None:
        items = min(items, streams + most_entries // chunk_entries)
    return Prepared(
        base=base,
        address=torch.empty(streams, entries, dtype=torch.int64, device=device),
        page=torch.empty(streams, entries, dtype=torch.int32, device=device),
        origin=torch.empty(streams, entries, dtype=torch.int32, device=device),
        segment=torch.empty(streams, 8, dtype=torch.int32, device=device),
        item_start=torch.empty(streams + 1, dtype=torch.int32, device=device),
        item_stream=torch.empty(items, dtype=torch.int32, device=device),
        chunk_entries=chunk_entries,
    )


Layout = tuple[tuple[int, int, int, int, tuple[int, ...]], ...]


def _layout(pools: Sequence[Pool], base: int) -> Layout:
    """Kind, rows, pages a slab, page bytes and slab addresses from `base` of each pool."""
    return tuple(
        (
            pool.fmt.format_id,
            pool.fmt.rows,
            pool.slab_pages,
            pool.fmt.page_bytes,
            tuple(slab.data_ptr() - base for slab in pool.slabs),
        )
        for pool in pools
    )


@lru_cache(maxsize=64)
def _describe(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pools and slab addresses on the device; the key says all of it, so it can't be out of date.

    Raises:
        ValueError: a slab that isn't aligned to 16 bytes against the first one.
    """
    facts, addresses = [], []
    for index, (kind, rows, slab_pages, page_bytes, slabs) in enumerate(layout):
        if any(address % ADDRESS_ALIGN_BYTES for address in slabs):
            raise ValueError(f"slabs of pool {index}: must be aligned to {ADDRESS_ALIGN_BYTES} bytes")
        facts.append([kind + 8 * rows, max(slab_pages, 1), len(addresses), page_bytes])
        addresses.extend(slabs)
    return torch.tensor(facts, dtype=torch.int64, device=device), torch.tensor(
        addresses, dtype=torch.int64, device=device
    )


_SORT_TYPES = {
    "pool": "*i8",
    "slot": "*i32",
    "page": "*i32",
    "count": "*i32",
    "pool_stride": "i32",
    "slot_stride": "i32",
    "page_stride": "i32",
    "entries": "i32",
    "pool_facts": "*i64",
    "slab_address": "*i64",
    "out_address": "*i64",
    "out_page": "*i32",
    "out_origin": "*i32",
    "out_segment": "*i32",
    "BLOCK": "constexpr",
    "COLUMN_BITS": "constexpr",
}
_LIST_TYPES = {
    "segment": "*i32",
    "item_start": "*i32",
    "item_stream": "*i32",
    "streams": "i32",
    "chunk_entries": "i32",
    "BLOCK": "constexpr",
    "SHARE": "constexpr",
}
SPEC = (
    Spec(
        "prepare_sort",
        sort_kernel,
        (Variant("any", _SORT_TYPES, {"BLOCK": SORT_BLOCK, "COLUMN_BITS": COLUMN_BITS}, num_warps=SORT_WARPS),),
    ),
    Spec("prepare_list", list_kernel, (Variant("any", _LIST_TYPES, {"BLOCK": SORT_BLOCK, "SHARE": PROTO_SHARE}),)),
)
