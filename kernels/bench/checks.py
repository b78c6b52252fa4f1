"""Correctness on the device: random ragged cases beside the float64 oracle, which runs on the host.

What a test in Triton's interpreter can't show is shown here: bf16, and code that was really compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.api import PageTable, Pool, attend
from kernels.pages import encode, page_format
from kernels.state import Partial


@dataclass(frozen=True)
class Check:
    """Arguments of one `attend` call on the host; what is not written is 0xff, NaN in every float format."""

    q: Tensor
    table: PageTable
    pools: tuple[Pool, ...]
    first: Tensor

    def on(self, device: str) -> Check:
        """The same on another device."""
        t = self.table
        table = PageTable(*(x.to(device) for x in (t.pool, t.slot, t.page, t.count)))
        pools = tuple(Pool(p.fmt, tuple(slab.to(device) for slab in p.slabs)) for p in self.pools)
        return Check(self.q.to(device), table, pools, self.first.to(device))

    def only(self, s: int) -> Check:
        """One stream alone."""
        t, part = self.table, slice(s, s + 1)
        table = PageTable(t.pool[part], t.slot[part], t.page[part], t.count[part])
        return Check(self.q[part], table, self.pools, self.first[part])

    def run(self, backend: str, q_dtype: torch.dtype, **options: Any) -> Partial:
        """The attention of the case."""
        scale = self.q.shape[3] ** -0.5
        return attend(self.q.to(q_dtype), self.table, self.pools, self.first, scale=scale, backend=backend, **options)


def make_check(
    names: Sequence[str],
    lengths: Sequence[int],
    *,
    page_tokens: int,
    head_dim: int,
    group: int = 4,
    tokens: int = 1,
    seed: int = 0,
) -> Check:
    """Streams of the given lengths; full pages get one of the formats by chance, a part page the first, a float one.

    Args:
        names: formats, a float one first.
        lengths: tokens of each stream, 0 or at least `tokens`.
        page_tokens: P.
        head_dim: D.
        group: G.
        tokens: T; the queries are the newest positions.
        seed: of everything.
    """
    rng = torch.Generator().manual_seed(seed)
    pages = [-(-n // page_tokens) for n in lengths]
    total, width = sum(pages), max([*pages, 1])
    loud = 1 + 4 * (torch.rand(head_dim, generator=rng) < 0.1)  # a few loud channels, as real keys have
    k = torch.randn(total, page_tokens, head_dim, generator=rng) * loud
    v = torch.randn(total, page_tokens, head_dim, generator=rng)
    kind = torch.randint(len(names), (total,), generator=rng)
    start = 0
    for n, length in zip(pages, lengths, strict=True):
        held = length - tokens
        kind[start + max(held, 0) // page_tokens : start + n] = 0  # pages that hold queries' own keys, or are not full
        if length % page_tokens:
            k[start + n - 1, length % page_tokens :] = float("nan")
            v[start + n - 1, length % page_tokens :] = float("nan")
        start += n
    slots, pools = torch.zeros(total, dtype=torch.int32), []
    for i, name in enumerate(names):
        fmt = page_format(name, page_tokens, head_dim, 2 if name == "proto" else 1)
        mine = (kind == i).nonzero()[:, 0]
        slab_pages = len(mine) // 2 + 2
        order = torch.randperm(2 * slab_pages, generator=rng)[: len(mine)]
        stored = torch.full((2 * slab_pages, fmt.page_bytes), 0xFF, dtype=torch.uint8)
        if len(mine):
            stored[order] = encode(fmt, k[mine], v[mine], "torch")
        slots[mine] = order.int()
        pools.append(Pool(fmt, (stored[:slab_pages].clone(), stored[slab_pages:].clone())))
    columns = [torch.zeros(len(pages), width, dtype=t) for t in (torch.int8, torch.int32, torch.int32)]
    start = 0
    for s, n in enumerate(pages):
        order = torch.randperm(n, generator=rng)
        values = (kind[start : start + n].char(), slots[start : start + n], torch.arange(n, dtype=torch.int32))
        for column, value in zip(columns, values, strict=True):
            column[s, :n] = value[order]
        start += n
    q = (torch.randn(len(pages), group, tokens, head_dim, generator=rng) * 2).half().bfloat16().float()
    first = torch.tensor(lengths, dtype=torch.int32) - tokens
    count = torch.tensor(pages, dtype=torch.int32)
    return Check(q, PageTable(columns[0], columns[1], columns[2], count), tuple(pools), first)


def distance(got: Partial, want: Partial) -> float:
    """The worst of: outputs relative to the largest, log-sum-exp relative, page mass; NaN and infinities must agree."""
    out, lse = got.out.double().cpu(), got.lse.double().cpu()
    seen = ~want.lse.isinf()
    if not torch.equal(lse.isinf(), want.lse.isinf()) or bool(out.isnan().any()):
        return float("inf")
    worst = [float((out - want.out).abs().max() / want.out.abs().max().clamp(min=1e-3))]
    if bool(seen.any()):
        worst.append(float(((lse - want.lse)[seen].abs() / (1 + want.lse[seen].abs())).max()))
    if got.mass is not None and want.mass is not None:
        worst.append(float((got.mass.double().cpu() - want.mass).abs().max()))
    return max(worst)
