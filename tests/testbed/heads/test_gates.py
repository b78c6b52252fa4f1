"""Gates between full and streaming attention, against a float64 forward with masks, differences and planted heads."""

from __future__ import annotations

import pytest
import tiny_heads as tiny
import torch
from tiny_heads import HK, L

from testbed.heads import gates
from testbed.heads.calibration import CalibrationConfig, CalibrationError
from testbed.heads.differentiable import Differentiable
from testbed.heads.gates import Trainer, gated, measure, passkeys, trapezoid
from testbed.heads.restrict import Rows, cut
from testbed.heads.texts import Asking, CalibrationText
from testbed.models import wrap
from testbed.models.hf import HfDecoder

pytestmark = pytest.mark.usefixtures("essays")

COUNT, CONTEXT, SINKS, WINDOW = 24, 14, 2, 5
TOKENS = tiny.tokens(COUNT, seed=5)


def text(seed: int) -> CalibrationText:
    asking = Asking((CONTEXT + 2,), (((3, 4),),))
    return CalibrationText("needle", tiny.tokens(COUNT, seed), None, {"retrieval_score": asking}, CONTEXT)


TEXTS = [text(seed) for seed in range(6)]


@pytest.fixture(scope="module")
def decoder() -> HfDecoder:
    return tiny.tiny()


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_shut_and_open_gates_are_streaming_and_full_attention(decoder: HfDecoder, value: float) -> None:
    """transformers' eager attention in float64, the rows after the context of every head masked."""
    piece = cut(decoder, TOKENS, CONTEXT, [COUNT - 2])
    attend = gated(Rows(piece, decoder.geometry, SINKS, WINDOW), torch.full((L, HK), value))
    hidden = Differentiable(decoder).hidden(piece.rest, piece.positions, attend)
    mask = tiny.mask(COUNT, CONTEXT, SINKS, WINDOW, list(range(HK)))
    masks = dict.fromkeys(range(L), mask) if value == 0.0 else {}
    expected = tiny.oracle(TOKENS, masks).hidden_states[-1][:, CONTEXT:]
    torch.testing.assert_close(hidden.double(), expected, rtol=1e-3, atol=1e-3)


def test_a_gate_half_open_mixes_outputs_not_masks(decoder: HfDecoder) -> None:
    piece = cut(decoder, TOKENS, 0, [COUNT - 2])
    rows = Rows(piece, decoder.geometry, SINKS, WINDOW)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, tiny.HQ, COUNT, tiny.D, generator=generator)
    k, v = (torch.randn(1, HK, COUNT, tiny.D, generator=generator) for _ in range(2))
    given = torch.tensor([[0.25, 1.0]] * L)
    full, streaming = rows.both(1, q, k, v)
    out = gated(rows, given)(1, q, k, v)
    torch.testing.assert_close(out[:, :2], 0.25 * full[:, :2] + 0.75 * streaming[:, :2])
    torch.testing.assert_close(out[:, 2:], full[:, 2:])
    assert not torch.allclose(full[:, 2:], streaming[:, 2:])


def test_distillation_is_the_error_of_the_hidden_states_after_the_context(decoder: HfDecoder) -> None:
    mask = tiny.mask(COUNT, CONTEXT, SINKS, WINDOW, list(range(HK)))
    trainer = Trainer(decoder, TEXTS[:2], SINKS, WINDOW)
    for at in range(2):
        ids = TEXTS[at].tokens
        full, other = (tiny.oracle(ids, masks).hidden_states[-1] for masks in ({}, dict.fromkeys(range(L), mask)))
        expected = (full - other)[0, CONTEXT:].square().mean()
        assert float(expected) > 0.01
        torch.testing.assert_close(trainer.distillation(at, torch.zeros(L, HK)).double(), expected, rtol=1e-3, atol=0)


