"""Transfers: bytes equal where the format stays, the codec's own result where it changes, in any store and block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.pages import decode, encode, page_format
from testbed.cache.archive import ArchiveAbout, ArchiveError, CorruptPages, FilePool, PageFile
from testbed.cache.archive.io import Batch, Engine, Ticket, make_engine
from testbed.cache.mover import Job, LaneName, Mover, Priority, State
from testbed.cache.pool import PageStore, SlabPool
from testbed.cache.transfer import Staging, transfer

CPU = torch.device("cpu")
FORMATS = {name: page_format(name, 16, 32) for name in ("bf16", "int8", "int4")}
PAGES = 24


def about() -> ArchiveAbout:
    return ArchiveAbout("", 1, 1, 32, 16, {name: fmt.page_bytes for name, fmt in FORMATS.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


class Unruly:
    """The real engine, whose batches can be held back, finished in reverse, or made to fail."""

    def __init__(self, inner: Engine) -> None:
        self.inner, self.name = inner, inner.name
        self.gate = threading.Event()
        self.gate.set()
        self.under_way = self.most = 0
        self.log: list[str] = []

    def submit(self, batch: Batch) -> Ticket:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.log.append(f"begin {len(batch.places)}")
        ticket = self.inner.submit(batch)
        outer = self

        class Held:
            def wait(self) -> None:
                assert outer.gate.wait(30)
                ticket.wait()
                outer.under_way -= 1
                outer.log.append(f"end {len(batch.places)}")

        return Held()

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def file(folder: Path) -> Iterator[PageFile]:
    one = PageFile.open(folder, about(), make=lambda *given: Unruly(make_engine(*given)))
    yield one
    one.close()


def pool(kind: str, fmt_name: str, file: PageFile) -> tuple[PageStore, Tensor]:
    """A store and its slots [PAGES]."""
    fmt = FORMATS[fmt_name]
    made = FilePool(fmt, file) if kind == "file" else SlabPool(fmt, 4, CPU)
    return made, made.allocate(PAGES)


def pages_of(name: str, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(count, 16, 32, generator=generator) for _ in range(2))
    return encode(FORMATS[name], k, v)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(["slab", "file"]),
    st.sampled_from(["slab", "file"]),
    st.sampled_from(list(FORMATS)),
    st.sampled_from(list(FORMATS)),
    st.integers(0, PAGES),
    st.integers(1, 9),
    st.integers(0, 99),
)
def test_pages_arrive(
    folder: Path, source_kind: str, target_kind: str, old: str, new: str, count: int, block_pages: int, seed: int
) -> None:
    file = PageFile.open(folder, about())
    (source, have), (target, room) = pool(source_kind, old, file), pool(target_kind, new, file)
    generator = torch.Generator().manual_seed(seed)
    source.write(have, pages_of(old, PAGES, seed))
    before = torch.zeros(PAGES, FORMATS[new].page_bytes, dtype=torch.uint8)
    target.write(room, before)
    taken, put = (torch.randperm(PAGES, generator=generator)[:count] for _ in range(2))
    staging = Staging(block_bytes=block_pages * max(FORMATS[old].page_bytes, FORMATS[new].page_bytes))
    transfer(source, have[taken], target, room[put], staging)
    expected = before.clone()
    for page, blob in zip(put.tolist(), pages_of(old, PAGES, seed)[taken], strict=True):
        # one page after another: blocks must not show
        expected[page] = blob if old == new else encode(FORMATS[new], *decode(FORMATS[old], blob[None]))[0]
    assert torch.equal(target.read(room), expected)
    file.close()


def test_the_next_block_is_read_while_one_is_placed(file: PageFile) -> None:
    (source, have), (target, room) = pool("file", "bf16", file), pool("slab", "bf16", file)
    blobs = pages_of("bf16", PAGES)
    source.write(have, blobs)
    engine = file.engine
    assert isinstance(engine, Unruly)
    engine.log.clear()
    engine.most = 0
    staging = Staging(block_bytes=10 * FORMATS["bf16"].page_bytes)
    transfer(source, have, target, room, staging)
    assert engine.log == ["begin 10", "begin 10", "end 10", "begin 4", "end 10", "end 4"]
    assert engine.most == 2
    assert torch.equal(target.read(room), blobs)


def test_the_next_block_is_gathered_while_one_is_written(file: PageFile) -> None:
    (slab, have), (target, room) = pool("slab", "bf16", file), pool("file", "bf16", file)
    blobs = pages_of("bf16", PAGES)
    slab.write(have, blobs)
    engine = file.engine
    assert isinstance(engine, Unruly)

    class Noted:
        fmt = slab.fmt

        def read(self, slots: Tensor) -> Tensor:
            engine.log.append(f"gather {len(slots)}")
            return slab.read(slots)

    transfer(Noted(), have, target, room, Staging(block_bytes=10 * slab.fmt.page_bytes))
    first, second, third = ([f"{what} {pages}" for what in ("gather", "begin", "end")] for pages in (10, 10, 4))
    assert engine.log == [*first[:2], second[0], first[2], second[1], third[0], second[2], *third[1:]]
    assert torch.equal(target.read(room), blobs)


def test_a_lost_page_is_named_and_nothing_stays_under_way(file: PageFile) -> None:
    (source, have), (target, room) = pool("file", "int8", file), pool("slab", "int8", file)
    source.write(have[:-1], pages_of("int8", PAGES - 1))
    with pytest.raises(CorruptPages) as caught:
        transfer(source, have, target, room, Staging(block_bytes=4 * FORMATS["int8"].page_bytes))
    assert caught.value.slots.tolist() == [int(have[-1])]
    engine = file.engine
    assert isinstance(engine, Unruly)
    assert engine.under_way == 0


def test_the_mover_leaves_out_only_what_is_lost(file: PageFile) -> None:
    (source, have), (target, room) = pool("file", "int8", file), pool("slab", "int8", file)
    written = torch.tensor([x for x in range(PAGES) if x not in (2, 9)])
    blobs = pages_of("int8", len(written))
    source.write(have[written], blobs)
    mover = Mover(chunk_bytes=5 * FORMATS["int8"].page_bytes)
    job = Job(Priority.DEMAND, 0, source, have, target, room)
    mover.submit(job)
    mover.wait([job])
    mover.close()
    assert job.state is State.FAILED
    assert isinstance(job.error, CorruptPages)
    assert job.arrived.nonzero().flatten().tolist() == written.tolist()
    assert torch.equal(target.read(room[written]), blobs)


def test_reads_that_end_out_of_order(file: PageFile) -> None:
    """Two workers share the file; what was begun first may end last, a demotion waits for nobody in memory."""
    (source, have), (target, room), (other, more) = (pool(kind, "int4", file) for kind in ("file", "slab", "slab"))
    blobs = pages_of("int4", PAGES)
    source.write(have, blobs)
    engine = file.engine
    assert isinstance(engine, Unruly)
    engine.gate.clear()
    mover = Mover(chunk_bytes=6 * FORMATS["int4"].page_bytes)
    reads = [Job(Priority.PREFETCH, i, source, have[i::2], target, room[i::2]) for i in range(2)]
    for job in reads:
        mover.submit(job)
    copy = Job(Priority.DEMOTE, 0, other, more[:3], other, more[3:6])
    mover.submit(copy)
    mover.wait([copy])
    assert not any(job.ended for job in reads)
    engine.gate.set()
    mover.drain()
    mover.close()
    assert torch.equal(target.read(room), blobs)


def test_a_failing_disk_fails_the_job_with_one_line(folder: Path) -> None:
    file = PageFile.open(folder, about(), max_bytes=1 << 20)
    (source, have), (target, room) = pool("slab", "int8", file), pool("file", "int8", file)
    source.write(have, pages_of("int8", PAGES))
    file.close()
    mover = Mover()
    job = Job(Priority.DEMOTE, 0, source, have, target, room)
    mover.submit(job)
    mover.wait([job])
    mover.close()
    assert isinstance(job.error, ArchiveError)
    assert "closed" in str(job.error)
    assert job.lane is None
    assert mover._lane(job).name == LaneName.FILE.value


def test_slots_must_match(file: PageFile) -> None:
    (source, have), (target, room) = pool("slab", "int8", file), pool("slab", "int8", file)
    with pytest.raises(ValueError, match=r"must be \[M\] each"):
        transfer(source, have[:3], target, room[:2], Staging())
    with pytest.raises(ValueError, match="block_bytes=0"):
        Staging(block_bytes=0)


def test_a_page_larger_than_a_block_goes_alone(file: PageFile) -> None:
    (source, have), (target, room) = pool("file", "bf16", file), pool("slab", "bf16", file)
    blobs = pages_of("bf16", 3)
    source.write(have[:3], blobs)
    transfer(source, have[:3], target, room[:3], Staging(block_bytes=1))
    assert torch.equal(target.read(room[:3]), blobs)
