"""The archive's native library (engine.cpp), built on first use as the kernels' is, and liburing's functions."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

from kernels.cpu import build

LIBURING = ("queue_init", "queue_exit", "get_sqe", "prep_read", "prep_write", "sqe_set_data64")
LIBURING_MORE = ("submit_and_wait", "peek_cqe", "cqe_seen")


@cache
def library() -> ctypes.CDLL:
    """Checksums and I/O engines.

    Raises:
        BuildError: no compiler, or it failed; see `kernels.cpu.build.library`.
    """
    here = Path(__file__).parent
    loaded = build.load(build.compiled("archive", [here / "engine.cpp"], sorted(here.glob("*.h"))))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.testbed_checksum.argtypes = [pointer, number, number, pointer, pointer]
    loaded.testbed_open_threads.argtypes = [number] * 4 + [pointer] * 2
    loaded.testbed_open_uring.argtypes = [number] * 3 + [pointer] * 2
    loaded.testbed_open_threads.restype = loaded.testbed_open_uring.restype = number
    loaded.testbed_submit.argtypes, loaded.testbed_submit.restype = [pointer, pointer], pointer
    loaded.testbed_wait.argtypes, loaded.testbed_wait.restype = [pointer] * 3, number
    loaded.testbed_close.argtypes = [pointer]
    loaded.testbed_checksum.restype = loaded.testbed_close.restype = None
    return loaded


@cache
def try_library() -> ctypes.CDLL | None:
    """The same, or None where it can't be had; `library` says why."""
    try:
        return library()
    except build.BuildError:
        return None


def liburing() -> list[int]:
    """Addresses of liburing's functions in the order of uring.h's Ring.

    The PyPI package (extra `uring`) carries the C library in its extension module. Its Python calls are left alone:
    they hold the interpreter while they wait for the disk.

    Raises:
        OSError: the package isn't there, or can't be used here.
    """
    found = importlib.util.find_spec("liburing")
    folders = list(found.submodule_search_locations or ()) if found else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("liburing*.so"))]
    if not files:
        raise OSError("the package liburing isn't installed (extra 'uring')")
    loaded = ctypes.CDLL(str(files[0]))
    try:
        functions = [getattr(loaded, f"io_uring_{name}") for name in (*LIBURING, *LIBURING_MORE)]
    except AttributeError as error:
        raise OSError(f"{files[0]} lacks a function: {error}") from error
    return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
