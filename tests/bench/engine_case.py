"""The contenders of the engine's benchmarks: transformers' own decoding and ours, same weights, same threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from testbed.assets import model_path
from testbed.models.base import Decoder
from testbed.workloads.haystack import documents


def context(decoder: Decoder, tokens: int) -> list[int]:
    """The first tokens of the essays."""
    texts = documents(None).values()
    found: list[int] = []
    for piece in map(decoder.encode, texts):
        found += piece
        if len(found) >= tokens:
            return found[:tokens]
    raise AssertionError(f"the essays have {len(found)} tokens, {tokens} are needed")


@dataclass
class Transformers:
    """SmolLM2 as transformers runs it: sdpa, `DynamicCache`, float32.

    Decoding is the bare forward loop that `generate` runs inside, without its logits processors and stopping rules,
    which makes it the faster of the two. Logits are computed for the last token only, as `generate` does.
    """

    model: Any = None
    cache: Any = None
    token: Tensor = field(default_factory=lambda: torch.zeros(1, 1, dtype=torch.long))

    def __post_init__(self) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        path = model_path("smollm2")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        self.model = model.eval().requires_grad_(False)
        # Renamed from `past_key_values` in transformers 5.2x.
        self._keyword = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> float:
        """Seconds of one forward over the context into a new cache."""
        from transformers import DynamicCache

        ids = torch.tensor([list(tokens)])
        self.cache = DynamicCache(config=self.model.config)
        started = time.perf_counter()
        self._forward(ids)
        return time.perf_counter() - started

    @torch.inference_mode()
    def step(self) -> float:
        """Seconds of the next greedy token."""
        started = time.perf_counter()
        self._forward(self.token)
        return time.perf_counter() - started

    def _forward(self, ids: Tensor) -> None:
        out = self.model(ids, use_cache=True, logits_to_keep=1, **{self._keyword: self.cache})
        self.token = out.logits[:, -1].argmax(-1, keepdim=True)
