"""The life of head measures on disk, and texts they are made on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny_run import save_model

import testbed.heads.library as library
from testbed.heads.calibration import CalibrationConfig, CalibrationError
from testbed.heads.headmap import HeadMapError
from testbed.heads.library import group_path, groups, head_measures, measure_group
from testbed.heads.texts import copying
from testbed.models import load
from testbed.models.hf import HfDecoder
from testbed.workloads.base import Sample

TINY = CalibrationConfig(
    needle_lengths=(400,),
    needle_samples_per_cell=1,
    text_tokens=300,
    text_samples=1,
    local_window_tokens=64,
    long_range_tokens=128,
    edge_window_tokens=100,
)
TEXT, NEEDLE = groups()["text"], groups()["needle"]
BEFORE = ("retrieval_score", "head_entropy", "head_local_ratio", "head_long_range")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> HfDecoder:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return load(folder, name="tiny")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and head maps of this test only: the workloads' default text would be an asset."""
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path / "cache"))
    body = " ".join(f"Sentence {at} says nothing at all." for at in range(200))
    monkeypatch.setattr("testbed.assets.essays", lambda: {f"essay{at}.txt": body for at in range(12)})


def nothing(part: float) -> None:
    """Progress that nobody looks at."""


def test_group_is_made_when_first_asked_for_and_read_again(decoder: HfDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float]] = []
    first = head_measures(decoder, TINY, lambda what, part: told.append((what, part)))
    assert set(BEFORE) < set(first)
    assert "retrieval_score" in first
    assert "no_such_measure" not in first
    assert not told  # looking at names measures nothing
    values = {name: first[name] for name in BEFORE}
    assert [what for what, part in told if part == 1.0] == ["measuring heads: needle", "measuring heads: text"]
    for _, parts in (("needle", told[:1]), ("text", told[1:])):
        assert [part for _, part in parts] == sorted(part for _, part in parts)
    for value in values.values():
        assert value.shape == (2, 2)
        assert bool(((value >= 0) & (value <= 1)).all())
    with pytest.raises(KeyError):
        first["no_such_measure"]

    def again(*arguments: object) -> None:
        raise AssertionError("measured a second time")

    monkeypatch.setattr(library.Group, "measure", again)
    second = head_measures(decoder, TINY)
    assert all(torch.equal(values[name], second[name]) for name in BEFORE)
    assert sorted(path.name for path in group_path(decoder, TINY, TEXT).parent.iterdir()) == sorted(
        group_path(decoder, TINY, group).name for group in (TEXT, NEEDLE)
    )


def test_file_holds_what_was_measured(decoder: HfDecoder) -> None:
    kept = head_measures(decoder, TINY)
    made = NEEDLE.measure(decoder, TINY, nothing)["retrieval_score"]
    for view in ("value", "mean", "low", "high"):
        torch.testing.assert_close(kept[f"retrieval_score:{view}"], getattr(made, view), atol=0, rtol=1e-5)
    torch.testing.assert_close(kept["retrieval_score"], made.value, atol=0, rtol=1e-5)
    with pytest.raises(KeyError):
        kept["retrieval_score:median"]


def test_another_model_or_setting_has_another_file(decoder: HfDecoder, tmp_path: Path) -> None:
    path = group_path(decoder, TINY, TEXT)
    for key, value in (("seed", 1), ("text_tokens", 301), ("local_window_tokens", 65)):
        assert group_path(decoder, dataclasses.replace(TINY, **{key: value}), TEXT) != path
    other_needles = dataclasses.replace(TINY, needle_lengths=(401,))
    assert group_path(decoder, other_needles, TEXT) == path  # plain text has none
    assert group_path(decoder, other_needles, NEEDLE) != group_path(decoder, TINY, NEEDLE)
    save_model(tmp_path / "other")
    again, changed = (load(tmp_path / "other", name="tiny") for _ in range(2))
    assert group_path(again, TINY, TEXT) == path  # the same model, read again
    with torch.no_grad():
        changed.model.lm_head.weight.mul_(-1.0)
    assert group_path(changed, TINY, TEXT) != path


def test_other_data_or_code_has_another_file(
    decoder: HfDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = groups()["dialogue"]
    (folder := tmp_path / "data" / group.data).mkdir(parents=True)
    monkeypatch.setenv("TESTBED_DATA", str(tmp_path / "data"))
    seen = [group_path(decoder, TINY, group), group_path(decoder, TINY, TEXT)]
    (folder / "some.jsonl").write_text("{}")
    seen.append(group_path(decoder, TINY, group))
    (folder / "some.jsonl").write_text("{  }")
    seen.append(group_path(decoder, TINY, group))
    assert group_path(decoder, TINY, TEXT) == seen[1]
    monkeypatch.setattr(library, "code_of", lambda module, *within: f"{module} {within}, changed")
    seen += [group_path(decoder, TINY, group), group_path(decoder, TINY, TEXT)]
    assert len(set(seen)) == 6


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not a head map"),
        ("{", "not a head map"),
        ("[]", "not a head map"),
        ('{"schema": 99}', "schema 99, this version reads 2"),
        ('{"schema": 2, "layers": 2, "kv_heads": 2, "query_heads": 4, "measures": {}}', "not a head map"),
    ],
)
def test_broken_file_is_refused(decoder: HfDecoder, content: str, said: str) -> None:
    path = group_path(decoder, TINY, TEXT)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(HeadMapError, match=said) as caught:
        measure_group(decoder, TINY, TEXT)
    assert str(path) in str(caught.value)
    assert "delete" in str(caught.value)
    assert path.read_text() == content


