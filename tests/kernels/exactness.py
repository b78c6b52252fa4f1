"""An oracle of paged attention that shares no code with kernels/: bytes by the documented layout, softmax in float64.

`kernels/reference.py` goes row by row and reads pages by `kernels.pages.decode`; this one takes all rows of a stream at
once and reads the bytes itself, so that a fault common to backends and reference shows, and thousands of tokens are
quick.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from paged_case import Case
from torch import Tensor

from kernels.api import PageTable, Pool
from kernels.pages import PageFormat, page_format, views
from kernels.state import Partial

LOG2E = 1 / math.log(2)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out unwritten is NaN (floats) or the largest integer, so an output left out shows."""
    module: Any = importlib.import_module("torch.utils.deterministic")
    before, fill = torch.are_deterministic_algorithms_enabled(), module.fill_uninitialized_memory
    # torch.use_deterministic_algorithms imports the compiler, which takes two seconds, and Triton.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    module.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch._C._set_deterministic_algorithms(before)
        module.fill_uninitialized_memory = fill


def bf16(raw: np.ndarray) -> np.ndarray:
    """Float64 of little-endian bf16 bytes."""
    wide = raw.view("<u2").astype(np.uint32) << 16
    return wide.view(np.float32).astype(np.float64)


def read_pages(fmt: PageFormat, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys and values [M, rows, D] and log2 counts [M, rows], float64, of page bytes [M, page_bytes]."""
    m, p, d, c = len(raw), fmt.page_tokens, fmt.head_dim, fmt.groups
    if fmt.name == "proto":
        k, v = (bf16(raw[:, i * 2 * c * d : (i + 1) * 2 * c * d].copy()).reshape(m, c, d) for i in (0, 1))
        return k, v, raw[:, 4 * c * d : 4 * c * d + 4 * c].copy().view("<f4").astype(np.float64)
    count = np.zeros((m, p))
    if fmt.name in ("fp32", "bf16", "fp16"):
        width = 4 if fmt.name == "fp32" else 2
        halves = (raw[:, i * width * p * d : (i + 1) * width * p * d].copy() for i in (0, 1))
        kinds = {"fp32": lambda x: x.view("<f4"), "bf16": bf16, "fp16": lambda x: x.view("<f2")}
        k, v = (kinds[fmt.name](x).astype(np.float64) for x in halves)
        return k.reshape(m, d, p).transpose(0, 2, 1), v.reshape(m, p, d), count
    bytes_each = p * d if fmt.name == "int8" else p * d // 2
    codes = [raw[:, i * bytes_each : (i + 1) * bytes_each] for i in (0, 1)]
    at = 2 * bytes_each
    header = raw[:, at : at + 24].copy().view("<f4").astype(np.float64)
    tail = raw[:, at + 24 : at + 24 + 2 * d + 2 * p].astype(np.float64)
    k_scale, k_zero, v_scale, v_zero = np.split(tail, [d, 2 * d, 2 * d + p], 1)
    k = _dequantise(codes[0].reshape(m, d, -1), k_scale, k_zero, header[:, :3], fmt.name)
    v = _dequantise(codes[1].reshape(m, p, -1), v_scale, v_zero, header[:, 3:], fmt.name)
    return k.transpose(0, 2, 1), v, count


def _dequantise(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, header: np.ndarray, name: str) -> np.ndarray:
    """[M, A, B]: base + zero code * zero unit + code * (step code * step unit)."""
    if name == "int4":
        codes = np.concatenate([codes % 16, codes // 16], 2)
    unit, base, zero_unit = (header[:, i, None, None] for i in range(3))
    return base + zero[..., None] * zero_unit + codes * (scale[..., None] * unit)


@dataclass(frozen=True)
class Rows:
    """What a stream may see: keys, values [n, D]; position, bias (log2 of the count), column [n]; always [n] bool."""

    k: Tensor
    v: Tensor
    position: Tensor
    bias: Tensor
    column: Tensor
    always: Tensor


def stream_rows(case: Case, s: int) -> Rows:
    """The rows of stream s in any order."""
    count = int(case.table.count[s])
    parts: list[tuple[Tensor, ...]] = []
    for i, pool in enumerate(case.pools):
        column = (case.table.pool[s, :count] == i).nonzero()[:, 0]
        if not len(column):
            continue
        slots = case.table.slot[s, column].long()
        blobs = torch.stack([pool.slabs[x // pool.slab_pages][x % pool.slab_pages] for x in slots.tolist()])
        k, v, bias = (torch.from_numpy(np.ascontiguousarray(x)) for x in read_pages(pool.fmt, blobs.numpy()))
        proto = pool.fmt.name == "proto"
        p, rows = pool.fmt.page_tokens, k.shape[1]
        within = torch.full((rows,), (p - 1) / 2) if proto else torch.arange(rows)
        position = case.table.page[s, column].double()[:, None] * p + within
        owner = column[:, None].expand(-1, rows)
        always = torch.full((len(column) * rows,), proto)
        parts.append((k.flatten(0, 1), v.flatten(0, 1), position.flatten(), bias.flatten(), owner.flatten(), always))
    if not parts:
        none = torch.zeros(0, dtype=torch.float64)
        empty = torch.zeros(0, case.q.shape[3], dtype=torch.float64)
        return Rows(empty, empty, none, none, none.long(), none.bool())
    return Rows(*(torch.cat(x) for x in zip(*parts, strict=True)))


def oracle(
    case: Case,
    scale: float,
    window_tokens: int | Tensor = 0,
    sink_tokens: int = 0,
    slopes: Tensor | None = None,
    extra: dict[int, tuple[Tensor, Tensor]] | None = None,
) -> Partial:
    """Attention of every stream in float64, with mass.

    Args:
        case: the call.
        scale, window_tokens, sink_tokens, slopes: as in `kernels.api.attend`.
        extra: stream -> (logits [G, T, n] in base 2, values [n, D]), further terms of the same softmax.
    """
    streams, group, tokens, head_dim = case.q.shape
    windows = torch.as_tensor(window_tokens).expand(streams)
    out = torch.zeros(streams, group, tokens, head_dim, dtype=torch.float64)
    lse = torch.full((streams, group, tokens), -math.inf, dtype=torch.float64)
    mass = torch.zeros(case.table.pool.shape, dtype=torch.float64)
    for s in range(streams):
        rows, window = stream_rows(case, s), int(windows[s])
        own = int(case.first_position[s]) + torch.arange(tokens)[:, None]
        seen = rows.position <= own
        if window:
            seen &= (rows.position > own - window) | (rows.position < sink_tokens)
        seen = (seen | rows.always) & (rows.bias > -math.inf)
        used = seen.any(0)[:, None]
        k, v = torch.where(used, rows.k, 0.0), torch.where(used, rows.v, 0.0)
        logit = case.q[s].double() @ k.T * scale
        if slopes is not None:
            logit = logit + slopes[s].double()[:, None, None] * rows.position
        logit = torch.where(seen, logit * LOG2E + rows.bias, -math.inf)
        if extra is not None and s in extra:
            logit, v = torch.cat([logit, extra[s][0]], 2), torch.cat([v, extra[s][1]])
        if not logit.shape[2]:
            continue
        top = logit.amax(2, keepdim=True)
        weight = torch.exp2(logit - torch.where(top.isinf(), 0.0, top))
        total = weight.sum(2, keepdim=True)
        share = torch.where(total > 0, weight / total, 0.0)
        out[s] = share @ v
        lse[s] = torch.where(total > 0, top + total.log2(), -math.inf)[..., 0]
        mass[s].index_add_(0, rows.column, share[..., : len(rows.column)].mean((0, 1)))
    return Partial(out, lse, mass)


def check(got: Partial, want: Partial, tolerance: float, where: str = "") -> None:
    """The rows of a stream within `tolerance` of their norm (each within thrice of its own); lse and mass likewise.

    lse is compared absolutely below 1. A stream's mass must sum to the part of its rows that see anything.
    """
    assert got.out.dtype == got.lse.dtype == torch.float32, where
    assert torch.isfinite(got.out).all(), f"{where}: out is not finite"
    assert torch.equal(got.lse == -math.inf, want.lse == -math.inf), f"{where}: rows that see nothing differ"
    assert not got.out[want.lse == -math.inf].any(), f"{where}: a row that sees nothing is not 0"
    if not got.out.numel():
        return
    error, norm = (got.out - want.out).norm(dim=3), want.out.norm(dim=3).clamp(min=1e-6)
    worst = (error / norm).amax() / 3
    together = (error.norm(dim=(1, 2)) / norm.norm(dim=(1, 2))).amax()
    assert max(worst, together) <= tolerance, f"{where}: relative error of out {together:.2e}, of a row {3 * worst:.2e}"
    seen = want.lse > -math.inf
    off = (got.lse - want.lse).abs()[seen] / (1 + want.lse[seen].abs())
    assert (off <= tolerance).all(), f"{where}: error of lse {off.amax():.2e}"
    if got.mass is not None and want.mass is not None:
        gap = (got.mass - want.mass).abs()
        assert not gap.isnan().any(), f"{where}: mass is NaN"
        assert (gap <= tolerance).all(), f"{where}: error of mass {gap.amax():.2e}"
        total = (got.mass.double().sum(1) - seen.double().mean((1, 2))).abs()
        assert (total <= max(tolerance, 1e-5)).all(), f"{where}: mass sums to one but for {total.amax():.2e}"


def with_background(case: Case, seed: int) -> Case:
    """The same streams, each with one more entry: a value and a logit offset for what it skips (a proto page, C = 1).

    Every third stream's stands for nothing: its log count is -inf and its key and value are NaN.
    """
    rng = torch.Generator().manual_seed(seed)
    streams, (p, d) = len(case.lengths), (case.pools[0].fmt.page_tokens, case.q.shape[3])
    fmt = page_format("proto", p, d, 1)
    k, v = (torch.randn(streams, 1, d, generator=rng) for _ in range(2))
    log2_count = 8 * torch.rand(streams, 1, generator=rng)
    k[2::3], v[2::3], log2_count[2::3] = math.nan, math.nan, -math.inf
    blobs = torch.zeros(streams, fmt.page_bytes, dtype=torch.uint8)
    for name, value in (("k", k), ("v", v), ("log2_count", log2_count)):
        views(fmt, blobs)[name].copy_(value)
    pools = (*case.pools, Pool(fmt, (blobs,)))
    t = case.table
    pool, slot, page = (torch.nn.functional.pad(x, (0, 1)) for x in (t.pool, t.slot, t.page))
    at = torch.arange(streams), t.count.long()
    pool[at], slot[at], page[at] = len(case.pools), torch.arange(streams, dtype=torch.int32), 0
    return replace(case, table=PageTable(pool, slot, page, t.count + 1), pools=pools)


def slice_table(table: PageTable, s: slice) -> PageTable:
    """Columns of a table."""
    count = (table.count.clamp(max=s.stop) - s.start).clamp(min=0)
    return PageTable(table.pool[:, s], table.slot[:, s], table.page[:, s], count)


def permuted(case: Case, order: list[int]) -> Case:
    """The same streams in another order."""
    t = case.table
    table = PageTable(*(x[order] for x in (t.pool, t.slot, t.page, t.count)))
    lengths = tuple(case.lengths[i] for i in order)
    return Case(case.q[order], table, case.pools, case.first_position[order], lengths)