def test_gradient_of_the_distillation_loss_is_that_of_finite_differences(decoder: HfDecoder) -> None:
    trainer = Trainer(decoder, TEXTS[:1], SINKS, WINDOW)
    start = torch.linspace(0.2, 0.8, L * HK).view(L, HK)
    given = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(trainer.distillation(0, given), given)
    step = 0.01
    for layer in range(L):
        for head in range(HK):
            change = torch.zeros(L, HK)
            change[layer, head] = step
            with torch.no_grad():
                rise = trainer.distillation(0, start + change) - trainer.distillation(0, start - change)
            assert float(gradient[layer, head]) == pytest.approx(float(rise) / (2 * step), rel=0.05, abs=2e-3)
    assert float(gradient.abs().min()) > 1e-4


def test_gates_of_heads_that_are_not_read_close_and_others_stay_open() -> None:
    """One KV head's outputs are multiplied by 0 in every layer: full attention or not, nothing changes."""
    model = tiny.build()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:, : tiny.G * tiny.D] = 0.0
    found = Trainer(wrap(model, name="planted"), TEXTS[:6], SINKS, WINDOW).train(30, rate=0.05, sparsity=1e-4)
    assert float(found[:, 0].max()) < 0.05
    assert float(found[:, 1].min()) > 0.5
    assert float(found.min()) >= 0.0
    assert float(found.max()) <= 1.0


def test_open_gates_lose_nothing_and_stay_without_a_price(decoder: HfDecoder) -> None:
    assert torch.equal(Trainer(decoder, TEXTS[:2], SINKS, WINDOW).train(4, 0.05, 0.0), torch.ones(L, HK))


def test_a_step_is_adamw_s_first(decoder: HfDecoder) -> None:
    """At open gates the loss is at its minimum, so only the price of the gates moves them: by the rate, all alike."""
    found = Trainer(decoder, TEXTS[:1], SINKS, WINDOW).train(1, rate=0.03, sparsity=0.05)
    torch.testing.assert_close(found, torch.full((L, HK), 0.97))


def test_same_texts_give_the_same_bits(decoder: HfDecoder) -> None:
    first, second, other = (
        Trainer(decoder, texts, SINKS, WINDOW).train(5, 0.05, 0.01) for texts in (TEXTS[:3], TEXTS[:3], TEXTS[3:6])
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_schedule_is_the_published_one() -> None:
    rate = trapezoid(40)
    assert [rate(step) for step in (0, 3, 7, 20, 32, 36, 39)] == pytest.approx([1 / 8, 4 / 8, 1, 1, 1, 4 / 8, 1 / 8])
    assert trapezoid(100)(0) == pytest.approx(0.1)
    assert trapezoid(3)(0) == 1.0


def test_the_group_trains_on_needles_far_from_their_questions(speaking: HfDecoder) -> None:
    config = CalibrationConfig(gate_tokens=500, gate_steps=2)
    told: list[float] = []
    out = measure(speaking, config, told.append)["head_gate"]
    assert out.value.shape == (2, 2)
    assert (out.samples, out.task, out.unit, out.length_tokens) == (1, "needle", "score", (500,))
    assert told == pytest.approx([0.15, 0.3, 0.65, 1.0])
    for made in passkeys(speaking, 500, 2, 0):
        asking = made.asks["retrieval_score"]
        assert len(asking.rows) == 7 * len(gates.DEPTHS)
        far = [row - end for row, ((_, end),) in zip(asking.rows, asking.spans, strict=True)]
        assert min(far) > config.local_window_tokens
        said = speaking.decode(made.tokens)
        assert all(said.count(speaking.decode(made.tokens[b:e])) == 2 for ((b, e),) in asking.spans)


def test_texts_within_the_window_are_refused(speaking: HfDecoder) -> None:
    with pytest.raises(
        CalibrationError, match=r"gate_tokens=132: must be above sink_tokens \+ local_window_tokens=132"
    ):
        measure(speaking, CalibrationConfig(gate_tokens=132), lambda done: None)
