"""A tiny llama with sharp attention, and its forward in float64 by transformers' own eager attention, head by head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from testbed.heads.headmap import HeadMap, Measured
from testbed.models import wrap
from testbed.models.hf import HfDecoder

L, HQ, HK, G, D, VOCAB = 3, 4, 2, 2, 8, 50


def build(seed: int = 0) -> Any:
    """transformers' own model; keys and queries are large, so that what a head sees matters."""
    torch.manual_seed(seed)
    config = tf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=L,
        num_attention_heads=HQ,
        num_key_value_heads=HK,
        intermediate_size=40,
        initializer_range=0.3,
    )
    model: Any = tf.LlamaForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    return model


def tiny(seed: int = 0) -> HfDecoder:
    """The same as a decoder."""
    return wrap(build(seed), name="tiny")


def tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def mask(count: int, first_row: int, sinks: int, window: int, heads: list[int]) -> Tensor:
    """[1, Hq, T, T] float64: causal; rows from `first_row` on of these KV heads see sinks and a window only."""
    out = torch.zeros(1, HQ, count, count, dtype=torch.float64)
    for head in range(HQ):
        for row in range(count):
            for key in range(count):
                cut = head // G in heads and row >= first_row and key >= sinks and key <= row - window
                if key > row or cut:
                    out[0, head, row, key] = -torch.inf
    return out


def oracle(ids: list[int], masks: Mapping[int, Tensor], seed: int = 0, **options: Any) -> Any:
    """Output of the float64 model with a mask of its own in some layers."""
    model = build(seed).double()
    plain = mask(len(ids), len(ids), 0, 0, [])
    for index, layer in enumerate(model.model.layers):
        given = masks.get(index, plain)
        layer.self_attn.register_forward_pre_hook(
            lambda _module, args, kwargs, given=given: (args, {**kwargs, "attention_mask": given}), with_kwargs=True
        )
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True, **options)


def model_words(folder: Path) -> list[str]:
    """What names a saved model to a command."""
    return ["model=hf", f"model.path={folder}", "model.name=tiny", "model.device=cpu"]


def trial_words(text: Path) -> list[str]:
    """The smallest trial of head maps that there is, on such a text."""
    sizes = ["trial.lengths=[150]", "trial.depths=[0.1]", "trial.contexts=1", "trial.texts=1", "trial.random_maps=19"]
    return ["threads=1", *sizes, f"trial.text={text}", "cache.hot_tokens=32"]


def scored_map(decoder: HfDecoder, *names: str) -> HeadMap:
    """A map whose measures rank the heads in order."""
    score = torch.arange(4.0).reshape(decoder.geometry.layers, decoder.geometry.kv_heads)
    measured = Measured(score, score, score, score, 1, "needle", "score")
    return HeadMap.of(decoder, dict.fromkeys(names, measured), {})
