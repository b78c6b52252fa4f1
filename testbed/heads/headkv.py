"""Head scores after HeadKV (arXiv 2410.19258): retrieval, and retrieval that needs a step of reasoning.

At each step that writes an answer, a query head's n most attended tokens are taken, n being the length of the answer
in the context; those that lie in it count by their attention, over n and the number of steps (the published code,
github.com/FYYFU/HeadKV, has ten times that). `head_headkv` asks for a needle. For `head_headkv_reasoning` a
needle is two numbers of two people and a sentence that says who is older; the older one's number is asked for, so that
finding a number is not enough.

Answers are forced: the right tokens are read whatever the model would have written, where the published code lets it
write and counts what it got right. A small model may fail the second question, and its score then says where it
looks as the right number is written, not that it reasons: SmolLM2-135M writes 9 of 9 plain answers at 1 k,
and 3 of 9 that need a step, where a guess between the two is right half of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from testbed.heads.calibration import CalibrationConfig, Tick
from testbed.heads.headmap import Measured
from testbed.heads.restrict import Cut, Rows, cut_text, needle_texts
from testbed.heads.texts import CalibrationText, Span, copying
from testbed.models.base import Decoder
from testbed.workloads.base import Sample
from testbed.workloads.haystack import Haystack, documents, split_documents
from testbed.workloads.needle import NUMBERS, insert

TASK = "needle_reasoning"
THINGS = ("badge number", "invoice number", "membership number", "order number", "case number")
PEOPLE = ("plumber", "golfer", "librarian", "guard", "tailor", "lawyer")
DEPTHS = (0.1, 0.5, 0.9)
NEEDLE = " The {thing} of the {first} is {number}. The {thing} of the {second} is {other}. {relation}"
RELATION = "The {older} is older than the {younger}."
QUESTION = "\n\nWhat is the {thing} of the older person? The {thing} of the older person is"


def measure(decoder: Decoder, config: CalibrationConfig, tick: Tick) -> dict[str, Measured]:
    """`head_headkv` and `head_headkv_reasoning`.

    Args:
        decoder: the model.
        config: lengths and samples of the needle texts.
        tick: told the share done.

    Raises:
        CalibrationError: a text is beyond the model's limit.
    """
    tasks = {"head_headkv": needle_texts(decoder, config), "head_headkv_reasoning": reasoning_texts(decoder, config)}
    done, total = 0, sum(map(len, tasks.values()))
    out: dict[str, Measured] = {}
    for name, found in tasks.items():
        scores: list[Tensor] = []
        for text in found:
            scores.append(answer_scores(decoder, text)[0])
            done += 1
            tick(done / total)
        out[name] = Measured.of(scores, found[0].task, "score", [text.context_tokens for text in found], config.seed)
    return out


def answer_scores(decoder: Decoder, text: CalibrationText) -> tuple[Tensor, float]:
    """Scores of one text.

    Args:
        decoder: the model.
        text: with answers copied from spans.

    Returns:
        [L, Hk, G] scores, and the share of answers of which the model would have written every token.
    """
    geometry = decoder.geometry
    piece = cut_text(decoder, text, 0)
    spans = text.asks["retrieval_score"].spans
    rows = Rows(piece, geometry, 0, 1)
    scores = torch.zeros(geometry.layers, geometry.kv_heads, geometry.group)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores[layer] = _top_mass(rows, piece, spans, layer, q, k)
        return rows.full(layer, q, k, v)

    with torch.no_grad():
        logits = decoder.forward(piece.rest, piece.positions, attend, "all")
    assert logits is not None
    hits = (logits[0, piece.asking].argmax(-1) == piece.right).tolist()
    answers = [
        all(hit for _, hit in group) for _, group in groupby(zip(spans, hits, strict=True), lambda pair: pair[0])
    ]
    return scores, sum(answers) / len(answers)


def _top_mass(rows: Rows, text: Cut, spans: Sequence[Sequence[Span]], layer: int, q: Tensor, k: Tensor) -> Tensor:
    """[Hk, G] of one layer: q [1, Hq, T, D], k [1, Hk, T, D]."""
    geometry = rows.geometry
    keys, _ = rows.with_context(layer, k, k)
    asked = q[0, :, text.asking].float().unflatten(0, (geometry.kv_heads, geometry.group))
    bias = rows.bias(layer, restricted=False).unflatten(1, (geometry.group, -1))[:, :, text.asking]
    logits = torch.einsum("hgrd,htd->hgrt", asked, keys[0].float()) * geometry.scale[layer]
    p = (logits + bias).softmax(-1)
    total = torch.zeros(geometry.kv_heads, geometry.group, device=q.device)
    for row, row_spans in enumerate(spans):
        tokens = [token for begin, end in row_spans for token in range(begin, end)]
        most, at = p[:, :, row].topk(len(tokens), dim=-1)
        inside = torch.isin(at, torch.tensor(tokens, device=at.device))
        total += (most * inside).sum(-1) / len(tokens)
    return (total / len(spans)).cpu()


def reasoning_texts(decoder: Decoder, config: CalibrationConfig) -> list[CalibrationText]:
    """As `needle_texts`, with needles of which the right part has to be chosen."""
    hay = Haystack.build(split_documents(documents(None), "calibration"), decoder.encode, decoder.decode)
    return [
        _reasoning_text(decoder, hay, length, np.random.default_rng([config.seed, turn, length]))
        for length in config.needle_lengths
        for turn in range(config.needle_samples_per_cell)
    ]


def _reasoning_text(decoder: Decoder, hay: Haystack, length: int, rng: np.random.Generator) -> CalibrationText:
    """One context with a needle at each depth, then every question with its right answer."""
    things = rng.permutation(THINGS)[: len(DEPTHS)]
    people = rng.permutation(PEOPLE).reshape(len(DEPTHS), 2)
    low, high = NUMBERS["calibration"]
    numbers = low + rng.choice(high - low + 1, (len(DEPTHS), 2), replace=False)
    right = rng.integers(0, 2, len(DEPTHS))  # whether the first or the second is older
    needles = []
    for thing, pair, values, older in zip(things, people, numbers, right, strict=True):
        relation = RELATION.format(older=pair[older], younger=pair[1 - older])
        names = {"thing": thing, "first": pair[0], "second": pair[1], "number": values[0], "other": values[1]}
        needles.append(decoder.encode(NEEDLE.format(**names, relation=relation)))
    plain = length - sum(map(len, needles))
    begin, stretch = hay.stretch(plain, rng, "calibration.needle_lengths")
    offsets = [hay.nearest_start(begin, plain, round(depth * plain)) for depth in DEPTHS]
    context, positions = insert(stretch, needles, offsets)
    samples = [
        Sample(
            id=f"{TASK}-{length}/{at}",
            context_id=TASK,
            context_tokens=context,
            question_tokens=decoder.encode(QUESTION.format(thing=things[at])),
            answer=str(numbers[at, right[at]]),
            continuation_tokens=decoder.encode(f" {numbers[at, right[at]]}"),
            meta={"needle_position": positions[at], "needle_tokens": len(needles[at])},
        )
        for at in range(len(DEPTHS))
    ]
    return replace(copying(decoder, samples), task=TASK)
