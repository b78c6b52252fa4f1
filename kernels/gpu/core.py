"""The attention kernel: one program for each chunk of a stream's pages and block of its query rows.

It runs over its float, int8, int4 and prototype pages in turn with one online softmax in base 2 (FlashAttention-2,
arXiv 2307.08691) and leaves its unnormalised sum, maximum and total; `kernels.gpu.merge` joins the chunks. The G * T
query rows of a stream are packed as rows of one matrix product, so that a key is read once for all heads that share it
(FlashInfer, FlashAttention-3 pack_gqa).

Steps of quantised keys differ from page to page, and belong into the queries. A matrix product has at least 16 rows
and decoding only a few queries, so the rows that would be empty hold the same queries folded for the other pages of the
tile: replica i of a query sees page i of every tile, and the replicas are joined at the end like any partial results.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# In compiled functions plain numbers are constexpr too.

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.tiles import (
    INT4,
    INT8,
    PROTO,
    fold_key_scales,
    from_word_order,
    load_keys,
    load_prototypes,
    load_values,
    place_of_column,
    sum_by_page,
    value_scales,
)

# attend_kernel is launched, and its variants are listed, by kernels.gpu.attend.
SPEC = ()


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
def join_replicas(top, total, acc, BLOCK_ROWS: tl.constexpr):
    """Joins the partial results of the same query row."""
    REPLICAS: tl.constexpr = top.shape[0] // BLOCK_ROWS
    top = tl.reshape(top, [REPLICAS, BLOCK_ROWS])
    highest = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest)[None, :])
    total = tl.sum(tl.reshape(total, [REPLICAS, BLOCK_ROWS]) * weight, 0)
    acc = tl.sum(tl.reshape(acc, [REPLICAS, BLOCK_ROWS, acc.shape[1]]) * weight[:, :, None], 0)
    return highest, total, acc


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
    replica,
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
    REPLICAS: tl.constexpr,
    ROWS: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    COLUMN_BITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    WANT_MASS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Adds entries begin to end - 1, all of one kind; ROWS is the most rows that a page has, as a power of two."""
    PAGES: tl.constexpr = BLOCK_N // ROWS
    QUANTISED: tl.constexpr = KIND == INT8 or KIND == INT4  # noqa: SIM109 - what is compiled knows no `in`
    n = tl.arange(0, BLOCK_N)
    slot, token = place_of_column(n, KIND, ROWS, BLOCK_N, LANES)
    old_top = top
    result = acc
    if QUANTISED:
        result = tl.zeros([q.shape[0], BLOCK_D], tl.float32)  # its channels are in another order
    for first in tl.range(begin, end, PAGES):
        entry = first + slot
        valid = entry < end
        if KIND == PROTO:
            keys, values, bias = load_prototypes(
                base, address, origin, entry, valid, token, D, BLOCK_D, COLUMN_BITS, DOT
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
                kept = position < sinks
                seen = seen & (kept | (position > lowest_own - window))
                visible = visible & (kept[None, :] | (position[None, :] > own[:, None] - window))
            keys = load_keys(base, address, first, end, KIND, P, D, BLOCK_D, BLOCK_N, LANES, DOT)
            values = load_values(base, address, entry, valid, token, seen, KIND, P, D, BLOCK_D, LANES, DOT)
            if QUANTISED:
                folded, middle = fold_key_scales(
                    q, base, address, first, end, replica, KIND, P, D, BLOCK_D, BLOCK_N, DOT
                )
                scores = (tl.dot(folded, keys, input_precision="ieee") + middle[:, None]) * scale
            else:
                scores = tl.dot(q, keys, input_precision="ieee") * scale
            if HAS_SLOPES:
                scores += slope[:, None] * (position[None, :] - own[:, None]).to(tl.float32)
        if REPLICAS > 1:
            visible = visible & ((slot % REPLICAS)[None, :] == replica[:, None])
        p, decay, shift, top, total = softmax_step(scores, visible, top, total)
        if WANT_MASS:
            of_page = sum_by_page(p, KIND, ROWS, BLOCK_N, LANES)
            page_slot = tl.arange(0, PAGES)
            e = first + page_slot
            mine = real_row[:, None] & (e < end)[None, :] & ((page_slot % REPLICAS)[None, :] == replica[:, None])
            tl.store(entry_lse + entry_row[:, None] + e[None, :], shift[:, None] + tl.log2(of_page), mask=mine)
        result = result * decay[:, None]
        if QUANTISED:
            step, low = value_scales(base, address, entry, valid, token, KIND, P, D)
            low = tl.broadcast_to(low[:, None], [BLOCK_N, 16]).to(DOT)
            result += tl.max(tl.dot(p.to(DOT), low, input_precision="ieee"), 1)[:, None]
            p = p * step[None, :]
        result = tl.dot(p.to(DOT), values, result, input_precision="ieee")
    if QUANTISED:
        shift = tl.where(top == float("-inf"), 0.0, top)
        result = acc * tl.exp2(old_top - shift)[:, None] + from_word_order(result, BLOCK_D, LANES)
    return top, total, result


# Compiled once, not for every alignment and length: it takes seconds.
@triton.jit(
    do_not_specialize=["entries", "chunk_entries", "window_tokens", "sinks", "streams", "rows"],
    do_not_specialize_on_alignment=["first_position", "windows", "slopes", "part_top", "part_total", "entry_lse"],
)
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
    BLOCK_ROWS: tl.constexpr,
    REPLICAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PROTO_N: tl.constexpr,
    LANES: tl.constexpr,
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
    m = tl.arange(0, BLOCK_M)
    r = tl.program_id(1) * BLOCK_ROWS + m % BLOCK_ROWS
    replica = m // BLOCK_ROWS
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
    if WINDOW != 0:
        # Without a window every token is kept, like a sink. (A block's mask joined with a scalar's is no mask to the
        # interpreter of Triton 3.9.)
        sinks = tl.where(window == 0, 2147483647, sinks)

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
                replica,
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
                REPLICAS,
                GROUPS if kind == 5 else P,
                P,
                D,
                BLOCK_D,
                PROTO_N if kind == 5 else BLOCK_N,
                LANES,
                COLUMN_BITS,
                WINDOW != 0,
                HAS_SLOPES,
                WANT_MASS,
                DOT,
            )
    if BLOCK_ROWS < BLOCK_M:
        top, total, acc = join_replicas(top, total, acc, BLOCK_ROWS)
        r = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        real_row = r < rows
    part_row = item.to(tl.int64) * rows + r
    HALF: tl.constexpr = D // 2
    BLOCK_HALF: tl.constexpr = BLOCK_D // 2
    channel = d // BLOCK_HALF * HALF + d % BLOCK_HALF
    inside = real_row[:, None] & (d % BLOCK_HALF < HALF)[None, :]
    tl.store(part_out + part_row[:, None] * D + channel[None, :], acc, mask=inside)
    tl.store(part_top + part_row, top, mask=real_row)
    tl.store(part_total + part_row, total, mask=real_row)
