"""Weights that are bf16 numbers are kept as such, without a changed logit; others are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from testbed.models import wrap
from testbed.models.probe import Dense

VOCAB, TOKENS = 131, 45
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def build(kind: str, tied: bool, exact: bool) -> Any:
    torch.manual_seed(0)
    config = {"llama": tf.LlamaConfig, "qwen2": tf.Qwen2Config, "qwen3": tf.Qwen3Config}[kind]
    model = tf.AutoModelForCausalLM.from_config(config(**SMALL, tie_word_embeddings=tied, initializer_range=0.2))
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:  # stay float32, whatever they hold
            weight.data = torch.rand_like(weight) + 0.5
        elif exact:
            weight.data = weight.data.bfloat16().float()
    return model.eval()


def in_chunks(decoder: Any, tokens: Tensor) -> Tensor:
    """More rows than native linears take, then some, then single ones."""
    attend, edges = Dense(decoder.geometry), [0, 20, 27, *range(28, TOKENS + 1)]
    positions = torch.arange(TOKENS)[None]
    pairs = zip(edges, edges[1:], strict=False)
    return torch.cat([decoder.forward(tokens[:, a:b], positions[:, a:b], attend, "all") for a, b in pairs], 1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_exact_weights_take_half_the_bytes_and_change_no_logit(kind: str, tied: bool) -> None:
    model = build(kind, tied, exact=True)
    tokens = torch.randint(0, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        truth = model(input_ids=tokens, use_cache=False).logits
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    vectors = sum(weight.numel() for weight in model.parameters() if weight.dim() == 1)
    decoder = wrap(model)
    assert decoder.lean is not None
    assert decoder.dtype == torch.float32
    assert decoder.weights == matrices + vectors
    assert decoder.weights_bytes == 2 * matrices + 4 * vectors
    assert truth.std() > 0.1
    assert float((in_chunks(decoder, tokens) - truth).abs().max()) < 1e-4


def test_nothing_is_held_twice() -> None:
    decoder = wrap(build("llama", True, exact=True))
    assert decoder.lean is not None
    kept = [weight for layer in decoder.lean.layers for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    storages = {weight.untyped_storage().data_ptr() for weight in (*kept, decoder.model.lm_head.weight)}
    theirs = {p.untyped_storage().data_ptr() for p in decoder.model.parameters() if p.dim() == 2}
    assert theirs == storages
    assert decoder.model.lm_head.weight.data_ptr() == decoder.model.model.embed_tokens.weight.data_ptr()


def test_one_number_that_is_not_bf16_keeps_its_matrix_in_float32() -> None:
    model = build("llama", False, exact=True)
    model.model.layers[1].mlp.down_proj.weight.data[3, 4] = 1 + 2**-12
    decoder = wrap(model)
    assert decoder.lean is not None
    dtypes = [layer.down.dtype for layer in decoder.lean.layers]
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]
    plain = wrap(build("llama", False, exact=False))
    assert plain.weights_bytes == 4 * plain.weights


def test_a_changed_module_gets_its_float32_weights_back() -> None:
    model = build("llama", True, exact=True)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda hidden: 2 * plain(hidden)
    tokens = torch.randint(0, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        truth = model(input_ids=tokens, use_cache=False).logits
    decoder = wrap(model)
    assert decoder.lean is None
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert decoder.weights_bytes == 4 * decoder.weights
    assert float((in_chunks(decoder, tokens) - truth).abs().max()) < 1e-4
