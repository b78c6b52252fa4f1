"""A disk that is slow, full, failing, short, out of order or lying: every engine, nothing wrong comes out."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import warm
from archive_case import ABOUT, ENGINES, FORMATS, Faults, blobs_of, open_file
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.build import BuildError
from testbed.cache.archive import ArchiveError, CorruptPages, FilePool, IoFault, PageFile, io
from testbed.cache.archive.header import HEADER_BYTES
from testbed.cache.archive.io import RUN_BYTES, TRIES, Batch, Engine, Ticket, make_engine
from testbed.cache.pool import PoolFull

FMT = FORMATS["int8"]
PAGES = 900  # several runs


def failing(place: Path, engine: str, direct: bool, answer: Callable[[bool, int, int], int]) -> tuple[FilePool, Faults]:
    faults = Faults(answer)
    return FilePool(FMT, open_file(place, engine, direct, make=faults.make(engine))), faults


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_short_reads_and_writes_go_on_where_they_stopped(tmp_path: Path, engine: str, direct: bool) -> None:
    def answer(write: bool, offset: int, size: int) -> int:
        return max(512, size // 3 // 512 * 512) if direct else min(size, size // 3 + 7)

    pool, faults = failing(tmp_path, engine, direct, answer)
    slots, blobs = pool.allocate(PAGES), blobs_of(PAGES, FMT, 0)
    pool.write(slots, blobs)
    assert torch.equal(pool.read(slots), blobs)
    runs = PAGES * pool.stride_bytes // RUN_BYTES
    assert len(faults.calls) > (3 if engine == "mmap" else 6) * runs  # a mapping is read without calls
    pool.file.close()


@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "uring"])
def test_interrupted_calls_are_tried_again(tmp_path: Path, engine: str) -> None:
    seen: Counter[tuple[bool, int]] = Counter()

    def answer(write: bool, offset: int, size: int) -> int:
        seen[write, offset] += 1
        return -(errno.EINTR if seen[write, offset] % 2 else errno.EAGAIN) if seen[write, offset] <= TRIES else size

    pool, _ = failing(tmp_path, engine, False, answer)
    slots, blobs = pool.allocate(PAGES), blobs_of(PAGES, FMT, 1)
    pool.write(slots, blobs)
    assert torch.equal(pool.read(slots), blobs)
    assert set(seen.values()) == {TRIES + 1}
    pool.file.close()


@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "uring"])
def test_a_call_that_is_interrupted_for_ever_fails_after_the_stated_tries(tmp_path: Path, engine: str) -> None:
    pool, faults = failing(tmp_path, engine, False, lambda write, offset, size: -errno.EAGAIN)
    slots = pool.allocate(1)
    with pytest.raises(ArchiveError, match="can't write"):
        pool.write(slots, blobs_of(1, FMT, 0))
    assert len(faults.calls) == TRIES + 1
    pool.file.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_failed_write_is_said_and_its_pages_are_not_believed(tmp_path: Path, engine: str, code: int) -> None:
    broken = threading.Event()

    def answer(write: bool, offset: int, size: int) -> int:
        return -code if write and broken.is_set() and offset > HEADER_BYTES + 2 * RUN_BYTES else size

    pool, _ = failing(tmp_path, engine, False, answer)
    slots, blobs = pool.allocate(PAGES), blobs_of(PAGES, FMT, 0)
    pool.write(slots, blobs)
    broken.set()
    said = os.strerror(errno.EBADF if engine == "uring" else code)
    with pytest.raises(ArchiveError, match=f"can't write {tmp_path} at byte .*{said}") as caught:
        pool.write(slots[100:], blobs_of(PAGES - 100, FMT, 1))
    assert ("free some space" in str(caught.value)) == (code != errno.EIO and engine != "uring")
    assert torch.equal(pool.read(slots[:100]), blobs[:100])
    with pytest.raises(CorruptPages) as lost:
        pool.read(slots)
    assert torch.equal(lost.value.slots, slots[100:])
    broken.clear()
    pool.write(slots, blobs)
    assert torch.equal(pool.read(slots), blobs)
    pool.file.close()


@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "mmap"])
def test_a_failed_read_is_said_and_the_next_may_work(tmp_path: Path, engine: str) -> None:
    broken = threading.Event()
    pool, _ = failing(
        tmp_path, engine, True, lambda write, offset, size: -errno.EIO if not write and broken.is_set() else size
    )
    slots, blobs = pool.allocate(PAGES), blobs_of(PAGES, FMT, 0)
    pool.write(slots, blobs)
    broken.set()
    with pytest.raises(ArchiveError, match=f"can't read {tmp_path} at byte") as caught:
        pool.read(slots)
    assert not isinstance(caught.value, CorruptPages)
    broken.clear()
    assert torch.equal(pool.read(slots), blobs)
    pool.file.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_runs_of_any_order_and_a_slow_one(tmp_path: Path, engine: str) -> None:
    """The first run is last to come back, and two threads ask at once."""
    first = HEADER_BYTES

    def answer(write: bool, offset: int, size: int) -> int:
        time.sleep(0.05 if offset == first else 0.0)
        return size

    pool, _ = failing(tmp_path, engine, False, answer)
    slots, blobs = pool.allocate(PAGES), blobs_of(PAGES, FMT, 0)
    pool.write(slots, blobs)
    order = torch.arange(PAGES).view(2, -1).T.flatten()  # neighbours in memory are far apart in the file
    wrong: list[int] = []

    def ask(part: torch.Tensor) -> None:
        if not torch.equal(pool.read(slots[part]), blobs[part]):
            wrong.append(len(part))

    askers = [threading.Thread(target=ask, args=(part,)) for part in order.chunk(3)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert wrong == []
    pool.file.close()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_cut_by_someone_else_is_an_error_and_no_signal(tmp_path: Path, engine: str, direct: bool) -> None:
    pool = FilePool(FMT, open_file(tmp_path / "pages.kv", engine, direct))
    slots, blobs = pool.allocate(PAGES), blobs_of(PAGES, FMT, 0)
    pool.write(slots, blobs)
    assert torch.equal(pool.read(slots), blobs)
    os.truncate(tmp_path / "pages.kv", HEADER_BYTES + int(pool.offsets(slots[700:701])) + 100)
    with pytest.raises(ArchiveError, match="cut by someone else"):
        pool.read(slots)
    assert torch.equal(pool.read(slots[:700]), blobs[:700])
    pool.file.close()


def test_a_full_disk_shows_when_room_is_taken_and_nothing_is(tmp_path: Path) -> None:
    """A limit on file sizes stands in for the disk: the same call of the system fails."""
    pool = FilePool(FMT, open_file(tmp_path))
    slots = pool.allocate(10)
    width = pool.slots.width
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, before[1]))
    try:
        with pytest.raises(PoolFull, match="File too large.*lower cache.l3_bytes"):
            pool.allocate(4 * width)
        assert pool.used_pages == 10
        assert pool.file.held_bytes == HEADER_BYTES + pool.file.extent_bytes
        rest = pool.allocate(width)  # what fits still does
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    blobs = blobs_of(width, FMT, 0)
    pool.write(rest, blobs)
    assert torch.equal(pool.read(rest), blobs)
    pool.free(torch.cat((slots, rest)))
    pool.file.close()


@settings(max_examples=60, deadline=None)
@given(page=st.integers(0, 19), bit=st.integers(0, 8 * FMT.page_bytes - 1), engine=st.sampled_from(ENGINES))
def test_a_flipped_bit_anywhere_is_found(page: int, bit: int, engine: str, tmp_path_factory: object) -> None:
    folder = tmp_path_factory.mktemp("flip")  # type: ignore[attr-defined]
    pool = FilePool(FMT, open_file(folder / "pages.kv", engine))
    slots, blobs = pool.allocate(20), blobs_of(20, FMT, 3)
    pool.write(slots, blobs)
    with (folder / "pages.kv").open("r+b") as raw:
        at = HEADER_BYTES + int(pool.offsets(slots[page : page + 1])) + bit // 8
        raw.seek(at)
        (old,) = raw.read(1)
        raw.seek(at)
        raw.write(bytes([old ^ 1 << bit % 8]))
    with pytest.raises(CorruptPages, match="1 pages are lost") as caught:
        pool.read(slots)
    assert caught.value.slots.tolist() == [int(slots[page])]
    sound = slots[torch.arange(20) != page]
    assert torch.equal(pool.read(sound), blobs[torch.arange(20) != page])
    pool.file.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_lost_torn_stale_or_misplaced_page_is_found(tmp_path: Path, engine: str) -> None:
    """Each is a whole page of plausible bytes."""
    pool = FilePool(FMT, open_file(tmp_path / "pages.kv", engine))
    slots = pool.allocate(8)
    old, new = blobs_of(8, FMT, 1), blobs_of(8, FMT, 2)
    pool.write(slots, old)
    pool.write(slots, new)
    where = (HEADER_BYTES + pool.offsets(slots)).tolist()
    with (tmp_path / "pages.kv").open("r+b") as raw:

        def put(index: int, data: bytes) -> None:
            raw.seek(where[index])
            raw.write(data)

        put(1, bytes(FMT.page_bytes))  # lost
        put(3, old[3].numpy().tobytes())  # stale
        put(4, old[4].numpy().tobytes()[:512])  # torn
        put(6, new[5].numpy().tobytes())  # its neighbour's
    with pytest.raises(CorruptPages) as caught:
        pool.read(slots)
    assert caught.value.slots.tolist() == slots[[1, 3, 4, 6]].tolist()
    pool.file.close()


def test_a_wrapped_engine_may_fail_as_it_likes(tmp_path: Path) -> None:
    """The seam for other tests: an engine is handed in, and its faults become errors that name the file."""

    class Broken:
        name = "broken"

        def submit(self, batch: Batch) -> Ticket:
            raise IoFault(errno.EIO, int(batch.offsets[0]))

        def close(self) -> None:
            pass

    file = PageFile.open(tmp_path, ABOUT, make=lambda kind, file, direct: Broken())
    pool = FilePool(FMT, file)
    slots = pool.allocate(1)
    with pytest.raises(ArchiveError, match=f"can't write {tmp_path} at byte 4096: {os.strerror(errno.EIO)}"):
        pool.write(slots, blobs_of(1, FMT, 0))
    file.close()


def test_a_ring_that_takes_nothing_fails_all_and_never_hangs(tmp_path: Path) -> None:
    """A table of functions that pretend a ring; it takes entries and then refuses every one."""
    code = """
