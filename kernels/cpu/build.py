"""Builds the native library on first use and loads it by ctypes.

The library has a plain C ABI, links neither torch nor OpenMP (see parallel.h), and is cached under a name hashed
from the source, the compiler, the flags and the CPU's own list of features; it is written aside and renamed, so that
two processes may build at once. So -march=native is safe: a machine with other features has another name, and builds
its own, even if the cache folder is shared. What the sources use beyond plain vectors (AVX2, F16C, AVX-512 with VNNI
and BF16) is behind the compiler's own macros; without them it is plain C++. TESTBED_NATIVE_FLAGS adds flags, e.g.
-march=x86-64 to get the build of an older CPU, or -DTESTBED_EMULATE_BF16 for bf16 dot products without the instruction.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = ("attend.cpp", "copy.cpp", "gemv.cpp", "score.cpp", "store.cpp")
HEADERS = tuple(sorted(path.name for path in Path(__file__).parent.glob("*.h")))
FLAGS = ("-O3", "-std=c++17", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-pthread", "-shared", "-fPIC")


STALE_SECONDS = 3600  # no build takes as long


class BuildError(RuntimeError):
    """There is no C++ compiler, or it failed."""


@cache
def library() -> ctypes.CDLL:
    """The native library, built if need be.

    Raises:
        BuildError: no compiler, a failed compilation, an unwritable cache folder, CXX or TESTBED_NATIVE_FLAGS that
            can't be used.
    """
    here = Path(__file__).parent
    loaded = load(compiled("attend", [here / name for name in SOURCES], [here / name for name in HEADERS]))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.testbed_attend.argtypes = [pointer] * 3 + [ctypes.c_float]
    loaded.testbed_append.argtypes = loaded.testbed_copy.argtypes = loaded.testbed_score.argtypes = [pointer]
    loaded.testbed_encode.argtypes = [pointer] * 4 + [number] * 7
    loaded.testbed_transcode.argtypes = [pointer] * 2 + [number] * 8
    loaded.testbed_gemv.argtypes = [pointer] * 3 + [number] * 4
    loaded.testbed_top_pages.argtypes = [pointer] * 5 + [number] * 5
    loaded.testbed_narrow.argtypes = [pointer] * 6 + [number] * 3 + [pointer] * 3
    loaded.testbed_narrow.restype = number  # what was wrong, 0 for nothing
    for name in ("attend", "append", "copy", "score", "encode", "transcode", "gemv", "top_pages"):
        function = getattr(loaded, f"testbed_{name}")
        function.restype, function.errcheck = number, _checked
    return loaded


def load(path: Path) -> ctypes.CDLL:
    """The library at `path`, as `compiled` named it.

    Raises:
        BuildError: it can't be loaded.
    """
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} can't be loaded: {error}") from error


def _checked(code: int, function: Any, arguments: Sequence[object]) -> int:
    """The code a native call returned, unless it failed: guard.h says which codes mean that."""
    if code >= 0:
        return code
    if code == -1:
        raise RuntimeError(f"{function.__name__} failed")
    size = f"{-code} bytes of working memory" if code < -2 else "working memory"
    raise MemoryError(f"{function.__name__} wanted {size}, which can't be had")


def cache_folder() -> Path:
    """Where libraries are kept: $TESTBED_CACHE/native, by default in the user's cache folder."""
    root = os.environ.get("TESTBED_CACHE")
    if root:
        return Path(root) / "native"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "testbed" / "native"


def compiled(name: str, sources: Sequence[Path], headers: Sequence[Path] = ()) -> Path:
    """Path of the library made of `sources`, which may include `headers`; compiled unless it is there.

    Raises:
        BuildError: as `library`, loading excepted.
    """
    compiler = _compiler()
    version = _run([compiler[0], "--version"]).stdout
    flags = (*compiler[1:], *FLAGS, *_words("TESTBED_NATIVE_FLAGS"))
    digest = hashlib.sha256()
    texts = [path.read_bytes() for path in (*sources, *headers)]
    for part in (*texts, version.encode(), " ".join(flags).encode(), cpu_features().encode()):
        digest.update(part + b"\0")
    target = cache_folder() / f"{name}-{digest.hexdigest()[:16]}.so"
    proof = target.with_suffix(".sha256")
    if _intact(target, proof):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _tidy(target.parent, name)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        os.close(descriptor)
    except OSError as error:
        raise BuildError(f"{target.parent} can't be written: {error}; set TESTBED_CACHE") from error
    try:
        done = _run([compiler[0], *flags, *map(str, sources), "-o", temporary])
        if done.returncode:
            raise BuildError(f"{compiler[0]} failed: {_first_error(done.stderr)}")
        # The proof goes first: a library without a fitting proof is built again, never loaded.
        proof.write_text(hashlib.sha256(Path(temporary).read_bytes()).hexdigest())
        Path(temporary).replace(target)
    except OSError as error:
        raise BuildError(f"{target.parent} can't be written: {error}; set TESTBED_CACHE") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def _intact(library: Path, proof: Path) -> bool:
    """Whether the file is what was built; a truncated library would kill the process when it is loaded."""
    try:
        return proof.read_bytes() == hashlib.sha256(library.read_bytes()).hexdigest().encode()
    except OSError:
        return False


def _tidy(folder: Path, name: str) -> None:
    """Removes what builds that were killed left behind."""
    for path in folder.glob(f".{name}-*.so.*"):
        try:
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
        except OSError:  # another process was faster, or owns it
            continue


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs the compiler."""
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} can't be run as a C++ compiler: {error}") from error


def _first_error(output: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")[:300]


def _words(name: str) -> list[str]:
    """The words of an environment variable, quoted as in a shell."""
    value = os.environ.get(name, "")
    try:
        return shlex.split(value)
    except ValueError as error:
        raise BuildError(f"{name}={value!r}: must be words quoted as in a shell ({error})") from error


def _compiler() -> list[str]:
    """$CXX, which may have flags after its name, or the first of g++, c++, clang++."""
    words = _words("CXX")
    if words:
        found = shutil.which(words[0])
        if found is None:
            raise BuildError(f"CXX={os.environ['CXX']!r}: must be a program that is there")
        return [found, *words[1:]]
    for name in ("g++", "c++", "clang++"):
        found = shutil.which(name)
        if found:
            return [found]
    raise BuildError("no C++ compiler (g++, c++, clang++ or $CXX) was found")


def cpu_features() -> str:
    """What -march=native depends on."""
    try:
        flags = re.search(r"^(?:flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        flags = None
    return platform.machine() + (flags.group(0) if flags else platform.processor())
