"""How pages get in and out of a file: batches handed to an engine, waited for later, finished in any order.

An engine joins pages that are neighbours in the file into runs of up to 256 KiB, keeps many runs under way and takes
the checksums as the bytes pass. Three native ones (engine.cpp; no Python per page, the interpreter lock is free while
they work): `threads` (pread and pwrite), `uring` (io_uring by liburing), `mmap` (reads copy out of a mapping; writes as
threads). Without a compiler `PythonEngine` does the same with os.preadv. A call that was interrupted or moved nothing
is tried again `TRIES` times in a row, a short one goes on where it stopped; anything else fails the batch.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from kernels.cpu.build import BuildError
from testbed.cache.archive.checksum import coefficients, plain_checksums
from testbed.cache.archive.errors import CUT, ArchiveError, IoFault
from testbed.cache.archive.native import library, liburing, try_library

KINDS = ("auto", "uring", "threads", "mmap")
THREADS = 8  # they sleep in the kernel; more than a disk's useful queue gains nothing
DEPTH = 32
PYTHON_THREADS = 4
RUN_BYTES = 256 << 10
BLOCK_BYTES = 512  # what O_DIRECT aligns to
TRIES = 8
NATIVE_CUT = -100000
ORDER = struct.Struct("9q").pack


@dataclass(frozen=True)
class Batch:
    """Pages to move. Nothing in it may change until it was waited for.

    Attributes:
        write: to the file; else from it.
        offsets: [M] int64 on the host, ascending: bytes from the start of the file.
        places: [M] int64 on the host: which row of `blobs` each page is.
        blobs: [R, page_bytes] uint8 on the host, contiguous.
        stride_bytes: from one page to its neighbour in the file; what lies between is written as zeros.
        sums: [M] int64 on the host, filled in.
    """

    write: bool
    offsets: Tensor
    places: Tensor
    blobs: Tensor
    stride_bytes: int
    sums: Tensor


class Ticket(Protocol):
    """A batch under way."""

    def wait(self) -> None:
        """Blocks until every page was moved or given up.

        Raises:
            IoFault: a page could not be moved; others may have been.
        """
        ...


class Engine(Protocol):
    """Moves batches of one open file; any thread may hand in and wait."""

    name: str

    def submit(self, batch: Batch) -> Ticket:
        """Hands a batch in and returns at once."""
        ...

    def close(self) -> None:
        """Finishes what was handed in, then lets go of threads and memory; the file stays open."""
        ...


class NativeTicket:
    """Of `NativeEngine`; one that nobody waits for is waited for when it is forgotten."""

    def __init__(self, engine: NativeEngine, batch: Batch) -> None:
        self._engine, self._batch = engine, batch
        table = coefficients(batch.blobs.shape[1] // 8)
        order = ORDER(
            batch.write,
            len(batch.offsets),
            batch.blobs.shape[1],
            batch.stride_bytes,
            batch.offsets.data_ptr(),
            batch.places.data_ptr(),
            batch.blobs.data_ptr(),
            batch.sums.data_ptr(),
            table.ctypes.data,
        )
        self._handle: int | None = library().testbed_submit(engine.handle, order)
        if not self._handle:
            raise IoFault(errno.ENOMEM)
        self._table = table

    def wait(self) -> None:
        """See `Ticket`."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        if self._engine.handle is None:
            raise ArchiveError("the archive was closed before its reads and writes were waited for")
        where = ctypes.c_int64(-1)
        code = library().testbed_wait(self._engine.handle, handle, ctypes.byref(where))
        if code:
            raise IoFault(CUT if code == NATIVE_CUT else -code, where.value)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None and self._engine.handle is not None:
            library().testbed_wait(self._engine.handle, self._handle, ctypes.byref(ctypes.c_int64()))


class NativeEngine:
    """One of the three kinds of engine.cpp.

    Args:
        kind: "threads", "uring" or "mmap".
        file: descriptor, open for reading and writing.
        direct: whether it was opened with O_DIRECT.
        threads: that wait for the disk; of "threads" and "mmap".
        depth: runs under way at once; of "uring".
        calls: addresses to use instead of pread and pwrite ("threads", "mmap": 2) or of liburing ("uring": 9), as
            threads.h and uring.h declare them.

    Raises:
        ArchiveError: this kind isn't to be had here.
    """

    def __init__(
        self,
        kind: str,
        file: int,
        direct: bool,
        threads: int = THREADS,
        depth: int = DEPTH,
        calls: list[int] | None = None,
    ) -> None:
        self.name = kind
        self.handle: int | None = None
        out = ctypes.c_void_p()
        try:
            native = library()
            if kind == "uring":
                table = calls or liburing()
                code = native.testbed_open_uring(file, direct, depth, _addresses(table), ctypes.byref(out))
            else:
                table = _addresses(calls) if calls else None
                mapped = kind == "mmap"
                code = native.testbed_open_threads(file, direct, mapped, threads, table, ctypes.byref(out))
            if code:
                raise OSError(-code, os.strerror(-code))
        except (OSError, BuildError) as error:
            raise ArchiveError(
                f"cache.l3_io={kind}: can't be had here: {error}; or auto for the best there is"
            ) from error
        self.handle = out.value
        self._process = os.getpid()

    def submit(self, batch: Batch) -> NativeTicket:
        """See `Engine`."""
        if self.handle is None or self._process != os.getpid():
            raise ArchiveError("the archive was closed, or belongs to the process that this one was forked from")
        return NativeTicket(self, batch)

    def close(self) -> None:
        """See `Engine`."""
        handle, self.handle = self.handle, None
        if handle is not None and self._process == os.getpid():
            library().testbed_close(handle)


