"""Moves through the mover beside what the machine can do: L2 to L1, and L3 to L1.

Memory: pages of 1 to 8 KB at random slots, a job each turn, beside torch's copy of one buffer of the same bytes on the
same number of threads (one: a worker has one). File: what the mover brings from a page file into a pool beside
`FilePool.read` of the same pages, which `testbed.bench.archive` holds against plain readers. Values are ratios of the
shortest calls of contenders that took turns. A round trip is a job of one page, submitted and waited for.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from kernels.bench.timing import Contender, take_turns
from kernels.pages import page_format
from testbed.bench.base import Options, Row, at_least
from testbed.cache.archive import ArchiveAbout, FilePool, PageFile
from testbed.cache.mover import Job, Mover, Priority
from testbed.cache.pool import PageStore, SlabPool

CASE = "moves"
BYTES, QUICK_BYTES = 128 << 20, 2 << 20
ROUNDS, LIMIT_S, TRIPS = 12, 20.0, 200
SLAB_PAGES = 128
OF_COPY, OF_READ = 0.8, 0.8


def run(options: Options) -> list[Row]:
    """Rows for memory by page size, for the file, and the cost of a job."""
    total = QUICK_BYTES if options.quick else BYTES
    rows = [
        row for fmt, head_dim in (("int4", 64), ("int8", 64), ("bf16", 128)) for row in _memory(fmt, head_dim, total)
    ]
    return [*rows, *_file(total // 2), _trip()]


class Mover1:
    """One job after another between two stores."""

    def __init__(self, source: PageStore, taken: Tensor, target: PageStore, put: Tensor) -> None:
        self.stores, self.slots = (source, target), (taken, put)
        self.mover = Mover()

    def __call__(self) -> None:
        """Submits all pages and waits."""
        job = Job(Priority.DEMAND, 0, self.stores[0], self.slots[0], self.stores[1], self.slots[1])
        self.mover.submit(job)
        self.mover.wait([job])
        if job.error is not None:
            raise job.error


def _pool(fmt_name: str, head_dim: int, pages: int) -> tuple[SlabPool, Tensor]:
    """A pool of some bytes and its slots in random order."""
    fmt = page_format(fmt_name, 16, head_dim)
    pool = SlabPool(fmt, SLAB_PAGES, torch.device("cpu"))
    slots = pool.allocate(pages)
    pool.write(slots, torch.randint(0, 256, (pages, fmt.page_bytes), dtype=torch.uint8))
    return pool, slots[torch.randperm(pages, generator=torch.Generator().manual_seed(pages))]


def _memory(fmt_name: str, head_dim: int, total_bytes: int) -> list[Row]:
    """L2 to L1 of one page format."""
    page_bytes = page_format(fmt_name, 16, head_dim).page_bytes
    pages = total_bytes // page_bytes
    (source, taken), (target, put) = _pool(fmt_name, head_dim, pages), _pool(fmt_name, head_dim, pages)
    plain, copy = torch.ones(2, pages * page_bytes, dtype=torch.uint8)
    move = Mover1(source, taken, target, put.flip(0))
    moved_bytes = 2 * pages * page_bytes
    contenders = [
        Contender("move", [move], moved_bytes),
        Contender("copy_", [lambda: copy.copy_(plain)], moved_bytes),
    ]
    ratio, gbps = _compare(contenders, "move", "copy_", pages * page_bytes)
    move.mover.close()
    name = f"L2>L1, pages of {page_bytes} B at random"
    return [at_least(CASE, f"{name}: of a copy of one buffer", ratio, OF_COPY), Row(CASE, name, gbps, "GB/s")]


def _file(total_bytes: int) -> list[Row]:
    """L3 to L1 of int8 pages, on the disk that holds the temporary folder."""
    fmt = page_format("int8", 16, 64)
    pages = total_bytes // fmt.page_bytes
    target, put = _pool("int8", 64, pages)
    with tempfile.TemporaryDirectory() as folder:
        about = ArchiveAbout("", 1, 1, 64, 16, {"int8": fmt.page_bytes})
        file = PageFile.open(Path(folder), about)
        store = FilePool(fmt, file)
        taken = store.allocate(pages)
        store.write(taken, target.read(put))
        move = Mover1(store, taken, target, put)
        contenders = [
            Contender("move", [move], pages * fmt.page_bytes),
            Contender("read", [lambda: store.read(taken)], pages * fmt.page_bytes),
        ]
        ratio, gbps = _compare(contenders, "move", "read", pages * fmt.page_bytes)
        move.mover.close()
        file.close()
    name = f"L3>L1, pages of {fmt.page_bytes} B"
    return [at_least(CASE, f"{name}: of reads of the page file", ratio, OF_READ), Row(CASE, name, gbps, "GB/s")]


def _compare(contenders: list[Contender], ours: str, theirs: str, moved_bytes: int) -> tuple[float, float]:
    """Our speed over theirs, and our GB/s."""
    times = take_turns(contenders, ROUNDS, LIMIT_S)
    for one in times.values():
        if one.failure:
            raise RuntimeError(one.failure)
    best = {name: one.best_ms or float("nan") for name, one in times.items()}
    return best[theirs] / best[ours], moved_bytes / best[ours] / 1e6


def _trip() -> Row:
    """What a small job costs the step that waits for it."""
    (source, taken), (target, put) = _pool("int8", 64, SLAB_PAGES), _pool("int8", 64, SLAB_PAGES)
    move = Mover1(source, taken[:1], target, put[:1])
    seconds = []
    for _ in range(TRIPS):
        started = time.perf_counter()
        move()
        seconds.append(time.perf_counter() - started)
    move.mover.close()
    return Row(CASE, "a job of one page: submit and wait, shortest", 1e6 * min(seconds), "us")
