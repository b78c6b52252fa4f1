"""Page scores and the best pages of each stream, without waiting for the host and without a sort.

A program scores a block of one stream's pages: their bounds are read once for all G * T query rows, on tensor cores
where queries and bounds are of one half-precision type. The k best are found by bisection on the scores' bits, taken
as ordered integers: the number of pages at or above a threshold says which half the k-th best lies in.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import launch, power_of_2
from kernels.gpu.spec import LOAD_128, TENSOR_CORE, Spec, Variant

DOT_ELEMENTS = 8192
BLOCK_ROWS = 16
ONE_TILE, TILE = 8192, 4096
# Keys of what must never be chosen and of NaN: below every number's, -inf included.
OUTSIDE, NAN = tl.constexpr(-(2**31)), tl.constexpr(-(2**31) + 1)


@triton.jit
def load_bounds(array, page, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """One vector a page, [pages, >= D]; 0 where there is none."""
    d = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(array + page.to(tl.int64)[:, None] * D + d, mask=inside[:, None] & (d < D), other=0.0)


@triton.jit
def best_of(best, score, real):
    """The better of two scores; one that is NaN, or of no real row, takes no part."""
    return tl.maximum(best, tl.where((score == score) & real, score, float("-inf")))


@triton.jit(do_not_specialize=["pages"])
def score_kernel(
    q,
    q_stream,
    q_group,
    q_token,
    highest,
    lowest,
    count,
    out,
    pages,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TWO: tl.constexpr,
    COUNTED: tl.constexpr,
    DOT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Program (s, b): pages b * BLOCK_N on of stream s; TWO bounds [S, N, D], or one vector a page in `highest`."""
    s = tl.program_id(0).to(tl.int64)
    page = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    held = tl.minimum(tl.load(count + s), pages) if COUNTED else pages
    inside = page < held
    above = load_bounds(highest + s * pages * D, page, inside, D, BLOCK_D)
    below = load_bounds(lowest + s * pages * D, page, inside, D, BLOCK_D) if TWO else above
    best = tl.full([BLOCK_N], float("-inf"), tl.float32)
    d = tl.arange(0, BLOCK_D)
    if DOT:
        for first in range(0, ROWS, BLOCK_R):
            r = first + tl.arange(0, BLOCK_R)
            at = (r // TOKENS).to(tl.int64) * q_group + (r % TOKENS).to(tl.int64) * q_token
            row = tl.load(
                q + s * q_stream + at[:, None] + d[None, :], mask=(r < ROWS)[:, None] & (d < D)[None, :], other=0.0
            )
            if TWO:
                # Split by sign; a NaN stays in the second part.
                score = tl.dot(tl.where(row > 0, row, 0.0).to(row.dtype), above.T)
                score += tl.dot(tl.where(row > 0, 0.0, row).to(row.dtype), below.T)
            else:
                score = tl.dot(row, above.T)
            best = tl.maximum(best, tl.max(best_of(float("-inf"), score, (r < ROWS)[:, None]), 0))
    else:
        above, below = above.to(tl.float32), below.to(tl.float32)
        for r in range(0, ROWS):
            at = q + s * q_stream + (r // TOKENS) * q_group + (r % TOKENS) * q_token
            row = tl.load(at + d, mask=d < D, other=0.0).to(tl.float32)
            if TWO:
                terms = tl.where(row > 0, row, 0.0)[None, :] * above + tl.where(row > 0, 0.0, row)[None, :] * below
            else:
                terms = row[None, :] * above
            best = best_of(best, tl.sum(terms, 1), True)
    tl.store(out + s * pages + page, tl.where(inside, best, float("-inf")), mask=page < pages)


@triton.jit
def ordered(row, column, held):
    """Scores as integers of the same order: NaN lowest, -0 equal to 0, and `OUTSIDE` beyond the columns held."""
    x = tl.load(row + column, mask=column < held, other=0.0)
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(column < held, tl.where(x == x, key, NAN), OUTSIDE)


@triton.jit
def at_least(keys, row, held, threshold, TILES: tl.constexpr, TILE: tl.constexpr):
    """Columns whose key is `threshold` or more; `keys` are those of a row that fits one tile."""
    if TILES == 1:
        total = tl.sum((keys >= threshold).to(tl.int32), 0)
    else:
        total = 0
        for tile in range(0, TILES):
            key = ordered(row, tile * TILE + tl.arange(0, TILE), held)
            total += tl.sum((key >= threshold).to(tl.int32), 0)
    return total


@triton.jit(do_not_specialize=["pages", "width"])
def top_kernel(
    score,
    count,
    k,
    columns,
    number,
    pages,
    width,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH_TILES: tl.constexpr,
):
    """Program s: the columns of stream s's k best scores, ascending, ties to the lower, -1 beyond."""
    s = tl.program_id(0).to(tl.int64)
    row, out = score + s * pages, columns + s * width
    held = tl.maximum(tl.minimum(tl.load(count + s), pages), 0)
    wanted = tl.maximum(tl.minimum(tl.minimum(tl.load(k + s), width), held), 0)
    tl.store(number + s, wanted)
    i = tl.arange(0, TILE)
    for tile in range(0, WIDTH_TILES):
        at = tile * TILE + i
        tl.store(out + at, tl.full([TILE], -1, tl.int32), mask=(at >= wanted) & (at < width))
    keys = ordered(row, i, held)
    # At least `wanted` keys are `least` or more, fewer are `beyond` or more; +inf's key lies below `beyond`.
    least, beyond = tl.full([], NAN, tl.int64), tl.full([], 2**31 - 1, tl.int64)
    for _ in range(0, 32):
        if beyond - least > 1:
            middle = (least + beyond) >> 1
            enough = at_least(keys, row, held, middle.to(tl.int32), TILES, TILE) >= wanted
            least, beyond = tl.where(enough, middle, least), tl.where(enough, beyond, middle)
    threshold = least.to(tl.int32)
    ties = wanted - at_least(keys, row, held, threshold + 1, TILES, TILE)
    done, tied = 0, 0
    for tile in range(0, TILES):
        column = tile * TILE + i
        key = keys if TILES == 1 else ordered(row, column, held)
        equal = (key == threshold).to(tl.int32)
        chosen = (key > threshold) | ((equal > 0) & (tied + tl.cumsum(equal, 0) <= ties))
        place = done + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(out + place, column, mask=chosen)
        done += tl.sum(chosen.to(tl.int32), 0)
        tied += tl.sum(equal, 0)


def page_scores(q: Tensor, highest: Tensor, lowest: Tensor | None, count: Tensor | None) -> Tensor:
    """As `kernels.scoring.query_bound`, or without `lowest` as `mean_key_score` of `highest`; arguments checked there.

    Args:
        q: [S, G, T, D] fp32, bf16 or fp16.
        highest: [S, N, D] fp32, bf16 or fp16.
        lowest: [S, N, D] like highest, or None.
        count: [S] int32 or None.

    Returns:
        [S, N] float32.
    """
    streams, group, tokens, head_dim = q.shape
    pages = highest.shape[1]
    out = torch.empty(streams, pages, device=q.device)
    if not out.numel():
        return out
    q = q if q.stride(3) == 1 else q.contiguous()
    highest = highest.contiguous()
    dot = q.dtype == highest.dtype != torch.float32
    blocks = _score_blocks(head_dim, dot)
    launch(
        score_kernel,
        (streams, -(-pages // blocks["BLOCK_N"])),
        q.device,
        q,
        *q.stride()[:3],
        highest,
        highest if lowest is None else lowest.contiguous(),
        count,
        out,
        pages,
        ROWS=group * tokens,
        TOKENS=tokens,
        TWO=lowest is not None,
        COUNTED=count is not None,
        DOT=dot,
        **blocks,
        num_warps=4,
    )
    return out


def top_pages(score: Tensor, count: Tensor, k: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """As `kernels.scoring.top_pages`, arguments checked there; count and k out of range are cut to it."""
    streams, pages = score.shape
    columns = torch.empty(streams, width, dtype=torch.int32, device=score.device)
    number = torch.empty(streams, dtype=torch.int32, device=score.device)
    if not streams:
        return columns, number
    tile = power_of_2(max(pages, 32)) if pages <= ONE_TILE else TILE
    arguments = (score.contiguous(), count.contiguous(), k.contiguous(), columns, number, pages, width)
    launch(
        top_kernel,
        (streams,),
        score.device,
        *arguments,
        TILES=max(1, -(-pages // tile)),
        TILE=tile,
        WIDTH_TILES=-(-width // tile),
        num_warps=_top_warps(tile),
    )
    return columns, number


def _score_blocks(head_dim: int, dot: bool) -> dict[str, int]:
    """Tile sides; without tensor cores half the elements, since they are held as float32."""
    block = max(16, power_of_2(head_dim))
    pages = max(16, (DOT_ELEMENTS if dot else DOT_ELEMENTS // 2) // block)
    return {"D": head_dim, "BLOCK_D": block, "BLOCK_N": min(pages, 64), "BLOCK_R": BLOCK_ROWS}


def _top_warps(tile: int) -> int:
    """Warps that hold at most 32 keys a thread."""
    return max(1, min(8, tile // 512))


def _score_variant(query: str, bounds: str, head_dim: int, rows: int, two: bool = True) -> Variant:
    dot = query == bounds != "fp32"
    constants: dict[str, Any] = {"ROWS": rows, "TOKENS": 1, "TWO": two, "COUNTED": True, "DOT": dot}
    constants |= _score_blocks(head_dim, dot)
    types = {"q": f"*{query}", "highest": f"*{bounds}", "lowest": f"*{bounds}", "count": "*i32", "out": "*fp32"}
    signature = {key: "constexpr" if key in constants else types.get(key, "i32") for key in score_kernel.arg_names}
    divisible = frozenset({"q", "q_stream", "q_group", "q_token", "highest", "lowest", "out"})
    expects = frozenset({TENSOR_CORE, LOAD_128} if dot else {LOAD_128})
    name = f"{query}-{bounds}-d{head_dim}-r{rows}{'' if two else '-mean'}"
    return Variant(name, signature, constants, divisible, num_warps=4, expects=expects)


def _top_variant(tile: int, tiles: int) -> Variant:
    constants = {"TILES": tiles, "TILE": tile, "WIDTH_TILES": 1}
    pointers = {"score": "*fp32", "count": "*i32", "k": "*i32", "columns": "*i32", "number": "*i32"}
    signature = {**pointers, "pages": "i32", "width": "i32", **dict.fromkeys(constants, "constexpr")}
    divisible = frozenset({"score", "columns"})
    return Variant(f"tile{tile}-x{tiles}", signature, constants, divisible, num_warps=_top_warps(tile))


SPEC = (
    Spec(
        "score",
        score_kernel,
        (
            _score_variant("bf16", "bf16", 64, 3),
            _score_variant("bf16", "bf16", 128, 4),
            _score_variant("bf16", "bf16", 128, 64),
            _score_variant("bf16", "bf16", 128, 4, two=False),
            _score_variant("fp32", "bf16", 128, 4),
            _score_variant("fp32", "fp32", 64, 3),
        ),
    ),
    Spec("top", top_kernel, (_top_variant(512, 1), _top_variant(8192, 1), _top_variant(4096, 16))),
)
