"""Attention over ragged paged streams on a GPU: split over the keys, all formats and heads in one launch.

A program takes one (stream, chunk of its pages) and a block of the stream's G * T query rows, packed so that every key
is read once for all heads that share it (grouped queries as rows of a matrix product: FlashInfer, FlashAttention-3).
It runs over its float, int8, int4 and prototype pages in turn with one online softmax in base 2, and leaves its
unnormalised sum, maximum and total; `kernels.gpu.merge` joins the chunks. A chunk covers a fixed number of keys, so
what a row adds up, and in which order, depends on its own stream alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.merge import MASS_ENTRIES, MERGE_ITEMS, mass_kernel, merge_kernel
from kernels.gpu.prepare import COLUMN_BITS, PROTO_SHARE, Prepared, prepared_for
from kernels.gpu.spec import ASYNC_128, TENSOR_CORE, Spec, Variant
from kernels.gpu.tiles import INT4, INT8, PROTO, load_keys, load_prototypes, load_values, value_scales
from kernels.pages import FORMAT_IDS
from kernels.state import Partial
from kernels.table import PageTable, Pool

if TYPE_CHECKING:
    from kernels.api import Options

MIN_BLOCK_D = 16
MIN_BLOCK_N = 16
LOG2_E = 1.4426950408889634
NO_WINDOW, ONE_WINDOW, WINDOWS = 0, 1, 2


@triton.jit
def softmax_step(scores, visible, top, total):
    """Probabilities of a tile against the new running maximum, and what to scale older sums by."""
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # -inf minus -inf is NaN: a row that has seen nothing yet is held against 0.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(top - shift)
    return p, decay, shift, new_top, total * decay + tl.sum(p, 1)


@triton.jit
def run_of_pages(
    begin,
    end,
    base,
    address,
    page,
    origin,
    entry_lse,
    q,
    own,
    slope,
    real_row,
    entry_row,
    lowest_own,
    highest_own,
    window,
    sinks,
    scale,
    top,
    total,
    acc,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMN_BITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    WANT_MASS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Adds entries begin to end - 1, all of one kind; ROWS is the most rows that a page has, as a power of two."""
    PAGES: tl.constexpr = BLOCK_N // ROWS
    n = tl.arange(0, BLOCK_N)
    if KIND == INT4:
        token = n % ROWS // 2 + n % 2 * (ROWS // 2)
    else:
        token = n % ROWS
    for first in tl.range(begin, end, PAGES):
        entry = first + n // ROWS
        valid = entry < end
        if KIND == PROTO:
            keys, values, bias = load_prototypes(
                base, address, origin, first, end, ROWS, D, BLOCK_D, BLOCK_N, COLUMN_BITS, DOT
            )
            scores = tl.dot(q, keys, input_precision="ieee") * scale + bias[None, :]
            visible = (bias > float("-inf"))[None, :]
            if HAS_SLOPES:
                position = (tl.load(page + entry, mask=valid, other=0) * P).to(tl.float32) + (P - 1) / 2
                scores += slope[:, None] * (position[None, :] - own.to(tl.float32)[:, None])
        else:
            position = tl.load(page + entry, mask=valid, other=0) * P + token
            seen = valid & (position <= highest_own)
            visible = valid[None, :] & (position[None, :] <= own[:, None])
            if HAS_WINDOW:
                kept = (position < sinks) | (window == 0)
                seen = seen & (kept | (position > lowest_own - window))
                visible = visible & (kept[None, :] | (position[None, :] > own[:, None] - window))
            keys = load_keys(base, address, first, end, KIND, P, D, BLOCK_D, BLOCK_N, DOT)
            values = load_values(base, address, first, end, token, seen, KIND, P, D, BLOCK_D, BLOCK_N, DOT)
            scores = tl.dot(q, keys, input_precision="ieee") * scale
            if HAS_SLOPES:
                scores += slope[:, None] * (position[None, :] - own[:, None]).to(tl.float32)
        p, decay, shift, top, total = softmax_step(scores, visible, top, total)
        if WANT_MASS:
            of_page = tl.sum(tl.reshape(p, [p.shape[0], PAGES, ROWS]), 2)
            e = first + tl.arange(0, PAGES)
            where = entry_lse + entry_row[:, None] + e[None, :]
            tl.store(where, shift[:, None] + tl.log2(of_page), mask=real_row[:, None] & (e < end)[None, :])
        acc = acc * decay[:, None]
        if KIND == INT8 or KIND == INT4:
            step, low = value_scales(base, address, first, end, token, KIND, P, D, BLOCK_N)
            acc += tl.sum(p * low[None, :], 1)[:, None]
            p = p * step[None, :]
        acc = tl.dot(p.to(DOT), values, acc, input_precision="ieee")
    return top, total, acc


