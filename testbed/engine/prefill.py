"""Chunked prefill: the context runs once, in bounded memory, into plain per-layer tensors.

No T x T matrix and no repeated heads: each chunk attends to what is before it and to itself
(`kernels.prefill.chunk_attention`). The result is what every policy starts from, so policies that are compared
share one prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.prefill import chunk_attention
from testbed.engine.signals import PrefillChunk, PrefillWatcher
from testbed.models.base import Decoder

Progress = Callable[[int], None]


class ContextError(ValueError):
    """A context the model can't take."""


@dataclass
class DenseKV:
    """A prefilled context.

    Attributes:
        keys, values: per layer [Hk, T, D], cache dtype, already rotated.
        tokens: [T] int64.
        chunk_tokens: tokens that were run at once; the same chunks give the same bits again.
    """

    keys: list[Tensor]
    values: list[Tensor]
    tokens: Tensor
    chunk_tokens: int = 512

    @property
    def length_tokens(self) -> int:
        """T."""
        return len(self.tokens)


def check_length(decoder: Decoder, context_tokens: int, more_tokens: int = 0) -> None:
    """Raises ContextError if context and answer together are empty or beyond the model's limit."""
    limit = decoder.geometry.max_context_tokens
    if context_tokens < 1:
        raise ContextError("the context is empty: give at least one token of text")
    if limit is not None and context_tokens + more_tokens > limit:
        raise ContextError(
            f"context of {context_tokens} tokens + {more_tokens} for question and answer is beyond the limit of "
            f"{limit} tokens of model {decoder.name}"
        )


@torch.inference_mode()
def prefill(
    decoder: Decoder,
    tokens: Sequence[int],
    dtype: torch.dtype,
    watchers: Sequence[PrefillWatcher] = (),
    chunk_tokens: int = 512,
    progress: Progress = lambda done: None,
) -> DenseKV:
    """Runs a context through the model, chunk by chunk.

    Args:
        decoder: the model.
        tokens: the context.
        dtype: of the keys and values kept.
        watchers: signal sources, measurements.
        chunk_tokens: tokens run at once; bounds activations.
        progress: called with the tokens done since the last call.

    Raises:
        ContextError: empty, or longer than the model's limit.
    """
    check_length(decoder, len(tokens))
    geometry, device = decoder.geometry, decoder.device
    total = len(tokens)
    ids = torch.tensor(list(tokens), dtype=torch.long, device=device)
    shape = (geometry.kv_heads, total, geometry.head_dim)
    keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(geometry.layers)]
    values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(geometry.layers)]
    start = 0
    hidden: list[Tensor] = []  # of the running layer

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stop = start + k.shape[2]
        keys[layer][:, start:stop], values[layer][:, start:stop] = k[0], v[0]
        past_k, past_v = (side[layer][:, :stop].to(q.dtype) for side in (keys, values))
        out, lse = chunk_attention(
            q[0],
            past_k,
            past_v,
            scale=geometry.scale[layer],
            window_tokens=geometry.window_tokens[layer],
            slopes=geometry.slopes,
        )
        if watchers:
            chunk = PrefillChunk(layer, q[0], lse, past_k, start, total, geometry, past_v, hidden[0][0])
            for watcher in watchers:
                watcher.watch_prefill(chunk)
        return out.unsqueeze(0).to(q.dtype)

    def look(layer: int, given: Tensor) -> None:
        hidden[:] = [given]

    for start in range(0, total, chunk_tokens):
        part = ids[start : start + chunk_tokens].unsqueeze(0)
        positions = torch.arange(start, start + part.shape[1], device=device).unsqueeze(0)
        decoder.forward(part, positions, attend, "none", look if watchers else None)
        progress(part.shape[1])
    return DenseKV(keys, values, ids, chunk_tokens)
