"""Joins the partial results of a stream's work items, and turns log-sum-exps of entries into softmax mass.

o = sum_i o_i 2^(m_i - m) / sum_i l_i 2^(m_i - m) with the items' unnormalised o_i, maxima m_i and sums l_i (FlashInfer,
cascade.cuh). Items are joined in their order, whatever the batch, so a row is bitwise the same in any of them.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# In compiled functions plain numbers are constexpr too.

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.spec import Spec, Variant

# Items joined at a time, and table entries a program of the mass kernel covers.
MERGE_ITEMS = 8
MASS_ENTRIES = 128


# Compiled once, not for every alignment and length: it takes seconds.
@triton.jit(
    do_not_specialize=["rows", "tokens"],
    do_not_specialize_on_alignment=[
        "part_top",
        "part_total",
        "first_position",
        "slopes",
        "lse",
        "row_top",
        "row_total",
    ],
)
def merge_kernel(
    part_out,
    part_top,
    part_total,
    item_start,
    first_position,
    slopes,
    out,
    lse,
    row_top,
    row_total,
    rows,
    tokens,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ITEMS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    WANT_MASS: tl.constexpr,
):
    """Program (s, r) makes row r of stream s; part_*: [items, rows(, D)], out: [S, rows, D], the rest [S, rows]."""
    stream = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    begin = tl.load(item_start + stream)
    end = tl.load(item_start + stream + 1)
    d = tl.arange(0, BLOCK_D)
    k = tl.arange(0, ITEMS)
    top = tl.full([ITEMS], float("-inf"), tl.float32)
    for start in tl.range(begin, end, ITEMS):
        item = start + k
        at = item.to(tl.int64) * rows + row
        top = tl.maximum(top, tl.load(part_top + at, mask=item < end, other=float("-inf")))
    highest = tl.max(top, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([ITEMS], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in tl.range(begin, end, ITEMS):
        item = start + k
        at = item.to(tl.int64) * rows + row
        weight = tl.exp2(tl.load(part_top + at, mask=item < end, other=float("-inf")) - shift)
        total += weight * tl.load(part_total + at, mask=item < end, other=0.0)
        inside = (item < end)[:, None] & (d < D)[None, :]
        part = tl.load(part_out + at[:, None] * D + d[None, :], mask=inside, other=0.0)
        acc += tl.sum(part * weight[:, None], 0)
    every = tl.sum(total, 0)
    at = stream * rows + row
    # Only an exact 0 is "sees nothing": a NaN in the query has to come through.
    empty = every == 0.0
    result = acc / tl.where(empty, 1.0, every)
    tl.store(out + at * D + d, result, mask=d < D)
    total_lse = shift + tl.log2(every)
    if HAS_SLOPES:
        # Logits were counted from the row's own position.
        own = (tl.load(first_position + stream) + row % tokens).to(tl.float32)
        total_lse += tl.load(slopes + stream * (rows // tokens) + row // tokens) * own * 1.4426950408889634
    tl.store(lse + at, tl.where(empty, float("-inf"), total_lse))
    if WANT_MASS:
        tl.store(row_top + at, shift)
        tl.store(row_total + at, every)


# Compiled once, not for every alignment and length: it takes seconds.
@triton.jit(
    do_not_specialize=["rows", "entries"],
    do_not_specialize_on_alignment=["row_top", "row_total"],
)
def mass_kernel(
    entry_lse,
    row_top,
    row_total,
    origin,
    segment,
    mass,
    rows,
    entries,
    BLOCK: tl.constexpr,
    COLUMN_BITS: tl.constexpr,
):
    """Program (s, b) makes the mass of BLOCK entries of stream s; entry_lse: [S, rows, N] in sorted order."""
    stream = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = tl.load(segment + stream * 8 + 6)
    inside = n < held
    acc = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(0, rows):
        at = stream * rows + row
        total = tl.load(row_total + at)
        share = tl.exp2(tl.load(entry_lse + at * entries + n, mask=inside, other=float("-inf")) - tl.load(row_top + at))
        acc += tl.where(total == 0.0, 0.0, share / tl.where(total == 0.0, 1.0, total))
    column = tl.load(origin + stream * entries + n, mask=inside, other=0) & ((1 << COLUMN_BITS) - 1)
    tl.store(mass + stream * entries + tl.where(inside, column, n), tl.where(inside, acc / rows, 0.0), mask=n < entries)


_MERGE_TYPES = {
    "part_out": "*fp32",
    "part_top": "*fp32",
    "part_total": "*fp32",
    "item_start": "*i32",
    "first_position": "*i32",
    "slopes": "*fp32",
    "out": "*fp32",
    "lse": "*fp32",
    "row_top": "*fp32",
    "row_total": "*fp32",
    "rows": "i32",
    "tokens": "i32",
    **dict.fromkeys(("D", "BLOCK_D", "ITEMS", "HAS_SLOPES", "WANT_MASS"), "constexpr"),
}
_MASS_TYPES = {
    "entry_lse": "*fp32",
    "row_top": "*fp32",
    "row_total": "*fp32",
    "origin": "*i32",
    "segment": "*i32",
    "mass": "*fp32",
    "rows": "i32",
    "entries": "i32",
    "BLOCK": "constexpr",
    "COLUMN_BITS": "constexpr",
}


def _merge_variant(head_dim: int, everything: bool) -> Variant:
    constants = {"D": head_dim, "BLOCK_D": head_dim, "ITEMS": MERGE_ITEMS}
    return Variant(
        f"d{head_dim}{'-mass-alibi' if everything else ''}",
        _MERGE_TYPES,
        {**constants, "HAS_SLOPES": everything, "WANT_MASS": everything},
        divisible=frozenset({"part_out", "out"}),
        num_warps=1,
    )


SPEC = (
    Spec("merge", merge_kernel, (_merge_variant(64, False), _merge_variant(128, False), _merge_variant(128, True))),
    Spec("mass", mass_kernel, (Variant("any", _MASS_TYPES, {"BLOCK": MASS_ENTRIES, "COLUMN_BITS": 24}),)),
)