@triton.jit
def attend_kernel(
    q,
    q_stream_stride,
    q_group_stride,
    q_token_stride,
    q_dim_stride,
    base,
    address,
    page,
    origin,
    segment,
    item_start,
    item_stream,
    entries,
    chunk_entries,
    first_position,
    windows,
    window_tokens,
    sinks,
    slopes,
    scale,
    part_out,
    part_top,
    part_total,
    entry_lse,
    streams,
    rows,
    tokens,
    FORMATS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PROTO_N: tl.constexpr,
    COLUMN_BITS: tl.constexpr,
    SHARE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    WANT_MASS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Program (i, b) adds up work item i for query rows b * BLOCK_M and on.

    FORMATS: bit k says whether pages of kind k may occur. scale: of the logits, times log2(e).
    """
    item = tl.program_id(0)
    if item >= tl.load(item_start + streams):
        return
    stream = tl.load(item_stream + item).to(tl.int64)
    chunk = item - tl.load(item_start + stream)
    r = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real_row = r < rows
    g = r // tokens
    t = r % tokens
    first_own = tl.load(first_position + stream)
    own = first_own + t
    d = tl.arange(0, BLOCK_D)
    at = stream * q_stream_stride + g.to(tl.int64) * q_group_stride + t * q_token_stride
    at = at[:, None] + d[None, :] * q_dim_stride
    query = tl.load(q + at, mask=real_row[:, None] & (d < D)[None, :], other=0.0)
    if query.dtype != DOT:
        query = query.to(tl.float32).to(DOT)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + stream * (rows // tokens) + g, mask=real_row, other=0.0) * 1.4426950408889634
    window = window_tokens
    if WINDOW == 2:
        window = tl.load(windows + stream)

    # A chunk's first entry: prototypes count for less than pages of tokens.
    own_segment = segment + stream * 8
    exact = tl.load(own_segment + 5)
    every = tl.load(own_segment + 6)
    begin = chunk * chunk_entries
    end = begin + chunk_entries
    begin = tl.where(begin < exact, begin, tl.minimum(exact + (begin - exact) * SHARE, every))
    end = tl.where(end < exact, end, tl.minimum(exact + (end - exact) * SHARE, every))

    address += stream * entries
    page += stream * entries
    origin += stream * entries
    entry_row = (stream * rows + r) * entries
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for kind in tl.static_range(6):
        if (FORMATS >> kind) & 1:
            low = tl.maximum(begin, tl.load(own_segment + kind))
            high = tl.minimum(end, tl.load(own_segment + kind + 1))
            top, total, acc = run_of_pages(
                low,
                high,
                base,
                address,
                page,
                origin,
                entry_lse,
                query,
                own,
                slope,
                real_row,
                entry_row,
                first_own,
                first_own + tokens - 1,
                window,
                sinks,
                scale,
                top,
                total,
                acc,
                kind,
                GROUPS if kind == 5 else P,
                P,
                D,
                BLOCK_D,
                PROTO_N if kind == 5 else BLOCK_N,
                COLUMN_BITS,
                WINDOW != 0,
                HAS_SLOPES,
                WANT_MASS,
                DOT,
            )
    part_row = item.to(tl.int64) * rows + r
    HALF: tl.constexpr = D // 2
    BLOCK_HALF: tl.constexpr = BLOCK_D // 2
    channel = (d // BLOCK_HALF) * HALF + d % BLOCK_HALF
    inside = real_row[:, None] & (d % BLOCK_HALF < HALF)[None, :]
    tl.store(part_out + part_row[:, None] * D + channel[None, :], acc, mask=inside)
    tl.store(part_top + part_row, top, mask=real_row)
    tl.store(part_total + part_row, total, mask=real_row)


@dataclass(frozen=True)
class Shape:
    """How a call is tiled; every field is part of the compiled kernel."""

    formats: int
    groups: int
    page_tokens: int
    head_dim: int
    block_d: int
    block_m: int
    block_n: int
    proto_n: int
    num_warps: int
    num_stages: int

    def constants(self, window: int, has_slopes: bool, want_mass: bool, dot: Any) -> dict[str, Any]:
        """The kernel's constexprs."""
        return {
            "FORMATS": self.formats,
            "GROUPS": self.groups,
            "P": self.page_tokens,
            "D": self.head_dim,
            "BLOCK_D": self.block_d,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "PROTO_N": self.proto_n,
            "COLUMN_BITS": COLUMN_BITS,
            "SHARE": PROTO_SHARE,
            "WINDOW": window,
            "HAS_SLOPES": has_slopes,
            "WANT_MASS": want_mass,
            "DOT": dot,
        }


def shape_for(
    formats: dict[str, int],
    page_tokens: int,
    head_dim: int,
    rows: int,
    block_tokens: int = 0,
    num_warps: int = 0,
    num_stages: int = 0,
    wide: bool = False,
) -> Shape:
    """The tiles of a call.

    Args:
        formats: names of the pools' formats -> most rows a page.
        page_tokens: P.
        head_dim: D.
        rows: G * T.
        block_tokens: keys a tile, at least a page; 0 for the default.
        num_warps: 0 for the default.
        num_stages: 0 for the default.
        wide: products in float32, which take more registers.
    """
    block_d = max(MIN_BLOCK_D, triton.next_power_of_2(head_dim))
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    block_n = block_tokens or (32 if wide or block_d > 128 else 64)
    groups = triton.next_power_of_2(formats.get("proto", 1))
    return Shape(
        formats=sum(1 << FORMAT_IDS[name] for name in formats),
        groups=groups,
        page_tokens=page_tokens,
        head_dim=head_dim,
        block_d=block_d,
        block_m=block_m,
        block_n=max(MIN_BLOCK_N, page_tokens, triton.next_power_of_2(block_n)),
        proto_n=max(32, groups),
        num_warps=num_warps or 4,
        num_stages=num_stages or (2 if wide else 3),
    )


def attend(
    q: Tensor,
    table: PageTable,
    pools: Sequence[Pool],
    first_position: Tensor,
    options: Options,
    prepared: Prepared | None = None,
) -> Partial:
    """As `kernels.api.attend`: two launches, or four for a table not seen before, or one more for the mass.

    Nothing waits for the device and no shape depends on data. Within a CUDA graph hand in `prepared`, or the table is
    sorted again in every replay.

    Args:
        q: see there; the rest too.
        table: rows contiguous.
        pools: slabs aligned to 16 bytes.
        first_position: [S] int32.
        options: `schedule.block_tokens`, `num_warps`, `num_stages` are the tile's, `split_tokens` a work item's.
        prepared: what `prepare` made of the same table and pools.
    """
    streams, group, tokens, head_dim = q.shape
    rows, entries = group * tokens, table.pool.shape[1]
    held = [pool for pool in pools if pool.slabs]
    if not held or not entries or not streams or not rows:
        mass = torch.zeros(table.pool.shape, device=q.device) if options.want_mass else None
        lse = torch.full(q.shape[:3], -math.inf, device=q.device)
        return Partial(torch.zeros(q.shape, device=q.device), lse, mass)
    schedule = options.schedule
    if prepared is None:
        prepared = prepared_for(table, pools, schedule.split_tokens)
    dot = dot_type(q.dtype, schedule.arithmetic)
    formats: dict[str, int] = {}
    for pool in held:
        formats[pool.fmt.name] = max(pool.fmt.rows, formats.get(pool.fmt.name, 1))
    shape = shape_for(
        formats,
        pools[0].fmt.page_tokens,
        head_dim,
        rows,
        schedule.block_tokens,
        schedule.num_warps,
        schedule.num_stages,
        dot == tl.float32,
    )
    items = len(prepared.item_stream)
    window = options.window_tokens
    each = isinstance(window, Tensor)
    slopes = None if options.slopes is None else options.slopes.float().contiguous()
    first_position = first_position.contiguous()
    empty = dict(dtype=torch.float32, device=q.device)
    part_out = torch.empty(items, rows, head_dim, **empty)
    part_top, part_total = torch.empty(2, items, rows, **empty)
    entry_lse = torch.empty(streams, rows, entries, **empty) if options.want_mass else part_top
    attend_kernel[(items, triton.cdiv(rows, shape.block_m))](
        q,
        *q.stride(),
        prepared.base,
        prepared.address,
        prepared.page,
        prepared.origin,
        prepared.segment,
        prepared.item_start,
        prepared.item_stream,
        entries,
        prepared.chunk_entries,
        first_position,
        window.contiguous() if isinstance(window, Tensor) else first_position,
        0 if each else window,
        options.sink_tokens,
        part_top if slopes is None else slopes,
        float(options.scale) * LOG2_E,
        part_out,
        part_top,
        part_total,
        entry_lse,
        streams,
        rows,
        tokens,
        **shape.constants(
            WINDOWS if each else ONE_WINDOW if window else NO_WINDOW, slopes is not None, options.want_mass, dot
        ),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    out = torch.empty(q.shape, **empty)
    lse, row_top, row_total = torch.empty(3, streams, group, tokens, **empty)
    merge_kernel[(streams, rows)](
        part_out,
        part_top,
        part_total,
        prepared.item_start,
        first_position,
        part_top if slopes is None else slopes,
        out,
        lse,
        row_top,
        row_total,
        rows,
        tokens,
        D=head_dim,
        BLOCK_D=shape.block_d,
        ITEMS=MERGE_ITEMS,
        HAS_SLOPES=slopes is not None,
        WANT_MASS=options.want_mass,
        num_warps=1,
    )
    if not options.want_mass:
        return Partial(out, lse)
    mass = torch.empty(streams, entries, **empty)
    mass_kernel[(streams, triton.cdiv(entries, MASS_ENTRIES))](
        entry_lse,
        row_top,
        row_total,
        prepared.origin,
        prepared.segment,
        mass,
        rows,
        entries,
        BLOCK=MASS_ENTRIES,
        COLUMN_BITS=COLUMN_BITS,
    )
    return Partial(out, lse, mass)


def dot_type(dtype: torch.dtype, arithmetic: str) -> Any:
    """The type of the products: float32 for float32 queries, else theirs; float32 in place of bf16 in the interpreter.

    The interpreter multiplies the bits of bf16 numbers.
    """
    half = tl.float16 if dtype == torch.float16 else tl.bfloat16
    if arithmetic == "float32" or (arithmetic == "auto" and dtype == torch.float32):
        return tl.float32
    return tl.float32 if half == tl.bfloat16 and triton.knobs.runtime.interpret else half


def _variant(
    names: tuple[str, ...], head_dim: int, page_tokens: int, rows: int = 4, groups: int = 2, everything: bool = False
) -> Variant:
    """A variant for bf16 queries."""
    shape = shape_for({name: groups if name == "proto" else page_tokens for name in names}, page_tokens, head_dim, rows)
    constants = shape.constants(WINDOWS if everything else NO_WINDOW, everything, everything, tl.bfloat16)
    types = {
        "q": "*bf16",
        **dict.fromkeys(("q_stream_stride", "q_group_stride", "q_token_stride"), "i32"),
        "q_dim_stride": "i32",
        "base": "*u8",
        "address": "*i64",
        "page": "*i32",
        "origin": "*i32",
        "segment": "*i32",
        "item_start": "*i32",
        "item_stream": "*i32",
        "entries": "i32",
        "chunk_entries": "i32",
        "first_position": "*i32",
        "windows": "*i32",
        "window_tokens": "i32",
        "sinks": "i32",
        "slopes": "*fp32",
        "scale": "fp32",
        **dict.fromkeys(("part_out", "part_top", "part_total", "entry_lse"), "*fp32"),
        **dict.fromkeys(("streams", "rows", "tokens"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    return Variant(
        f"{'+'.join(names)}-d{head_dim}-p{page_tokens}-m{shape.block_m}{'-mass-alibi-windows' if everything else ''}",
        types,
        constants,
        divisible=frozenset({"q", "q_stream_stride", "q_group_stride", "base", "part_out"}),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        expects=frozenset({TENSOR_CORE} | (set() if names == ("proto",) else {ASYNC_128})),
    )


SPEC = Spec(
    "attend",
    attend_kernel,
    (
        _variant(("bf16",), 128, 16),
        _variant(("bf16",), 128, 64),
        _variant(("bf16",), 64, 32),
        _variant(("bf16",), 128, 16, rows=64),
        _variant(("int8",), 128, 16),
        _variant(("int8",), 128, 64),
        _variant(("int8",), 64, 32),
        _variant(("int4",), 128, 16),
        _variant(("int4",), 128, 64),
        _variant(("int4",), 64, 32),
        _variant(("proto",), 128, 16),
        _variant(("bf16", "int8", "int4", "proto"), 128, 16),
        _variant(("bf16", "int8", "int4", "proto"), 128, 16, everything=True),
    ),
)
