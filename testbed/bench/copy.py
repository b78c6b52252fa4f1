"""Pages at random slots from slab to slab, against torch's copy of one large buffer of as many bytes.

The large copy is what the machine's memory gives with as many threads; the pages lie in slabs by chance, as they do in
a cache that has run for a while, and each is read and written once a call.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.api import Pool, copy_pages, gather, scatter
from kernels.bench.timing import Contender, take_turns
from kernels.pages import PageFormat, page_format
from testbed.bench.base import Options, Row, at_least, unjudged

CASE = "copy"
# Format, P and D of pages of 1, 1.2, 2.2, 4, 8 and 32 KiB.
FORMATS = (("bf16", 16, 16), ("int4", 16, 64), ("int8", 16, 64), ("bf16", 16, 64), ("bf16", 16, 128), ("bf16", 64, 128))
BYTES, QUICK_BYTES = 128 << 20, 4 << 20
FEW_PAGES = 16
ROUNDS, LIMIT_S = 12, 20.0
BOUND = 0.8


def run(options: Options) -> list[Row]:
    """A row for each page size: bytes a second over those of the large copy."""
    size = QUICK_BYTES if options.quick else BYTES
    rounds = 2 if options.quick else ROUNDS
    large = [torch.ones(size, dtype=torch.uint8) for _ in range(2)]
    rows: list[Row] = []
    for name, page_tokens, head_dim in FORMATS:
        rows += _rows(page_format(name, page_tokens, head_dim), large, rounds)
    return unjudged(rows) if options.quick else rows


def _pool(fmt: PageFormat, slabs: int, slab_pages: int) -> Pool:
    return Pool(fmt, tuple(torch.ones(slab_pages, fmt.page_bytes, dtype=torch.uint8) for _ in range(slabs)))


def _rows(fmt: PageFormat, large: list[Tensor], rounds: int) -> list[Row]:
    slab_pages = min(1024, large[0].nbytes // fmt.page_bytes // 4)
    slabs = large[0].nbytes // fmt.page_bytes // slab_pages
    source, target = (_pool(fmt, slabs, slab_pages) for _ in range(2))
    rng = torch.Generator().manual_seed(0)
    from_slots, to_slots = (torch.randperm(source.pages, generator=rng) for _ in range(2))
    size = source.pages * fmt.page_bytes
    few = [slots.split(FEW_PAGES) for slots in (from_slots, to_slots)]

    def through_blobs() -> None:
        scatter(target, to_slots, gather(source, from_slots))

    contenders = (
        Contender("large", [lambda: large[1][:size].copy_(large[0][:size])], size),
        Contender("pages", [partial(copy_pages, source, from_slots, target, to_slots)], size),
        Contender("blobs", [through_blobs], size),
        Contender("few", [partial(copy_pages, source, a, target, b) for a, b in zip(*few, strict=True)], size),
    )
    ms = {name: times.best_ms or float("nan") for name, times in take_turns(contenders, rounds, LIMIT_S).items()}
    what = f"{fmt.page_bytes / 1024:.3g} KiB"
    return [
        at_least(CASE, f"pages of {what} over one large copy", ms["large"] / ms["pages"], BOUND),
        Row(CASE, f"pages of {what}", size / ms["pages"] / 1e6, "GB/s"),
        Row(CASE, f"gathered and scattered pages of {what} over one large copy", ms["large"] / ms["blobs"]),
        Row(CASE, f"call of {FEW_PAGES} pages of {what}", 1e3 * ms["few"], "us"),
    ]
