"""L3: pages in a file, read and written in place with positional I/O.

The file starts with a header that says what it is; each page sits at header + slot * page_bytes. It belongs to one
run: it is created, locked and removed with it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from kernels.pages import PageFormat
from testbed.cache.pool import CacheError, SlotMap

MAGIC = b"testbed pages 1\n"
HEADER_BYTES = 4096  # one block, so that pages start aligned


class ArchiveError(CacheError):
    """The page file can't be made, written or read."""


def check_folder(folder: Path) -> None:
    """Says early and in one line that the archive folder is no good.

    Raises:
        ArchiveError: not a folder that files can be made in.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ArchiveError(f"cache.l3_path={folder}: {error.strerror or error}; name a writable folder") from error


class FilePool:
    """Pages of one format in one file; the same interface as `pool.SlabPool`."""

    def __init__(self, fmt: PageFormat, folder: Path, compute_device: torch.device) -> None:
        self.fmt = fmt
        self.folder = folder
        self.compute_device = compute_device
        self.slots = SlotMap()
        self._file: int | None = None
        self._remove: weakref.finalize | None = None
        self.path: Path | None = None
        self._returned_pages = 0  # free slots whose blocks the file system has back

    def _open(self) -> int:
        """The file, made on first use."""
        if self._file is None:
            check_folder(self.folder)
            handle, name = tempfile.mkstemp(prefix=f"pages-{self.fmt.name}-", suffix=".kv", dir=self.folder)
            self._file, self.path = handle, Path(name)
            self._remove = weakref.finalize(self, _close_and_remove, handle, self.path)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            about = {
                "format": self.fmt.name,
                "page_tokens": self.fmt.page_tokens,
                "head_dim": self.fmt.head_dim,
                "page_bytes": self.fmt.page_bytes,
            }
            self._put(MAGIC + json.dumps(about).encode().ljust(HEADER_BYTES - len(MAGIC)), 0)
        return self._file

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        handle = self._open()
        view = memoryview(data)
        while len(view):
            try:
                done = os.pwrite(handle, view, offset)
            except OSError as error:
                hint = "; free some space or lower what is archived" if error.errno == errno.ENOSPC else ""
                raise ArchiveError(f"can't write {self.path}: {error.strerror}{hint}") from error
            view, offset = view[done:], offset + done

    @property
    def used_pages(self) -> int:
        """Slots taken."""
        return self.slots.used

    @property
    def held_bytes(self) -> int:
        """Bytes of header and slots, less those of freed slots that were given back (in whole blocks)."""
        if self._file is None:
            return 0
        return HEADER_BYTES + (self.slots.capacity - self._returned_pages) * self.fmt.page_bytes

    def allocate(self, pages: int) -> Tensor:
        """Slots [pages] int64, lowest free first; the file grows by what is missing."""
        missing = pages - (self.slots.capacity - self.slots.used)
        if missing > 0:
            self.slots.grow(missing)
            try:
                os.ftruncate(self._open(), HEADER_BYTES + self.slots.capacity * self.fmt.page_bytes)
            except OSError as error:
                raise ArchiveError(f"can't grow {self.path}: {error.strerror}") from error
        self._returned_pages = max(0, self._returned_pages - (pages - max(0, missing)))
        return self.slots.take(pages)

    def free(self, slots: Tensor) -> None:
        """Gives slots back; their blocks go back to the file system where it takes them."""
        self.slots.give(slots)
        ordered = slots.sort().values
        for start, stop in _runs(ordered):
            length = (stop - start) * self.fmt.page_bytes
            if _punch(self._open(), self._offset(int(ordered[start])), length):
                self._returned_pages += stop - start

    def write(self, slots: Tensor, blobs: Tensor) -> None:
        """Copies blobs [M, page_bytes] uint8 into slots [M]; neighbours go in one write."""
        data = blobs.contiguous().cpu().numpy()
        for start, stop in _runs(slots):
            self._put(data[start:stop].data.cast("B"), self._offset(int(slots[start])))

    def read(self, slots: Tensor) -> Tensor:
        """Blobs at slots [M]: [M, page_bytes] uint8; neighbours come in one read."""
        out = torch.empty(len(slots), self.fmt.page_bytes, dtype=torch.uint8)
        data = out.numpy()
        for start, stop in _runs(slots):
            view = data[start:stop].data.cast("B")
            offset = self._offset(int(slots[start]))
            while len(view):
                try:
                    done = os.preadv(self._open(), [view], offset)
                except OSError as error:
                    raise ArchiveError(f"can't read {self.path}: {error.strerror}") from error
                if not done:
                    raise ArchiveError(f"{self.path} is shorter than its pages: it was cut by someone else")
                view, offset = view[done:], offset + done
        return out.to(self.compute_device)

    def _offset(self, slot: int) -> int:
        return HEADER_BYTES + slot * self.fmt.page_bytes

    def clone(self) -> FilePool:
        """An independent copy in a file of its own."""
        other = FilePool(self.fmt, self.folder, self.compute_device)
        other.slots, other._returned_pages = self.slots.clone(), self._returned_pages
        if self.path is not None:
            other._open()
            assert other.path is not None
            try:
                shutil.copyfile(self.path, other.path)
            except OSError as error:
                other.close()
                raise ArchiveError(f"can't copy {self.path}: {error.strerror}") from error
        return other

    def close(self) -> None:
        """Closes and removes the file; a pool that was forgotten does so when it is collected."""
        if self._remove is not None:
            self._remove()
        self._file = self.path = self._remove = None


def _close_and_remove(handle: int, path: Path) -> None:
    os.close(handle)
    path.unlink(missing_ok=True)


def _punch(handle: int, offset: int, length: int) -> bool:
    """Returns a range of a file to the file system, its size unchanged; False where that is not to be had."""
    keep_size_and_punch = 0x01 | 0x02
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is None:
        return False
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call(handle, keep_size_and_punch, offset, length) == 0


def _runs(slots: Tensor) -> list[tuple[int, int]]:
    """Index ranges [start, stop) of `slots` whose slots are consecutive."""
    if not len(slots):
        return []
    cuts = ((slots[1:] - slots[:-1]) != 1).nonzero().flatten().add(1).tolist()
    edges = [0, *cuts, len(slots)]
    return list(zip(edges[:-1], edges[1:], strict=True))
