"""Logits of every supported kind of decoder equal transformers' own; others are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from testbed.models import Geometry, ModelError, wrap
from testbed.models.hf import HfDecoder

VOCAB = 97
LONG_TOKENS = 40
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
MHA = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
GPT2 = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 128}

SUPPORTED: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**SMALL),
    "llama-head-dim": lambda: tf.LlamaConfig(**SMALL, head_dim=16),
    "mistral-full": lambda: tf.MistralConfig(**SMALL, sliding_window=None),
    "mistral-window": lambda: tf.MistralConfig(**SMALL, sliding_window=9),
    "qwen2": lambda: tf.Qwen2Config(**SMALL),
    "qwen2-window": lambda: tf.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": lambda: tf.Qwen3Config(**SMALL, head_dim=16),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **SMALL,
        head_dim=16,
        sliding_window=5,
        query_pre_attn_scalar=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": lambda: tf.Phi3Config(**SMALL, bos_token_id=1, eos_token_id=2),
    "gpt2": lambda: tf.GPT2Config(**GPT2),
    "gpt2-layer-scale": lambda: tf.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True),
    "gpt2-no-scale": lambda: tf.GPT2Config(**GPT2, scale_attn_weights=False),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**MHA, rotary_pct=0.25),
    "gpt_neo": lambda: tf.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        num_layers=2,
        num_heads=6,
        attention_types=[[["global", "local"], 1]],
        window_size=6,
        max_position_embeddings=128,
    ),
    "bloom": lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=48, n_layer=3, n_head=6),
    "opt": lambda: tf.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        ffn_dim=64,
        word_embed_proj_dim=48,
        max_position_embeddings=128,
    ),
}


def build(config: Any, seed: int = 0) -> Any:
    """A random model with weights large enough that attention is far from uniform."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) * 1.5 / math.sqrt(weight.shape[-1]))
    return model


