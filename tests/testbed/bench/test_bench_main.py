"""`python -m testbed.bench`: targets are judged as said, finished cases are kept, whatever ends the run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from testbed.bench import __main__ as command
from testbed.bench.base import Options, Row, at_least, at_most, case, case_names, table, within


def test_bounds_include_their_ends_and_refuse_nan() -> None:
    assert at_least("c", "n", 0.8, 0.8).met
    assert not at_least("c", "n", 0.79, 0.8).met
    assert at_most("c", "n", 0.05, 0.05).met
    assert not at_most("c", "n", 0.06, 0.05).met
    assert within("c", "n", 1.1, 0.9, 1.1).met
    assert not within("c", "n", 1.2, 0.9, 1.1).met
    assert not any(row.met for row in (at_least("c", "n", math.nan, 0), at_most("c", "n", math.nan, 0)))
    with pytest.raises(ValueError, match="without a target"):
        Row("c", "n", 1.0, met=True)
    with pytest.raises(ValueError, match="threads=0"):
        Options(0)


def test_every_case_can_be_run() -> None:
    assert not {"base", "__main__"} & set(case_names())
    for name in case_names():
        assert callable(case(name).run), name


def test_table_says_every_row() -> None:
    lines = table([at_least("copy", "8 KB", 0.912, 0.8), Row("copy", "[x]", 3.0, "GB/s")]).splitlines()
    assert lines[2].split() == ["copy", "8", "KB", "0.912", ">=", "0.8", "met"]
    assert lines[3].split() == ["copy", "[x]", "3", "GB/s"]


def _stop(kind: type[BaseException]) -> NoReturn:
    raise kind("broken")


@pytest.mark.parametrize(("kind", "code", "outcome"), [(KeyboardInterrupt, 130, "inter"), (OSError, 1, "failed: OSE")])
def test_finished_cases_are_kept(
    kind: type[BaseException], code: int, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {
        "good": lambda options: [at_least("good", f"{options.threads} threads", 1.0, 0.5), Row("good", "n", math.nan)],
        "bad": lambda options: _stop(kind),
        "late": lambda options: [at_most("late", "n", 2.0, 1.0)],
    }
    monkeypatch.setattr(command, "case", lambda name: SimpleNamespace(run=cases[name]))
    out = tmp_path / "deep" / "rows.json"
    assert command.run(list(cases), Options(3), out) == code
    body = json.loads(out.read_text())
    late = [] if code == 130 else [("late", 2.0, False)]
    assert [(row["case"], row["value"], row["met"]) for row in body["rows"]] == [
        ("good", 1.0, True),
        ("good", "nan", None),
        *late,
    ]
    assert body["rows"][0]["name"] == "3 threads"
    assert [stage["outcome"].startswith(outcome) for stage in body["stages"]][:2] == [False, True]
    assert [x.name for x in out.parent.iterdir()] == ["rows.json"]


def test_quick_runs_judge_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [at_least("one", "n", 0.1, 0.5)]
    monkeypatch.setattr(command, "case", lambda name: SimpleNamespace(run=lambda options: rows))
    assert command.run(["one"], Options(quick=True), tmp_path / "rows.json") == 0
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["met"] is None


def test_unknown_cases_and_threads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, word in ((["--cases", "nosuch"], "nosuch"), (["--threads", "0"], "at least 1")):
        with pytest.raises(SystemExit):
            command.main(arguments)
        assert word in capsys.readouterr().err
