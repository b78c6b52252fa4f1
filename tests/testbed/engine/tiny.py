"""Tiny random models, sessions on them, and Hugging Face's own answers to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from policies.base import Policy
from testbed.cache.layout import CacheConfig
from testbed.engine.prefill import prefill
from testbed.engine.session import Session, SessionConfig
from testbed.engine.signals import SignalContext
from testbed.models import wrap
from testbed.models.hf import HfDecoder

VOCAB = 97
WINDOW = 40
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 640,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
MHA = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**SMALL),
    "mistral": lambda: tf.MistralConfig(**SMALL, sliding_window=WINDOW),
    "qwen2": lambda: tf.Qwen2Config(**SMALL),
    "qwen3": lambda: tf.Qwen3Config(**SMALL, head_dim=16),
    "gpt2": lambda: tf.GPT2Config(vocab_size=VOCAB, n_embd=96, n_layer=3, n_head=6, n_positions=640),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**MHA, rotary_pct=0.25),
    "bloom": lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=96, n_layer=3, n_head=6),
}
CACHE = {"dtype": "float32", "sink_tokens": 16, "hot_tokens": 32, "slab_pages": 4}


def text(tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def hugging_face(kind: str) -> Any:
    """A random model with weights large enough that attention is far from uniform, as transformers runs it."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(MODELS[kind](), attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) * 1.5 / math.sqrt(weight.shape[-1]))
    return model


@cache
def decoder(kind: str = "llama") -> HfDecoder:
    return wrap(hugging_face(kind), name=f"tiny-{kind}")


@torch.inference_mode()
def truth(kind: str, tokens: list[int]) -> Tensor:
    """Logits [T, V] of the whole text at once, without a cache, by transformers alone."""
    return hugging_face(kind)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def measures() -> Mapping[str, Tensor]:
    """A head map of a model that nobody calibrated."""
    generator = torch.Generator().manual_seed(5)
    names = ("retrieval_score", "head_entropy", "head_local_ratio", "head_long_range")
    return {name: torch.rand(3, 2, generator=generator) for name in names}


@dataclass(frozen=True)
class Run:
    """How a session is made."""

    kind: str = "llama"
    fraction: float | None = None
    kernel: str | None = None
    seed: int = 0
    chunk_tokens: int = 37
    cache: Mapping[str, Any] | None = None

    def start(self, policy: Policy, context: list[int]) -> Session:
        """A session that has compressed the context."""
        config = CacheConfig(**CACHE | dict(self.cache or {}))
        settings = SessionConfig(config, self.fraction, self.kernel, self.seed)
        session = Session(
            decoder(self.kind), policy, settings, SignalContext(config.page_tokens, measures, decoder(self.kind))
        )
        sources = list(session.sources.values())
        dense = prefill(decoder(self.kind), context, config.torch_dtype, sources, self.chunk_tokens)
        session.start(dense)
        return session


def decode(session: Session, tokens: list[int]) -> Tensor:
    """Logits [T, V] of given tokens, one step each."""
    return torch.stack([session.step(token) for token in tokens])