class Loops:
    """Attention written out query by query and head by head: slow, plain, float64."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(geometry.layers)]
        self.order: list[int] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.order.append(layer)
        cache, first = self.seen[layer], len(self.seen[layer])
        cache += [(k[:, :, t].double().clone(), v[:, :, t].double().clone()) for t in range(k.shape[2])]
        out = torch.zeros(q.shape, dtype=torch.float64)
        for t in range(q.shape[2]):
            for head in range(q.shape[1]):
                out[:, head, t] = self.one(layer, head, first + t, q[:, head, t].double())
        return out.to(q.dtype)

    def one(self, layer: int, head: int, position: int, q: Tensor) -> Tensor:
        geometry = self.geometry
        window = geometry.window_tokens[layer]
        start = max(0, position - window + 1) if window else 0
        pairs = self.seen[layer][start : position + 1]
        group = head // (geometry.query_heads // geometry.kv_heads)
        keys = torch.stack([k[:, group] for k, _ in pairs], 1)
        values = torch.stack([v[:, group] for _, v in pairs], 1)
        score = (keys * q[:, None]).sum(-1) * geometry.scale[layer]
        if geometry.slopes is not None:
            distance = torch.arange(start, position + 1) - position
            score = score + geometry.slopes[head].double() * distance
        return (score.softmax(-1)[..., None] * values).sum(1)


def in_chunks(decoder: HfDecoder, tokens: Tensor, attend: Loops, edges: list[int]) -> Tensor:
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    parts = []
    for start, end in zip(edges, edges[1:], strict=False):
        logits = decoder.forward(tokens[:, start:end], positions[:, start:end], attend, "all")
        assert logits is not None
        parts.append(logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_logits_equal_transformers_prefilled_in_chunks_then_token_by_token(kind: str) -> None:
    model = build(SUPPORTED[kind]())
    tokens = torch.randint(0, VOCAB, (2, LONG_TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        truth = model(input_ids=tokens, use_cache=False).logits
    assert truth.std() > 0.1  # logits worth comparing
    decoder = wrap(model)
    edges = [0, 17, 30, *range(31, LONG_TOKENS + 1)]
    assert (decoder.lean is not None) == kind.startswith(("llama", "mistral", "qwen"))
    for lean in {decoder.lean, None}:
        decoder.lean = lean
        attend = Loops(decoder.geometry)
        ours = in_chunks(decoder, tokens, attend, edges)
        assert ours.dtype == torch.float32
        assert float((ours - truth).abs().max()) < 1e-4
        assert attend.order == list(range(decoder.geometry.layers)) * (len(edges) - 1)


def test_window_and_scale_are_read_per_layer() -> None:
    geometry = {kind: wrap(build(SUPPORTED[kind]())).geometry for kind in ("qwen2-window", "gemma3", "gpt_neo")}
    assert geometry["qwen2-window"].window_tokens == (0, 7, 7)
    assert geometry["gemma3"].window_tokens == (5, 0, 5)
    assert geometry["gpt_neo"].window_tokens == (0, 6)
    assert geometry["gemma3"].scale == pytest.approx((20**-0.5,) * 3)
    assert geometry["gpt_neo"].scale == (1.0, 1.0)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_last_and_none_compute_no_more_than_asked(kind: str) -> None:
    decoder = wrap(build(SUPPORTED[kind]()))
    tokens, positions = torch.arange(8)[None], torch.arange(8)[None]
    rows: list[int] = []
    handle = decoder.model.lm_head.register_forward_pre_hook(lambda _m, args: rows.append(args[0].shape[1]))
    every = decoder.forward(tokens, positions, Loops(decoder.geometry), "all")
    last = decoder.forward(tokens, positions, Loops(decoder.geometry), "last")
    none = decoder.forward(tokens, positions, Loops(decoder.geometry), "none")
    handle.remove()
    assert every is not None and last is not None and none is None  # noqa: PT018
    assert rows == [8, 1]
    assert torch.allclose(last[:, 0], every[:, -1], atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "mistral-window", "gemma3", "bloom", "gpt2"])
def test_no_square_tensor_and_no_repeated_head_is_made(kind: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    decoder = wrap(build(SUPPORTED[kind]()))
    tokens_count = 61  # prime: no product of the model's sizes
    shapes: list[tuple[int, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                shapes.append(tuple(out.shape))
            return out

    tokens = torch.arange(tokens_count)[None]
    heads: set[int] = set()

    def attend(_layer: int, q: Tensor, k: Tensor, _v: Tensor) -> Tensor:
        heads.add(k.shape[1])
        return q

    with Watch():
        decoder.forward(tokens, tokens, attend, "last")
    assert shapes
    assert not [shape for shape in shapes if shape.count(tokens_count) > 1]
    assert heads == {decoder.geometry.kv_heads}


def test_two_models_do_not_share_state() -> None:
    first, second = (wrap(build(SUPPORTED["llama"](), seed)) for seed in (0, 1))
    tokens = torch.arange(5)[None]
    inner: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer == 1:
            logits = second.forward(tokens, tokens, Loops(second.geometry), "last")
            assert logits is not None
            inner.append(logits)
        return alone(layer, q, k, v)

    alone = Loops(first.geometry)
    nested = first.forward(tokens, tokens, attend, "last")
    plain = first.forward(tokens, tokens, Loops(first.geometry), "last")
    expected = second.forward(tokens, tokens, Loops(second.geometry), "last")
    assert nested is not None and plain is not None and expected is not None  # noqa: PT018
    assert torch.equal(nested, plain)
    assert torch.equal(inner[0], expected)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "t5": (
        lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        "encoder-decoder",
    ),
    "bert": (
        lambda: build(
            tf.BertConfig(
                vocab_size=VOCAB,
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=16,
            )
        ),
        "not causal",
    ),
    "mamba": (
        lambda: build(tf.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)),
        "0 attention calls for 1 layers",
    ),
    "rwkv": (
        lambda: build(tf.RwkvConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16)),
        "0 attention calls for 2 layers",
    ),
    "gemma2": (lambda: build(tf.Gemma2Config(**SMALL, head_dim=16)), "soft-capped"),
    "gpt_oss": (
        lambda: build(tf.GptOssConfig(**SMALL, head_dim=16, num_local_experts=2, num_experts_per_tok=1)),
        "sinks",
    ),
    "mla": (
        lambda: build(
            tf.DeepseekV3Config(
                **{**SMALL, "num_key_value_heads": 6},
                q_lora_rank=8,
                kv_lora_rank=8,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=12,
                first_k_dense_replace=3,
            )
        ),
        "sizes 16, 16, 12",
    ),
    "falcon-alibi": (
        lambda: build(tf.FalconConfig(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, num_attention_heads=6)),
        "0 attention calls for 2 layers",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_kinds_are_refused_with_what_is_supported(kind: str) -> None:
    make, reason = REFUSED[kind]
    with pytest.raises(ModelError) as caught:
        wrap(make(), name="mine")
    message = str(caught.value)
    assert "model mine" in message
    assert reason in message
    assert "supported are causal decoders" in message


def test_a_model_that_mixes_tokens_outside_attention_is_refused() -> None:
    model = build(SUPPORTED["llama"]())
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda hidden: plain(hidden + hidden.roll(1, dims=1))
    with pytest.raises(ModelError, match="differ from transformers' own"):
        wrap(model)
