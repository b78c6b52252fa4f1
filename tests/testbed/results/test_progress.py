"""Progress where there is no terminal: plain lines, few of them."""

from __future__ import annotations

import pytest

from testbed.results import progress
from testbed.results.progress import Progress


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    with Progress() as bar:
        for done in (0.1, 0.25, 1.0):
            bar.fraction("essays", done)
        bar.start("code", 8)
        bar.advance(4)
        bar.note("kept")
    return capsys.readouterr().err.splitlines()


def test_a_phase_is_named_once_and_says_nothing_more_for_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys) == ["essays ...", "code ...", "kept"]


def test_a_long_phase_says_how_far_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    assert lines(capsys) == [
        "essays ...",
        "essays ... 10%",
        "essays ... 25%",
        "essays ... 100%",
        "code ...",
        "code ... 50%",
        "kept",
    ]
