"""Where copies of the sources are made, one a seeded bug, and where the tests that must catch it run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from mutants import Mutant

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_SECONDS = 900
ASSERTED = ("AssertionError", "assert ", "Failed: DID NOT RAISE", "Failed: DID NOT WARN")


@dataclass(frozen=True)
class Parts:
    """What a copy consists of.

    Attributes:
        folders: below the repository's root.
        native: mutants may change native sources, so each copy compiles its own, without optimisation. Else what the
            machine has compiled before will do, byte code too.
    """

    folders: tuple[str, ...]
    native: bool = False


class Bench:
    """Makes copies and runs their tests; native objects that they have in common are compiled once."""

    def __init__(self, folder: Path, parts: Parts) -> None:
        self.folder, self.parts = folder, parts
        hidden = ("PYTEST_", "TESTBED_", "TRITON_") if parts.native else ("PYTEST_", "TRITON_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # importing them takes longer than most tests
        if parts.native:
            (folder / "objects").mkdir()
            compiler = folder / "cxx"
            compiler.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "cached_cxx.py"}" "$@"\n')
            compiler.chmod(0o755)
            environment |= {"CXX": str(compiler), "OBJECTS": str(folder / "objects")}
        command = [sys.executable, str(HERE / "zygote.py")]
        pipe = subprocess.PIPE
        self.zygote = subprocess.Popen(command, env=environment, text=True, cwd=folder, stdin=pipe, stdout=pipe)

    def copy(self, name: str) -> Path:
        """A copy of what the tests need, made once a name."""
        place = self.folder / name
        if not place.exists():
            hidden = shutil.ignore_patterns(".*", *["__pycache__"] * self.parts.native)
            for part in self.parts.folders:
                shutil.copytree(ROOT / part, place / part, ignore=hidden)
            for name in ("pyproject.toml", "tests/conftest.py", "tests/warm.py"):
                shutil.copy(ROOT / name, place / name)
        return place

    def run(self, place: Path, tests: tuple[str, ...], interp: bool = False) -> tuple[int, str]:
        """Runs tests of a copy in a process of its own; its exit status and what it printed."""
        environment = {"PYTHONPATH": str(place)}
        if self.parts.native:
            environment["TESTBED_CACHE"] = str(place / "cache")
        if interp:
            environment["TRITON_INTERPRET"] = "1"
        arguments = [
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "_hypothesis_pytestplugin",
            "--tb=short",
            "--junitxml=result.xml",
            "--hypothesis-seed=0",
        ]
        arguments += ["-m", "interp" if interp else "not interp", *tests]
        order = {"place": str(place), "environment": environment, "arguments": arguments}
        assert self.zygote.stdin is not None
        assert self.zygote.stdout is not None
        print(json.dumps({**order, "limit_seconds": LIMIT_SECONDS}), file=self.zygote.stdin, flush=True)
        return int(self.zygote.stdout.readline()), (place / "output.txt").read_text()[-3000:]

    def check_unchanged(self, tests: tuple[str, ...], interp: bool = False) -> None:
        """The tests pass, and none is skipped, on a copy without a bug."""
        place = self.copy("unchanged")
        status, printed = self.run(place, tests, interp)
        assert status == 0, printed
        assert outcome(place) == ([], [], 0), "a test that is skipped catches nothing"

    def check_caught(self, mutant: Mutant) -> None:
        """The mutant's tests fail by an assertion, and by nothing else."""
        place = self.copy(mutant.name)
        files = [path for path in sorted(place.glob(mutant.file)) if path.is_file()]
        found = {path: path.read_text().count(mutant.old) for path in files}
        assert sum(found.values()) == 1, f"stale: {mutant.old!r} occurs {sum(found.values())} times in {mutant.file}"
        (path,) = (path for path, times in found.items() if times)
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        status, printed = self.run(place, mutant.tests, mutant.interp)
        assert status == 1, f"not caught, or not run:\n{printed}"
        failures, errors, _ = outcome(place)
        assert not errors, errors
        assert failures
        assert all(message.startswith(ASSERTED) for message in failures), failures
        shutil.rmtree(place)

    def close(self) -> None:
        """Ends the process that runs the tests."""
        assert self.zygote.stdin is not None
        self.zygote.stdin.close()
        self.zygote.wait()


def outcome(place: Path) -> tuple[list[str], list[str], int]:
    """Messages of failures and of errors, and the number of tests skipped."""
    cases = ElementTree.parse(place / "result.xml").iter("testcase")
    failures, errors, skipped = [], [], 0
    for case in cases:
        failures += [x.get("message", "") for x in case.findall("failure")]
        errors += [x.get("message", "") for x in case.findall("error")]
        skipped += len(case.findall("skipped"))
    return failures, errors, skipped


def check_table(mutants: tuple[Mutant, ...], least: int) -> None:
    """Names differ, each changes something and names tests."""
    names = [mutant.name for mutant in mutants]
    assert len(set(names)) == len(names) >= least
    for mutant in mutants:
        assert mutant.old != mutant.new, mutant.name
        assert mutant.tests, mutant.name
