"""A file of named tensors and a text that says what they are: what a saved session is written to.

    prefix | tensors, one after the other | index (JSON: the text, name -> type, shape, place, checksum)

Every byte is under a checksum: each tensor under one of its own, the index under one in the prefix, the prefix under
its own. The file appears under its name only once it is whole and on the disk; what fails before leaves nothing.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from testbed.cache.archive.checksum import checksums
from testbed.cache.pool import CacheError

MAGIC = b"testbed session\n"
VERSION = 2
PREFIX = struct.Struct("<16sQQQqq")  # magic, version, place and bytes of the index, its checksum, the prefix's own
ROW_BYTES = 4096  # summed at once


class SavedError(CacheError):
    """A saved session that can't be written, read or used."""


def digest(data: Tensor) -> int:
    """64 bits that any flipped bit changes: data [n] uint8; rows are summed, then their sums, until one is left."""
    rows = checksums(_rows(data))
    while len(rows) > 1:
        rows = checksums(_rows(rows.view(torch.uint8)))
    return int(rows[0]) ^ len(data)


def _rows(data: Tensor) -> Tensor:
    """[n] uint8 -> [M, ROW_BYTES], the last row padded with zeros."""
    return torch.nn.functional.pad(data, (0, -len(data) % ROW_BYTES if len(data) else ROW_BYTES)).view(-1, ROW_BYTES)


def _bytes(tensor: Tensor) -> Tensor:
    """[n] uint8 on the host."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


class Writer:
    """Takes tensors one by one, so that not all need be held at once. Get one by `writing`."""

    def __init__(self, file: int, path: Path) -> None:
        self._file, self._path = file, path
        self._end = PREFIX.size
        self._index: dict[str, list[Any]] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor.

        Raises:
            SavedError: the disk refused.
        """
        data = _bytes(tensor)
        kind = str(tensor.dtype).removeprefix("torch.")
        self._index[name] = [kind, list(tensor.shape), self._end, len(data), digest(data)]
        self._write(data.numpy().data)

    def finish(self, about: Mapping[str, Any]) -> None:
        """Writes index and prefix; the file is whole then."""
        line = json.dumps({"about": about, "tensors": self._index}).encode()
        data = torch.frombuffer(bytearray(line), dtype=torch.uint8)
        start = self._end
        self._write(line)
        fields = (MAGIC, VERSION, start, len(line), digest(data))
        own = digest(torch.frombuffer(bytearray(PREFIX.pack(*fields, 0)), dtype=torch.uint8))
        self._end = 0
        self._write(PREFIX.pack(*fields, own))

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            done = os.pwrite(self._file, view, self._end)
            view, self._end = view[done:], self._end + done


@contextmanager
def writing(path: Path, sync: Callable[[], None] = lambda: None) -> Iterator[Writer]:
    """A writer whose file replaces `path` when the block ends well; else `path` is what it was.

    Args:
        path: in an existing folder.
        sync: called once all is written and before the file gets its name: what it refers to must be on the disk too.

    Raises:
        SavedError: names the path and what is wrong with it.
    """
    part = path.with_name(f".{path.name}.part")
    file = folder = None
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        file = _unnamed(path.parent, part)
        yield Writer(file, path)
        os.fsync(file)
        sync()
        if not _named(file, part):
            part.unlink(missing_ok=True)  # of a save that was killed right here
            os.link(f"/proc/self/fd/{file}", part, src_dir_fd=folder)  # without it Python links the link itself
        os.replace(part, path)
        os.fsync(folder)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SavedError(f"can't save to {path}: {error.strerror or error}") from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        for handle in (file, folder):
            if handle is not None:
                os.close(handle)


def _unnamed(folder: Path, part: Path) -> int:
    """A file that ends with the process, or one called `part` where the file system has no such files."""
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
    except (OSError, AttributeError):
        return os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)


def _named(file: int, part: Path) -> bool:
    return part.exists() and os.path.samestat(os.fstat(file), os.stat(part))


class Reader:
    """An open saved session. Its tensors are checked as they are read.

    Attributes:
        about: the text that was saved.

    Raises:
        SavedError: no such file, not a saved session, another version, cut short, damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise SavedError(f"can't read the saved session {path}: {error.strerror or error}") from error
        try:
            index = self._read_index()
        except BaseException:
            self._file.close()
            raise
        self.about: dict[str, Any] = index["about"]
        self._tensors: dict[str, list[Any]] = index["tensors"]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read_index(self) -> dict[str, Any]:
        prefix = self._file.read(PREFIX.size)
        if not prefix.startswith(MAGIC[: len(prefix)]) or not prefix:
            raise SavedError(f"{self.path} is not a saved session")
        if len(prefix) < PREFIX.size:
            raise SavedError(f"{self.path} is cut short: it ends after {len(prefix)} bytes")
        _, version, start, count, right, own = PREFIX.unpack(prefix)
        blank = bytearray(prefix[: -struct.calcsize("<q")]) + bytes(struct.calcsize("<q"))
        if digest(torch.frombuffer(blank, dtype=torch.uint8)) != own:
            raise SavedError(f"{self.path} is damaged: its first bytes are not what was written")
        if version != VERSION:
            raise SavedError(f"{self.path} is a saved session of version {version}, this testbed has version {VERSION}")
        size = os.fstat(self._file.fileno()).st_size
        if size != start + count:
            raise SavedError(f"{self.path} is cut short: it has {size} of {start + count} bytes")
        return json.loads(bytes(self._checked(start, count, right, "its index").numpy()))

    def names(self, start: str) -> list[str]:
        """Names of the tensors that begin with a text, in the order they were put."""
        return [name for name in self._tensors if name.startswith(start)]

    def get(self, name: str) -> Tensor:
        """One tensor, on the host.

        Raises:
            SavedError: it is not what was written.
        """
        kind, shape, start, count, right = self._tensors[name]
        data = self._checked(start, count, right, f"the part {name!r}")
        return data.view(getattr(torch, kind)).view(shape) if count else torch.zeros(shape, dtype=getattr(torch, kind))

    def _checked(self, start: int, count: int, right: int, what: str) -> Tensor:
        data = torch.empty(count, dtype=torch.uint8)
        try:
            self._file.seek(start)
            done = self._file.readinto(data.numpy().data) if count else 0
        except OSError as error:
            raise SavedError(f"can't read the saved session {self.path}: {error.strerror or error}") from error
        if done != count:
            raise SavedError(f"{self.path} is cut short: {what} ends after {done} of {count} bytes")
        if digest(data) != right:
            raise SavedError(f"{self.path} is damaged: {what} is not what was written")
        return data
