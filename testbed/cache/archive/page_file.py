"""The page file of L3: a header, then extents, each of which holds pages of one format.

A run that names a folder gets a file without a name there, which ends with the run whatever ends it. A run that names a
file makes it or takes over what an earlier run left: its pages count only once a pool is told their slots and checksums
(`FilePool.restore`), so a file that a killed run left half written can't be mistaken for a whole one. A lock keeps a
second run out.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from testbed.cache.archive import system
from testbed.cache.archive.errors import HINTS, ArchiveError
from testbed.cache.archive.header import HEADER_BYTES, ArchiveAbout, Header, check_same, parse
from testbed.cache.archive.io import BLOCK_BYTES, Engine, make_engine
from testbed.cache.archive.places import check_options, kind_of, open_locked
from testbed.cache.pool import PoolFull

EXTENT_BYTES = 1 << 20
LEAST_EXTENTS = 64  # that a limit should be worth, so that formats can share a small archive
EngineMaker = Callable[[str, int, bool], Engine]  # kind, descriptor, whether it is direct


def stride_bytes(page_bytes: int) -> int:
    """From one page to the next in the file: whole blocks, as O_DIRECT wants."""
    return -(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES


class PageFile:
    """One open page file. Get one by `PageFile.open`.

    Extents are claimed and released by one thread; the engine serves any.

    Attributes:
        path: the file, or the folder of one without a name.
        header: what its first block says.
        kept: whether the file outlives the run.
        was_clean: False if a killed run left it.
        max_bytes: of header and extents; None = what the disk holds.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        file: int | None,
        max_bytes: int | None,
        io: tuple[str, bool | str],
        maker: EngineMaker,
        was_clean: bool = True,
    ) -> None:
        self.path, self.header, self.kept, self.was_clean = path, header, file is not None, was_clean
        self.max_bytes = max_bytes
        self._io, self._maker = io, maker
        self._making = threading.Lock()  # the first page may come on several threads
        self._resources = _Resources(file)
        self._claimed = torch.zeros(0, dtype=torch.bool)  # [extents] a pool has it
        self._occupied = torch.zeros(0, dtype=torch.bool)  # [extents] it takes room on the disk
        self.pools = 0  # made for this file; the first one's bytes include the header
        self.closed = False
        self._finalizer = weakref.finalize(self, self._resources.close)
        if file is not None:
            left = max(0, os.fstat(file).st_size - HEADER_BYTES)
            self._see(-(-left // self.extent_bytes))
            self._occupied[:] = True

    @staticmethod
    def open(
        path: Path | str,
        about: ArchiveAbout,
        max_bytes: int | None = None,
        io: str = "auto",
        direct: bool | str = "auto",
        make: EngineMaker = make_engine,
    ) -> PageFile:
        """Opens or makes the page file that a configuration names.

        Args:
            path: an existing folder, for a file that ends with the run (made when the first page comes); or a file,
                made if missing, kept at the end.
            about: whose pages.
            max_bytes: cache.l3_bytes; None = no limit but the disk.
            io: cache.l3_io.
            direct: cache.l3_direct; "auto" takes O_DIRECT where the file system does.
            make: gives the engine; called once, when the first page comes.

        Raises:
            ArchiveError: the path is no good, is no page file, is of another version, model or shape, is in use.
        """
        path = Path(path)
        check_options(io, direct)
        extent = _extent_bytes(about, max_bytes)
        kind = kind_of(path)
        if kind == "folder":
            return PageFile(path, Header(about, extent), None, max_bytes, (io, direct), make)
        file = open_locked(path, create=True)
        try:
            fresh = os.fstat(file).st_size == 0
            header = Header(about, extent) if fresh else parse(os.pread(file, HEADER_BYTES, 0), path)
            check_same(header.about, about, path)
            opened = PageFile(path, header, file, max_bytes, (io, direct), make, fresh or header.clean)
        except BaseException:
            os.close(file)
            raise
        try:
            opened.mark(clean=False)
        except ArchiveError:
            if fresh:
                os.ftruncate(file, 0)
            if kind == "missing":
                path.unlink()
            opened._finalizer()
            raise
        return opened

    # --- the file --------------------------------------------------------------------------------------------

    @property
    def extent_bytes(self) -> int:
        """Grain in which formats share the file."""
        return self.header.extent_bytes

    @property
    def file(self) -> int:
        """The descriptor; the file is made if it wasn't."""
        if self.closed:
            raise ArchiveError(f"{self.path}: the page file was closed")
        if self._resources.file is None:
            try:
                self._resources.file = system.unnamed_file(self.path)
            except OSError as error:
                raise ArchiveError(f"can't make a page file in {self.path}: {error.strerror or error}") from error
            self.mark(clean=False)
        return self._resources.file

    @property
    def engine(self) -> Engine:
        """What reads and writes pages."""
        with self._making:
            return self._resources.engine or self._make_engine()

    def _make_engine(self) -> Engine:
        kind, wanted = self._io
        target = self.file
        if wanted is not False and kind != "mmap":
            try:
                self._resources.direct = target = system.open_direct(target, BLOCK_BYTES)
            except OSError as error:
                if wanted is True:
                    reason = error.strerror or error
                    raise ArchiveError(
                        f"cache.l3_direct=true: {self.path} can't be read past the page cache: {reason}; or auto"
                    ) from error
        self._resources.engine = self._maker(kind, target, self.direct)
        return self._resources.engine

    @property
    def direct(self) -> bool:
        """Whether pages go past the system's page cache; known once the engine is there."""
        return self._resources.direct is not None

    def mark(self, clean: bool) -> None:
        """Writes the header.

        Raises:
            ArchiveError: the disk refused.
        """
        self.header = replace(self.header, clean=clean)
        packed, done = self.header.packed(), 0
        try:
            while done < len(packed):  # a disk that fills up in the midst of it says so the second time
                done += os.pwrite(self.file, packed[done:], done)
        except OSError as error:
            raise ArchiveError(f"can't write {self.path}: {error.strerror}{HINTS.get(error.errno or 0, '')}") from error

    def sync(self) -> None:
        """Returns once all that was written is on the disk.

        Raises:
            ArchiveError: the disk refused.
        """
        try:
            os.fsync(self.file)
        except OSError as error:
            raise ArchiveError(f"can't write {self.path}: {error.strerror}") from error

    def close(self) -> None:
        """Finishes reads and writes and closes; a kept file is marked as whole, another one is gone. May be repeated.

        Raises:
            ArchiveError: a kept file can't be marked; it is closed all the same.
        """
        if self.closed:
            return
        try:
            if self.kept:
                self._resources.stop()
                self.sync()  # pages before the mark that vouches for them
                self.mark(clean=True)
                self.sync()
        finally:
            self.closed = True
            self._finalizer()

    # --- extents ---------------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Bytes of the disk that the file takes; 0 as long as it isn't made."""
        if self.closed or self._resources.file is None:
            return 0
        return HEADER_BYTES + int(self._occupied.sum()) * self.extent_bytes

    @property
    def idle_bytes(self) -> int:
        """Those of them that no pool has: what an earlier run left, or what the file system doesn't take back."""
        return int((self._occupied & ~self._claimed).sum()) * self.extent_bytes

    @property
    def room_bytes(self) -> int | None:
        """Bytes that pools may still claim; None = no limit but the disk."""
        if self.max_bytes is None:
            return None
        return max(0, self.max_bytes - HEADER_BYTES - int(self._claimed.sum()) * self.extent_bytes)

    def claim(self, count: int) -> Tensor:
        """The lowest free extents [count] int64, with room on the disk.

        Raises:
            PoolFull: more than `max_bytes`, or than the disk has; nothing is claimed then.
        """
        free = (~self._claimed).nonzero().flatten()[:count]
        extents = torch.cat((free, len(self._claimed) + torch.arange(count - len(free))))
        self._take(extents)
        return extents

    def claim_these(self, extents: Tensor) -> None:
        """Extents [E] int64 that hold pages of an earlier run.

        Raises:
            PoolFull: as `claim`.
            ArchiveError: one is taken, by pages of another format or by newer ones.
        """
        known = extents[extents < len(self._claimed)]
        if bool(self._claimed[known].any()):
            raise ArchiveError(f"{self.path}: pages to be restored lie where other pages are; restore them first")
        self._take(extents)

    def _take(self, extents: Tensor) -> None:
        if not len(extents):
            return
        wanted, room = len(extents) * self.extent_bytes, self.room_bytes
        if room is not None and wanted > room:
            raise PoolFull(f"{wanted} bytes more of archive, cache.l3_bytes={self.max_bytes} leaves room for {room}")
        try:
            for start, count in _stretches(extents):
                system.reserve(self.file, self._offset(start), count * self.extent_bytes)
        except OSError as error:
            hint = HINTS.get(error.errno or 0, "")
            raise PoolFull(f"{wanted} bytes more in {self.path}: {error.strerror or error}{hint}") from error
        except ArchiveError as error:
            if self.closed:
                raise
            raise PoolFull(str(error)) from error  # not even made: the disk is full to the last block, the folder gone
        self._see(int(extents.max()) + 1)
        self._claimed[extents] = self._occupied[extents] = True

    def release(self, extents: Tensor) -> None:
        """Gives extents [E] int64 back, to the file system where it takes them."""
        self._claimed[extents] = False
        self._punch(extents)

    def trim(self) -> None:
        """Gives back what an earlier run left and nobody restored."""
        self._punch((self._occupied & ~self._claimed).nonzero().flatten())

    def _punch(self, extents: Tensor) -> None:
        for start, count in _stretches(extents):
            if system.punch(self.file, self._offset(start), count * self.extent_bytes):
                self._occupied[start : start + count] = False

    def _offset(self, extent: int) -> int:
        return HEADER_BYTES + extent * self.extent_bytes

    def _see(self, extents: int) -> None:
        missing = torch.zeros(max(0, extents - len(self._claimed)), dtype=torch.bool)
        self._claimed, self._occupied = torch.cat((self._claimed, missing)), torch.cat((self._occupied, missing))


class _Resources:
    """What must be let go of, whoever forgets the page file."""

    def __init__(self, file: int | None) -> None:
        self.file, self.direct, self.engine = file, None, None
        self.file: int | None
        self.direct: int | None
        self.engine: Engine | None

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = None

    def close(self) -> None:
        self.stop()
        for descriptor in (self.direct, self.file):
            if descriptor is not None:
                os.close(descriptor)
        self.file = self.direct = None


def _extent_bytes(about: ArchiveAbout, max_bytes: int | None) -> int:
    """A power of two that holds any page, smaller where the limit is small."""
    extent = EXTENT_BYTES
    largest = max(map(stride_bytes, about.formats.values()))
    if max_bytes is not None:
        while extent > max(HEADER_BYTES, largest) and extent * LEAST_EXTENTS > max_bytes:
            extent //= 2
    while extent < largest:
        extent *= 2
    return extent


def _stretches(extents: Tensor) -> list[tuple[int, int]]:
    """(first, count) of consecutive extents."""
    ordered = sorted(extents.tolist())
    starts = [i for i, extent in enumerate(ordered) if i == 0 or extent != ordered[i - 1] + 1]
    ends = [*starts[1:], len(ordered)]
    return [(ordered[start], end - start) for start, end in zip(starts, ends, strict=False)]
