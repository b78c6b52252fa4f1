"""Calls of the file system that Python has no name for, and those whose failure is an answer."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

KEEP_SIZE_AND_PUNCH = 0x01 | 0x02


def unnamed_file(folder: Path) -> int:
    """A file without a name in a folder: it ends with its descriptor, even if the process is killed.

    Raises:
        OSError: the folder takes none.
    """
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
    except OSError as error:  # kernels and file systems without it answer these
        if error.errno not in (errno.EISDIR, errno.EOPNOTSUPP, errno.ENOENT, errno.EINVAL):
            raise
    file, name = tempfile.mkstemp(prefix=".pages-", suffix=".kv", dir=folder)
    os.unlink(name)
    return file


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call


def _ask(file: int, mode: int, offset: int, length: int) -> int:
    """0 or an errno."""
    call = _fallocate()
    if call is None:
        return errno.EOPNOTSUPP
    while True:
        if call(file, mode, offset, length) == 0:
            return 0
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return code


def reserve(file: int, offset: int, length: int) -> None:
    """Makes room on the disk for a range, so that a later write can't find it full; grows the file where needed.

    Raises:
        OSError: no room.
    """
    code = _ask(file, 0, offset, length)
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        if os.fstat(file).st_size < offset + length:
            os.ftruncate(file, offset + length)
    elif code:
        raise OSError(code, os.strerror(code))


def punch(file: int, offset: int, length: int) -> bool:
    """Gives a range back to the file system, the file's size unchanged; False where it takes none."""
    return _ask(file, KEEP_SIZE_AND_PUNCH, offset, length) == 0


def open_direct(file: int, block_bytes: int) -> int:
    """The same file past the page cache (O_DIRECT), in blocks of `block_bytes`; its first two blocks must be there.

    Raises:
        OSError: the file system or the disk doesn't do that.
    """
    direct = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT)
    try:
        os.preadv(direct, [memoryview(mmap.mmap(-1, block_bytes))], block_bytes)
    except OSError:
        os.close(direct)
        raise
    return direct
