"""Gates between full and streaming attention, against a float64 forward with masks, differences and planted heads."""

from __future__ import annotations

import pytest
import tiny_heads as tiny
import torch
from tiny_heads import HK, L
from tiny_run import save_model

from testbed.heads import gates
from testbed.heads.calibration import CalibrationConfig, CalibrationError
from testbed.heads.differentiable import Differentiable
from testbed.heads.gates import distillation, gated, measure, passkeys, train, trapezoid
from testbed.heads.restrict import Rows, cut
from testbed.heads.texts import Asking, CalibrationText
from testbed.models import load, wrap
from testbed.models.hf import HfDecoder

COUNT, CONTEXT, SINKS, WINDOW = 24, 14, 2, 5
TOKENS = tiny.tokens(COUNT, seed=5)


def text(seed: int) -> CalibrationText:
    asking = Asking((CONTEXT + 2,), (((3, 4),),))
    return CalibrationText("needle", tiny.tokens(COUNT, seed), None, {"retrieval_score": asking}, CONTEXT)


TEXTS = [text(seed) for seed in range(30)]


@pytest.fixture(scope="module")
def decoder() -> HfDecoder:
    return tiny.tiny()


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_shut_and_open_gates_are_streaming_and_full_attention(decoder: HfDecoder, value: float) -> None:
    """transformers' eager attention in float64, every head of every layer with the mask."""
    whole = cut(decoder, TOKENS, 0, [COUNT - 2])
    model = Differentiable(decoder)
    attend = gated(Rows(whole, decoder.geometry, SINKS, WINDOW), torch.full((L, HK), value))
    hidden = model.hidden(whole.rest, whole.positions, attend)
    mask = tiny.mask(COUNT, 0, SINKS, WINDOW, list(range(HK)))
    masks = dict.fromkeys(range(L), mask) if value == 0.0 else {}
    expected = tiny.oracle(TOKENS, masks).hidden_states[-1]
    torch.testing.assert_close(hidden.double(), expected, rtol=1e-3, atol=1e-3)


def test_a_gate_half_open_mixes_outputs_not_masks(decoder: HfDecoder) -> None:
    whole = cut(decoder, TOKENS, 0, [COUNT - 2])
    rows = Rows(whole, decoder.geometry, SINKS, WINDOW)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, tiny.HQ, COUNT, tiny.D, generator=generator)
    k, v = (torch.randn(1, HK, COUNT, tiny.D, generator=generator) for _ in range(2))
    given = torch.tensor([[0.25, 1.0]] * L)
    full, streaming = rows.both(1, q, k, v)
    out = gated(rows, given)(1, q, k, v)
    torch.testing.assert_close(out[:, :2], 0.25 * full[:, :2] + 0.75 * streaming[:, :2])
    torch.testing.assert_close(out[:, 2:], full[:, 2:])
    assert not torch.allclose(full[:, 2:], streaming[:, 2:])


def test_gradient_of_the_distillation_loss_is_that_of_finite_differences(decoder: HfDecoder) -> None:
    whole = cut(decoder, TOKENS, 0, [COUNT - 2])
    model = Differentiable(decoder)
    start = torch.linspace(0.2, 0.8, L * HK).view(L, HK)
    given = start.clone().requires_grad_()
    loss = distillation(model, whole, CONTEXT, given, SINKS, WINDOW)
    (gradient,) = torch.autograd.grad(loss, given)
    step = 0.01
    for layer in range(L):
        for head in range(HK):
            change = torch.zeros(L, HK)
            change[layer, head] = step
            with torch.no_grad():
                up = distillation(model, whole, CONTEXT, start + change, SINKS, WINDOW)
                down = distillation(model, whole, CONTEXT, start - change, SINKS, WINDOW)
            expected = float(up - down) / (2 * step)
            assert float(gradient[layer, head]) == pytest.approx(expected, rel=0.05, abs=2e-3)
    assert float(gradient.abs().min()) > 1e-4


def test_only_what_comes_after_the_context_is_distilled(decoder: HfDecoder) -> None:
    """All rows that see less than everything lie in the context: nothing is lost after it, if the last layer is cut."""
    whole = cut(decoder, TOKENS, 0, [COUNT - 2])
    model = Differentiable(decoder)
    shut = torch.ones(L, HK)
    shut[-1] = 0.0
    lost = [float(distillation(model, whole, at, shut, SINKS, WINDOW)) for at in (0, SINKS + WINDOW, CONTEXT)]
    rows = Rows(whole, decoder.geometry, SINKS, WINDOW)
    full = model.hidden(whole.rest, whole.positions, rows.full)[0]
    cut_down = model.hidden(whole.rest, whole.positions, gated(rows, shut))[0]
    assert torch.equal(full[: SINKS + WINDOW], cut_down[: SINKS + WINDOW])
    assert lost == pytest.approx([float((full - cut_down)[at:].square().mean()) for at in (0, SINKS + WINDOW, CONTEXT)])
    assert lost[0] > 0


def test_gates_of_heads_that_are_not_read_close_and_others_stay_open() -> None:
    """One KV head's outputs are multiplied by 0 in every layer: full attention or not, nothing changes."""
    model = tiny.build()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:, : tiny.G * tiny.D] = 0.0
    found = train(wrap(model, name="planted"), TEXTS, SINKS, WINDOW, rate=0.05, sparsity=1e-4)
    assert float(found[:, 0].max()) < 0.05
    assert float(found[:, 1].min()) > 0.5
    assert float(found.min()) >= 0.0
    assert float(found.max()) <= 1.0


def test_open_gates_lose_nothing_and_stay_without_a_price(decoder: HfDecoder) -> None:
    assert torch.equal(train(decoder, TEXTS[:4], SINKS, WINDOW, 0.05, 0.0), torch.ones(L, HK))


def test_a_step_is_adamw_s_first(decoder: HfDecoder) -> None:
    """At open gates the loss is at its minimum, so only the price of the gates moves them: by the rate, all alike."""
    found = train(decoder, TEXTS[:1], SINKS, WINDOW, rate=0.03, sparsity=0.05)
    torch.testing.assert_close(found, torch.full((L, HK), 0.97))


def test_same_texts_give_the_same_bits(decoder: HfDecoder) -> None:
    first, second = (train(decoder, TEXTS[:5], SINKS, WINDOW, 0.05, 0.01) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, train(decoder, TEXTS[5:10], SINKS, WINDOW, 0.05, 0.01))


def test_schedule_is_the_published_one() -> None:
    rate = trapezoid(40)
    assert [rate(step) for step in (0, 3, 7, 20, 32, 36, 39)] == pytest.approx([1 / 8, 4 / 8, 1, 1, 1, 4 / 8, 1 / 8])
    assert trapezoid(100)(0) == pytest.approx(0.1)
    assert trapezoid(3)(0) == 1.0


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> HfDecoder:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, positions=2048)
    return load(folder, name="speaking")


@pytest.fixture(autouse=True)
def essays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text of this test only: the workloads' default would be an asset."""
    body = " ".join(f"Sentence {at} says nothing at all." for at in range(200))
    monkeypatch.setattr("testbed.assets.essays", lambda: {f"essay{at}.txt": body for at in range(12)})


def test_the_group_trains_on_needles_far_from_their_questions(speaking: HfDecoder) -> None:
    config = CalibrationConfig(gate_tokens=500, gate_steps=2)
    told: list[float] = []
    out = measure(speaking, config, told.append)["head_gate"]
    assert out.value.shape == (2, 2)
    assert (out.samples, out.task, out.unit, out.length_tokens) == (1, "needle", "score", (500,))
    assert told == [0.5, 1.0]
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
