"""Where a page file may be: what cache.l3_path names, looked at early and opened so that no other run has it."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from testbed.cache.archive import system
from testbed.cache.archive.errors import ArchiveError
from testbed.cache.archive.header import HEADER_BYTES, parse
from testbed.cache.archive.io import KINDS

ADVICE = "name a folder, a new file or a page file"


def check_options(io: str, direct: bool | str) -> None:
    """Refuses options that are unknown or don't go together.

    Raises:
        ArchiveError: names key and value.
    """
    if io not in KINDS:
        raise ArchiveError(f"cache.l3_io={io!r}: must be one of {', '.join(KINDS)}")
    if direct not in ("auto", True, False):
        raise ArchiveError(f"cache.l3_direct={direct!r}: must be auto, true or false")
    if direct is True and io == "mmap":
        raise ArchiveError("cache.l3_direct=true: a mapping (cache.l3_io=mmap) goes through the page cache; or auto")


def open_locked(path: Path, create: bool) -> int:
    """A regular file, open for reading and writing, that no other run has.

    Raises:
        ArchiveError: names the path and what is wrong with it.
    """
    file = None
    try:
        if kind_of(path) == "missing" and not path.parent.is_dir():
            raise ArchiveError(f"cache.l3_path={path}: there is no folder {path.parent}; make it first")
        file = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if file is not None:
            os.close(file)
        if isinstance(error, BlockingIOError):
            raise ArchiveError(
                f"cache.l3_path={path}: is in use by another run; wait for it or name another file"
            ) from error
        raise ArchiveError(f"cache.l3_path={path}: {error.strerror or error}; {ADVICE}") from error
    return file


def kind_of(path: Path) -> str:
    """What is there: folder, file or missing.

    Raises:
        ArchiveError: something else, or nothing that may be looked at.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError as error:
        raise ArchiveError(f"cache.l3_path={path}: {error.strerror or error}; {ADVICE}") from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise ArchiveError(f"cache.l3_path={path}: is neither a folder nor a regular file; {ADVICE}")
    return "folder" if stat.S_ISDIR(mode) else "file"


def check_archive(path: Path | str) -> None:
    """Says early and in one line that cache.l3_path is no good; leaves nothing behind.

    Raises:
        ArchiveError: a folder or a place that no file can be made in, something that is no page file, a page file of
            another version or in use.
    """
    path = Path(path)
    kind = kind_of(path)
    if kind != "file":
        folder = path if kind == "folder" else path.parent
        if not folder.is_dir():
            raise ArchiveError(f"cache.l3_path={path}: there is no folder {folder}; make it first")
        try:
            os.close(system.unnamed_file(folder))
        except OSError as error:
            reason = error.strerror or error
            raise ArchiveError(f"cache.l3_path={path}: {reason}; name a writable folder or a file in one") from error
        return
    file = open_locked(path, create=False)
    try:
        if os.fstat(file).st_size:
            parse(os.pread(file, HEADER_BYTES, 0), path)
    finally:
        os.close(file)
