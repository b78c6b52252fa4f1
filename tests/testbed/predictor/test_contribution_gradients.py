"""Contributions of pages to the next token's logit: against the model itself, against differences, complete."""

from __future__ import annotations

import pytest
import torch
from tiny import decoder, text
from torch import Tensor

from testbed.engine.prefill import prefill
from testbed.heads.differentiable import Differentiable
from testbed.models.base import Attend
from testbed.predictor.contribution import ContributionError, Step, contributions, gated_logits

PAST, PAGE, TARGET = 150, 16, 11
HOT = torch.tensor([True] + [False] * 6 + [True] * 3)


def step(kind: str) -> Step:
    dense = prefill(decoder(kind), text(PAST), torch.float32)
    return Step(5, TARGET, torch.stack(dense.keys), torch.stack(dense.values), HOT, PAGE)


def plain(kind: str, at: Step, kept: Tensor) -> float:
    """The model's own logit where attention sees the kept tokens [PAST + 1] only, by torch's attention."""
    model = decoder(kind)
    geometry = model.geometry

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = torch.cat((at.keys[layer], k[0]), 1).repeat_interleave(geometry.group, 0)
        values = torch.cat((at.values[layer], v[0]), 1).repeat_interleave(geometry.group, 0)
        seen = kept.clone()
        if geometry.window_tokens[layer]:
            seen &= torch.arange(PAST, -1, -1) < geometry.window_tokens[layer]
        mask = torch.zeros(PAST + 1, dtype=torch.float64).masked_fill(~seen, -torch.inf)
        if geometry.slopes is not None:
            mask = mask + geometry.slopes.double().view(-1, 1, 1) * torch.arange(-PAST, 1)
        wide = (x.double() for x in (q[0], keys, values))
        out = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=mask, scale=geometry.scale[layer])
        return out.unsqueeze(0).to(q.dtype)

    run: Attend = attend
    with torch.inference_mode():
        logits = model.forward(torch.tensor([[at.token]]), torch.tensor([[PAST]]), run)
    assert logits is not None
    return float(logits[0, -1, TARGET])


@pytest.mark.parametrize("kind", ["llama", "mistral", "bloom"])
def test_gates_skip_pages(kind: str) -> None:
    at, model = step(kind), Differentiable(decoder(kind))
    shape = (model.geometry.layers, model.geometry.kv_heads, len(HOT))
    gates = torch.ones(3, *shape)
    gates[1] = HOT.float()
    gates[2, ..., 3] = 0.0
    with torch.no_grad():
        got = gated_logits(model, at, gates).tolist()
    tokens = torch.arange(PAST + 1) // PAGE
    kept = [torch.ones(PAST + 1, dtype=torch.bool), HOT[tokens], tokens != 3]
    assert got == pytest.approx([plain(kind, at, each) for each in kept], rel=1e-3, abs=1e-3)


def test_slope_is_the_difference_quotient() -> None:
    at, model = step("llama"), Differentiable(decoder("llama"))
    gates = torch.full((1, 3, 2, len(HOT)), 0.7)
    wanted = gates.clone().requires_grad_()
    (slope,) = torch.autograd.grad(gated_logits(model, at, wanted).sum(), wanted)
    width = 0.02
    for layer, head, page in ((0, 0, 1), (1, 1, 4), (2, 0, 6), (0, 1, 9)):
        ends = gates.repeat(2, 1, 1, 1)
        ends[0, layer, head, page] += width
        ends[1, layer, head, page] -= width
        with torch.no_grad():
            up, down = gated_logits(model, at, ends).tolist()
        assert float(slope[0, layer, head, page]) == pytest.approx((up - down) / (2 * width), rel=0.02, abs=2e-3)


def test_sum_is_what_the_candidates_are_worth() -> None:
    at, model = step("llama"), Differentiable(decoder("llama"))
    coarse, fine = (contributions(model, at, points) for points in (2, 16))
    everything = torch.ones(PAST + 1, dtype=torch.bool)
    assert fine.logit == pytest.approx(plain("llama", at, everything), abs=1e-3)
    assert fine.without == pytest.approx(plain("llama", at, HOT[torch.arange(PAST + 1) // PAGE]), abs=1e-3)
    assert fine.gap < 1e-3 < coarse.gap
    assert float(fine.value.sum()) == pytest.approx(fine.logit - fine.without, abs=5e-3)
    assert bool((fine.value[..., HOT] == 0).all())
    assert int((fine.value[..., ~HOT] != 0).sum()) == 3 * 2 * 6


def test_bad_input() -> None:
    at = step("llama")
    with pytest.raises(ContributionError, match=r"hot: must be \[10\]"):
        Step(5, TARGET, at.keys, at.values, ~HOT, PAGE)
    with pytest.raises(ContributionError, match="points=0"):
        contributions(Differentiable(decoder("llama")), at, 0)
