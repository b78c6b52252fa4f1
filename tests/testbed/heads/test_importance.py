"""What a head is worth, against a naive float64 forward with a mask for one head, and against finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_heads as tiny
import torch
import transformers as tf
from tiny_heads import HK, HQ, L
from tiny_run import save_model
from torch import Tensor

from testbed.heads import importance
from testbed.heads.calibration import CalibrationConfig, CalibrationError
from testbed.heads.differentiable import Differentiable
from testbed.heads.importance import gate_gradients, restricted_losses
from testbed.heads.library import groups
from testbed.heads.restrict import Rows, cut, kl_nats, loss_nats
from testbed.models import ModelError, load, wrap
from testbed.models.hf import HfDecoder

COUNT, CONTEXT, SINKS, WINDOW = 26, 15, 2, 5
ASKING = [17, 18, 24]
TOKENS = tiny.tokens(COUNT)


@pytest.fixture(scope="module")
def decoder() -> HfDecoder:
    return tiny.tiny()


def asked(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [n, V] and losses [n] at the asked positions of logits [1, T, V]."""
    log = logits[0, ASKING].double().log_softmax(-1)
    return log, -log.gather(-1, torch.tensor(TOKENS)[[at + 1 for at in ASKING]].unsqueeze(-1)).squeeze(-1)