import ctypes, sys, torch
sys.path.insert(0, sys.argv[2])
from archive_case import ABOUT, FORMATS, SUBMIT, blobs_of
from testbed.cache.archive import ArchiveError, FilePool, PageFile
from testbed.cache.archive.io import NativeEngine

P, I = ctypes.c_void_p, ctypes.c_int
room = ctypes.create_string_buffer(64)
kinds = [
    (ctypes.CFUNCTYPE(I, ctypes.c_uint, P, ctypes.c_uint), lambda *a: 0),
    (ctypes.CFUNCTYPE(None, P), lambda *a: None),
    (ctypes.CFUNCTYPE(P, P), lambda *a: ctypes.addressof(room)),
    (ctypes.CFUNCTYPE(None, P, I, P, ctypes.c_uint, ctypes.c_uint64), lambda *a: None),
    (ctypes.CFUNCTYPE(None, P, I, P, ctypes.c_uint, ctypes.c_uint64), lambda *a: None),
    (ctypes.CFUNCTYPE(None, P, ctypes.c_uint64), lambda *a: None),
    (SUBMIT, lambda *a: -16),
    (ctypes.CFUNCTYPE(I, P, P), lambda *a: -11),
    (ctypes.CFUNCTYPE(None, P, P), lambda *a: None),
]
kept = [kind(body) for kind, body in kinds]
calls = [ctypes.cast(f, P).value for f in kept]
file = PageFile.open(sys.argv[1], ABOUT, make=lambda k, fd, d: NativeEngine("uring", fd, d, calls=calls))
pool = FilePool(FORMATS["int8"], file)
slots = pool.allocate(500)
for _ in range(2):
    try:
        pool.write(slots, blobs_of(500, pool.fmt, 0))
    except ArchiveError as error:
        print(error)
