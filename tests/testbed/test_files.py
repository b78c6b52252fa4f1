"""Files written whole or not at all: what stands in their place already, and a disk that is full."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from full_disk import no_file_beyond
from safetensors.torch import load_file

from testbed.results.record import RecordError, write_atomically
from testbed.tensors import write_tensors

Write = Callable[[Path], None]


def text(path: Path) -> None:
    write_atomically(path, "new" * 10_000)


def tensors(path: Path) -> None:
    write_tensors(path, {"x": torch.arange(10_000)}, {"about": "new"})


WRITERS = pytest.mark.parametrize("write", [text, tensors])


@WRITERS
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to a pipe", "link to itself"])
def test_what_is_no_regular_file_is_left_alone(write: Write, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    if "pipe" in kind:
        os.mkfifo(tmp_path / "pipe")
    if kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/null") if os.geteuid() else _device(path)
    else:
        path.symlink_to(path if kind == "link to itself" else tmp_path / "pipe")
        path = tmp_path / "pipe" if kind == "pipe" else path
    before = os.lstat(path)
    with pytest.raises((OSError, RecordError), match="not a regular file|Is a directory") as caught:
        write(path)
    assert str(path) in str(caught.value)
    assert (os.lstat(path).st_ino, os.lstat(path).st_mode) == (before.st_ino, before.st_mode)
    assert not list(tmp_path.glob(".*"))


def _device(path: Path) -> Path:
    """A null device of one's own, not to lose the machine's."""
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    except OSError:
        pytest.skip("no devices can be made here")
    return path


@WRITERS
@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_points_to_is_written(write: Write, there: bool, tmp_path: Path) -> None:
    target, link = tmp_path / "a" / "target", tmp_path / "link"
    if there:
        target.parent.mkdir()
        target.write_text("old")
    link.symlink_to(Path("a") / "target")
    write(link)
    assert link.is_symlink()
    assert not target.is_symlink()
    assert target.stat().st_size > 10_000
    assert [path.name for path in target.parent.iterdir()] == ["target"]


@WRITERS
def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_the_old_one(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    with no_file_beyond(4096), pytest.raises((OSError, RecordError)) as caught:
        write(path)
    assert str(path) in str(caught.value)
    assert "File too large" in str(caught.value)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_come_back(tmp_path: Path) -> None:
    tensors(tmp_path / "a" / "x")
    assert torch.equal(load_file(tmp_path / "a" / "x")["x"], torch.arange(10_000))
