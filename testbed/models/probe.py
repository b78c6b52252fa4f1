"""Finds out at load what a model's attention is, and that the testbed can stand in for it.

One token through the model with a recorder as attention shows, per layer, the heads, the scale and the window
that transformers itself would use. Then a few tokens, in two chunks, with plain dense attention must give the
logits that the model gave before it was touched: what the recorder cannot see (state across tokens, another mask,
positions that are ignored) is found there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from testbed.models.base import Decoder, Geometry, ModelError
from testbed.models.interface import ADAPTERS, bloom_slopes, handling

SUPPORTED = (
    "supported are causal decoders whose every layer is softmax attention through transformers' attention interface "
    "(llama, mistral, qwen2, qwen3, gemma3, phi3, gpt2, gpt_neox, ...) or an adapter "
    f"({', '.join(ADAPTERS)}), with keys and values of one size, a full or a sliding causal window, RoPE, learned "
    "positions or ALiBi; not: encoders, encoder-decoders, recurrent or linear attention, latent attention (MLA), "
    "attention sinks, soft-capped scores"
)
_LAYER_TYPES = {"full_attention", "sliding_attention", "global", "local"}
_REFUSED_OPTIONS = {"softcap": "soft-capped attention scores", "s_aux": "learned attention sinks"}
_PROBE_TOKENS = (1, 2, 3, 5)
_FIRST_CHUNK_TOKENS = 3


def refuse(name: str, reason: str) -> ModelError:
    """The one error for a model that is of another kind."""
    return ModelError(f"model {name}: {reason}; {SUPPORTED}")


@dataclass(frozen=True)
class _Call:
    """What one layer handed over."""

    module: nn.Module
    shapes: tuple[torch.Size, torch.Size, torch.Size]
    masked: bool
    options: Mapping[str, Any]


def record(run: Callable[[], object]) -> list[_Call]:
    """Runs one token through a switched model and lists the attention calls in order."""
    calls: list[_Call] = []

    def recorder(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        calls.append(_Call(module, (q.shape, k.shape, v.shape), mask is not None, dict(options)))
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # a single token attends to itself alone

    with handling(recorder):
        run()
    return calls


def geometry(name: str, config: Any, calls: list[_Call], vocab: int) -> Geometry:
    """The geometry that the recorded calls show; each layer's module learns its index.

    Raises:
        ModelError: attention of a kind that is not supported.
    """
    layers = config.num_hidden_layers
    if len(calls) != layers or len({id(call.module) for call in calls}) != layers:
        raise refuse(name, f"{len(calls)} attention calls for {layers} layers of type {config.model_type!r}")
    windows, scales = [], []
    for layer, (call, expected) in enumerate(zip(calls, _configured_windows(name, config), strict=True)):
        _check_call(name, layer, call, calls[0])
        window = call.options.get("sliding_window", expected) or 0
        if expected is not None and window != expected:
            raise refuse(name, f"layer {layer} uses a window of {window} tokens, its configuration says {expected}")
        windows.append(window)
        scale = call.options.get("scaling")
        scales.append(float(scale) if scale is not None else call.shapes[0][-1] ** -0.5)
        # Read back at every call: the order of calls is the index, whatever the model's own name for it.
        call.module.testbed_layer = layer  # pyright: ignore[reportArgumentType]
    query_shape, key_shape, _ = calls[0].shapes
    return Geometry(
        layers=layers,
        query_heads=query_shape[1],
        kv_heads=key_shape[1],
        head_dim=query_shape[3],
        vocab=vocab,
        max_context_tokens=getattr(config, "max_position_embeddings", None),
        window_tokens=tuple(windows),
        scale=tuple(scales),
        slopes=bloom_slopes(query_shape[1]) if config.model_type == "bloom" else None,
    )


def _check_call(name: str, layer: int, call: _Call, first: _Call) -> None:
    query, key, value = call.shapes
    for option, what in _REFUSED_OPTIONS.items():
        if call.options.get(option) is not None:
            raise refuse(name, f"layer {layer} has {what}")
    for option, given in call.options.items():
        if isinstance(given, Tensor) and option not in {"position_ids", "cache_position"}:
            raise refuse(name, f"layer {layer} hands attention a tensor {option!r} that is not understood")
    if not getattr(call.module, "is_causal", True):
        raise refuse(name, f"layer {layer} is not causal")
    if call.masked:
        raise refuse(name, f"layer {layer} brings a mask or bias of its own")
    if not query[-1] == key[-1] == value[-1]:
        raise refuse(name, f"layer {layer} has queries, keys and values of sizes {query[-1]}, {key[-1]}, {value[-1]}")
    if call.shapes != first.shapes:
        raise refuse(name, f"layer {layer} has other heads than layer 0")


def _configured_windows(name: str, config: Any) -> list[int | None]:
    """Per layer, the window the configuration names; None where it does not say."""
    layers = config.num_hidden_layers
    types = getattr(config, "layer_types", None)
    if types is None:
        return [None] * layers
    unknown = set(types) - _LAYER_TYPES
    if unknown:
        raise refuse(name, f"layers of type {', '.join(sorted(map(str, unknown)))}")
    window = getattr(config, "sliding_window", None) or 0
    return [window if kind in {"sliding_attention", "local"} else 0 for kind in types]


class Dense:
    """Plain attention over everything seen so far; the truth of small tests, not a cache to decode with.

    Keeps keys and values of every layer in the decoder's dtype and computes in float32 with a full mask.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The `Attend` of the contract."""
        geometry = self.geometry
        if layer in self.keys:
            k, v = torch.cat((self.keys[layer], k), 2), torch.cat((self.values[layer], v), 2)
        self.keys[layer], self.values[layer] = k, v
        batch, heads, new, size = q.shape
        total = k.shape[2]
        grouped = q.float().reshape(batch, geometry.kv_heads, geometry.group, new, size)
        score = torch.einsum("bhgtd,bhsd->bhgts", grouped, k.float()) * geometry.scale[layer]
        age = torch.arange(total - new, total, device=q.device)[:, None] - torch.arange(total, device=q.device)
        if geometry.slopes is not None:
            slopes = geometry.slopes.to(q.device).view(geometry.kv_heads, geometry.group, 1, 1)
            score = score - slopes * age
        window = geometry.window_tokens[layer] or total
        score = score.masked_fill((age < 0) | (age >= window), float("-inf"))
        out = torch.einsum("bhgts,bhsd->bhgtd", score.softmax(-1), v.float())
        return out.reshape(batch, heads, new, size).to(q.dtype)


