"""The page file itself: whose it is, who may have it, what is left of it, what a killed run means."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import warm
from archive_case import ABOUT, ENGINES, FORMATS, blobs_of, open_file, pools_of, takes
from full_disk import no_file_beyond
from torch import Tensor

from testbed.cache.archive import ArchiveAbout, ArchiveError, CorruptPages, FilePool, PageFile, check_archive, system
from testbed.cache.archive.header import HEADER_BYTES, Header
from testbed.cache.pool import PoolFull

HERE = str(Path(__file__).parent)
FMT = FORMATS["int8"]


def open_files() -> set[str]:
    """What this process has open."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:  # the listing's own
            continue
    return found


def written(place: Path, pages: int = 50) -> tuple[PageFile, FilePool, Tensor, Tensor]:
    file = open_file(place)
    pool = FilePool(FMT, file)
    slots, blobs = pool.allocate(pages), blobs_of(pages, FMT, 7)
    pool.write(slots, blobs)
    return file, pool, slots, blobs


# --- a folder: the file ends with the run ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "forget", "kill"])
def test_a_file_in_a_folder_ends_with_the_run(tmp_path: Path, how: str) -> None:
    if how == "kill":
        code = f"""
import sys, time
sys.path.insert(0, {HERE!r})
from pathlib import Path
from test_archive_file import written
kept = written(Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""
        child = warm.start(["-c", code, str(tmp_path)])
        assert child.stdout.readline() == "ready\n"
        child.kill()
        child.wait()
    else:
        before = open_files()
        file, pool, slots, blobs = written(tmp_path)
        assert open_files() != before
        assert torch.equal(pool.read(slots), blobs)
        if how == "close":
            file.close()
        del file, pool
        gc.collect()
        assert open_files() == before
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_made_before_a_page_comes(tmp_path: Path) -> None:
    before = open_files()
    file = open_file(tmp_path)
    pools = pools_of(file)
    assert open_files() == before
    assert (file.held_bytes, sum(pool.held_bytes for pool in pools.values())) == (0, 0)
    file.close()


def test_where_there_are_no_unnamed_files_a_named_one_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system.os, "O_TMPFILE", os.O_DIRECTORY)  # what the kernel makes of it where it is unknown
    file, pool, slots, blobs = written(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(pool.read(slots), blobs)
    file.close()


# --- a file: it is kept -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_pages_of_a_kept_file_come_back(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "pages.kv"
    file = open_file(path, engine)
    slots, blobs, sums = {}, {}, {}
    for name, pool in pools_of(file).items():
        slots[name], blobs[name] = pool.allocate(300), blobs_of(300, FORMATS[name], 1)
        pool.write(slots[name], blobs[name])
        sums[name] = pool.checksums(slots[name])
    identity = file.header.identity
    file.close()
    again = open_file(path, engine, direct=True)
    assert (again.was_clean, again.header.identity, again.kept) == (True, identity, True)
    pools = pools_of(again)
    for name, pool in pools.items():
        some = torch.arange(0, 300, 2)
        pool.restore(slots[name][some], sums[name][some])
        assert torch.equal(pool.read(slots[name][some]), blobs[name][some])
        fresh = pool.allocate(200)
        assert not set(fresh.tolist()) & set(slots[name][some].tolist())
        pool.write(fresh, blobs[name][:200])
        assert torch.equal(pool.read(slots[name][some]), blobs[name][some])
    again.close()


def test_what_nobody_restores_is_room_again(tmp_path: Path) -> None:
    path = tmp_path / "pages.kv"
    file, pool, slots, _ = written(path, 3000)
    sums = pool.checksums(slots)
    full = file.held_bytes
    file.close()
    again = open_file(path)
    pool = FilePool(FMT, again)
    assert again.held_bytes == pool.held_bytes == full
    keep = slots[-1:]
    pool.restore(keep, sums[-1:])
    again.trim()
    assert again.held_bytes == pool.held_bytes == HEADER_BYTES + again.extent_bytes
    assert takes(again, again.held_bytes)
    pool.read(keep)
    again.close()


def test_restoring_where_new_pages_are_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pages.kv"
    file, pool, slots, _ = written(path)
    sums = pool.checksums(slots)
    file.close()
    again = open_file(path)
    pools = pools_of(again)
    pools["fp32"].allocate(1)
    with pytest.raises(ArchiveError, match="restore them first"):
        pools["int8"].restore(slots, sums)
    again.close()


def test_pages_overwritten_since_are_found(tmp_path: Path) -> None:
    """A session that was saved, another run on the same file, then the session comes back."""
    path = tmp_path / "pages.kv"
    file, pool, slots, blobs = written(path)
    sums = pool.checksums(slots)
    file.close()
    other = open_file(path)
    pool = FilePool(FMT, other)
    pool.write(pool.allocate(10), blobs_of(10, FMT, 99))
    other.close()
    again = open_file(path)
    pool = FilePool(FMT, again)
    pool.restore(slots, sums)
    with pytest.raises(CorruptPages) as caught:
        pool.read(slots)
    assert caught.value.slots.tolist() == slots[:10].tolist()
    assert torch.equal(pool.read(slots[10:]), blobs[10:])
    again.close()


def test_pages_beyond_the_end_of_the_file_are_lost(tmp_path: Path) -> None:
    path = tmp_path / "pages.kv"
    file, pool, slots, _ = written(path)
    sums = pool.checksums(slots)
    file.close()
    os.truncate(path, HEADER_BYTES)
    again = open_file(path)
    pool = FilePool(FMT, again)
    pool.restore(slots, sums)
    with pytest.raises(CorruptPages, match="50 pages are lost"):
        pool.read(slots)
    again.close()


KILLED = f"""
import sys
sys.path.insert(0, {HERE!r})
from pathlib import Path
from archive_case import FORMATS, blobs_of, open_file
from testbed.cache.archive import FilePool
pool = FilePool(FORMATS["int8"], open_file(Path(sys.argv[1]), sys.argv[2], direct=True))
slots = pool.allocate(400)
turn = 0
while True:
    part = slots[(turn * 37) % 300 :][:100]
    pool.write(part, blobs_of(100, pool.fmt, turn))
    print(turn, *pool.checksums(part).tolist(), flush=True)
    turn += 1
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_after_kill_9_in_the_middle_of_writes_pages_are_right_or_found(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "pages.kv"
    child = warm.start(["-c", KILLED, str(path), engine])
    lines = [child.stdout.readline() for _ in range(20)]
    time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    lines += child.stdout.read().splitlines(keepends=True)
    child.wait()
    noted: dict[int, tuple[int, Tensor]] = {}
    for line in (line for line in lines if line.endswith("\n")):
        turn, *sums = map(int, line.split())
        first = turn * 37 % 300
        for i, (total, blob) in enumerate(zip(sums, blobs_of(100, FMT, turn), strict=True)):
            noted[first + i] = (total, blob)
    file = open_file(path, engine)
    assert not file.was_clean
    pool = FilePool(FMT, file)
    slots = torch.tensor(sorted(noted))
    pool.restore(slots, torch.tensor([noted[slot][0] for slot in slots.tolist()]))
    try:
        pool.read(slots)
        lost: set[int] = set()
    except CorruptPages as error:
        lost = set(error.slots.tolist())
    assert len(lost) <= 100  # the write that was under way
    sound = [slot for slot in slots.tolist() if slot not in lost]
    assert torch.equal(pool.read(torch.tensor(sound)), torch.stack([noted[slot][1] for slot in sound]))
    file.close()


def test_a_forgotten_file_counts_as_unclean_and_is_free_again(tmp_path: Path) -> None:
    path = tmp_path / "pages.kv"
    file, pool, *_ = written(path)
    del file, pool, _
    gc.collect()
    again = open_file(path)
    assert not again.was_clean
    again.close()
    third = open_file(path)
    assert third.was_clean
    third.close()


# --- two runs -----------------------------------------------------------------------------------------------------


def test_two_runs_on_one_file_are_one_error(tmp_path: Path) -> None:
    path = tmp_path / "pages.kv"
    file, pool, slots, blobs = written(path)
    code = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from archive_case import open_file
from testbed.cache.archive import ArchiveError, check_archive
for attempt in (open_file, check_archive):
    try:
        attempt(Path(sys.argv[1]))
    except ArchiveError as error:
        print(error)
"""
    done = warm.run(["-c", code, str(path), HERE])
    assert (
        done.stdout.splitlines()
        == [f"cache.l3_path={path}: is in use by another run; wait for it or name another file"] * 2
    ), done.stderr
    with pytest.raises(ArchiveError, match="in use"):
        open_file(path)
    assert torch.equal(pool.read(slots), blobs)
    file.close()
    open_file(path).close()


# --- paths and headers that are no good ---------------------------------------------------------------------------


def other_version(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"testbed pages 2\n", b"testbed pages 1\n", 1))


def damaged(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[200] ^= 1
    path.write_bytes(whole)


def no_page_file(path: Path) -> None:
    path.write_bytes(b"\x7fELF" + bytes(9000))


def cut_short(path: Path) -> None:
    os.truncate(path, 300)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (other_version, "is a page file of version 1, this testbed has version 2"),
        (damaged, "header is damaged"),
        (no_page_file, "is not a page file"),
        (cut_short, "header is damaged"),
    ],
)
def test_files_that_are_no_page_files_of_ours(tmp_path: Path, harm: Callable[[Path], None], says: str) -> None:
    path = tmp_path / "pages.kv"
    open_file(path).close()
    harm(path)
    before = path.read_bytes()
    for attempt in (lambda: check_archive(path), lambda: open_file(path)):
        with pytest.raises(ArchiveError, match=says) as caught:
            attempt()
        assert str(caught.value).startswith(f"cache.l3_path={path}: ")
        assert len(str(caught.value).splitlines()) == 1
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "other-2"}, "model is 'toy-1' there, 'other-2' here"),
        ({"layers": 4}, "layers is 2 there, 4 here"),
        ({"kv_heads": 1}, "kv_heads is 3 there, 1 here"),
        ({"head_dim": 64}, "head_dim is 32 there, 64 here"),
        ({"page_tokens": 32}, "page_tokens is 16 there, 32 here"),
        ({"formats": {"int8": 1216}}, "formats is .*'fp32': 4096.* there, {'int8': 1216} here"),
    ],
)
def test_another_model_or_shape_is_named_with_both_values(tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = tmp_path / "pages.kv"
    open_file(path).close()
    with pytest.raises(ArchiveError, match=says):
        PageFile.open(path, replace(ABOUT, **change))
    PageFile.open(path, replace(ABOUT, model="")).close()
    check_archive(path)  # says nothing of the model, which isn't known yet


def test_the_header_says_what_the_file_is_in_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "pages.kv"
    open_file(path).close()
    lines = path.read_bytes()[:HEADER_BYTES].rstrip(b"\0").decode().splitlines()
    assert lines[0] == "testbed pages 2"
    said = json.loads(lines[2])
    assert said["about"]["model"] == "toy-1"
    assert said["about"]["formats"] == {name: fmt.page_bytes for name, fmt in FORMATS.items()}
    assert said["clean"] is True


def test_a_new_file_may_be_there_already_if_empty(tmp_path: Path) -> None:
    path = tmp_path / "pages.kv"
    path.touch()
    check_archive(path)
    assert path.stat().st_size == 0
    open_file(path).close()
    assert path.stat().st_size >= HEADER_BYTES


def a_pipe(path: Path) -> Path:
    os.mkfifo(path / "pipe")
    return path / "pipe"


def a_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "s"))
    return path / "s"


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (lambda path: path / "no" / "pages.kv", "there is no folder .*/no; make it first"),
        (lambda path: Path("/dev/null"), "neither a folder nor a regular file"),
        (a_pipe, "neither a folder nor a regular file"),
        (a_socket, "neither a folder nor a regular file"),
        (lambda path: Path("/proc"), "name a"),
        (lambda path: Path("/proc/pages.kv"), "name a"),
        (lambda path: path / ("x" * 300), "File name too long"),
        (lambda path: Path(__file__) / "pages.kv", "there is no folder|Not a directory"),
    ],
)
def test_places_that_no_file_can_be_in(tmp_path: Path, place: Callable[[Path], Path], says: str) -> None:
    path = place(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ArchiveError, match=says) as caught:
        check_archive(path)
    assert str(caught.value).startswith(f"cache.l3_path={path}: ")
    with pytest.raises((ArchiveError, PoolFull)):
        FilePool(FMT, open_file(path)).allocate(1)
    assert sorted(tmp_path.iterdir()) == before


def test_what_permissions_forbid() -> None:
    """As somebody without rights, even where the tests run as root."""
    with tempfile.TemporaryDirectory() as place:
        folder, file, hidden = Path(place) / "folder", Path(place) / "file", Path(place) / "hidden"
        folder.mkdir()
        file.touch()
        hidden.mkdir()
        modes = {Path(place): 0o755, folder: 0o555, file: 0o444, hidden: 0}
        for path, mode in modes.items():
            path.chmod(mode)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            for path in (folder, file, folder / "pages.kv", hidden / "pages.kv"):
                for attempt in (lambda path=path: check_archive(path), lambda path=path: written(path)):
                    with pytest.raises((ArchiveError, PoolFull), match="Permission denied") as caught:
                        attempt()
                    assert str(path) in str(caught.value)
        finally:
            if root:
                os.seteuid(0)
            for path in modes:
                path.chmod(0o700)


def test_checking_leaves_nothing_behind(tmp_path: Path) -> None:
    before = open_files()
    check_archive(tmp_path)
    check_archive(tmp_path / "pages.kv")
    assert list(tmp_path.iterdir()) == []
    open_file(tmp_path / "pages.kv").close()
    whole = (tmp_path / "pages.kv").read_bytes()
    check_archive(str(tmp_path / "pages.kv"))
    assert (tmp_path / "pages.kv").read_bytes() == whole
    assert open_files() == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"io": "aio"}, "cache.l3_io='aio': must be one of auto, uring, threads, mmap"),
        ({"direct": "maybe"}, "cache.l3_direct='maybe': must be auto, true or false"),
        ({"io": "mmap", "direct": True}, "cache.l3_direct=true: a mapping"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, object], says: str) -> None:
    with pytest.raises(ArchiveError, match=says):
        PageFile.open(tmp_path, ABOUT, **options)  # type: ignore[arg-type]


def test_o_direct_on_demand_is_an_error_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, block_bytes: int) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(system, "open_direct", refuse)
    file = PageFile.open(tmp_path, ABOUT, direct=True)
    pool = FilePool(FMT, file)
    slots = pool.allocate(1)
    with pytest.raises(ArchiveError, match="cache.l3_direct=true: .*past the page cache: Invalid argument; or auto"):
        pool.write(slots, blobs_of(1, FMT, 0))
    file.close()
    file = PageFile.open(tmp_path, ABOUT)
    assert not file.direct
    assert file.engine.name in ("threads", "python")
    file.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "m" * 2000}, "at most 1024 bytes"),
        ({"layers": 0}, "layers=0"),
        ({"formats": {}}, "at least one"),
        ({"formats": {"int8": 1217}}, "multiple of 8"),
    ],
)
def test_descriptions_that_no_header_takes(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(ABOUT, **change)


def test_the_longest_description_fits() -> None:
    about = ArchiveAbout("\N{GRINNING FACE}" * 256, 9999, 9999, 9999, 64, {f"format{i}": 1 << 20 for i in range(9)})
    assert len(Header(about, 1 << 20).packed()) == HEADER_BYTES


@pytest.mark.parametrize("room_bytes", [0, 1000])
def test_a_disk_without_room_for_a_header_is_a_full_tier(tmp_path: Path, room_bytes: int) -> None:
    """The file of a folder is made in the midst of a run, where pages can still go elsewhere; later there is room."""
    with closing(open_file(tmp_path)) as file:
        pools = pools_of(file)
        with no_file_beyond(room_bytes), pytest.raises(PoolFull, match="File too large"):
            pools["int8"].allocate(3)
        assert pools["int8"].used_pages == 0
        slots, blobs = pools["int8"].allocate(3), blobs_of(3, FORMATS["int8"], 0)
        pools["int8"].write(slots, blobs)
        assert torch.equal(pools["int8"].read(slots), blobs)


def test_a_folder_that_is_gone_is_a_full_tier(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with closing(open_file(folder)) as file:
        pools = pools_of(file)
        folder.rmdir()
        with pytest.raises(PoolFull, match=f"can't make a page file in {folder}"):
            pools["int8"].allocate(3)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("room_bytes", [0, 1000])
def test_a_kept_file_that_can_not_be_begun_leaves_nothing(tmp_path: Path, there: bool, room_bytes: int) -> None:
    path = tmp_path / "pages.kv"
    if there:
        path.touch()
    with no_file_beyond(room_bytes), pytest.raises(ArchiveError, match=f"can't write {path}: File too large"):
        open_file(path)
    assert [file.stat().st_size for file in tmp_path.iterdir()] == [0] * there
    open_file(path).close()
