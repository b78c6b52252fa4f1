"""Pages go from slot to slot byte by byte, and nothing else is touched; on worker threads too."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import warm
from hypothesis import given, settings
from hypothesis import strategies as st
from test_guard_store import Fence
from torch import Tensor

from kernels.api import Pool, choose_backend, copy_pages, gather, scatter
from kernels.cpu.store import PAST_CACHE_BYTES
from kernels.pages import PageFormat, page_format

BACKENDS = ("cpu", "torch", "reference")
# Pages of 512 bytes to 32 KiB, some no multiple of the native code's pieces.
FORMATS = [
    page_format(*x)
    for x in (
        ("bf16", 16, 8),
        ("int4", 16, 64),
        ("int8", 16, 64),
        ("fp32", 32, 72),
        ("proto", 16, 40),
        ("bf16", 64, 128),
    )
]


def filled(fmt: PageFormat, slabs: int, slab_pages: int, seed: int) -> Pool:
    rng = torch.Generator().manual_seed(seed)
    shape = (slab_pages, fmt.page_bytes)
    return Pool(fmt, tuple(torch.randint(0, 256, shape, dtype=torch.uint8, generator=rng) for _ in range(slabs)))


def whole(pool: Pool) -> Tensor:
    return torch.cat(pool.slabs)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30, deadline=None)
@given(
    fmt=st.sampled_from(FORMATS),
    slabs=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    slab_pages=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    threads=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 99),
)
def test_copies_equal_torch_indexing(
    backend: str,
    fmt: PageFormat,
    slabs: tuple[int, int],
    slab_pages: tuple[int, int],
    threads: int | None,
    seed: int,
) -> None:
    source, target = (filled(fmt, slabs[i], slab_pages[i], seed + i) for i in (0, 1))
    rng = torch.Generator().manual_seed(seed)
    places = torch.randperm(target.pages, generator=rng)[: int(torch.randint(target.pages + 1, (), generator=rng))]
    slots = torch.randint(source.pages, (len(places),), generator=rng)  # a page may be read twice
    before = whole(source)
    want = whole(target).index_copy(0, places, before[slots])
    copy_pages(source, slots, target, places, backend, threads)
    assert torch.equal(whole(target), want)
    assert torch.equal(whole(source), before)
    assert torch.equal(gather(source, slots, backend, threads), before[slots])
    again = filled(fmt, slabs[1], slab_pages[1], seed + 1)
    scatter(again, places, before[slots], backend, threads)
    assert torch.equal(whole(again), want)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: str(fmt.page_bytes))
def test_many_pages_go_past_the_cache_and_over_threads(fmt: PageFormat, threads: int) -> None:
    """More than `PAST_CACHE_BYTES`, so that other stores and several work items are used."""
    pages = 3 * PAST_CACHE_BYTES // fmt.page_bytes + 5
    source, target = filled(fmt, 3, pages // 3 + 1, 0), filled(fmt, 2, pages // 2 + 1, 1)
    rng = torch.Generator().manual_seed(2)
    slots, places = (torch.randperm(pool.pages, generator=rng)[:pages] for pool in (source, target))
    want = whole(target).index_copy(0, places, whole(source)[slots])
    copy_pages(source, slots, target, places, "cpu", threads)
    assert torch.equal(whole(target), want)
    copy_pages(target, places, source, slots, "cpu", threads)
    other = filled(fmt, 2, pages // 2 + 1, 1)
    scatter(other, places, gather(source, slots, "cpu", threads), "cpu", threads)
    assert torch.equal(whole(other), want)


@pytest.mark.parametrize("shift", [1, 32])
def test_slabs_that_are_not_aligned_are_served(shift: int) -> None:
    fmt = page_format("int4", 16, 64)
    pages = 2 * PAST_CACHE_BYTES // fmt.page_bytes
    memory = torch.zeros(pages * fmt.page_bytes + 128, dtype=torch.uint8)
    start = (-memory.data_ptr()) % 64 + shift
    odd = Pool(fmt, (memory[start : start + pages * fmt.page_bytes].view(pages, -1),))
    source = filled(fmt, 1, pages, 0)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    copy_pages(source, order, odd, order.flip(0), "cpu")
    assert torch.equal(odd.slabs[0][order.flip(0)], source.slabs[0][order])
    assert not memory[:start].any()
    assert not memory[start + pages * fmt.page_bytes :].any()


def test_within_one_pool() -> None:
    pool = filled(FORMATS[2], 2, 5, 0)
    before = whole(pool)
    copy_pages(pool, torch.tensor([0, 9, 3]), pool, torch.tensor([5, 1, 8]))
    assert torch.equal(whole(pool)[[5, 1, 8]], before[[0, 9, 3]])
    rest = [0, 2, 3, 4, 6, 7, 9]
    assert torch.equal(whole(pool)[rest], before[rest])


def test_slots_that_are_no_neighbours_in_memory() -> None:
    fmt = FORMATS[0]
    slots = torch.arange(12).view(6, 2)[:, 0]
    for backend in BACKENDS:
        source, target = filled(fmt, 2, 6, 0), filled(fmt, 1, 12, 1)
        copy_pages(source, slots, target, slots.flip(0), backend)
        assert torch.equal(whole(target)[slots.flip(0)], whole(source)[slots])


TWO = torch.tensor([0, 1])


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(
    ("source_slots", "target_slots", "named"),
    [
        (TWO, torch.tensor([0]), r"source_slots \(2,\).*target_slots \(1,\)"),
        (TWO.int(), TWO, "source_slots torch.int32"),
        (TWO, TWO.float(), "target_slots torch.float32"),
        (TWO[None], TWO[None], r"source_slots torch.int64 \(1, 2\)"),
        (torch.tensor([0, 6]), TWO, "source_slots 0 to 6: must be 0 to 5"),
        (torch.tensor([-1, 2]), TWO, "source_slots -1 to 2: must be 0 to 5"),
        (TWO, torch.tensor([1, 4]), "target_slots 1 to 4: must be 0 to 3"),
        (TWO, torch.tensor([1, -(2**40)]), "target_slots -1099511627776 to 1: must be 0 to 3"),
        (TWO.to("meta"), TWO.to("meta"), "source_slots on meta"),
        (TWO, TWO.to("meta"), "target_slots .* on meta"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_copied(
    source_slots: Tensor, target_slots: Tensor, named: str, backend: str
) -> None:
    source, target = filled(FORMATS[1], 2, 3, 0), filled(FORMATS[1], 2, 2, 1)
    before = whole(target)
    with pytest.raises(ValueError, match=named):
        copy_pages(source, source_slots, target, target_slots, backend)
    assert torch.equal(whole(target), before)


def test_other_formats_pools_without_pages_and_numbers_of_threads_are_refused() -> None:
    source = filled(FORMATS[1], 1, 3, 0)
    with pytest.raises(ValueError, match="int4 pages to int8"):
        copy_pages(source, TWO, filled(FORMATS[2], 1, 3, 0), TWO)
    empty = Pool(FORMATS[1], ())
    with pytest.raises(ValueError, match="source_slots 0 to 1: must be 0 to -1"):
        copy_pages(empty, TWO, source, TWO)
    copy_pages(empty, TWO[:0], source, TWO[:0])
    for threads in (0, -1, 1.0, True):
        with pytest.raises(ValueError, match="threads="):
            copy_pages(source, TWO, source, TWO + 1, threads=threads)  # type: ignore[arg-type]


def test_worker_threads_copy_beside_each_other() -> None:
    """Each of four threads copies its own slots to and fro, while the main thread runs Python."""
    fmt = FORMATS[3]
    source, target = filled(fmt, 2, 64, 0), filled(fmt, 4, 32, 1)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    want = whole(source)

    def work(i: int) -> None:
        mine = order[i::4]
        for threads in (1, None, 2) * 5:
            copy_pages(source, mine, target, mine, threads=threads)
            copy_pages(target, mine, source, mine, threads=threads)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert torch.equal(whole(source), want)
    assert torch.equal(whole(target), want)


def test_the_interpreter_is_free_meanwhile() -> None:
    """While another thread copies, this one counts: with the lock held it would stand still for whole copies."""
    fmt = FORMATS[5]
    source, target = filled(fmt, 1, 1024, 0), filled(fmt, 1, 1024, 1)
    slots = torch.arange(1024)
    inside, done = threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        for _ in range(20):
            copy_pages(source, slots, target, slots, threads=1)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    counted = 0
    while not done.is_set():
        counted += 1
    thread.join()
    assert counted > 2000  # 20 calls hand the lock over some 20 times; a free loop goes round 10 million times a second


def use_the_fence(at_end: bool) -> None:
    """Copies of either kind with every tensor against an unreadable page."""
    fence = Fence(at_end)
    for fmt in FORMATS:
        for pages in (3, 2 * PAST_CACHE_BYTES // fmt.page_bytes):
            source, target = (Pool(fmt, tuple(fence(x) for x in filled(fmt, 2, pages, i).slabs)) for i in (0, 1))
            slots = fence(torch.arange(2 * pages))
            places = fence(slots.flip(0))
            copy_pages(source, slots, target, places, "cpu")
            scatter(target, places, fence(gather(source, slots, "cpu")), "cpu")
            assert torch.equal(whole(target).flip(0), whole(source))


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect by ctypes is written for Linux")
@pytest.mark.parametrize("at_end", [True, False])
def test_native_copies_stay_inside_their_tensors(at_end: bool) -> None:
    choose_backend("cpu")
    folder = Path(__file__).parent
    path = os.pathsep.join((str(folder), str(folder.parents[1])))
    done = warm.run([__file__, str(int(at_end))], env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    use_the_fence(sys.argv[1] == "1")
