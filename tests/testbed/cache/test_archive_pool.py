"""Pools in a page file against a dictionary: any order of allocating, sharing, freeing, writing and reading."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from archive_case import ABOUT, ENGINES, FORMATS, blobs_of, maker, open_file, pools_of, takes
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from testbed.cache.archive import CorruptPages, FilePool, PageFile
from testbed.cache.archive.header import HEADER_BYTES
from testbed.cache.pool import PoolFull
from testbed.cache.slots import SlotError

NAMES = sorted(FORMATS)
LIMIT_BYTES = 400 << 10


class Model(RuleBasedStateMachine):
    """Pages by (format, slot) with their bytes, None before they are written, and their number of holders."""

    pages: dict[tuple[str, int], Tensor | None]
    holders: dict[tuple[str, int], int]

    @initialize(engine=st.sampled_from(ENGINES), direct=st.booleans(), limited=st.booleans())
    def start(self, engine: str, direct: bool, limited: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        limit = LIMIT_BYTES if limited else None
        self.file = open_file(Path(self.folder.name), engine, direct, max_bytes=limit)
        self.pools = pools_of(self.file)
        self.pages, self.holders, self.seed = {}, {}, 0

    def some(self, data: st.DataObject, name: str, only_written: bool = False) -> list[int]:
        there = sorted(s for n, s in self.pages if n == name and not (only_written and self.pages[n, s] is None))
        return data.draw(st.lists(st.sampled_from(there), unique=True)) if there else []

    @rule(name=st.sampled_from(NAMES), pages=st.integers(1, 90))
    def allocate(self, name: str, pages: int) -> None:
        pool = self.pools[name]
        room = pool.available()
        try:
            slots = pool.allocate(pages)
        except PoolFull:
            assert pages > room
            return
        assert pages <= room
        keys = [(name, slot) for slot in slots.tolist()]
        assert len(set(keys)) == pages
        assert not set(keys) & set(self.pages)
        self.pages |= dict.fromkeys(keys)
        self.holders |= dict.fromkeys(keys, 1)

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def share(self, data: st.DataObject, name: str) -> None:
        slots = self.some(data, name)
        self.pools[name].share(torch.tensor(slots, dtype=torch.int64))
        for slot in slots:
            self.holders[name, slot] += 1

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def free(self, data: st.DataObject, name: str) -> None:
        slots = self.some(data, name)
        self.pools[name].free(torch.tensor(slots, dtype=torch.int64))
        for key in ((name, slot) for slot in slots):
            self.holders[key] -= 1
            if not self.holders[key]:
                del self.holders[key], self.pages[key]

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def write(self, data: st.DataObject, name: str) -> None:
        slots = self.some(data, name)
        self.seed += 1
        blobs = blobs_of(len(slots), FORMATS[name], self.seed)
        self.pools[name].write(torch.tensor(slots, dtype=torch.int64), blobs)
        self.pages |= {(name, slot): blob for slot, blob in zip(slots, blobs, strict=True)}

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def read(self, data: st.DataObject, name: str) -> None:
        slots = self.some(data, name, only_written=True)
        got = self.pools[name].read(torch.tensor(slots, dtype=torch.int64))
        for slot, blob in zip(slots, got, strict=True):
            want = self.pages[name, slot]
            assert want is not None
            assert torch.equal(blob, want)

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def read_what_nobody_wrote(self, data: st.DataObject, name: str) -> None:
        slots = self.some(data, name)
        empty = [slot for slot in slots if self.pages[name, slot] is None]
        if empty:
            with pytest.raises(CorruptPages) as caught:
                self.pools[name].read(torch.tensor(slots))
            assert caught.value.slots.tolist() == empty

    @invariant()
    def bytes_are_what_they_are(self) -> None:
        if not hasattr(self, "pools"):
            return
        for name, pool in self.pools.items():
            assert pool.used_pages == sum(n == name for n, _ in self.pages)
        held = sum(pool.held_bytes for pool in self.pools.values())
        assert held == self.file.held_bytes
        if self.file.max_bytes is not None:
            assert held <= self.file.max_bytes
        if held:
            assert takes(self.file, held)

    def teardown(self) -> None:
        if hasattr(self, "file"):
            self.file.close()
            self.folder.cleanup()


Model.TestCase.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAgainstADictionary = Model.TestCase


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_moves_any_order_of_pages(tmp_path: Path, engine: str, direct: bool) -> None:
    """Thousands of pages, so that runs are cut, taken apart and joined; formats lie among each other."""
    file = open_file(tmp_path, engine, direct)
    for seed, (name, pool) in enumerate(pools_of(file).items()):
        slots = torch.cat([pool.allocate(700) for _ in range(3)])
        blobs = blobs_of(len(slots), FORMATS[name], seed)
        order = torch.randperm(len(slots), generator=torch.manual_seed(seed))
        pool.write(slots[order], blobs[order])
        assert torch.equal(pool.read(slots), blobs)
        assert torch.equal(pool.read(slots[order]), blobs[order])
        picked = order[:333]
        pool.write(slots[picked], blobs[picked].flip(1))
        assert torch.equal(pool.read(slots[picked]), blobs[picked].flip(1))
        assert pool.read(slots[:0]).shape == (0, FORMATS[name].page_bytes)
    assert file.direct == (direct and engine != "mmap")
    file.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_reads_and_writes_may_overlap(tmp_path: Path, engine: str) -> None:
    """All are begun before any is waited for, the last first."""
    file = open_file(tmp_path, engine, direct=True)
    pool = FilePool(FORMATS["int4"], file)
    slots, blobs = pool.allocate(900), blobs_of(900, pool.fmt, 5)
    writes = [pool.begin_write(s, b) for s, b in zip(slots.split(100), blobs.split(100), strict=True)]
    for write in reversed(writes):
        write.wait()
    out = torch.zeros(900, pool.fmt.page_bytes, dtype=torch.uint8)
    reads = [pool.begin_read(s, o) for s, o in zip(slots.split(70), out.split(70), strict=True)]
    for read in reversed(reads):
        read.wait()
    assert torch.equal(out, blobs)
    del reads[:], writes[:]
    pool.begin_read(slots)  # forgotten: the engine is done with its memory before that goes
    file.close()


def test_the_lowest_slots_come_first_and_a_slot_says_where_its_page_is(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    pools = pools_of(file)
    first = pools["int4"].allocate(1)
    other = pools["int8"].allocate(1)
    width = pools["int4"].slots.width
    assert first.tolist() == [0]
    assert int(other) // pools["int8"].slots.width == 1  # the second extent
    rest = pools["int4"].allocate(width)
    assert rest.tolist() == [*range(1, width), 2 * width]  # then the third
    blob = blobs_of(1, FORMATS["int4"], 1)
    pools["int4"].write(rest[-1:], blob)
    with open(f"/proc/self/fd/{file.file}", "rb") as raw:
        raw.seek(HEADER_BYTES + 2 * file.extent_bytes)
        assert raw.read(blob.shape[1]) == blob.numpy().tobytes()
    pools["int4"].free(rest[5:7])
    assert pools["int4"].allocate(2).tolist() == rest[5:7].tolist()
    file.close()


def test_empty_extents_serve_another_format(tmp_path: Path) -> None:
    file = open_file(tmp_path, max_bytes=LIMIT_BYTES)
    pools = pools_of(file)
    slots = pools["fp32"].allocate(pools["fp32"].available())
    with pytest.raises(PoolFull, match=f"l3_bytes={LIMIT_BYTES}"):
        pools["int4"].allocate(1)
    full = file.held_bytes
    assert takes(file, full)
    pools["fp32"].free(slots)
    assert file.held_bytes == HEADER_BYTES
    assert takes(file, HEADER_BYTES)
    assert pools["int4"].available() == len(pools["int4"].allocate(pools["int4"].available()))
    assert takes(file, full)
    file.close()


def test_slots_that_nobody_holds_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    pool = FilePool(FORMATS["int8"], file)
    with pytest.raises(SlotError):
        pool.free(torch.tensor([0]))
    slots = pool.allocate(4)
    for wrong in ([0, 0], [4], [10**6], [-1]):
        with pytest.raises(SlotError):
            pool.free(torch.tensor(wrong))
    with pytest.raises(SlotError):
        pool.share(torch.tensor([7]))
    assert pool.used_pages == 4
    pool.free(slots)
    assert (pool.used_pages, pool.slots.held_extents) == (0, 0)
    file.close()


def test_slots_of_an_extent_that_went_back_are_nobodys(tmp_path: Path) -> None:
    """Its row in the tables serves another extent now."""
    file = open_file(tmp_path)
    pools = pools_of(file)
    pool = pools["int8"]
    gone = pool.allocate(3)
    pool.free(gone)
    pools["fp32"].allocate(1)  # the lowest extent is another format's now
    here = pool.allocate(3)
    assert not set(here.tolist()) & set(gone.tolist())
    for refused in (pool.free, pool.share, pool.read, pool.checksums):
        with pytest.raises(SlotError):
            refused(gone)
    assert pool.used_pages == 3
    file.close()


def test_memory_of_the_tables_is_counted(tmp_path: Path) -> None:
    """Eight bytes of checksum, four of holders, one of state for each slot, little else."""
    file = open_file(tmp_path)
    pool = FilePool(FORMATS["int4"], file)
    pool.allocate(20_000)
    assert 13 * 20_000 <= pool.memory_bytes < 13 * 20_000 * 1.4
    file.close()


def test_a_small_limit_makes_small_extents() -> None:
    """Else one page of a format would take the whole archive."""
    with tempfile.TemporaryDirectory() as folder:
        for limit in (200 << 10, 10 << 20, None):
            file = PageFile.open(folder, ABOUT, limit, make=maker("threads"))
            assert max(ABOUT.formats.values()) <= file.extent_bytes <= 1 << 20
            if limit is not None:
                assert file.extent_bytes * 10 < limit
            file.close()
