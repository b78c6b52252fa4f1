"""Verdicts in files: none is lost when several commands write, what JSON can't hold is null, broken files are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_heads as tiny
from tiny_run import save_model, save_text

from policies.classifiers.by_measure import ByMeasure
from testbed.heads import analyse, kept, recommend, show, verdict
from testbed.heads.headmap import HeadMap, HeadMapError
from testbed.models import load
from testbed.models.hf import HfDecoder

PLAIN: dict[str, Any] = {"beats_random": False, "why": "it is noise"}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> HfDecoder:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder / "model")
    save_text(folder / "text")
    return load(folder / "model", name="tiny", dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path: Path, decoder: HfDecoder) -> Path:
    tiny.scored_map(decoder, "retrieval_score").write(tmp_path / "map.json")
    return tmp_path / "map.json"


def judge(path: Path, decoder: HfDecoder, *more: str) -> None:
    given = ["classifiers=[retrieval]", *tiny.trial_words(folder(decoder) / "text"), *model(decoder)]
    verdict.main([str(path), *given, *more])


def folder(decoder: HfDecoder) -> Path:
    return Path(str(decoder.model.config.name_or_path)).parent


def model(decoder: HfDecoder) -> list[str]:
    return tiny.model_words(folder(decoder) / "model")


def strict(path: Path) -> Any:
    def no_number(text: str) -> None:
        raise AssertionError(f"{path} holds {text}")

    return json.loads(path.read_text(), parse_constant=no_number)


def test_one_context_has_no_interval_and_files_hold_no_infinity(path: Path, decoder: HfDecoder) -> None:
    judge(path, decoder)
    found = strict(kept.kept_path(decoder.fingerprint))["retrieval"]
    assert (found["low"], found["high"], found["beats_random"]) == (None, None, False)
    assert "1 context gives no interval" in found["why"]
    assert "inf" not in found["why"]
    assert strict(path)["verdicts"]["retrieval"]["low"] is None
    assert HeadMap.read(path).verdicts["retrieval"]["high"] is None


def during(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, what: Callable[[], object]) -> None:
    """Has something happen while a command works."""
    real = getattr(where, name)

    def work(*args: Any, **kwargs: Any) -> Any:
        what()
        return real(*args, **kwargs)

    monkeypatch.setattr(where, name, work)


def test_verdicts_given_meanwhile_stay(path: Path, decoder: HfDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def another() -> None:
        HeadMap.read(path).with_verdict("duo", PLAIN).write(path)
        kept.keep(decoder.fingerprint, {"duo": PLAIN})

    during(monkeypatch, verdict, "verdicts", another)
    judge(path, decoder)
    assert set(HeadMap.read(path).verdicts) == {"duo", "retrieval"} == set(kept.kept(decoder.fingerprint))


def test_verdicts_given_while_heads_are_measured_stay(
    path: Path, decoder: HfDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = HeadMap.read(path)
    monkeypatch.setattr(analyse, "analyse", lambda *given: measured)
    during(monkeypatch, analyse, "analyse", lambda: kept.add(path, decoder.fingerprint, {"duo": PLAIN}))
    analyse.main(["threads=1", f"output={path}", *model(decoder)])
    assert HeadMap.read(path).verdicts == {"duo": PLAIN}


def test_many_at_once_lose_none(path: Path, decoder: HfDecoder) -> None:
    names = [f"classifier {at}" for at in range(16)]

    def one(name: str) -> None:
        kept.add(path, decoder.fingerprint, {name: PLAIN})
        kept.keep(decoder.fingerprint, {name: PLAIN})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, names))
    assert set(HeadMap.read(path).verdicts) == set(names) == set(kept.kept(decoder.fingerprint))


def test_a_map_of_other_weights_by_then_is_left_alone(path: Path, decoder: HfDecoder) -> None:
    with pytest.raises(HeadMapError, match=r"map\.json: was replaced by a map of other weights"):
        kept.add(path, "f" * 16, {"duo": PLAIN})
    assert HeadMap.read(path).verdicts == {}
    assert decoder.fingerprint == HeadMap.read(path).fingerprint


@pytest.mark.parametrize("text", ["", "[]", "5", "null", '{"x": 5}', '{"x": {"identity": "y"}}', "[" * 100_000])
def test_broken_kept_verdicts_are_told_before_the_trial(
    path: Path, decoder: HfDecoder, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    file = kept.kept_path(decoder.fingerprint)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    tried: list[str] = []
    during(monkeypatch, verdict, "verdicts", lambda: tried.append("yes"))
    uses: list[Callable[[], object]] = [
        lambda: judge(path, decoder),
        lambda: verdict.label(ByMeasure("retrieval_score", 0.5, 0.5, "low"), decoder.fingerprint),
        lambda: kept.keep(decoder.fingerprint, {"duo": PLAIN}),
        lambda: show.main([str(path)]),
        lambda: recommend.main([str(path), "length=1000", "budget.fraction=1", *model(decoder)]),
    ]
    for use in uses:
        with pytest.raises(HeadMapError, match=f"^{file}: .*; delete the file$"):
            use()
    assert tried == []
    assert file.read_text() == text


def test_the_map_has_its_verdicts_even_where_none_can_be_kept(
    path: Path, decoder: HfDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = kept.kept_path(decoder.fingerprint)
    file.parent.mkdir(parents=True)
    during(monkeypatch, verdict, "verdicts", lambda: file.write_text("[]"))
    with pytest.raises(HeadMapError, match="not verdicts"):
        judge(path, decoder)
    assert set(HeadMap.read(path).verdicts) == {"retrieval"}


@pytest.mark.parametrize(
    ("command", "word", "said"),
    [
        ("analyse", "groups=5", "groups=5: must be a list"),
        ("analyse", "groups=text", "groups='text': must be a list"),
        ("analyse", "slow=5", "slow=5: must be a list"),
        ("analyse", "slow=gates", "slow='gates': must be a list"),
        ("analyse", "evidence=null", "evidence=None: must hold the keys lengths, seeds, seed_groups"),
        ("analyse", "evidence.lengths=5", "evidence.lengths=5: must be a list"),
        ("analyse", "evidence.seeds=null", "evidence.seeds=None: must be a list"),
        ("analyse", "evidence.seeds=[1,1]", "evidence.seeds=[1, 1]: holds a value twice"),
        ("analyse", "threads=1.5", "threads=1.5: must be a whole number"),
        ("analyse", "output=/dev/null", "output=/dev/null: not a regular file"),
        ("verdict", "classifiers=[]", "classifiers=[]: must be a list with at least one entry"),
        ("verdict", "classifiers=null", "classifiers=None: must be a list"),
        ("verdict", "classifiers=retrieval", "classifiers='retrieval': must be a list"),
        ("verdict", "threads=1.7", "threads=1.7: must be a whole number of at least 1"),
        ("verdict", "threads=0", "threads=0: must be a whole number of at least 1"),
        ("recommend", "out=/dev/null", "out=/dev/null: /dev/null is no folder"),
    ],
)
def test_bad_settings_are_told_before_a_model_is_loaded(path: Path, command: str, word: str, said: str) -> None:
    main: Callable[[list[str]], None] = {"analyse": analyse, "verdict": verdict, "recommend": recommend}[command].main
    words = [] if command == "analyse" else [str(path)]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        main([*words, "model=hf", "model.path=/nowhere", word])
    assert str(caught.value).startswith(said)


def test_a_length_beyond_the_model_is_refused(path: Path, decoder: HfDecoder) -> None:
    with pytest.raises(HeadMapError, match="length=100000000: must be at most 1024, the limit of tiny"):
        recommend.main([str(path), "length=100000000", *model(decoder)])