def probe_tokens(vocab: int, device: torch.device) -> Tensor:
    """[1, T] int64 tokens that any vocabulary has."""
    return torch.tensor([_PROBE_TOKENS], device=device) % vocab


def error(decoder: Decoder, tokens: Tensor, truth: Tensor) -> str | None:
    """Runs `tokens` [1, T] in two chunks with dense attention; None if that gives the untouched model's logits.

    Args:
        decoder: who is tried.
        tokens: of `probe_tokens`.
        truth: [1, T, V], what transformers itself answers, in the model's dtype.

    Returns:
        What is wrong, or None.
    """
    dense = Dense(decoder.geometry)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    first, rest = slice(0, _FIRST_CHUNK_TOKENS), slice(_FIRST_CHUNK_TOKENS, None)
    start = decoder.forward(tokens[:, first], positions[:, first], dense, "all")
    end = decoder.forward(tokens[:, rest], positions[:, rest], dense, "last")
    assert start is not None
    assert end is not None
    ours = torch.cat((start, end), 1)
    if ours.shape != truth.shape:
        return f"logits of shape {tuple(ours.shape)}, transformers' own are {tuple(truth.shape)}"
    spread = float(truth.float().std()) or 1.0
    rms = float((ours - truth.float()).square().mean().sqrt()) / spread
    # Rounding in half precision reaches 0.1; a lost token or a wrong position 0.8 and more.
    tolerance = 1e-3 if truth.dtype == torch.float32 else 0.3
    if rms <= tolerance:
        return None
    return f"logits in chunks differ from transformers' own by {rms:.2g} standard deviations of the logits"