def test_file_without_its_measures_is_refused(decoder: HfDecoder) -> None:
    made = measure_group(decoder, TINY, TEXT)
    path = group_path(decoder, TINY, TEXT)
    dataclasses.replace(made, measures={"head_entropy": made.measures["head_entropy"]}).write(path)
    with pytest.raises(HeadMapError, match="no measure 'head_local_ratio'; it has head_entropy"):
        measure_group(decoder, TINY, TEXT)


def test_group_that_gives_less_than_its_yaml_says(decoder: HfDecoder) -> None:
    greedy = dataclasses.replace(TEXT, measures=("head_entropy", "head_colour"))
    with pytest.raises(HeadMapError, match="text.yaml: testbed.heads.tasks.text_group gave no head_colour"):
        measure_group(decoder, TINY, greedy)
    assert not group_path(decoder, TINY, greedy).exists()
    with pytest.raises(CalibrationError, match="settings has 'texts'; there are .*text_tokens"):
        group_path(decoder, TINY, dataclasses.replace(TEXT, settings=("texts",)))


def test_interrupted_group_leaves_the_finished_ones(decoder: HfDecoder) -> None:
    def stop(what: str, part: float) -> None:
        if what.endswith("needle"):
            raise KeyboardInterrupt

    measures = head_measures(decoder, TINY, stop)
    assert measures["head_entropy"].shape == (2, 2)
    with pytest.raises(KeyboardInterrupt):
        measures["retrieval_score"]
    assert [path.name for path in group_path(decoder, TINY, TEXT).parent.iterdir()] == [
        group_path(decoder, TINY, TEXT).name
    ]


def test_map_that_cannot_be_kept(decoder: HfDecoder, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "headmaps").write_text("in the way")
    with pytest.raises(HeadMapError, match="can't keep the head map"):
        measure_group(decoder, TINY, TEXT)


def test_calibration_beyond_the_model(decoder: HfDecoder) -> None:
    config = dataclasses.replace(TINY, needle_lengths=(1024,))  # and its questions: more than 1024
    with pytest.raises(CalibrationError, match=r"calibration.needle_lengths.*limit of 1024"):
        measure_group(decoder, config, NEEDLE)
    assert not group_path(decoder, config, NEEDLE).exists()


def test_config_is_checked() -> None:
    for key, window in (("long_range_tokens", 300), ("local_window_tokens", 300), ("edge_window_tokens", 296)):
        with pytest.raises(CalibrationError, match=rf"{key}.*=300: must be below text_tokens=300"):
            dataclasses.replace(TINY, **{key: window})
    with pytest.raises(ValueError, match="calibration.needle_lengths=32"):
        dataclasses.replace(TINY, needle_lengths=(32,))
    with pytest.raises(ValueError, match="calibration.rows=0"):
        dataclasses.replace(TINY, rows=0)


def test_every_group_names_measures_that_have_a_signal() -> None:
    signals = {path.stem for path in (Path(__file__).parents[3] / "conf" / "signal").glob("*.yaml")}
    named = [name for group in groups().values() for name in group.measures]
    assert set(BEFORE) < set(named) <= signals
    assert len(set(named)) == len(named)


def sample(context: list[int], position: int, needle: list[int], answer: str, continuation: list[int]) -> Sample:
    meta = {"needle_position": position, "needle_tokens": len(needle)}
    return Sample("a", "c", context, [90, 91], answer, continuation, meta)


def test_copying_asks_at_the_token_before_each_answer_token(decoder: HfDecoder) -> None:
    number = decoder.encode("1234567")
    needle = [*decoder.encode("x is "), *number, *decoder.encode(".")]
    context = [7] * 10 + needle + [8] * 20
    made = copying(decoder, [sample(context, 10, needle, "1234567", [*decoder.encode(" "), *number])] * 2)
    asking = made.asks["retrieval_score"]
    assert [made.tokens[row + 1] for row in asking.rows] == number * 2
    assert asking.spans == (((15, 22),),) * 14
    assert made.tokens[15:22] == number
    assert made.context_tokens == len(context)
    with pytest.raises(CalibrationError, match="splits '1234567' differently"):
        copying(decoder, [sample(context, 10, needle, "1234567", number[:-1])])
