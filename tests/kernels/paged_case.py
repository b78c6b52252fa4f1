"""Random ragged paged streams for the kernels' tests, with unwritten slots full of NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.api import PageTable, Pool, attend
from kernels.pages import encode, page_format
from kernels.state import Partial


@dataclass(frozen=True)
class Case:
    """Arguments of one `attend` call; `lengths` are tokens a stream."""

    q: Tensor
    table: PageTable
    pools: tuple[Pool, ...]
    first_position: Tensor
    lengths: tuple[int, ...]

    def run(self, backend: str, **options: object) -> Partial:
        options.setdefault("scale", self.q.shape[3] ** -0.5)
        return attend(self.q, self.table, self.pools, self.first_position, backend=backend, **options)

    def only(self, s: int) -> Case:
        """Stream s alone, its table cut to its own length."""
        count = int(self.table.count[s])
        cut = [x[s : s + 1, :count].contiguous() for x in (self.table.pool, self.table.slot, self.table.page)]
        table = PageTable(*cut, self.table.count[s : s + 1])
        return Case(self.q[s : s + 1], table, self.pools, self.first_position[s : s + 1], self.lengths[s : s + 1])


def make_case(
    seed: int,
    names: tuple[str, ...],
    lengths: tuple[int, ...],
    head_dim: int = 64,
    page_tokens: int = 16,
    group: int = 3,
    tokens: int = 1,
    slabs: int = 2,
    groups: int = 2,
) -> Case:
    """Streams of the given lengths; full pages get a format by chance, the last page a float one.

    Every slot of a pool that isn't written, and every token beyond a stream's length, is NaN (floats) or 0xff.
    """
    rng = torch.Generator().manual_seed(seed)
    pages = [-(-n // page_tokens) for n in lengths]
    width = max([*pages, 1]) + 1
    formats = [page_format(n, page_tokens, head_dim, groups if n == "proto" else 1) for n in names]
    floats = [i for i, f in enumerate(formats) if f.is_float]
    slab_pages = -(-(sum(pages) + 3) // slabs)
    stored = [torch.full((slab_pages * slabs, f.page_bytes), 0xFF, dtype=torch.uint8) for f in formats]
    free = [torch.randperm(slab_pages * slabs, generator=rng).tolist() for _ in formats]
    # Beyond the count a table may hold anything.
    pool = torch.full((len(lengths), width), 99, dtype=torch.int8)
    slot = torch.full((len(lengths), width), -(2**30), dtype=torch.int32)
    page = torch.full((len(lengths), width), 2**30, dtype=torch.int32)
    written: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in formats]  # slot -> keys and values
    for s, length in enumerate(lengths):
        for n in range(pages[s]):
            full = (n + 1) * page_tokens <= length - tokens
            choices = range(len(formats)) if full else floats
            i = choices[int(torch.randint(len(choices), (1,), generator=rng))]
            pool[s, n], slot[s, n], page[s, n] = i, free[i].pop(), n
            written[i][int(slot[s, n])] = _page(page_tokens, head_dim, min(page_tokens, length - n * page_tokens), rng)
    for store, fmt, each in zip(stored, formats, written, strict=True):
        if each:
            k, v = (torch.stack(x) for x in zip(*each.values(), strict=True))
            store[list(each)] = encode(fmt, k, v, backend="torch")
    for s, count in enumerate(pages):  # the order of a table's entries carries no meaning
        order = torch.randperm(count, generator=rng)
        for column in (pool, slot, page):
            column[s, :count] = column[s, order]
    pools = tuple(
        Pool(f, tuple(x.clone() for x in whole.split(slab_pages))) for f, whole in zip(formats, stored, strict=True)
    )
    table = PageTable(pool, slot, page, torch.tensor(pages, dtype=torch.int32))
    q = torch.randn(len(lengths), group, tokens, head_dim, generator=rng) * 2
    first = torch.tensor([n - tokens for n in lengths], dtype=torch.int32)
    return Case(q, table, pools, first, lengths)


def any_case(
    seed: int,
    names: list[str],
    lengths: list[int],
    windows: list[int],
    sink_tokens: int,
    alibi: bool,
    *,
    tokens: int,
    group: int,
    **shape: int,
) -> tuple[Case, dict[str, object]]:
    """What hypothesis drew as a case with an fp32 pool, and the options of its call; one window is that of all."""
    held = tuple(n if n == 0 else max(n, tokens) for n in lengths)
    formats = ("fp32", *(n for n in names if n != "fp32"))
    case = make_case(seed, formats, held, tokens=tokens, group=group, **shape)
    slopes = torch.linspace(0.01, 0.5, len(held) * group).view(len(held), group) if alibi else None
    each = torch.tensor((windows * len(held))[: len(held)], dtype=torch.int32)
    window = windows[0] if len(windows) == 1 else each
    return case, {"window_tokens": window, "sink_tokens": sink_tokens, "slopes": slopes}


def _page(page_tokens: int, head_dim: int, tokens: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    channels = 1 + 4 * (torch.rand(head_dim, generator=rng) < 0.1)  # a few loud channels, as real keys have
    k = torch.randn(page_tokens, head_dim, generator=rng) * channels
    v = torch.randn(page_tokens, head_dim, generator=rng)
    if tokens < page_tokens:
        k[tokens:], v[tokens:] = float("nan"), float("nan")
    return k, v


def with_formats_poisoned(case: Case) -> Case:
    """The same case with every byte of pages no table lists turned over."""
    pools = []
    for i, pool in enumerate(case.pools):
        used = torch.zeros(pool.pages, dtype=torch.bool)
        for s, count in enumerate(case.table.count.tolist()):
            mine = case.table.pool[s, :count] == i
            used[case.table.slot[s, :count][mine].long()] = True
        slabs = []
        for j, slab in enumerate(pool.slabs):
            other = slab.clone()
            other[~used[j * pool.slab_pages : (j + 1) * pool.slab_pages]] ^= 0x5A
            slabs.append(other)
        pools.append(Pool(pool.fmt, tuple(slabs)))
    return replace(case, pools=tuple(pools))
