"""Seeded bugs that the suite must catch: each is put into a copy of kernels/, where the named tests must then fail.

They must fail by an assertion: a mutant that does not compile or import proves nothing. Once, all the named tests run
on an unchanged copy and must pass.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from mutants import MUTANTS, Mutant

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_SECONDS = 900
ASSERTED = ("AssertionError", "assert ", "Failed: DID NOT RAISE", "Failed: DID NOT WARN")


class Bench:
    """Where copies are made and their tests run; native objects are shared between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "objects").mkdir()
        compiler = folder / "cxx"
        compiler.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "cached_cxx.py"}" "$@"\n')
        compiler.chmod(0o755)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TESTBED_", "TRITON_"))}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"CXX": str(compiler), "OBJECTS": str(folder / "objects")}
        command = [sys.executable, str(HERE / "zygote.py")]
        pipe = subprocess.PIPE
        self.zygote = subprocess.Popen(command, env=environment, text=True, cwd=folder, stdin=pipe, stdout=pipe)

    def copy(self, name: str) -> Path:
        """A copy of what the tests of kernels need, made once a name."""
        place = self.folder / name
        if not place.exists():
            hidden = shutil.ignore_patterns("__pycache__", ".*")
            for part in ("kernels", "tests/kernels"):
                shutil.copytree(ROOT / part, place / part, ignore=hidden)
            shutil.copy(ROOT / "pyproject.toml", place)
        return place

    def run(self, place: Path, tests: tuple[str, ...], interp: bool) -> tuple[int, str]:
        """Runs tests of a copy in a process of its own; its exit status and what it printed."""
        environment = {"PYTHONPATH": str(place), "TESTBED_CACHE": str(place / "cache")}
        if interp:
            environment["TRITON_INTERPRET"] = "1"
        arguments = ["-x", "-p", "no:cacheprovider", "--tb=short", "--junitxml=result.xml"]
        arguments += ["-m", "interp" if interp else "not interp", *tests]
        order = {"place": str(place), "environment": environment, "arguments": arguments}
        assert self.zygote.stdin is not None
        assert self.zygote.stdout is not None
        print(json.dumps({**order, "limit_seconds": LIMIT_SECONDS}), file=self.zygote.stdin, flush=True)
        return int(self.zygote.stdout.readline()), (place / "output.txt").read_text()[-3000:]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("mutants"))
    yield made
    assert made.zygote.stdin is not None
    made.zygote.stdin.close()
    made.zygote.wait()


def outcome(place: Path) -> tuple[list[str], list[str], int]:
    """Messages of failures and of errors, and the number of tests skipped."""
    cases = ElementTree.parse(place / "result.xml").iter("testcase")
    failures, errors, skipped = [], [], 0
    for case in cases:
        failures += [x.get("message", "") for x in case.findall("failure")]
        errors += [x.get("message", "") for x in case.findall("error")]
        skipped += len(case.findall("skipped"))
    return failures, errors, skipped


@pytest.mark.parametrize("interp", [False, True], ids=["native and torch", "triton"])
def test_the_chosen_tests_pass_without_a_mutant(bench: Bench, interp: bool) -> None:
    tests = tuple(dict.fromkeys(t for m in MUTANTS if m.interp == interp for t in m.tests))
    place = bench.copy("unchanged")
    status, printed = bench.run(place, tests, interp)
    assert status == 0, printed
    assert outcome(place) == ([], [], 0), "a test that is skipped catches nothing"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mutant_is_caught(bench: Bench, mutant: Mutant) -> None:
    place = bench.copy(mutant.name)
    files = [path for path in sorted(place.glob(mutant.file)) if path.is_file()]
    found = {path: path.read_text().count(mutant.old) for path in files}
    assert sum(found.values()) == 1, f"stale: {mutant.old!r} occurs {sum(found.values())} times in {mutant.file}"
    (path,) = (path for path, times in found.items() if times)
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    status, printed = bench.run(place, mutant.tests, mutant.interp)
    assert status == 1, f"not caught, or not run:\n{printed}"
    failures, errors, _ = outcome(place)
    assert not errors, errors
    assert failures
    assert all(message.startswith(ASSERTED) for message in failures), failures
    shutil.rmtree(place)


def test_the_table_is_sound() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 14
    for mutant in MUTANTS:
        assert mutant.old != mutant.new, mutant.name
        assert mutant.tests, mutant.name
