"""The commands `analyse` and `show` on a tiny model."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from tiny_run import save_model

from testbed.assets import AssetError
from testbed.heads import library
from testbed.heads.__main__ import main, run
from testbed.heads.calibration import CalibrationError
from testbed.heads.headmap import HeadMap
from testbed.heads.library import Group

SETTINGS = [
    "calibration.needle_lengths=[400]",
    "calibration.needle_samples_per_cell=2",
    "calibration.text_tokens=300",
    "calibration.text_samples=2",
    "calibration.local_window_tokens=64",
    "calibration.long_range_tokens=128",
    "calibration.edge_window_tokens=100",
    "calibration.shift_tokens=120",
    "calibration.prefix_tokens=40",
    "evidence.lengths=[500,4000]",
    "groups=[text,needle,other_language]",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path / "cache"))
    body = " ".join(f"Sentence {at} says nothing at all." for at in range(200))
    monkeypatch.setattr("testbed.assets.essays", lambda: {f"essay{at}.txt": body for at in range(12)})

    def nowhere() -> dict[str, str]:
        raise AssetError("no network")

    monkeypatch.setattr("testbed.assets.foreign_texts", nowhere)


def analyse(model: Path, *more: str) -> None:
    given = {word.partition("=")[0] for word in more}
    kept = [word for word in SETTINGS if word.partition("=")[0] not in given]
    run(["analyse", "model=hf", f"model.path={model}", "model.device=cpu", *kept, *more])


def test_analyse_writes_a_map_and_shows_it(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "map.json"
    analyse(model, f"output={output}")
    said = capsys.readouterr()
    assert "measuring heads: needle, 500 tokens (6 of 7)" in said.err
    assert said.out.endswith(f"head map: {output}\n")
    assert "left out: other_language: no network" in said.out
    assert re.search(r"left out: needle, 4000 tokens: .*limit of 1024", said.out)
    made = HeadMap.read(output)
    assert {"retrieval_score", "head_entropy", "head_entropy@needle", "head_edge_mass_published"} < set(made.measures)
    assert made.measures["retrieval_score"].samples == 2
    assert made.settings["calibration"]["text_tokens"] == 300
    stable = made.evidence["stability"]
    assert set(stable["retrieval_score"]) == {"texts", "lengths", "seeds"}
    assert set(stable["retrieval_score"]["lengths"]) == {"400 500"}
    assert set(stable["head_entropy"]) == {"texts", "seeds"}
    assert "text needle" in made.evidence["carry_over"]["head_entropy"]
    verdict = {"beats_random": False, "why": "it is noise", "samples": 3}
    made.with_verdict("duo", verdict).write(output)
    run(["show", str(output)])
    shown = capsys.readouterr().out
    assert "duo: not better than random: it is noise" in shown
    value = float(made.measures["retrieval_score"].value.max())
    assert f"{value:.3g}".lstrip("0") in shown
    analyse(model, f"output={output}")  # again: nothing is measured, and what was tried stays
    assert HeadMap.read(output).verdicts == {"duo": verdict}


def test_interrupted_analysis_goes_on_where_it_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, made = library.Group.measure, []

    def stop_at_needles(self: Group, *arguments: object) -> object:
        made.append(self.name)
        if self.name == "needle" and made.count("needle") == 1:
            raise KeyboardInterrupt
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(library.Group, "measure", stop_at_needles)
    output = tmp_path / "map.json"
    more = (f"output={output}", "evidence.lengths=[]", "evidence.seeds=[]", "groups=[text,needle]", "threads=1")
    with pytest.raises(KeyboardInterrupt):
        analyse(model, *more)
    assert "the same command goes on from there" in " ".join(capsys.readouterr().err.split())
    assert not output.exists()
    analyse(model, *more)
    assert made == ["text", "needle", "needle"]
    assert set(HeadMap.read(output).evidence["stability"]) > {"retrieval_score", "head_entropy"}
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["groups=[poems]"], "groups: 'poems' is no group of measures; there are code, dialogue"),
        (["groups=[]"], "name at least one"),
        (["evidence.seed_groups=[poems]"], "seed_groups: 'poems' is no group"),
        (["evidence.lengths=[10]"], "evidence.lengths=10: must be a whole number of at least 64"),
        (["calibration.text_tokens=100"], "must be below text_tokens=100"),
        (["threads=0"], "threads=0: must be a whole number"),
        (["map.json"], "analyse takes key=value, and was given 'map.json'"),
        (["calibration.needle_lengths=[1024]"], "limit of 1024"),
        (["groups=[other_language]", "evidence.seeds=[]", "evidence.lengths=[]"], "other_language: no network"),
    ],
)
def test_bad_settings(model: Path, words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        analyse(model, *words)


def test_output_that_is_no_map_is_not_replaced(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "thesis.json"
    output.write_text("my thesis")
    with pytest.raises(ValueError, match="this one is no head map to replace"):
        analyse(model, f"output={output}", "groups=[text]", "evidence.seeds=[]", "evidence.lengths=[]")
    assert output.read_text() == "my thesis"


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["analyze"], "error: unknown command 'analyze'. Did you mean analyse? There are: analyse, show, compare"),
        (["show"], "error: show takes one head map"),
        (["show", "nowhere.json"], "error: nowhere.json: No such file or directory"),
    ):
        monkeypatch.setattr(sys, "argv", ["heads", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        assert capsys.readouterr().err.startswith(said)
    run([])
    assert "analyse" in capsys.readouterr().out


def test_group_of_a_text_that_is_too_short(model: Path) -> None:
    with pytest.raises(CalibrationError, match="edge_window_tokens"):
        analyse(model, "calibration.edge_window_tokens=300")
