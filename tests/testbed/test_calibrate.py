"""Head measures against attention made by hand, and the life of the head map on disk."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from tiny_run import save_model
from torch import Tensor

import testbed.calibrate as calibrate
from testbed.calibrate import CalibrationConfig, CalibrationError, copying, head_measures, map_path, measure, read_map
from testbed.engine.measure_heads import CopyMass, Shape, attention_rows
from testbed.engine.prefill import prefill
from testbed.engine.signals import PrefillChunk
from testbed.models import Geometry, load
from testbed.models.hf import HfDecoder
from testbed.workloads.base import Sample

D, G = 4, 2
TINY = CalibrationConfig(
    needle_lengths=(400,),
    needle_samples_per_cell=1,
    text_tokens=300,
    text_samples=1,
    local_window_tokens=64,
    long_range_tokens=128,
)


def geometry(kv_heads: int, layers: int = 1, window: int = 0, slopes: Tensor | None = None) -> Geometry:
    return Geometry(layers, G * kv_heads, kv_heads, D, 10, None, (window,) * layers, (1.0,) * layers, slopes)


def chunks(q: Tensor, k: Tensor, size: int, shape: Geometry) -> list[PrefillChunk]:
    """A prefill of q [Hq, T, D] and k [Hk, T, D] in parts."""
    total = q.shape[1]
    return [
        PrefillChunk(0, q[:, at : at + size], torch.zeros(len(q), 0), k[:, : min(at + size, total)], at, total, shape)
        for at in range(0, total, size)
    ]


def pointing(targets: list[int]) -> tuple[Tensor, Tensor]:
    """Queries and keys of one KV head where query t puts all its weight on key targets[t]: [G, T, 4], [1, T, 4].

    Keys lie on a circle, and the softmax is sharp enough to be one-hot.
    """
    angle = torch.arange(len(targets)) * (2 * math.pi / len(targets))
    circle = torch.stack((angle.cos(), angle.sin(), torch.zeros_like(angle), torch.zeros_like(angle)), -1)
    return (1e6 * circle[targets]).expand(G, -1, -1), circle.unsqueeze(0)


@pytest.mark.parametrize("size", [7, 128, 500])
def test_uniform_attention_in_closed_form(size: int) -> None:
    total, local, far = 300, 32, 50
    q, k = torch.zeros(G, total, D), torch.randn(1, total, D, generator=torch.Generator().manual_seed(0))
    source = Shape(1, 1, local, far)
    for chunk in chunks(q, k, size, geometry(1)):
        source.watch_prefill(chunk)
    rows = range(far, total)  # shorter rows have nothing far away
    seen = {name: float(value) for name, value in source.measures().items()}
    assert seen["head_entropy"] == pytest.approx(1.0, abs=1e-5)
    near = sum(min(local, row + 1) / (row + 1) for row in rows) / len(rows)
    beyond = sum((row + 1 - far) / (row + 1) for row in rows) / len(rows)
    assert seen["head_local_ratio"] == pytest.approx(near, abs=1e-5)
    assert seen["head_long_range"] == pytest.approx(beyond, abs=1e-5)


def test_one_hot_attention_in_closed_form() -> None:
    total, local, far = 200, 16, 40
    distance = 16  # the first that is not near any more
    sharp_q, k = pointing([max(0, t - distance) for t in range(total)])
    near_q, _ = pointing([max(0, t - distance + 1) for t in range(total)])
    far_q, _ = pointing([max(0, t - far) for t in range(total)])
    source = Shape(1, 3, local, far)
    for chunk in chunks(torch.cat((near_q, sharp_q, far_q)), k.expand(3, -1, -1), 33, geometry(3)):
        source.watch_prefill(chunk)
    seen = source.measures()
    torch.testing.assert_close(seen["head_entropy"], torch.zeros(1, 3))
    torch.testing.assert_close(seen["head_local_ratio"], torch.tensor([[1.0, 0.0, 0.0]]))
    torch.testing.assert_close(seen["head_long_range"], torch.tensor([[0.0, 0.0, 1.0]]))


def test_heads_of_a_group_are_averaged() -> None:
    """One query head looks near, the other far: half of the mass is each."""
    total = 120
    near, k = pointing(list(range(total)))
    far, _ = pointing([0] * total)
    source = Shape(1, 1, 8, 60)
    for chunk in chunks(torch.cat((near[:1], far[:1])), k, 50, geometry(1)):
        source.watch_prefill(chunk)
    seen = source.measures()
    assert float(seen["head_local_ratio"]) == pytest.approx(0.5)
    assert float(seen["head_long_range"]) == pytest.approx(0.5)


def test_attention_rows_see_window_and_slopes() -> None:
    total = 12
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(G, total, D, generator=generator), torch.randn(1, total, D, generator=generator)
    slopes = torch.tensor([0.5, 0.25])
    shape = geometry(1, window=5, slopes=slopes)
    chunk = PrefillChunk(0, q[:, 4:], torch.zeros(G, 8), k, 4, total, shape)
    rows = torch.tensor([0, 3, 7])
    p = attention_rows(chunk, rows)[0]
    for g in range(G):
        for at, row in enumerate((4, 7, 11)):
            keys = range(max(0, row - 4), row + 1)
            logits = {t: float(q[g, row] @ k[0, t]) + float(slopes[g]) * (t - row) for t in keys}
            total_mass = sum(math.exp(x) for x in logits.values())
            expected = [math.exp(logits[t]) / total_mass if t in logits else 0.0 for t in range(total)]
            torch.testing.assert_close(p[g, at], torch.tensor(expected))


@pytest.mark.parametrize("size", [11, 52, 64])
def test_copy_mass_of_a_head_that_copies(size: int) -> None:
    total, source_at, asking_at, answer = 64, 20, 50, 5
    copier, k = pointing([t - 30 if t >= asking_at else 0 for t in range(total)])  # 50 + i reads 20 + i
    neighbour, _ = pointing([t - 24 if t >= asking_at else 0 for t in range(total)])  # beside the source
    blind = torch.zeros(G, total, D)
    half = torch.cat((copier[:1], neighbour[:1]))
    sources = [(source_at, source_at + answer)] * answer
    watcher = CopyMass(1, 4, range(asking_at, asking_at + answer), sources)
    for chunk in chunks(torch.cat((copier, neighbour, blind, half)), k.expand(4, -1, -1), size, geometry(4)):
        watcher.watch_prefill(chunk)
    even = sum(answer / (asking_at + at + 1) for at in range(answer)) / answer
    # The group counts by its best head: one of two copying is as good as both.
    torch.testing.assert_close(watcher.score, torch.tensor([[1.0, 0.0, even, 1.0]]))


def test_best_head_is_chosen_for_the_whole_answer_not_for_each_chunk() -> None:
    total, asking = 60, [50, 51]
    first, k = pointing([20 if t == 50 else 0 for t in range(total)])
    second, _ = pointing([21 if t == 51 else 0 for t in range(total)])
    watcher = CopyMass(1, 1, asking, [(20, 22)] * 2)
    for chunk in chunks(torch.cat((first[:1], second[:1])), k, 51, geometry(1)):
        watcher.watch_prefill(chunk)
    assert float(watcher.score) == pytest.approx(0.5)


# --- on a model -----------------------------------------------------------------------------------------------------


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


def test_map_is_made_once_and_read_again(decoder: HfDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float]] = []
    first = head_measures(decoder, TINY, lambda what, part: told.append((what, part)))
    assert [part for _, part in told] == sorted(part for _, part in told)
    assert told[-1] == ("measuring heads", pytest.approx(1.0))
    assert set(first) == {"retrieval_score", "head_entropy", "head_local_ratio", "head_long_range"}
    for value in first.values():
        assert value.shape == (2, 2)
        assert bool(((value >= 0) & (value <= 1)).all())

    def again(*arguments: object) -> None:
        raise AssertionError("measured a second time")

    monkeypatch.setattr(calibrate, "measure", again)
    second = head_measures(decoder, TINY)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not list(map_path(decoder, TINY).parent.glob("*.tmp"))


def test_map_holds_what_was_measured(decoder: HfDecoder) -> None:
    kept = head_measures(decoder, TINY)
    made = measure(decoder, TINY, lambda what, part: None)
    for name, value in made.items():
        torch.testing.assert_close(kept[name], value, atol=1e-6, rtol=0)


def test_another_model_or_setting_has_another_map(decoder: HfDecoder, tmp_path: Path) -> None:
    path = map_path(decoder, TINY)
    for key, value in (("seed", 1), ("text_tokens", 301), ("needle_lengths", (401,)), ("local_window_tokens", 65)):
        assert map_path(decoder, dataclasses.replace(TINY, **{key: value})) != path
    save_model(tmp_path / "other")
    weights = load(tmp_path / "other", name="tiny")
    assert map_path(weights, TINY) == path  # the same model, read again
    with torch.no_grad():
        weights.model.lm_head.weight.mul_(-1.0)
    assert map_path(weights, TINY) != path


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not a head map"),
        ("{", "not a head map"),
        ("[]", "not a head map"),
        ('{"schema": 99}', "schema 99, this version reads 1"),
        ('{"schema": 1, "measures": {}}', "not a head map"),
        ('{"schema": 1, "measures": {"retrieval_score": [["x"]]}}', "not a head map"),
    ],
)
def test_broken_map_is_refused(decoder: HfDecoder, content: str, said: str) -> None:
    path = map_path(decoder, TINY)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(CalibrationError, match=said) as caught:
        head_measures(decoder, TINY)
    assert str(path) in str(caught.value)
    assert "delete the file" in str(caught.value)
    assert path.read_text() == content


def test_map_that_cannot_be_kept(decoder: HfDecoder, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "headmaps").write_text("in the way")
    with pytest.raises(CalibrationError, match="can't keep the head map"):
        head_measures(decoder, TINY)


def test_calibration_beyond_the_model(decoder: HfDecoder) -> None:
    config = dataclasses.replace(TINY, needle_lengths=(1024,))  # and its questions: more than 1024
    with pytest.raises(CalibrationError, match=r"calibration.needle_lengths.*limit of 1024"):
        head_measures(decoder, config)
    assert not map_path(decoder, config).exists()


def test_config_is_checked() -> None:
    with pytest.raises(CalibrationError, match="long_range_tokens=300: must be below text_tokens=300"):
        dataclasses.replace(TINY, long_range_tokens=300)
    with pytest.raises(ValueError, match="calibration.needle_lengths=32"):
        dataclasses.replace(TINY, needle_lengths=(32,))


def sample(context: list[int], position: int, needle: list[int], answer: str, continuation: list[int]) -> Sample:
    meta = {"needle_position": position, "needle_tokens": len(needle)}
    return Sample("a", "c", context, [90, 91], answer, continuation, meta)


def test_copying_asks_at_the_token_before_each_answer_token(decoder: HfDecoder) -> None:
    number = decoder.encode("1234567")
    needle = [*decoder.encode("x is "), *number, *decoder.encode(".")]
    context = [7] * 10 + needle + [8] * 20
    made = copying(decoder, [sample(context, 10, needle, "1234567", [*decoder.encode(" "), *number])] * 2)
    for ask, (begin, end) in zip(made.asking, made.sources, strict=True):
        assert made.tokens[begin:end] == number
        assert made.tokens[ask + 1] in number
    assert [made.tokens[ask + 1] for ask in made.asking] == number * 2
    assert made.sources == [(15, 22)] * 14
    with pytest.raises(CalibrationError, match="splits '1234567' differently"):
        copying(decoder, [sample(context, 10, needle, "1234567", number[:-1])])


def test_score_is_the_attention_that_transformers_computes(decoder: HfDecoder, tmp_path: Path) -> None:
    """The mass of `CopyMass` in a real prefill against eager attention's own output."""
    import transformers as tf

    save_model(tmp_path / "eager")
    eager = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "eager", attn_implementation="eager")
    tokens = torch.randint(0, 256, (120,), generator=torch.Generator().manual_seed(0)).tolist()
    asking, span = [100, 101, 110], (30, 40)
    with torch.no_grad():
        rows = eager(input_ids=torch.tensor([tokens]), output_attentions=True).attentions
    mass = torch.stack([layer[0, :, asking, span[0] : span[1]].sum(-1).mean(-1) for layer in rows])
    expected = mass.view(2, 2, 2).amax(-1)
    watcher = CopyMass(2, 2, asking, [span] * 3)
    prefill(decoder, tokens, torch.float32, [watcher], chunk_tokens=128)
    torch.testing.assert_close(watcher.score, expected, atol=1e-5, rtol=0)


def test_command(
    decoder: HfDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "model")
    settings = [
        f"calibration.{key}={list(v) if isinstance(v, tuple) else v}" for key, v in dataclasses.asdict(TINY).items()
    ]
    arguments = [
        "model=hf",
        f"model.path={tmp_path / 'model'}",
        "model.device=cpu",
        f"hydra.run.dir={tmp_path / 'out'}",
    ]
    monkeypatch.setattr(sys, "argv", ["calibrate", *arguments, *(each.replace(" ", "") for each in settings)])
    calibrate.main()
    said = capsys.readouterr().out.strip()
    assert said.startswith("head map: ")
    path = Path(said.removeprefix("head map: "))
    assert set(read_map(path)) == set(calibrate.MEASURES)
    assert json.loads(path.read_text())["calibration"]["text_tokens"] == 300
