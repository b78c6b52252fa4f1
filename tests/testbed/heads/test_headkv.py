"""HeadKV's scores against transformers' own attention in float64, and the texts that need a step of reasoning."""

from __future__ import annotations

import re

import pytest
import tiny_heads as tiny
import torch
from tiny_heads import HQ, G, L

from testbed.heads.calibration import CalibrationConfig
from testbed.heads.headkv import DEPTHS, TASK, answer_scores, measure, reasoning_texts
from testbed.heads.library import groups
from testbed.heads.texts import Asking, CalibrationText
from testbed.models.hf import HfDecoder
from testbed.workloads.needle import NUMBERS

pytestmark = pytest.mark.usefixtures("essays")

COUNT, CONTEXT = 30, 20
TOKENS = tiny.tokens(COUNT, seed=3)
ROWS = (22, 23, 27)
SPANS = (((4, 7),), ((4, 7),), ((9, 10), (12, 17)))


def test_scores_are_those_of_transformers_attention() -> None:
    text = CalibrationText(TASK, TOKENS, None, {"retrieval_score": Asking(ROWS, SPANS)}, CONTEXT)
    scores, share = answer_scores(tiny.tiny(), text)
    out = tiny.oracle(TOKENS, {}, output_attentions=True)
    for layer in range(L):
        for head in range(HQ):
            expected = 0.0
            for row, spans in zip(ROWS, SPANS, strict=True):
                inside = [key for begin, end in spans for key in range(begin, end)]
                p = out.attentions[layer][0, head, row].tolist()
                most = sorted(range(COUNT), key=lambda key, p=p: -p[key])[: len(inside)]
                expected += sum(p[key] for key in most if key in inside) / len(inside) / len(ROWS)
            assert float(scores[layer, head // G, head % G]) == pytest.approx(expected, abs=1e-5)
    assert float(scores.max()) > 0.01
    assert (scores == 0).any()  # heads whose most attended tokens lie elsewhere
    right = [int(out.logits[0, row].argmax()) == TOKENS[row + 1] for row in ROWS]
    assert share == pytest.approx(((right[0] and right[1]) + right[2]) / 2)


def test_an_answer_is_right_when_every_token_of_it_is() -> None:
    ids = list(TOKENS)
    for row in (22, 23):  # what the model itself says there
        ids[row + 1] = int(tiny.oracle(ids, {}).logits[0, row].argmax())
    for rows, spans, share in (
        ((22, 23), SPANS[:2], 1.0),
        ((22, 23, 27), SPANS, 0.5),
        ((22, 23, 27), (*SPANS[:2], SPANS[0]), 0.0),
    ):
        text = CalibrationText(TASK, ids, None, {"retrieval_score": Asking(rows, spans)}, CONTEXT)
        assert answer_scores(tiny.tiny(), text)[1] == share


CONFIG = CalibrationConfig(needle_lengths=(600, 700), needle_samples_per_cell=2)


def test_the_older_one_s_number_is_the_answer(speaking: HfDecoder) -> None:
    texts = reasoning_texts(speaking, CONFIG)
    assert [text.context_tokens for text in texts] == [600, 600, 700, 700]
    assert {text.task for text in texts} == {TASK}
    orders = set()
    for text in texts:
        said = speaking.decode(text.tokens)
        context, questions = said[: text.context_tokens], said[text.context_tokens :]
        pattern = (
            r"The ([a-z ]+) of the (\w+) is (\d{7})\. The \1 of the (\w+) is (\d{7})\. "
            r"The (\w+) is older than the (\w+)\."
        )
        needles = re.findall(pattern, context)
        assert len(needles) == len(DEPTHS)
        right = {}
        for thing, first, one, second, other, older, younger in needles:
            assert {older, younger} == {first, second}
            low, high = NUMBERS["calibration"]
            assert low <= int(one) <= high
            assert low <= int(other) <= high
            orders.add(older == first)
            right[thing] = one if older == first else other
        asked = re.findall(r"What is the ([a-z ]+) of the older person\? .*? is (\d{7})", questions)
        assert dict(asked) == right
        asking = text.asks["retrieval_score"]
        for row, ((begin, end),) in zip(asking.rows, asking.spans, strict=True):
            assert said[begin:end] in right.values()
            assert said[row + 1] in said[begin:end]
    assert orders == {True, False}
    again = reasoning_texts(speaking, CONFIG)
    assert [text.tokens for text in again] == [text.tokens for text in texts]


def test_the_group_gives_its_measures(speaking: HfDecoder) -> None:
    told: list[float] = []
    config = CalibrationConfig(needle_lengths=(600,), needle_samples_per_cell=1)
    out = measure(speaking, config, told.append)
    assert set(out) == set(groups()["headkv"].measures)
    assert told == [0.5, 1.0]
    for measured in out.values():
        assert measured.value.shape == (2, 2)
        assert bool(((measured.value >= 0) & (measured.value <= 1 / 7)).all())
        assert (measured.samples, measured.unit, measured.length_tokens) == (1, "score", (600,))
    assert [measured.task for measured in out.values()] == ["needle", TASK]
    assert torch.isfinite(torch.stack([measured.mean for measured in out.values()])).all()
