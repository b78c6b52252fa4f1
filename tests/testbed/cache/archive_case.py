"""Page files for tests, and engines that misbehave on purpose."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kernels.pages import PageFormat, page_format
from testbed.cache.archive import ArchiveAbout, ArchiveError, FilePool, PageFile
from testbed.cache.archive.io import Engine, NativeEngine, PythonEngine
from testbed.cache.archive.native import liburing

FORMATS = {name: page_format(name, 16, 32) for name in ("fp32", "int8", "int4")}
ABOUT = ArchiveAbout("toy-1", 2, 3, 32, 16, {name: fmt.page_bytes for name, fmt in FORMATS.items()})


def uring_is_here() -> bool:
    """The package is an extra, and a container may forbid the calls."""
    with tempfile.TemporaryFile() as file:
        try:
            NativeEngine("uring", file.fileno(), False).close()
        except ArchiveError:
            return False
    return True


ENGINES = ("threads", "uring", "mmap", "python") if uring_is_here() else ("threads", "mmap", "python")

READ = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
PREPARE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64)
SUBMIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint)


def blobs_of(pages: int, fmt: PageFormat, seed: int) -> Tensor:
    return torch.randint(0, 256, (pages, fmt.page_bytes), generator=torch.manual_seed(seed), dtype=torch.uint8)


def maker(name: str) -> Callable[[str, int, bool], Engine]:
    """Of the engine under that name, whatever the configuration says."""

    def make(kind: str, file: int, direct: bool) -> Engine:
        return PythonEngine(file, direct) if name == "python" else NativeEngine(name, file, direct)

    return make


def open_file(place: Path, engine: str = "threads", direct: bool = False, **more: object) -> PageFile:
    io = "mmap" if engine == "mmap" else "auto"
    arguments = {"io": io, "direct": direct and engine != "mmap", "make": maker(engine)} | more
    return PageFile.open(place, ABOUT, **arguments)  # type: ignore[arg-type]


def pools_of(file: PageFile) -> dict[str, FilePool]:
    return {name: FilePool(fmt, file) for name, fmt in FORMATS.items()}


def takes(file: PageFile, held_bytes: int) -> bool:
    """Whether the file system says that the file takes so much, give or take the header and its own lists of blocks."""
    return abs(os.fstat(file.file).st_blocks * 512 - held_bytes) <= 8 << 10


@dataclass
class Faults:
    """How system calls misbehave: `answer(write, offset, bytes)` is how many bytes to really move, or -errno."""

    answer: Callable[[bool, int, int], int]
    calls: list[tuple[bool, int, int]] = field(default_factory=list)

    def __call__(self, write: bool, offset: int, size: int) -> int:
        self.calls.append((write, offset, size))
        return self.answer(write, offset, size)

    def make(self, name: str) -> Callable[[str, int, bool], Engine]:
        """An engine of that name whose system calls pass through here."""
        if name == "python":
            return lambda kind, file, direct: FaultyPython(file, direct, self)
        if name == "uring":
            return lambda kind, file, direct: FaultyUring(file, direct, self)
        return lambda kind, file, direct: FaultyThreads(name, file, direct, self)


class FaultyPython(PythonEngine):
    def __init__(self, file: int, direct: bool, faults: Faults) -> None:
        super().__init__(file, direct)
        self.faults = faults

    def read(self, into: memoryview, offset: int) -> int:
        return super().read(into[: self._allowed(False, into, offset)], offset)

    def write(self, data: memoryview, offset: int) -> int:
        return super().write(data[: self._allowed(True, data, offset)], offset)

    def _allowed(self, write: bool, view: memoryview, offset: int) -> int:
        answer = self.faults(write, offset, len(view))
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        return answer


class FaultyThreads(NativeEngine):
    def __init__(self, kind: str, file: int, direct: bool, faults: Faults) -> None:
        def call(write: bool) -> Callable[[int, int, int, int], int]:
            def moved(fd: int, at: int, size: int, offset: int) -> int:
                answer = faults(write, offset, size)
                if answer <= 0:
                    return answer
                view = memoryview((ctypes.c_uint8 * answer).from_address(at)).cast("B")
                return os.pwrite(fd, view, offset) if write else os.preadv(fd, [view], offset)

            return moved

        self.kept = [READ(call(False)), READ(call(True))]
        super().__init__(kind, file, direct, calls=[ctypes.cast(c, ctypes.c_void_p).value or 0 for c in self.kept])


class FaultyUring(NativeEngine):
    """Short: fewer bytes are asked for. Failing: a descriptor that isn't open, which the kernel answers with EBADF."""

    def __init__(self, file: int, direct: bool, faults: Faults) -> None:
        table = liburing()

        def call(write: bool, real: Callable[..., None]) -> Callable[[int, int, int, int, int], None]:
            def prepare(entry: int, fd: int, at: int, size: int, offset: int) -> None:
                answer = faults(write, offset, size)
                real(entry, fd if answer >= 0 else 9999, at, max(0, answer), offset)

            return prepare

        self.kept = [PREPARE(call(False, PREPARE(table[3]))), PREPARE(call(True, PREPARE(table[4])))]
        table[3:5] = [ctypes.cast(c, ctypes.c_void_p).value or 0 for c in self.kept]
        super().__init__("uring", file, direct, calls=table)
