"""Head maps as data: checks, intervals, ties, and the file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_heads import tiny
from torch import Tensor

from testbed.heads.headmap import HeadMap, HeadMapError, Measured, bootstrap

L, HK, G = 3, 2, 2


def samples(n: int = 5, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(L, HK, G, generator=generator) for _ in range(n)]


def head_map(**changes: object) -> HeadMap:
    measures = {
        "retrieval_score": Measured.of(samples(), "needle", "share", [100, 100, 200, 200, 300], seed=1),
        "head_window95": Measured.of([1000 * each for each in samples(1, 2)], "text", "tokens"),
    }
    made = HeadMap("m", "f00d", L, HK, HK * G, measures, {"calibration": {"seed": 0}, "lengths": [1, 2]})
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_value_is_the_best_of_the_group_and_mean_the_mean() -> None:
    each = samples()
    measured = Measured.of(each, "text", "share", seed=3)
    stacked = np.stack([sample.double().numpy() for sample in each])
    np.testing.assert_allclose(measured.value, stacked.max(-1).mean(0), rtol=1e-6)
    np.testing.assert_allclose(measured.mean, stacked.mean((0, -1)), rtol=1e-6)
    assert measured.samples == 5
    assert bool((measured.low < measured.value).all())
    assert bool((measured.value < measured.high).all())
    one = Measured.of(each[:1], "text", "share")
    assert torch.equal(one.low, one.value)
    assert torch.equal(one.high, one.value)


def test_bootstrap_is_that_of_scipy() -> None:
    from scipy import stats

    x = torch.randn(12, 2, 3, generator=torch.Generator().manual_seed(0)) + 5
    low, high = bootstrap(x, seed=0)
    for layer in range(2):
        for head in range(3):
            sample = x[:, layer, head].double().numpy()
            found = stats.bootstrap((sample,), np.mean, method="percentile", n_resamples=9999, rng=1)
            interval = found.confidence_interval
            width = interval.high - interval.low
            assert float(low[layer, head]) == pytest.approx(interval.low, abs=0.1 * width)
            assert float(high[layer, head]) == pytest.approx(interval.high, abs=0.1 * width)
    again, _ = bootstrap(x, seed=0)
    assert torch.equal(low, again)
    assert not torch.equal(low, bootstrap(x, seed=1)[0])


def test_ties_are_heads_that_share_their_value() -> None:
    value = torch.tensor([[1.0, 1.0], [0.5, 0.2], [0.2, 0.2]])
    assert Measured(value, value, value, value, 1, "text", "share").ties == 5
    assert head_map().measures["retrieval_score"].ties == 0


def test_file_holds_the_map(tmp_path: Path) -> None:
    made = (
        head_map()
        .with_evidence({"chance": {"0.15": 0.123456789}})
        .with_verdict("duo", {"beats_random": False, "why": "x"})
    )
    made.write(tmp_path / "a" / "map.json")
    read = HeadMap.read(tmp_path / "a" / "map.json")
    for name, measured in made.measures.items():
        for key in ("value", "mean", "low", "high", "each"):
            torch.testing.assert_close(
                getattr(read.measures[name], key), getattr(measured, key), atol=0, rtol=1e-5, msg=f"{name} {key}"
            )
        for key in ("samples", "task", "unit", "length_tokens"):
            assert getattr(read.measures[name], key) == getattr(measured, key)
    assert read.evidence == {"chance": {"0.15": 0.123457}}
    for key in ("model", "fingerprint", "layers", "kv_heads", "query_heads", "settings", "verdicts"):
        assert getattr(read, key) == getattr(made, key)
    read.write(tmp_path / "b.json")
    assert (tmp_path / "b.json").read_text() == (tmp_path / "a" / "map.json").read_text()
    made.write(tmp_path / "c.json", digits=2, with_each=False)
    short = HeadMap.read(tmp_path / "c.json")
    assert short.measures["retrieval_score"].each is None
    assert json.loads((tmp_path / "c.json").read_text())["measures"]["retrieval_score"]["ties"] == 0
    torch.testing.assert_close(
        short.measures["retrieval_score"].value, made.measures["retrieval_score"].value, atol=0.005, rtol=0
    )
    assert not list(tmp_path.rglob("*.tmp"))


def test_more_measures_replace_those_of_their_name() -> None:
    other = Measured.of(samples(2, 9), "text", "share")
    made = head_map().with_measures({"head_entropy": other, "head_window95": other})
    assert set(made.measures) == {"retrieval_score", "head_window95", "head_entropy"}
    assert made.measure("head_window95") is other
    with pytest.raises(HeadMapError, match="no measure 'head_colour'; it has head_entropy, head_window95"):
        made.measure("head_colour")


def changed(change: str, tmp_path: Path) -> Path:
    """A map's file, spoilt."""
    head_map().write(tmp_path / "map.json")
    data = json.loads((tmp_path / "map.json").read_text())
    value = data["measures"]["retrieval_score"]["value"]
    if change == "nan":
        value[1][0] = float("nan")
    elif change == "ragged":
        value[1] = [0.5]
    elif change == "shape":
        data["layers"] = 4
    elif change == "unit":
        data["measures"]["retrieval_score"]["unit"] = "metres"
    elif change == "each":
        data["measures"]["retrieval_score"]["each"].pop()
    elif change == "low":
        data["measures"]["retrieval_score"]["low"] = [[0.1]]
    elif change == "schema":
        data["schema"] = 1
    elif change == "no measures":
        del data["measures"]
    elif change == "words":
        value[0][0] = "high"
    elif change == "big":
        value[0][0] = 10**400
    elif change == "each nan":
        data["measures"]["retrieval_score"]["each"][2][1][0] = float("nan")
    elif change == "low above high":
        data["measures"]["retrieval_score"]["low"][2][1] = 9
    elif "=" in change:
        key, _, text = change.partition("=")
        (data if key in data else data["measures"]["retrieval_score"])[key] = json.loads(text)
    text = {"cut": "[1", "deep": '{"a":' * 100_000}.get(change, json.dumps(data))
    (tmp_path / "map.json").write_text(text)
    return tmp_path / "map.json"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("nan", "measure retrieval_score: value: layer 1, head 0 is nan, not a number"),
        ("ragged", "not a head map"),
        ("shape", "measure retrieval_score: shape (3, 2), the model has 4 layers x 2 KV heads"),
        ("unit", "measure retrieval_score: unit='metres': must be one of share, bits"),
        ("each", "measure retrieval_score: each: shape (4, 3, 2), must be [5, L, Hk]"),
        ("low", "measure retrieval_score: low: shape (1, 1), must be [L, Hk] = (3, 2)"),
        ("schema", "schema 1, this version reads 2"),
        ("no measures", "not a head map"),
        ("words", "not a head map"),
        ("cut", "not a head map"),
        ("deep", "not a head map"),
        ("big", "not a head map"),
        ("each nan", "measure retrieval_score: each: sample 2, layer 1, head 0 is not a number"),
        ("low above high", "measure retrieval_score: low: layer 2, head 1 lies above high"),
        ("layers=Infinity", "layers=inf: must be a whole number of at least 1"),
        ("layers=3.5", "layers=3.5: must be a whole number of at least 1"),
        ("kv_heads=0", "kv_heads=0: must be a whole number of at least 1"),
        ("query_heads=true", "query_heads=True: must be a whole number of at least 1"),
        ("samples=Infinity", "measure retrieval_score: samples=inf: must be a whole number of at least 1"),
        ("length_tokens=[1, Infinity]", "measure retrieval_score: length_tokens=inf: must be a whole number"),
        ("length_tokens=5", "not a head map"),
        ('verdicts={"a": 5}', "verdict a: holds 5, must have beats_random, true or false"),
        ('verdicts={"a": {}}', "verdict a: holds {}, must have beats_random, true or false"),
        ('verdicts={"a": {"beats_random": true}}', "verdict a: holds {'beats_random': True}, must have why, a text"),
    ],
)
def test_spoilt_file_is_one_clear_error(change: str, said: str, tmp_path: Path) -> None:
    path = changed(change, tmp_path)
    with pytest.raises(HeadMapError) as caught:
        HeadMap.read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_no_file() -> None:
    with pytest.raises(HeadMapError, match=r"nowhere.json: No such file"):
        HeadMap.read("nowhere.json")


def test_map_of_another_model() -> None:
    decoder = tiny()
    geometry = decoder.geometry
    mine = head_map(fingerprint=decoder.fingerprint)
    assert (geometry.layers, geometry.kv_heads, geometry.query_heads) == (L, HK, HK * G)
    mine.check_model(decoder)
    with pytest.raises(
        HeadMapError, match=r"head map of m: 3 layers x 2 KV heads \(8 query heads\), but tiny has 3 x 2"
    ):
        dataclasses.replace(mine, query_heads=8).check_model(decoder)
    with pytest.raises(HeadMapError, match=r"head map of m \(f00d\): tiny has other weights"):
        head_map().check_model(decoder)
