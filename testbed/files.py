"""Files that are written whole or not at all, and by one process at a time.

with replacing(path) as partial:
    partial.write_text(text)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path


def target_of(path: Path) -> Path:
    """The file to write where a path is named: symlinks are followed, there may be none yet.

    Raises:
        OSError: a folder, a pipe, a device: nothing that a file may take the place of.
    """
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    target = Path(os.path.realpath(path))
    if (path.exists() and not path.is_file()) or target.is_symlink():  # still one: it leads to itself
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return target


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """One process at a time; the kernel lets go of the lock when its holder dies.

    Args:
        path: of the lock's own file, in a folder that is there.
        waiting: called where another process holds it.
    """
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def replacing(path: Path, make_folder: bool = True) -> Iterator[Path]:
    """A temporary file beside the one to write, which replaces it when the block ends well, in one step.

    Args:
        path: see `target_of`.
        make_folder: make its folder where there is none.

    Raises:
        OSError: see `target_of`, or the file system refused; names the path, and nothing half-written stays. So is
            every OSError of the block renamed, whatever file it was about.
    """
    try:
        target = target_of(path)
        if make_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            yield partial
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, target)
        finally:
            with contextlib.suppress(OSError):  # gone after the rename
                partial.unlink()
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
