"""L3 against plain readers and writers of the same file, with and without the system's page cache.

The plain ones move the same bytes from and to the same memory with one call a block: one after the other in blocks of
256 KiB (sequential), page by page in a random order (random), the same from eight threads. The archive moves them
through `FilePool`, which joins neighbours and takes a checksum of every page. They take turns on one file; the best of
several rounds counts. Without O_DIRECT the page cache is emptied before every read (a mapping keeps its pages there all
the same), and every write ends with fsync.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kernels.pages import page_format
from testbed.bench.base import Options, Row, at_least, unjudged
from testbed.cache.archive import ArchiveAbout, ArchiveError, FilePool, PageFile
from testbed.cache.archive.checksum import checksums
from testbed.cache.archive.file_pool import aligned_pages
from testbed.cache.archive.header import HEADER_BYTES
from testbed.cache.archive.io import RUN_BYTES

CASE = "archive"
FILE_BYTES, QUICK_BYTES = 256 << 20, 4 << 20
RANDOM_PAGES, QUICK_PAGES = 4096, 256
ROUNDS, QUICK_ROUNDS = 6, 1
THREADS = 8
TARGET = 0.8
FORMAT = page_format("bf16", 16, 64)
Calls = dict[str, Callable[[], object]]
Block = tuple[int, memoryview]


def run(options: Options) -> list[Row]:
    """Rows in GB/s, and the archive's as a share of each plain one."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [_checksum_row()]
        for io, direct in (("threads", True), ("threads", False), ("uring", True), ("uring", False), ("mmap", False)):
            rows += _measured(Path(folder), io, direct, options)
    return unjudged(rows) if options.quick else rows


def _checksum_row() -> Row:
    pages = aligned_pages(256, FORMAT.page_bytes).random_(0, 256)
    best_s = min(_seconds(lambda: checksums(pages)) for _ in range(50))
    return at_least(CASE, "checksum of pages in cache, one thread", pages.nbytes / best_s / 1e9, 5.0, "GB/s")


def _measured(folder: Path, io: str, direct: bool, options: Options) -> list[Row]:
    about = ArchiveAbout("", 1, 1, FORMAT.head_dim, FORMAT.page_tokens, {FORMAT.name: FORMAT.page_bytes})
    name = f"{io}, {'O_DIRECT' if direct else 'page cache'}"
    file = PageFile.open(folder, about, io=io, direct=direct)
    try:
        pool = FilePool(FORMAT, file)
        slots = pool.allocate((QUICK_BYTES if options.quick else FILE_BYTES) // FORMAT.page_bytes)
        blobs = aligned_pages(len(slots), FORMAT.page_bytes).random_(0, 256)
        pool.write(slots, blobs)
        file.sync()
    except ArchiveError as error:
        file.close()
        return [Row(CASE, f"{name}: {error}", math.nan)]
    plain = os.open(f"/proc/self/fd/{file.file}", os.O_RDWR | (os.O_DIRECT if direct else 0))
    try:
        return _rows(name, pool, slots, blobs, plain, direct, options)
    finally:
        os.close(plain)
        file.close()


def _rows(
    name: str, pool: FilePool, slots: torch.Tensor, blobs: torch.Tensor, plain: int, direct: bool, options: Options
) -> list[Row]:
    out = aligned_pages(*blobs.shape).fill_(0)
    order = torch.randperm(len(slots), generator=torch.manual_seed(0))
    order = order[: QUICK_PAGES if options.quick else RANDOM_PAGES]
    some, some_out = slots[order], out[: len(order)]
    some_blobs = aligned_pages(len(order), FORMAT.page_bytes).copy_(blobs[order])
    starts, places = range(0, blobs.nbytes, RUN_BYTES), pool.offsets(some).tolist()
    to_whole, to_pages = _blocks(out, starts, RUN_BYTES), _blocks(some_out, places, pool.stride_bytes)
    of_whole, of_pages = _blocks(blobs, starts, RUN_BYTES), _blocks(some_blobs, places, pool.stride_bytes)
    reads: list[tuple[str, int, Calls]] = [
        (
            "sequential read",
            blobs.nbytes,
            {"archive": lambda: pool.read(slots, out), "plain": lambda: _move(plain, to_whole, write=False)},
        ),
        (
            "random read",
            some_blobs.nbytes,
            {
                "archive": lambda: pool.read(some, some_out),
                "plain": lambda: _move(plain, to_pages, write=False),
                f"plain, {THREADS} threads": lambda: _spread(plain, to_pages),
            },
        ),
    ]
    synced = (lambda: None) if direct else pool.file.sync

    def then_sync(call: Callable[[], object]) -> Callable[[], object]:
        return lambda: (call(), synced())

    writes: list[tuple[str, int, Calls]] = [
        (
            "sequential write",
            blobs.nbytes,
            {
                "plain": then_sync(lambda: _move(plain, of_whole, write=True)),
                "archive": then_sync(lambda: pool.write(slots, blobs)),
            },
        ),
        (
            "random write",
            some_blobs.nbytes,
            {
                "plain": then_sync(lambda: _move(plain, of_pages, write=True)),
                "archive": then_sync(lambda: pool.write(some, some_blobs)),
            },
        ),
    ]
    rows: list[Row] = []
    for what, moved_bytes, calls in (*reads, *writes):
        empty = (lambda: None) if direct or "write" in what else (lambda: _empty_cache(pool.file))
        rows += _compared(f"{what} ({name})", moved_bytes, calls, empty, options)
    return rows


def _compared(what: str, moved_bytes: int, calls: Calls, before: Callable[[], object], options: Options) -> list[Row]:
    """Rows of contenders that took turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(QUICK_ROUNDS if options.quick else ROUNDS):
        for name, call in calls.items():
            before()
            times[name].append(_seconds(call))
    best = {name: moved_bytes / min(each) / 1e9 for name, each in times.items()}
    rows = [Row(CASE, f"{what}: {name}", value, "GB/s") for name, value in best.items()]
    return rows + [
        at_least(CASE, f"{what}: archive / {name}", best["archive"] / value, TARGET)
        for name, value in best.items()
        if name != "archive"
    ]


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _move(file: int, blocks: Sequence[Block], write: bool) -> None:
    """One call of the system a block, on one thread."""
    for at, part in blocks:
        done = os.pwrite(file, part, at) if write else os.preadv(file, [part], at)
        if done != len(part):
            raise OSError(f"{done} of {len(part)} bytes moved at {at}")


def _spread(file: int, blocks: Sequence[Block]) -> None:
    """Reads on several threads."""
    with ThreadPoolExecutor(THREADS) as threads:
        for done in [threads.submit(_move, file, blocks[i::THREADS], False) for i in range(THREADS)]:
            done.result()


def _blocks(memory: torch.Tensor, offsets: Sequence[int], size: int) -> list[Block]:
    """Where blocks are in the file, and the memory of each."""
    view = memory.view(-1).numpy().data
    return [(HEADER_BYTES + at, view[i * size : (i + 1) * size]) for i, at in enumerate(offsets)]


def _empty_cache(file: PageFile) -> None:
    file.sync()
    os.posix_fadvise(file.file, 0, 0, os.POSIX_FADV_DONTNEED)
