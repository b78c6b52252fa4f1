"""Offsets of the background state: found where they are known, better on text they were not learned on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_run import save_model
from torch import Tensor

from testbed.cache.offsets import BackgroundOffsets
from testbed.models.base import Geometry
from testbed.predictor.background import closed_form, errors, fit_gradient, fit_ridge, main
from testbed.predictor.skipping import (
    LOG2_E,
    SAMPLE_QUERIES,
    WARM_QUERIES,
    Choice,
    Context,
    LeftOut,
    Pages,
    SkippingError,
    check_geometry,
    left_out,
    sample_blocks,
)

S, R, D, P = 3, 200, 8, 16


def drawn(seed: int, known: BackgroundOffsets) -> LeftOut:
    """Rows whose skipped part is exactly the mean moved by known offsets."""
    g = torch.Generator().manual_seed(seed)
    kept, mean, query = (torch.randn(S, R, D, generator=g) for _ in range(3))
    lse, mean_lse = (torch.randn(S, R, generator=g) for _ in range(2))
    skipped, skipped_lse = known.moved(mean, mean_lse)
    return LeftOut(kept, lse, skipped, skipped_lse, mean_lse, mean, query)


def known_offsets() -> BackgroundOffsets:
    g = torch.Generator().manual_seed(9)
    return BackgroundOffsets(
        torch.tensor([0.8, -0.5, 0.0]), torch.tensor([1.2, 0.7, 1.0]), torch.randn(S, D, generator=g)
    )


def test_ridge_finds_the_offsets_that_made_the_rows() -> None:
    known = known_offsets()
    found = fit_ridge(drawn(0, known), ridge=1e-9, rounds=12)
    for key in ("log2", "scale", "value"):
        assert torch.allclose(getattr(found, key), getattr(known, key), atol=1e-3)
    other = drawn(1, known)
    assert float(other.error(*found.moved(other.mean_value, other.mean_lse)).max()) < 1e-2


def test_gradient_comes_near_them_and_both_beat_the_mean_on_other_rows() -> None:
    known = known_offsets()
    rows, other = drawn(0, known), drawn(1, known)
    judged = errors([other], {"ridge": fit_ridge(rows), "gradient": fit_gradient(rows, steps=300)})
    for method in ("ridge", "gradient"):
        assert bool((judged[method] < 0.2 * judged["mean"]).all())
    assert bool((judged["mean"] != judged["skipped"]).all())


def text(seed: int, tokens: int = 320, layers: int = 1, heads: int = 2, group: int = 2) -> Context:
    """Keys and values with a few heavy directions, queries at two blocks that all lean one way."""
    g, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    mix, lean = torch.randn(D, D, generator=fixed), torch.randn(D, generator=fixed)
    k, v = (torch.randn(layers, heads, tokens, D, generator=g) @ mix / 3 for _ in range(2))
    v = v + 0.5 * k.square()
    positions = sample_blocks(tokens, 2)
    q = (torch.randn(layers, heads, group, len(positions), D, generator=g) + lean) * LOG2_E / math.sqrt(D)
    return Context(k.bfloat16(), v.bfloat16(), q.half(), positions)


def test_offsets_hold_on_text_they_were_not_learned_on() -> None:
    """Values grow with the square of the keys and queries lean one way, so all texts leave the mean alike."""
    choice = [Choice("query_bound", 0.1)]
    rows = [left_out(text(seed), 0, choice, Pages(recent_pages=2))[0] for seed in range(4)]
    learned = {"ridge": fit_ridge(LeftOut.joined([block for blocks in rows for block in blocks]))}
    judged = errors(left_out(text(7), 0, choice, Pages(recent_pages=2))[0], learned)
    assert bool((judged["ridge"] < judged["mean"]).all())
    assert bool((judged["closed"] < judged["ridge"]).all())


def brute_score(context: Context, predictor: str, head: int, row: int, count: int) -> Tensor:
    """[N] in float64, query by query: the definition."""
    q, k = context.queries[0, head].double(), context.keys[0, head].double()

    def mass(at: int) -> Tensor:
        logits = (q[:, at] @ k.T) / LOG2_E
        logits[:, int(context.positions[at]) + 1 :] = -torch.inf
        weight = torch.nn.functional.pad(logits.softmax(-1), (0, max(0, count * P - k.shape[0])))
        return weight[:, : count * P].unflatten(1, (count, P)).sum(2).mean(0)

    block = WARM_QUERIES + SAMPLE_QUERIES
    start = row // block * block
    if predictor == "next_mass":
        return mass(row)
    if predictor == "query_bound":
        pages = k[: count * P].unflatten(0, (-1, P))
        product = q[:, row - 1, None, None] * pages  # [G, N, P, D]
        return product.amax(2).sum(2).amax(0)
    average = torch.stack([mass(at) for at in range(start, start + WARM_QUERIES // 2)]).mean(0)
    for at in range(start + WARM_QUERIES // 2, row):
        average = 0.9 * average + 0.1 * mass(at)
    return average


@pytest.mark.parametrize("predictor", ["next_mass", "query_bound", "attention_ema"])
def test_rows_are_attention_over_the_chosen_pages(predictor: str) -> None:
    """Kept, skipped and mean parts against float64 sums over tokens, with pages chosen by the definition."""
    context, pages = text(3), Pages(recent_pages=2)
    blocks = left_out(context, 0, [Choice(predictor, 0.2)], pages)[0]
    group = context.queries.shape[2]
    for block, rows in enumerate(blocks):
        for head, at in ((0, 0), (1, 7)):
            row = block * (WARM_QUERIES + SAMPLE_QUERIES) + WARM_QUERIES + at
            position = int(context.positions[row])
            last = position // P
            end = int(context.positions[block * 48 + 47])
            score = brute_score(context, predictor, head, row, end // P + 1)
            candidates = list(range(1, last - 1))
            chosen = sorted(candidates, key=lambda page: -float(score[page]))[: math.ceil((last + 1) * 0.2)]
            skipped = torch.zeros(context.keys.shape[2], dtype=torch.bool)
            for page in set(candidates) - set(chosen):
                skipped[page * P : (page + 1) * P] = True
            seen = torch.arange(len(skipped)) <= position
            k, v = context.keys[0, head].double(), context.values[0, head].double()
            for g in range(group):
                q = context.queries[0, head, g, row].double()
                logits = k @ q
                r = g * SAMPLE_QUERIES + at
                for mask, out, lse in (
                    (skipped, rows.skipped_out, rows.skipped_lse),
                    (seen & ~skipped, rows.kept_out, rows.kept_lse),
                ):
                    weight = torch.exp2(logits[mask])
                    assert float(lse[head, r]) == pytest.approx(float(weight.sum().log2()), abs=1e-4)
                    assert torch.allclose(out[head, r].double(), weight @ v[mask] / weight.sum(), atol=1e-4)
                mean = k[skipped].mean(0) @ q + math.log2(int(skipped.sum()))
                assert float(rows.mean_lse[head, r]) == pytest.approx(float(mean), abs=1e-4)
                assert torch.allclose(rows.mean_value[head, r].double(), v[skipped].mean(0), atol=1e-5)
                weight = torch.exp2(logits[seen])
                assert torch.allclose(rows.truth[head, r].double(), weight @ v[seen] / weight.sum(), atol=1e-4)


def test_closed_form_is_never_far_above_the_mean() -> None:
    """On the rows it is fitted to it is at least as good as what it starts from."""
    rows = left_out(text(5), 0, [Choice("attention_ema", 0.1)], Pages(recent_pages=2))[0][0]
    assert bool((rows.error(*closed_form(rows)).mean(1) < rows.error(rows.mean_value, rows.mean_lse).mean(1)).all())


def test_too_short_a_text_and_unknown_predictors_are_refused() -> None:
    with pytest.raises(SkippingError, match="too few for 3 blocks"):
        sample_blocks(200, 3)
    with pytest.raises(SkippingError, match="must be one of next_mass"):
        Choice("fortune", 0.1)
    with pytest.raises(SkippingError, match="windows or position slopes"):
        check_geometry(Geometry(1, 1, 1, 8, 10, None, (64,), (1.0,)))


def test_the_command_learns_judges_and_writes(tmp_path: Path) -> None:
    """On a tiny model and two modules of the standard library."""
    save_model(tmp_path / "model", positions=2048)
    one = [
        f"background.{part}.{kind}={int(kind == 'modules')}"
        for part in ("train", "test")
        for kind in ("essays", "modules", "agents", "needles")
    ]
    main(
        [
            "model=hf",
            f"model.path={tmp_path / 'model'}",
            f"record={tmp_path / 'record.json'}",
            f"offsets={tmp_path}",
            "background.length_tokens=1024",
            "background.blocks=2",
            "background.keeps=[0.1]",
            *one,
        ]
    )
    record = json.loads((tmp_path / "record.json").read_text())
    fingerprint = record["model"].split()[-1]
    found = BackgroundOffsets.read(tmp_path / f"background-{fingerprint}.safetensors", fingerprint, 4, 16)
    for choice in ("query_bound 0.1", "attention_ema 0.1"):
        error = {name: each["error"][0] for name, each in record["error"][choice].items()}
        # A model of random weights attends evenly: the mean is all but exact, and offsets have nothing to mend.
        assert max(error["mean"], error["ridge"], error["closed"]) < 0.1 * error["skipped"]
    assert float(found.log2.abs().max()) > 0
