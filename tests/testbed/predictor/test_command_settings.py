"""The predictor's commands refuse what they can't work with before a model is loaded, in one line that names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import save_model

from testbed.commands import MENDABLE, describe
from testbed.predictor import background, evaluate, needles, train
from testbed.predictor.corpus import Amounts

COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train.main,
    "evaluate": evaluate.main,
    "background": background.main,
    "needles": needles.main,
}
NONE = "{essays: 0, modules: 0, agents: 0, needles: 0}"


def refused(command: str, *words: str) -> str:
    with pytest.raises(MENDABLE) as caught:
        COMMANDS[command](["model=hf", "model.path=/nowhere", *words])
    return describe(caught.value)


@pytest.mark.parametrize(
    ("commands", "word", "said"),
    [
        ("train evaluate background needles", "threads=0", "threads=0: must be a whole number of at least 1"),
        ("train evaluate background needles", "threads=abc", "threads='abc': must be a whole number"),
        ("train evaluate", "corpus=null", "corpus=None: must hold the keys length_tokens, seed"),
        ("train evaluate", "+corpus.more=1", "must hold the keys length_tokens, seed"),
        ("train evaluate", "corpus.length_tokens=abc", "corpus.length_tokens='abc': must be a whole number"),
        ("train evaluate", "corpus.length_tokens=100", "corpus.length_tokens=100: must be a whole number of at least"),
        ("train evaluate", "corpus.windows=0", "corpus.windows=0: must be a whole number of at least 1"),
        ("train evaluate", "corpus.windows=-1", "corpus.windows=-1"),
        ("train evaluate", "corpus.window_tokens=0", "corpus.window_tokens=0"),
        ("train evaluate", "corpus.seed=-1", "corpus.seed=-1: must be a whole number of at least 0"),
        ("train evaluate", "shares=0.1", "shares=0.1: must be a list with at least one entry"),
        ("train evaluate", "shares=[]", "must be a list with at least one entry"),
        ("train evaluate", "shares=[0]", "shares=[0]: must be above 0"),
        ("train evaluate needles", "shares=[abc]", "shares='abc': must be a number in [0, 1]"),
        ("train evaluate needles", "cache.page_tokens=7", "cache.page_tokens=7"),
        ("train", "judge=abc", "judge='abc': must be true or false"),
        ("train", "training.epochs=0", "training.epochs=0: must be a whole number"),
        ("evaluate needles", "predictors=[]", "predictors=[]: must be a list with at least one entry"),
        ("evaluate needles", "predictors=quest", "predictors='quest': must be a list"),
        ("evaluate needles", "predictors=[5,quest]", "unknown predictor '5'"),
        ("evaluate needles", "predictors=[quest,quest]", "predictors=['quest', 'quest']: holds a value twice"),
        ("evaluate needles", "shares=[0.1,0.25,0.10]", "shares=[0.1, 0.25, 0.1]: holds a value twice"),
        ("needles", "with_prototypes=[1,1.0]", "with_prototypes=[1, 1.0]: holds a value twice"),
        ("evaluate", "best=age", "best=age: must be one of the judged predictors, oracle"),
        ("needles", "seed=-1", "seed=-1: must be a whole number of at least 0"),
        ("needles", "with_prototypes=0.1", "with_prototypes=0.1: must be a list"),
        ("background", "what=rest", "what='rest': must be offsets or stand_ins"),
        ("background", "method=x", "method='x': must be ridge or gradient"),
        ("background", "background=null", "background=None: must hold the keys length_tokens"),
        ("background", "background.train=null", "background.train=None: must hold the keys essays, modules"),
        ("background", "background.test.essays=-1", "background.test.essays=-1: must be a whole number of at least 0"),
        ("background", "background.blocks=0", "background.blocks=0: must be a whole number of at least 1"),
        ("background", "background.seed=-1", "background.seed=-1"),
        ("background", "background.keeps=[]", "background.keeps=[]: must be a list"),
        ("background", "background.keeps=[a]", "background.keeps='a': must be a number in [0, 1]"),
        ("background", "background.keeps=[0.1,0.1]", "background.keeps=[0.1, 0.1]: holds a value twice"),
        ("background", "background.predictors=[fortune]", "must be one of next_mass"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_line_that_names_them(commands: str, word: str, said: str) -> None:
    for command in commands.split():
        told = refused(command, word)
        assert said in told
        assert "Error in call" not in told  # Hydra's wrapping


def test_needles_without_any_share() -> None:
    assert "shares and with_prototypes=[]" in refused("needles", "shares=[]", "with_prototypes=[]")


@pytest.mark.parametrize(
    ("command", "key", "folder"),
    [
        ("train", "output", True),
        ("evaluate", "record", False),
        ("needles", "record", False),
        ("background", "record", False),
        ("background", "offsets", True),
    ],
)
def test_bad_outputs_are_told_before_the_work(tmp_path: Path, command: str, key: str, folder: bool) -> None:
    wrong = tmp_path / "there"
    wrong.write_text("x") if folder else wrong.mkdir()
    assert refused(command, f"{key}={wrong}").startswith(f"{key}={wrong}: ")
    wrong = tmp_path / "file" / "below"
    wrong.parent.write_text("x")
    assert refused(command, f"{key}={wrong}").startswith(f"{key}={wrong}: ")


@pytest.mark.parametrize(
    "words",
    [(f"background.test={NONE}",), (f"background.train={NONE}",), ("what=stand_ins", f"background.test={NONE}")],
    ids=str,
)
def test_background_without_documents(tmp_path: Path, words: tuple[str, ...]) -> None:
    save_model(tmp_path / "model", positions=2048)
    part = re.findall(r"background\.(\w+)=", words[-1])[0]
    few = [f"background.{other}={{essays: 0, modules: 1, agents: 0, needles: 0}}" for other in ("train", "test")]
    words = (f"model.path={tmp_path / 'model'}", *(word for word in few if part not in word), *words)
    said = refused("background", *words)
    assert said.startswith(f"background.{part}={{'essays': 0, 'modules': 0")
    assert said.endswith("there is no such document")


def test_amounts_that_are_none() -> None:
    for value in (-1, "x", 1.5, True):
        with pytest.raises(ValueError, match="needles="):
            Amounts(1, 1, 1, value)  # type: ignore[arg-type]