file.close()
"""
    here = str(Path(__file__).parent)
    done = warm.run(["-c", code, str(tmp_path), here], timeout=60)
    assert done.stdout.count("Device or resource busy") == 2, done.stderr


# --- engines that can't be had ---------------------------------------------------------------------------------


def test_without_liburing_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    file = PageFile.open(tmp_path, ABOUT, io="uring")
    pool = FilePool(FMT, file)
    slots = pool.allocate(1)
    with pytest.raises(ArchiveError, match="cache.l3_io=uring: can't be had here: .*extra 'uring'"):
        pool.write(slots, blobs_of(1, FMT, 0))
    file.close()


def test_without_a_compiler_python_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "try_library", lambda: None)
    file = PageFile.open(tmp_path, ABOUT)
    assert file.engine.name == "python"
    file.close()

    def refuse() -> None:
        raise BuildError("no C++ compiler")

    monkeypatch.setattr(io, "library", refuse)
    with pytest.raises(ArchiveError, match="cache.l3_io=mmap: can't be had here: no C\\+\\+ compiler"):
        make_engine("mmap", 0, False)


def test_an_engine_of_a_closed_file_refuses(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    pool = FilePool(FMT, file)
    slots = pool.allocate(3)
    pool.write(slots, blobs_of(3, FMT, 0))
    engine: Engine = file.engine
    file.close()
    file.close()
    with pytest.raises(ArchiveError, match="closed"):
        pool.read(slots)
    with pytest.raises(ArchiveError, match="closed"):
        engine.submit(Batch(False, slots, slots, blobs_of(3, FMT, 0), 512, slots))


def test_a_forked_process_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    """Threads don't survive a fork; waiting for them would never end."""
    code = """
import os, sys
sys.path.insert(0, sys.argv[2])
from archive_case import FORMATS, blobs_of, open_file
from testbed.cache.archive import ArchiveError, FilePool
from pathlib import Path
pool = FilePool(FORMATS["int8"], open_file(Path(sys.argv[1])))
slots, blobs = pool.allocate(5), blobs_of(5, FORMATS["int8"], 0)
pool.write(slots, blobs)
child = os.fork()
if not child:
    try:
        pool.read(slots)
    except ArchiveError as error:
        print(error, flush=True)
    pool.file.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert (pool.read(slots) == blobs).all()
pool.file.close()
"""
    here = str(Path(__file__).parent)
    done = warm.run(["-c", code, str(tmp_path), here], timeout=60)
    assert done.returncode == 0, done.stderr
    assert "forked" in done.stdout
