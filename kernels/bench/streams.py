"""Inputs for the benchmark: random ragged streams, as pages of every format and as the dense tensors of the rivals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.api import PageTable, Pool
from kernels.pages import encode, page_format

ENCODE_PAGES = 16384  # at once, so that a large cache needs no float32 copy of its own size


@dataclass(frozen=True)
class Streams:
    """Keys, values and queries of S streams; lengths are multiples of 64 tokens, the longest first.

    Attributes:
        lengths: tokens of each stream.
        k: [sum of lengths, D] bf16, stream after stream.
        v: the same for values.
        q: [S, G, 1, D] float32, exactly representable in bf16.
    """

    lengths: tuple[int, ...]
    k: Tensor
    v: Tensor
    q: Tensor

    def __post_init__(self) -> None:
        """Checks what the page layouts and the buckets rely on."""
        if any(n <= 0 or n % 64 for n in self.lengths) or list(self.lengths) != sorted(self.lengths, reverse=True):
            raise ValueError(f"lengths={self.lengths}: must be positive multiples of 64, longest first")

    @property
    def head_dim(self) -> int:
        """D."""
        return self.k.shape[1]

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.k.device

    @property
    def dense_bytes(self) -> int:
        """K and V in bf16."""
        return 2 * self.k.nbytes

    def truth(self) -> Tensor:
        """[S * G, D] float64: attention over the keys and values before any format rounds them."""
        rows, start = [], 0
        for s, length in enumerate(self.lengths):
            k, v = (x[start : start + length].double() for x in (self.k, self.v))
            logit = self.q[s, :, 0].double() @ k.T * self.head_dim**-0.5
            rows.append((logit.softmax(1) @ v).cpu())
            start += length
        return torch.cat(rows)

    def buckets(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Streams of equal length together: q [1, n, G, D], k, v [1, n, T, D], bf16."""
        out, first, start = [], 0, 0
        while first < len(self.lengths):
            length = self.lengths[first]
            n = self.lengths.count(length)
            part = slice(start, start + n * length)
            q = self.q[first : first + n, :, 0].bfloat16()[None]
            out.append((q, *(x[part].view(1, n, length, self.head_dim) for x in (self.k, self.v))))
            first, start = first + n, start + n * length
        return out

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """k, v [1, S, longest, D] bf16 with zeros behind each stream, visible [1, S, 1, longest] bool."""
        longest = self.lengths[0]
        k, v = (x.new_zeros(1, len(self.lengths), longest, self.head_dim) for x in (self.k, self.v))
        start = 0
        for s, length in enumerate(self.lengths):
            k[0, s, :length], v[0, s, :length] = (x[start : start + length] for x in (self.k, self.v))
            start += length
        held = torch.tensor(self.lengths, device=self.device)
        visible = torch.arange(longest, device=self.device) < held[:, None]
        return k, v, visible[None, :, None]


def make_streams(
    lengths: Sequence[int], group: int, head_dim: int, seed: int, device: str | torch.device = "cpu"
) -> Streams:
    """Random normal keys, values and queries.

    Args:
        lengths: as in `Streams`.
        group: G.
        head_dim: D.
        seed: of the generator.
        device: where to make them.
    """
    rng = torch.Generator(device=device).manual_seed(seed)
    total = sum(lengths)
    k, v = (torch.empty(total, head_dim, device=device, dtype=torch.bfloat16).normal_(generator=rng) for _ in range(2))
    q = torch.empty(len(lengths), group, 1, head_dim, device=device).normal_(generator=rng).bfloat16().float()
    return Streams(tuple(lengths), k, v, q)


@dataclass(frozen=True)
class Paged:
    """Copies of the same streams as pages.

    Attributes:
        pools: what the tables point into.
        tables: one a copy; no two share a page.
        first: [S] int32, position of the query.
        read_bytes: of the pages one table lists.
    """

    pools: tuple[Pool, ...]
    tables: tuple[PageTable, ...]
    first: Tensor
    read_bytes: int


def copies_for(read_bytes: int, cold_bytes: int, least: int = 2) -> int:
    """Copies needed so that all together hold cold_bytes."""
    return max(least, math.ceil(cold_bytes / max(read_bytes, 1)))


def make_paged(
    streams: Streams,
    formats: Sequence[str],
    page_tokens: int,
    cold_bytes: int,
    *,
    share: float = 1.0,
    scattered: bool = False,
    seed: int = 0,
    groups: int = 1,
) -> Paged:
    """Stores streams as pages, several times.

    Args:
        streams: what to store.
        formats: one, or two: the first for `share` of the pages of each stream, chosen at random, the second for
            the others.
        page_tokens: P.
        cold_bytes: all copies together hold at least this.
        share: of pages in the first format.
        scattered: whether neighbouring pages lie anywhere in the pool, as after many evictions; else in order, as a
            prefill leaves them.
        seed: of choice and order.
        groups: prototypes a page, where a format is "proto".
    """
    device, d = streams.device, streams.head_dim
    rng = torch.Generator().manual_seed(seed)
    counts = [n // page_tokens for n in streams.lengths]
    total, width = sum(counts), max(counts)
    kind = (torch.rand(total, generator=rng) >= share).to(torch.int8) if len(formats) > 1 else torch.zeros(total).char()
    fmts = [page_format(name, page_tokens, d, groups if name == "proto" else 1) for name in formats]
    used = [int((kind == i).sum()) for i in range(len(fmts))]
    read_bytes = sum(n * fmt.page_bytes for n, fmt in zip(used, fmts, strict=True))
    copies = copies_for(read_bytes, cold_bytes)
    k, v = (x.view(total, page_tokens, d) for x in (streams.k, streams.v))
    pools, slots = [], torch.zeros(copies, total, dtype=torch.int32)
    for i, (fmt, n) in enumerate(zip(fmts, used, strict=True)):
        mine = (kind == i).nonzero()[:, 0]
        order = torch.randperm(copies * n, generator=rng) if scattered else torch.arange(copies * n)
        slab = torch.empty(max(copies * n, 1), fmt.page_bytes, dtype=torch.uint8, device=device)
        for start in range(0, n, ENCODE_PAGES):
            some = mine[start : start + ENCODE_PAGES].to(device)
            blobs = encode(fmt, k[some], v[some], None if device.type == "cpu" else "torch")
            for c in range(copies):
                at = order[c * n + start : c * n + start + len(some)]
                slab[at.to(device)] = blobs
        slots[:, mine] = order.view(copies, n).int()
        pools.append(Pool(fmt, (slab,)))
    count = torch.tensor(counts, dtype=torch.int32, device=device)
    tables = tuple(PageTable(*_ragged(counts, width, kind, row, device), count) for row in slots)
    first = torch.tensor(streams.lengths, dtype=torch.int32, device=device) - 1
    return Paged(tuple(pools), tables, first, read_bytes)


def _ragged(
    counts: Sequence[int], width: int, kind: Tensor, slots: Tensor, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Pool, slot and page [S, width] of streams whose pages lie one stream after the other."""
    pool = torch.zeros(len(counts), width, dtype=torch.int8)
    slot, page = (torch.zeros(len(counts), width, dtype=torch.int32) for _ in range(2))
    start = 0
    for s, n in enumerate(counts):
        pool[s, :n], slot[s, :n] = kind[start : start + n], slots[start : start + n]
        page[s, :n] = torch.arange(n, dtype=torch.int32)
        start += n
    return pool.to(device), slot.to(device), page.to(device)
