"""Predicted bytes against a real session, the search against a plain loop, the written config against a real run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny_heads as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import Place as RunPlace
from tiny_run import errors, finish, save_model, save_text, start
from torch import Tensor

from policies.base import Head
from policies.formats.one import FORMATS
from testbed.cache.layout import CacheConfig
from testbed.compose import compose_policy
from testbed.engine.prefill import prefill
from testbed.engine.session import Session, SessionConfig
from testbed.engine.signals import SignalContext
from testbed.heads import recommend as command
from testbed.heads.calibration import CalibrationConfig
from testbed.heads.headmap import HeadMap, HeadMapError, Measured
from testbed.heads.strategies import Place, Search, Strategy, Worth, recommend
from testbed.heads.trial import Fixed
from testbed.models import load

CACHE = CacheConfig(sink_tokens=16, hot_tokens=32, slab_pages=4)
SEARCH = {
    "local_tokens": [32, 64, 200],
    "special_tokens": [128],
    "local_shares": [0.0, 0.5, 1.0],
    "global_shares": [0.0, 0.17, 0.5],
    "local_formats": ["int4"],
    "special_formats": ["int8"],
    "global_formats": ["int8", "compute"],
    "int8_nats": 0.01,
    "int4_nats": 0.1,
}


def measured(value: Tensor) -> Measured:
    return Measured(value, value, value, value, 1, "needle", "score")


def head_map(**measures: Tensor) -> HeadMap:
    settings = {"local_window_tokens": 50}
    return HeadMap("tiny", "0" * 16, 3, 2, 4, {name: measured(value) for name, value in measures.items()}, settings)


KL = torch.tensor([[0.3, 0.0], [0.02, 0.5], [0.1, 0.1]])
REACH = {
    "head_window90": torch.tensor([[10.0, 1.0], [300.0, 1.0], [50.0, 50.0]]),
    "head_window95": torch.tensor([[20.0, 1.0], [400.0, 1.0], [90.0, 90.0]]),
    "head_window99": torch.tensor([[160.0, 1.0], [410.0, 200.0], [91.0, 400.0]]),
}


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(0.5, 0.5, 100, 128, "int4", "int4", "int8"),
        Strategy(0.34, 0.17, 64, 200, "compute", "int4", "compute"),
        Strategy(0.0, 0.0, 64, 5000, "int8", "int8", "int8"),
    ],
    ids=lambda strategy: strategy.local_format,
)
def test_predicted_bytes_are_what_a_session_holds(strategy: Strategy) -> None:
    decoder, length = load_tiny(), 700
    worth = Worth.of(head_map(head_restrict_kl=KL))
    overrides = [
        f"policy.budget.{key}={value}"
        for key, value in {
            "local_tokens": strategy.local_tokens,
            "special_tokens": strategy.special_tokens,
            **{f"{name}_block_pages": 16 for name in ("local", "special", "global")},
        }.items()
    ]
    overrides += [
        f"policy.format.{k}_format={getattr(strategy, f'{k}_format')}" for k in ("local", "special", "global")
    ]
    policy = compose_policy("redknot", overrides)
    object.__setattr__(policy, "classifier", Fixed(worth.classes(strategy)))
    session = Session(decoder, policy, SessionConfig(CACHE), SignalContext(16, dict))
    session.start(prefill(decoder, tiny.tokens(length), torch.bfloat16))
    session.cache.settle()
    place = Place.of(3, 2, decoder.geometry.head_dim, CACHE, length)
    assert place.full_bytes == session.full_bytes(length)
    assert session.cache.ledger().device_bytes == pytest.approx(place.device_bytes(strategy), rel=0.01)
    session.close()


def load_tiny() -> tiny.HfDecoder:
    return tiny.tiny()


def test_heads_are_split_by_importance() -> None:
    worth = Worth.of(head_map(head_restrict_kl=KL, retrieval_score=1 - KL))
    assert worth.measure == "head_restrict_kl"
    classes = worth.classes(Strategy(0.5, 0.17, 64, 128, "int4", "int4", "int4"))
    # Ascending: .0, .02, .1 (2, 0) local; .1 (2, 1), .3 special; .5 global.
    local, special, everything = Head.LOCAL, Head.SPECIAL, Head.GLOBAL
    assert classes.tolist() == [[special, local], [local, everything], [local, special]]
    assert Worth.of(head_map(retrieval_score=KL)).measure == "retrieval_score"
    assert Worth.of(head_map(head_restrict_kl=KL, head_gate=KL), "head_gate").measure == "head_gate"
    for measures, name in (({"head_entropy": KL}, None), ({"head_restrict_kl": KL}, "head_gate")):
        with pytest.raises(HeadMapError, match="the head map has no"):
            Worth.of(head_map(**measures), name)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"calibration": asdict(CalibrationConfig(local_window_tokens=300)), "torch": "2"}, 300),  # of `analyse`
        ({"local_window_tokens": 50}, 50),  # of a group of measures
        ({}, CalibrationConfig().local_window_tokens),
    ],
)
def test_the_window_is_that_which_heads_were_measured_with(settings: dict[str, Any], tokens: int) -> None:
    given = replace(head_map(head_restrict_kl=KL, **REACH), settings=settings)
    assert Worth.of(given).cut_tokens == tokens


@pytest.mark.parametrize("settings", [{"calibration": 5}, {"calibration": {"local_window_tokens": "x"}}])
def test_a_window_that_is_none_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="settings.calibration=5|settings.local_window_tokens='x'"):
        Worth.of(replace(head_map(head_restrict_kl=KL), settings=settings))


def test_mass_beyond_a_window_goes_through_what_was_measured() -> None:
    worth = Worth.of(head_map(head_restrict_kl=KL, **REACH))
    flat = {name: value.flatten() for name, value in REACH.items()}
    heads = KL.flatten().argsort(stable=True).tolist()
    for name, share in (("head_window90", 0.1), ("head_window95", 0.05), ("head_window99", 0.01)):
        for at, head in enumerate(heads):
            if float(flat[name][head]) > 1:
                assert float(worth.beyond(float(flat[name][head]))[at]) == pytest.approx(share, rel=1e-3)
    half = float(worth.beyond(math.sqrt(10 * 20))[heads.index(0)])  # half way on both logarithms
    assert half == pytest.approx(math.sqrt(0.1 * 0.05), rel=1e-3)
    assert worth.beyond(math.inf).tolist() == [0.0] * 6


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 4096), min_size=2, max_size=8))
def test_a_wider_window_never_loses_more(windows: list[int]) -> None:
    worth = Worth.of(head_map(head_restrict_kl=KL, head_restrict_kl_text=KL / 7, **REACH))
    lost = [worth.lost(float(window), 2000) for window in sorted(windows)]
    for narrow, wide in zip(lost, lost[1:], strict=False):
        assert bool((wide <= narrow + 1e-9).all())
    assert all(bool((each >= 0).all()) for each in lost)


def test_loss_is_importance_times_what_the_window_leaves_out() -> None:
    worth = Worth.of(head_map(head_restrict_kl=KL, head_restrict_kl_text=KL / 10, **REACH))
    head = KL.flatten().argsort(stable=True).tolist().index(0)  # head (0, 0): importance .3, text .03
    expected = 0.3 * (1 - 160 / 1000) + 0.03 * 0.01 / float(worth.beyond(50)[head])
    assert float(worth.lost(160, 1000)[head]) == pytest.approx(expected, rel=1e-3)
    assert float(worth.lost(1000, 1000)[head]) == 0.0


@pytest.mark.parametrize("fraction", [0.25, 0.35, 0.5, 1.0])
def test_the_search_finds_the_least_loss_within_the_budget(fraction: float) -> None:
    """Against a loop over heads that counts a head at a time."""
    worth, search = Worth.of(head_map(head_restrict_kl=KL, **REACH)), Search(**SEARCH)
    place = Place.of(3, 2, 16, CACHE, 700)
    budget = int(fraction * place.full_bytes)
    order = KL.flatten().argsort(stable=True).tolist()
    best = math.inf
    for local, everything, window, fmt in product([0, 3, 6], [0, 1, 3], [32, 64, 200], ["int8", "compute"]):
        if local + everything > 6 or (local == 6 and everything):
            continue
        strategy = Strategy(local / 6, everything / 6, window, 128, "int4", "int8", fmt)
        if place.device_bytes(strategy) > budget or (window > 128 and local + everything < 6):
            continue
        loss = 0.0
        for at, head in enumerate(order):
            kept, name = (window, "int4") if at < local else (128, "int8") if at < 6 - everything else (700, fmt)
            loss += float(KL.flatten()[head]) * max(0.0, 1 - kept / 700)
            loss += {"int4": 0.1, "int8": 0.01, "compute": 0.0}[name] / 6
        best = min(best, loss)
    found = recommend(worth, place, search, budget)
    assert found.device_bytes <= budget
    assert found.loss == pytest.approx(best, abs=1e-9)
    assert found.loss == pytest.approx(found.window_loss + found.format_loss)


def test_more_bytes_never_cost_more_and_too_few_are_an_error() -> None:
    worth, search = Worth.of(head_map(head_restrict_kl=KL, **REACH)), Search(**SEARCH)
    place = Place.of(3, 2, 16, CACHE, 700)
    losses = [recommend(worth, place, search, budget).loss for budget in range(60_000, 280_000, 20_000)]
    assert losses == sorted(losses, reverse=True)
    with pytest.raises(HeadMapError, match="the smallest strategy tried takes"):
        recommend(worth, place, search, 10_000)


@pytest.mark.parametrize(
    ("key", "value"), [("local_formats", ["int3"]), ("int8_nats", -1.0), ("local_shares", [1.5]), ("local_tokens", [0])]
)
def test_a_search_that_makes_no_sense_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"search.{key}"):
        Search(**{**SEARCH, key: value})  # type: ignore[arg-type]
    assert set(FORMATS) == {"compute", "int8", "int4"}


def test_what_is_recommended_runs_and_holds_the_predicted_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "model", positions=2048)
    save_text(tmp_path / "text")
    decoder = load(str(tmp_path / "model"), name=None, dtype="float32", device="cpu")
    score = torch.tensor([[0.3, 0.1], [0.0, 0.2]])
    path = tmp_path / "map.json"
    HeadMap.of(decoder, {"retrieval_score": measured(score)}, {}).write(path)
    model = ["model=hf", f"model.path={tmp_path / 'model'}", "model.device=cpu"]
    search = ["search.local_tokens=[128]", "search.local_shares=[0.5]", "search.global_shares=[0.5]"]
    out = tmp_path / "made"
    command.main([str(path), *model, *search, "budget.fraction=0.6", "length=1000", f"out={out}"])
    said = capsys.readouterr().out
    assert "heads by retrieval_score, 1,000 tokens" in said
    folder = tmp_path / "run"
    place = RunPlace(tmp_path)
    overrides = [each for each in place.overrides if each.partition("=")[0] in ("model", "model.path", "model.device")]
    overrides += [f"workload.text={tmp_path / 'text'}", "workload.depths=[0.5]", "workload.samples_per_cell=1"]
    overrides += ["workload.needles_per_context=1", "workload.max_new_tokens=2", "wandb=disabled", "twin=[h200]"]
    done = finish(start(folder, *overrides, "experiment=recommended", flags=["--config-dir", str(out)]))
    assert done.returncode == 0, errors(done)
    record = json.loads((folder / "record.json").read_text())
    held = next(each["value"] for each in record["results"] if each["name"] == "kv.device_bytes")
    length = next(each["value"] for each in record["results"] if each["name"] == "context.tokens")
    strategy = Strategy(0.5, 0.5, 128, 1024, "int4", "int4", "int8")
    predicted = Place.of(2, 2, 16, CacheConfig(), 1000).device_bytes(strategy)
    assert length == 1000
    assert held == pytest.approx(predicted, rel=0.05)
    assert record["activity"]["heads_by_class"] == {"local": 2, "global": 2, "special": 0, "dense": 0}
    with pytest.raises(HeadMapError, match="budget.fraction"):
        command.main([str(path), *model, "budget.fraction=0"])
