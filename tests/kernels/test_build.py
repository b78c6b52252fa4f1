"""The native library: one OpenMP runtime, several builders at once, no compiler, a failing compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kernels.cpu import build

# Without optimisation: what is tested is the building, not the library.
BUILD = "import kernels.cpu.build as b; b.FLAGS = ('-O0', *b.FLAGS[1:]); b.library()"


def run_python(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_two_processes_may_build_at_once(tmp_path: Path) -> None:
    builders = [run_python(BUILD, TESTBED_CACHE=str(tmp_path)) for _ in range(2)]
    for builder in builders:
        _, error = builder.communicate()
        assert builder.returncode == 0, error
    proof, library = sorted((tmp_path / "native").iterdir(), key=lambda path: path.suffix)
    assert library.name.startswith("attend-")
    assert (proof.stem, {proof.suffix, library.suffix}) == (library.stem, {".sha256", ".so"})


def test_a_broken_library_is_built_again_and_not_loaded(tmp_path: Path) -> None:
    """A truncated one would end the process with a bus error."""
    assert run_python(BUILD, TESTBED_CACHE=str(tmp_path)).wait() == 0
    (library,) = (tmp_path / "native").glob("*.so")
    whole = library.read_bytes()
    library.write_bytes(whole[: len(whole) // 2])
    builder = run_python(BUILD, TESTBED_CACHE=str(tmp_path))
    _, error = builder.communicate()
    assert builder.returncode == 0, error
    assert library.read_bytes() == whole


def test_the_process_keeps_one_openmp_runtime() -> None:
    code = """
import torch, re
from kernels.cpu.build import library
torch.set_num_threads(2)
torch.randn(500, 500) @ torch.randn(500, 500)
library()
lines = open("/proc/self/maps").read().splitlines()
print(len({l.split()[-1] for l in lines if re.search(r"lib(gomp|omp|iomp5)", l)}))
"""
    out, error = run_python(code).communicate()
    assert out.strip() == "1", error


def test_without_a_compiler_torch_serves_and_says_so(tmp_path: Path) -> None:
    code = """
from kernels.api import choose_backend
print(choose_backend(None))
assert choose_backend() == choose_backend(None, "cpu") == choose_backend(name=None, device="cpu")  # one notice
try:
    choose_backend("cpu")
except RuntimeError as error:
    print(error)
"""
    out, error = run_python(code, PATH=str(tmp_path), CXX="", TESTBED_CACHE=str(tmp_path)).communicate()
    assert out.splitlines()[0] == "torch"
    assert "no C++ compiler" in out.splitlines()[1]
    assert len(error.strip().splitlines()) == 1
    assert "using torch" in error


def test_a_failing_compiler_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad"
    bad.write_text("#!/bin/sh\necho no such machine >&2\nexit 1\n")
    bad.chmod(0o755)
    monkeypatch.setenv("CXX", str(bad))
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path / "cache"))
    with pytest.raises(build.BuildError, match="no such machine"):
        build.library.__wrapped__()
    assert not list((tmp_path / "cache" / "native").iterdir())


def test_a_proof_of_any_bytes_is_built_again(tmp_path: Path) -> None:
    assert run_python(BUILD, TESTBED_CACHE=str(tmp_path)).wait() == 0
    (proof,) = (tmp_path / "native").glob("*.sha256")
    whole = proof.read_bytes()
    proof.write_bytes(b"\xff\xfe\x80")
    builder = run_python(BUILD, TESTBED_CACHE=str(tmp_path))
    _, error = builder.communicate()
    assert builder.returncode == 0, error
    assert proof.read_bytes() == whole


def test_what_killed_builds_left_is_removed_once_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad"
    bad.write_text("#!/bin/sh\nexit 1\n")
    bad.chmod(0o755)
    monkeypatch.setenv("CXX", str(bad))
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path))
    folder = tmp_path / "native"
    folder.mkdir()
    old, new, library = folder / ".attend-0.so.old", folder / ".attend-0.so.new", folder / "attend-0.so"
    for path, hours in ((old, 2), (new, 0), (library, 2)):
        path.write_bytes(b"")
        written = time.time() - hours * 3600
        os.utime(path, (written, written))
    with pytest.raises(build.BuildError, match="said nothing"):
        build.library.__wrapped__()
    assert sorted(folder.iterdir()) == [new, library]


def test_a_compiler_that_can_not_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"\x7fno program")
    text.chmod(0o755)
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path))
    wrong = (
        ("CXX", str(text), "can't be run"),
        ("CXX", "no-such-compiler -O1", "CXX='no-such-compiler -O1'"),
        ("CXX", "g++ '", "CXX="),
        ("TESTBED_NATIVE_FLAGS", "-DX='", "TESTBED_NATIVE_FLAGS="),
    )
    for name, value, message in wrong:
        with monkeypatch.context() as one:
            one.setenv(name, value)
            with pytest.raises(build.BuildError, match=message):
                build.library.__wrapped__()


def test_flags_of_cxx_are_used_and_one_line_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    monkeypatch.setenv("CXX", f"{compiler} -include no-such-file.h")
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path))
    with pytest.raises(build.BuildError, match="no-such-file.h") as caught:
        build.library.__wrapped__()
    assert len(str(caught.value).splitlines()) == 1


def test_an_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match="TESTBED_CACHE"):
        build.library.__wrapped__()


def test_import_is_fast_and_compiles_nothing(tmp_path: Path) -> None:
    code = """
import sys, torch
before = set(sys.modules)
import kernels.api, kernels.prefill, kernels.scoring
print(sorted(m for m in set(sys.modules) - before if not m.startswith("kernels")))
print(hasattr(kernels, "__version__"))
"""
    out, error = run_python(code, TESTBED_CACHE=str(tmp_path)).communicate()
    assert out.splitlines() == ["[]", "False"], error
    assert not list(tmp_path.iterdir())