def _addresses(table: list[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(table))(*table)


class PythonEngine:
    """Runs over a few Python threads with os.preadv and os.pwrite; also what the native ones are checked against.

    Args:
        file, direct: as `NativeEngine`.
        threads: that wait for the disk.
    """

    name = "python"

    def __init__(self, file: int, direct: bool, threads: int = PYTHON_THREADS) -> None:
        self.file, self.direct = file, direct
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="archive")

    def submit(self, batch: Batch) -> PythonTicket:
        """See `Engine`."""
        return PythonTicket([self._threads.submit(self._move, batch, run) for run in _runs(batch)])

    def close(self) -> None:
        """See `Engine`."""
        self._threads.shutdown()

    def read(self, into: memoryview, offset: int) -> int:
        """One call of the system: bytes read, 0 at the end of the file."""
        return os.preadv(self.file, [into], offset)

    def write(self, data: memoryview, offset: int) -> int:
        """One call of the system: bytes written."""
        return os.pwrite(self.file, data, offset)

    def _move(self, batch: Batch, run: slice) -> None:
        offset, places = int(batch.offsets[run.start]), batch.places[run].numpy()
        pages, width, stride = batch.blobs.numpy(), batch.blobs.shape[1], batch.stride_bytes
        view = memoryview(mmap.mmap(-1, len(places) * stride))  # aligned for O_DIRECT, all zeros
        rows = np.frombuffer(view, dtype=np.uint8).reshape(len(places), stride)[:, :width]
        if batch.write:
            rows[:] = pages[places]
            batch.sums.numpy()[run] = plain_checksums(rows)
        self._call(batch.write, view, offset)
        if not batch.write:
            pages[places] = rows
            batch.sums.numpy()[run] = plain_checksums(rows)

    def _call(self, write: bool, view: memoryview, offset: int) -> None:
        done = tries = 0
        while done < len(view):
            before = done
            try:
                moved = (self.write if write else self.read)(view[done:], offset + done)
                if not moved:
                    raise IoFault(errno.EIO if write else CUT, offset + done)
                done += moved
            except (InterruptedError, BlockingIOError):
                pass
            except OSError as error:
                raise IoFault(error.errno or errno.EIO, offset + done) from error
            if self.direct and done < len(view):
                done -= done % BLOCK_BYTES
            tries = 0 if done > before else tries + 1
            if tries > TRIES:
                raise IoFault(errno.EIO if write else CUT, offset + done)


class PythonTicket:
    """Of `PythonEngine`."""

    def __init__(self, runs: list[Future[None]]) -> None:
        self._runs = runs

    def wait(self) -> None:
        """See `Ticket`."""
        faults = [fault for fault in (run.exception() for run in self._runs) if fault is not None]
        if faults:
            raise faults[0]


def _runs(batch: Batch) -> list[slice]:
    """Stretches of pages that are neighbours in the file, of at most RUN_BYTES."""
    offsets = batch.offsets.numpy()
    if not len(offsets):
        return []
    most = max(1, RUN_BYTES // batch.stride_bytes)
    cuts = [0, *(np.flatnonzero(np.diff(offsets) != batch.stride_bytes) + 1).tolist(), len(offsets)]
    edges = zip(cuts[:-1], cuts[1:], strict=True)
    return [slice(i, min(i + most, stop)) for start, stop in edges for i in range(start, stop, most)]


def make_engine(kind: str, file: int, direct: bool) -> Engine:
    """The engine of a configuration's name; "auto" takes native threads, else Python's.

    Measured (README of the archive's benchmark): threads and io_uring are level on large runs, threads ahead on few.

    Raises:
        ArchiveError: an unknown kind, or one that isn't to be had here.
    """
    if kind not in KINDS:
        raise ArchiveError(f"cache.l3_io={kind!r}: must be one of {', '.join(KINDS)}")
    if kind in ("auto", "threads"):
        return PythonEngine(file, direct) if try_library() is None else NativeEngine("threads", file, direct)
    return NativeEngine(kind, file, direct)
