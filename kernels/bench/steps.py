"""What a decode step does beside attention, as contenders: page scores and top-k, append with upkeep, the linears."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from kernels.api import PageTable, Pool, Upkeep, append
from kernels.bench.record import Row
from kernels.bench.streams import Paged, Streams, copies_for
from kernels.bench.timing import Contender
from kernels.gemv import gemv_bf16
from kernels.pages import page_format
from kernels.scoring import narrow, page_bounds, query_bound, top_pages


def score_contender(
    streams: Streams, paged: Paged, page_tokens: int, kept: float, cold_bytes: int, backend: str | None = None
) -> tuple[Contender, tuple[PageTable, ...]]:
    """Quest's bounds of all pages in bf16, the best `kept` of them, the table of those.

    Returns:
        The contender, and the tables it makes, one a copy of `paged`.
    """
    counts = [n // page_tokens for n in streams.lengths]
    bounds = page_bounds(streams.k.view(-1, page_tokens, streams.head_dim))
    width = max(counts)
    shape = (len(counts), width, streams.head_dim)
    lowest, highest = (torch.zeros(shape, dtype=torch.bfloat16, device=streams.device) for _ in range(2))
    start = 0
    for s, n in enumerate(counts):
        for padded, flat in zip((lowest, highest), bounds, strict=True):
            padded[s, :n] = flat[start : start + n]
        start += n
    q = streams.q.bfloat16()
    count = paged.tables[0].count
    wanted = (count * kept).ceil().int()
    most = int(wanted.max())
    read_bytes = 2 * 2 * sum(counts) * streams.head_dim
    copies = [(lowest.clone(), highest.clone()) for _ in range(copies_for(read_bytes, cold_bytes))]

    def call(c: int) -> PageTable:
        score = query_bound(q, *copies[c % len(copies)], count, backend)
        columns, number = top_pages(score, count, wanted, most, backend)
        return narrow(paged.tables[c % len(paged.tables)], columns, number, backend)

    tables = tuple(call(c) for c in range(len(paged.tables)))
    calls, note = [partial(call, c) for c in range(len(copies))], f"{sum(counts)} pages, bounds in bf16"
    return Contender("page bounds + top-k + table", calls, read_bytes, note=note), tables


def append_contender(
    name: str,
    streams: int,
    head_dim: int,
    page_tokens: int,
    cold_bytes: int,
    *,
    upkeep: bool,
    device: str = "cpu",
    backend: str | None = None,
) -> Contender:
    """A token for each row of a page: a call of the contender is `page_tokens` appends, to as many cold pages a stream.

    Args:
        name: of the contender.
        streams: S.
        head_dim: D.
        page_tokens: P.
        cold_bytes: all pages together hold at least this.
        upkeep: whether key bounds are widened and the full page is quantised to int8 and summed up by a prototype.
        device: where the pages are.
        backend: of `append`.
    """
    formats = [page_format(x, page_tokens, head_dim) for x in ("bf16", "int8", "proto")]
    copies = copies_for(page_tokens * streams * formats[0].page_bytes, cold_bytes)
    pages, sealed, proto = (
        Pool(f, (torch.zeros(n * copies * streams, f.page_bytes, dtype=torch.uint8, device=device),))
        for f, n in zip(formats, (page_tokens, 1, 1), strict=True)
    )
    rng = torch.Generator().manual_seed(11)
    token = torch.randn(streams, 1, head_dim, generator=rng).bfloat16().to(device)
    own = torch.arange(streams, dtype=torch.int32, device=device)[:, None]
    none = torch.full_like(own, -1)
    shape = (streams, copies * page_tokens, head_dim)
    lowest, highest = (torch.full(shape, x, dtype=torch.bfloat16, device=device) for x in (torch.inf, -torch.inf))
    arguments = []
    for c in range(copies):
        for t in range(page_tokens):
            column = c * page_tokens + t
            page, offset = (torch.full((1,), x, dtype=torch.int32, device=device) for x in (column, t))
            to = own + c * streams if t == page_tokens - 1 else none
            kept = Upkeep(page, lowest, highest, sealed, to, proto, to) if upkeep else None
            arguments.append((own + column * streams, offset, pages, kept))

    def call(c: int) -> None:
        for slot, offset, pool, kept in arguments[c * page_tokens : (c + 1) * page_tokens]:
            append(token, token, slot, offset, pool, kept, backend)

    return Contender(name, [partial(call, c) for c in range(copies)], 0)


def a_token(row: Row, page_tokens: int) -> Row:
    """The row of `append_contender`, as the mean over the tokens of a page."""
    if row.ms is None or row.median_ms is None:
        return row
    cpu_ms = None if row.cpu_ms is None else row.cpu_ms / page_tokens
    note = f"mean over the {page_tokens} tokens of a page"
    return replace(row, ms=row.ms / page_tokens, median_ms=row.median_ms / page_tokens, cpu_ms=cpu_ms, note=note)


def linears(layers: int, hidden: int, inner: int, vocabulary: int) -> Contender:
    """The matrix-vector products of a decode step of a llama with 9 heads, 3 KV heads, D = hidden / 9."""
    pairs = hidden // 9 * 3
    shapes = [(hidden + 2 * pairs, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    weights = [torch.zeros(n, m, dtype=torch.bfloat16).normal_() for _ in range(layers) for n, m in shapes]
    weights.append(torch.zeros(vocabulary, hidden, dtype=torch.bfloat16).normal_())
    inputs = {m: torch.randn(1, m) for m in (hidden, inner)}

    def step() -> None:
        for weight in weights:
            gemv_bf16(inputs[weight.shape[1]], weight)

    return Contender(f"linears of a step, {layers} layers", [step], sum(w.nbytes for w in weights))