def test_one_head_restricted_as_a_naive_forward_with_a_mask_has_it(decoder: HfDecoder) -> None:
    text = cut(decoder, TOKENS, CONTEXT, ASKING)
    told: list[float] = []
    kl, loss = restricted_losses(Differentiable(decoder), text, SINKS, WINDOW, told.append)
    full_log, full_loss = asked(tiny.oracle(TOKENS, {}).logits)
    for layer in range(L):
        for head in range(HK):
            masks = {layer: tiny.mask(COUNT, CONTEXT, SINKS, WINDOW, [head])}
            log, other = asked(tiny.oracle(TOKENS, masks).logits)
            expected = (full_log.exp() * (full_log - log)).sum(-1).mean()
            assert float(expected) > 1e-3  # the case is not an empty one
            torch.testing.assert_close(kl[layer, head].double(), expected, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(loss[layer, head].double(), (other - full_loss).mean(), rtol=1e-3, atol=1e-5)
    assert told == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_heads_of_one_layer_in_several_batches(decoder: HfDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    text, model = cut(decoder, TOKENS, CONTEXT, ASKING), Differentiable(decoder)
    together = restricted_losses(model, text, SINKS, WINDOW)
    monkeypatch.setattr(importance, "BATCH_HEADS", 1)
    torch.testing.assert_close(restricted_losses(model, text, SINKS, WINDOW), together)


def test_a_window_over_everything_costs_nothing(decoder: HfDecoder) -> None:
    text, model = cut(decoder, TOKENS, CONTEXT, ASKING), Differentiable(decoder)
    kl, loss = restricted_losses(model, text, 0, COUNT)
    assert float(kl.max()) < 1e-6
    assert float(loss.abs().max()) < 1e-5
    by_cut, by_output = gate_gradients(model, text, 0, COUNT)
    assert not by_cut.any()
    assert bool(by_output.any())


def test_gradients_are_those_of_finite_differences(decoder: HfDecoder) -> None:
    text, model = cut(decoder, TOKENS, CONTEXT, ASKING), Differentiable(decoder)
    rows = Rows(text, decoder.geometry, SINKS, WINDOW)

    def loss(layer: int, head: int, g: float, a: float) -> float:
        def attend(at: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = rows.full(at, q, k, v).clone()
            if at == layer:
                change = rows.restricted(at, q, k, v)[:, head] - out[:, head]
                out[:, head] = out[:, head] * (1 + a) + g * change
            return out

        with torch.no_grad():
            logits = model.logits(text.rest, text.positions, attend, text.asking)
        return float(loss_nats(logits[0].double(), text.right).mean())

    by_cut, by_output = gate_gradients(model, text, SINKS, WINDOW)
    step = 0.01
    for layer in range(L):
        for head in range(HQ):
            for found, g, a in ((by_cut, step, 0.0), (by_output, 0.0, step)):
                expected = (loss(layer, head, g, a) - loss(layer, head, -g, -a)) / (2 * step)
                assert float(found.flatten(1)[layer, head]) == pytest.approx(expected, rel=0.02, abs=3e-3)
    assert float(by_cut.abs().max()) > 0.05


SMALL: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
}
FAMILIES = {
    "llama": lambda: tf.LlamaConfig(**SMALL),
    "mistral-window": lambda: tf.MistralConfig(**SMALL, sliding_window=9),
    "gpt2": lambda: tf.GPT2Config(vocab_size=tiny.VOCAB, n_embd=32, n_layer=3, n_head=4),
    "bloom": lambda: tf.BloomConfig(vocab_size=tiny.VOCAB, hidden_size=32, n_layer=3, n_head=4),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_of_every_family_with_and_without_their_first_layers(kind: str) -> None:
    """Against transformers' own, of the untouched model: the whole text at once, no chunks and no context."""
    torch.manual_seed(2)
    model: Any = tf.AutoModelForCausalLM.from_config(FAMILIES[kind]()).eval()
    with torch.no_grad():
        truth = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0, ASKING].float()
    decoder = wrap(model, name=kind)
    ours = Differentiable(decoder)
    text = cut(decoder, TOKENS, CONTEXT, ASKING)
    rows = Rows(text, decoder.geometry, SINKS, WINDOW)
    spread = float(truth.std())
    out = ours.logits(text.rest, text.positions, rows.full, text.asking)
    torch.testing.assert_close(out[0], truth, rtol=0, atol=1e-4 * spread)
    states = ours.states(text.rest, text.positions, rows.full)
    two = (text.rest.expand(2, -1), text.positions.expand(2, -1))
    for layer in range(3):
        ran: list[int] = []

        def attend(at: int, q: Tensor, k: Tensor, v: Tensor, ran: list[int] = ran) -> Tensor:
            ran.append(at)
            return rows.full(at, q, k, v)

        out = ours.logits_from(layer, states, *two, attend, text.asking)
        assert ran == list(range(layer, 3))
        torch.testing.assert_close(out, truth.expand(2, -1, -1), rtol=0, atol=1e-4 * spread)
    again = ours.logits(text.rest, text.positions, rows.full, text.asking)
    torch.testing.assert_close(again[0], truth, rtol=0, atol=1e-4 * spread)


def test_layers_run_again_after_an_error(decoder: HfDecoder) -> None:
    text, model = cut(decoder, TOKENS, CONTEXT, ASKING), Differentiable(decoder)
    rows = Rows(text, decoder.geometry, SINKS, WINDOW)
    states = model.states(text.rest, text.positions, rows.full)

    def broken(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("broken")

    before = model.logits(text.rest, text.positions, rows.full, text.asking)
    with pytest.raises(RuntimeError, match="broken"):
        model.logits_from(2, states, text.rest, text.positions, broken, text.asking)
    torch.testing.assert_close(model.logits(text.rest, text.positions, rows.full, text.asking), before)


def test_packed_weights_are_copied_and_the_decoder_stays_as_it_was(decoder: HfDecoder) -> None:
    weights = {str(weight.dtype) for weight in decoder.model.parameters()}
    halved = tiny.build()
    with torch.no_grad():
        for weight in halved.parameters():
            weight.copy_(weight.bfloat16())  # bf16 numbers in float32: LeanLlama packs them
    packed = wrap(halved, name="packed")
    assert weights == {"torch.float32"}
    assert torch.bfloat16 in {weight.dtype for weight in packed.model.parameters()}
    kept = {name: weight.clone() for name, weight in packed.model.state_dict().items()}
    assert Differentiable(decoder).model is decoder.model
    model = Differentiable(packed)
    assert model.model is not packed.model
    text = cut(packed, TOKENS, CONTEXT, ASKING)
    rows = Rows(text, packed.geometry, SINKS, WINDOW)
    ours = model.logits(text.rest, text.positions, rows.full, text.asking)
    theirs = packed.forward(text.rest, text.positions, rows.full, "all")
    assert theirs is not None
    torch.testing.assert_close(ours, theirs[:, text.asking], rtol=1e-4, atol=1e-4)
    for name, weight in packed.model.state_dict().items():
        assert weight.dtype == kept[name].dtype
        assert torch.equal(weight, kept[name])


def test_what_cannot_be_measured_is_refused(decoder: HfDecoder) -> None:
    other: Any = _Other()
    with pytest.raises(ModelError, match="gradients need transformers' modules"):
        Differentiable(other)
    for asking in ([], [CONTEXT - 1], [COUNT - 1]):
        with pytest.raises(ValueError, match="must be positions from context_tokens=15"):
            cut(decoder, TOKENS, CONTEXT, asking)


class _Other:
    """Some other decoder."""

    name = "other"


def test_kl_and_loss_in_closed_form() -> None:
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
    expected = 0.5 * torch.log(torch.tensor(0.5 / 0.9)) + 0.5 * torch.log(torch.tensor(0.5 / 0.1))
    torch.testing.assert_close(kl_nats(p.log() + 3, q.log() - 1), expected)
    torch.testing.assert_close(loss_nats(q.log()[None], torch.tensor([1])), -torch.tensor([0.1]).log())


CONFIG = CalibrationConfig(
    needle_lengths=(300,),
    needle_samples_per_cell=1,
    text_tokens=300,
    text_samples=2,
    local_window_tokens=64,
    long_range_tokens=128,
    edge_window_tokens=100,
)


@pytest.fixture
def essays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text of this test only: the workloads' default would be an asset."""
    body = " ".join(f"Sentence {at} says nothing at all." for at in range(200))
    monkeypatch.setattr("testbed.assets.essays", lambda: {f"essay{at}.txt": body for at in range(12)})


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> HfDecoder:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return load(folder, name="speaking")


@pytest.mark.usefixtures("essays")
def test_the_group_gives_its_measures(speaking: HfDecoder) -> None:
    told: list[float] = []
    out = importance.measure(speaking, CONFIG, told.append)
    assert set(out) == set(groups()["importance"].measures)
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)
    for name, measured in out.items():
        assert measured.value.shape == (2, 2)
        assert measured.unit == "nats"
        text = name.endswith("_text")
        assert (measured.task, measured.samples) == (("text", 2) if text else ("needle", 1))
        assert measured.length_tokens == (300,) * measured.samples
    assert bool((out["head_restrict_kl"].value > 0).all())
    assert bool((out["head_gradient"].mean > 0).all())


@pytest.mark.usefixtures("essays")
def test_text_beyond_the_model(speaking: HfDecoder) -> None:
    config = CalibrationConfig(needle_lengths=(1500,), text_tokens=1000)
    with pytest.raises(CalibrationError, match=r"a text of task needle.*limit of 1024"):
        importance.measure(speaking, config, lambda done: None)
