"""What holds for every part in conf/policy/<slot>/: a new YAML is tested without a change here."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import yaml
from hydra.utils import get_class, instantiate
from policy_trace import CONF, KV_HEADS, LAYERS, PAGES, PARTS, first_signals, full_bytes
from torch import Tensor

from policies.base import Format, Head, Mode, PolicyError, Signals, Tier

STREAMS = (LAYERS, KV_HEADS)
SHAPE = (LAYERS, KV_HEADS, PAGES)
every_part = pytest.mark.parametrize(("slot", "name"), PARTS, ids=[f"{slot}/{name}" for slot, name in PARTS])


def config(slot: str, name: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / "policy" / slot / f"{name}.yaml").read_text())


def ask(slot: str, part: Any, signals: Signals) -> dict[str, Tensor]:
    score = torch.linspace(0, 1, math.prod(SHAPE)).reshape(SHAPE)
    resident = (torch.arange(PAGES) % 3 != 1).expand(SHAPE)
    if slot == "classifier":
        return {"classes": part.classify(signals)}
    if slot == "predictor":
        return {"score": part.score(signals)}
    if slot == "budget":
        share = part.share(signals, torch.full(SHAPE, int(Format.INT8), dtype=torch.int8))
        return {"quota": share.quota_bytes, "eligible": share.eligible}
    if slot == "format":
        return {"format": part.choose(signals, score)}
    if slot == "eviction":
        return {"rank": part.rank(signals, score)}
    if slot == "attention":
        spare = torch.linspace(0, 5000, math.prod(STREAMS), dtype=torch.float64).reshape(STREAMS)
        return {"mode": part.modes(signals, score, resident, spare), "resident": resident, "spare": spare}
    return {"fetch": part.fetch(signals, score, resident)}


@every_part
@pytest.mark.parametrize("fraction", [None, 0.9, 0.3, 0.05])
def test_answers_have_the_contracts_shape_type_and_range(slot: str, name: str, fraction: float | None) -> None:
    part = instantiate(config(slot, name))
    budget = None if fraction is None else int(full_bytes() * fraction)
    signals = first_signals(part.needs, budget)
    answer = ask(slot, part, signals)
    expected = {
        "classes": (STREAMS, torch.int8),
        "score": (SHAPE, torch.float32),
        "quota": (STREAMS, torch.float64),
        "eligible": (SHAPE, torch.bool),
        "format": (SHAPE, torch.int8),
        "rank": (SHAPE, torch.float32),
        "mode": (SHAPE, torch.int8),
        "fetch": (SHAPE, torch.bool),
    }
    for key, (shape, dtype) in expected.items():
        if key in answer:
            assert tuple(answer[key].shape) == shape, key
            assert answer[key].dtype == dtype, key
    for key, codes in (("classes", Head), ("format", Format), ("mode", Mode)):
        if key in answer:
            assert set(answer[key].flatten().tolist()) <= set(codes), key
    for key in ("score", "rank"):
        if key in answer:
            assert torch.isfinite(answer[key]).all(), key
    if slot == "budget":
        assert not torch.isnan(answer["quota"]).any()
        assert (answer["quota"] >= 0).all()
    if slot == "attention":
        assert 0.0 <= part.prototype_share < 1.0
        assert answer["resident"][answer["mode"] == Mode.EXACT].all()
        size = signals.page_bytes
        asked = (answer["mode"] == Mode.CLUSTER).sum(-1) * size.prototype
        asked = asked + (answer["mode"] == Mode.BACKGROUND).any(-1) * size.background
        assert (asked <= answer["spare"]).all()
    if slot == "eviction":
        assert part.victim_tier in (Tier.L2, Tier.L3, Tier.DROPPED)


@every_part
def test_same_question_same_answer_and_inputs_untouched(slot: str, name: str) -> None:
    part = instantiate(config(slot, name))
    signals = first_signals(part.needs, full_bytes() // 2)
    before = {key: value.clone() for key, value in signals.values.items()}
    held = signals.held.tier.clone()
    first, second = ask(slot, part, signals), ask(slot, part, signals)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(torch.equal(before[key], signals.values[key]) for key in before)
    assert torch.equal(held, signals.held.tier)


@every_part
def test_yaml_states_every_field_so_that_every_field_can_be_overridden(slot: str, name: str) -> None:
    content = config(slot, name)
    part_class = get_class(content.pop("_target_"))
    assert dataclasses.is_dataclass(part_class)
    assert part_class.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert set(content) == {field.name for field in dataclasses.fields(part_class)}


@every_part
@pytest.mark.parametrize("bad", ["no such!", math.nan, -1, True, [1]], ids=repr)
def test_bad_values_are_refused_by_name(slot: str, name: str, bad: object) -> None:
    content = config(slot, name)
    part_class = get_class(content.pop("_target_"))
    for field in content:
        with pytest.raises(PolicyError, match=field):
            part_class(**{**content, field: bad})


@every_part
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_signal_that_is_no_number_is_refused_by_name(slot: str, name: str, bad: float) -> None:
    part = instantiate(config(slot, name))
    for need in part.needs:
        signals = first_signals(part.needs)
        broken = signals.values[need].clone().float()
        broken.view(-1)[1] = bad
        with pytest.raises(PolicyError, match=need):
            ask(slot, part, dataclasses.replace(signals, values={**signals.values, need: broken}))


@every_part
def test_a_signal_of_another_shape_is_refused_by_name(slot: str, name: str) -> None:
    part = instantiate(config(slot, name))
    for need in part.needs:
        signals = first_signals(part.needs)
        with pytest.raises(PolicyError, match=need):
            ask(slot, part, dataclasses.replace(signals, values={**signals.values, need: torch.zeros(5, 5)}))
