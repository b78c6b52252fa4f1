"""The contract of a decoder: everything but attention. Whoever runs it supplies attention.

A decoder turns tokens into hidden states and logits. At every layer it hands the queries, keys and values of
the new tokens to an `Attend` and takes back the attended output: no cache, no mask, no repeated heads inside.

Letters: B sequences, L layers, Hq query heads, Hk KV heads, G = Hq / Hk, T new tokens, D head size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [B, Hq, T, D], k [B, Hk, T, D], v [B, Hk, T, D]) -> out [B, Hq, T, D], in the decoder's dtype.

q and k are already rotated at their absolute positions; q is not yet scaled (`Geometry.scale`). The tensors
may be views with any strides, valid during the call only: copy what must be kept. Once a layer, in order.
"""

Watch = Callable[[int, Tensor], None]
"""(layer, hidden [B, T, C]): what the layer's attention is about to be given, after its norm; once a layer."""

Logits = Literal["all", "last", "none"]


class ModelError(ValueError):
    """A model that can't be read, or whose attention is of a kind the testbed does not support."""


@dataclass(frozen=True)
class Geometry:
    """What attention must know about a model.

    Attributes:
        layers: L.
        query_heads: Hq.
        kv_heads: Hk; query head h reads KV head h // G.
        head_dim: D.
        vocab: V, the width of the logits.
        max_context_tokens: most positions the model was made for, None where it names no limit.
        window_tokens: per layer; a query at position p sees keys at positions > p - window (itself included);
            0 = all of them.
        scale: per layer, the factor on q.k before softmax.
        slopes: [Hq] float32, ALiBi (arXiv 2108.12409): slope * (key position - query position) is added to
            the scaled score; None = no bias.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context_tokens: int | None
    window_tokens: tuple[int, ...]
    scale: tuple[float, ...]
    slopes: Tensor | None = None

    def __post_init__(self) -> None:
        """Checks the numbers against each other."""
        for key in ("layers", "query_heads", "kv_heads", "head_dim", "vocab"):
            if getattr(self, key) < 1:
                raise ModelError(f"geometry.{key}={getattr(self, key)!r}: must be at least 1")
        if self.query_heads % self.kv_heads:
            raise ModelError(f"geometry.query_heads={self.query_heads}: must be a multiple of kv_heads={self.kv_heads}")
        for key in ("window_tokens", "scale"):
            if len(getattr(self, key)) != self.layers:
                raise ModelError(f"geometry.{key}: has {len(getattr(self, key))} entries, one a layer is {self.layers}")
        if min(self.window_tokens) < 0:
            raise ModelError(f"geometry.window_tokens={self.window_tokens}: 0 (no window) or more")
        if self.slopes is not None and self.slopes.shape != (self.query_heads,):
            raise ModelError(f"geometry.slopes: shape {tuple(self.slopes.shape)}, must be ({self.query_heads},)")

    @property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.query_heads // self.kv_heads

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token in all layers, in `dtype`."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


class Decoder(Protocol):
    """A causal language model without its attention; see `testbed.models.load` and `testbed.models.wrap`."""

    @property
    def name(self) -> str:
        """The model's name in records."""
        ...

    @property
    def geometry(self) -> Geometry:
        """What attention must know."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states, q, k and v."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    @property
    def weights(self) -> int:
        """Number of all parameters, tied ones once."""
        ...

    @property
    def weights_bytes(self) -> int:
        """Bytes that hold them and that a step reads; may be less than `weights` in `dtype` where that is exact."""
        ...

    @property
    def fingerprint(self) -> str:
        """Tells other weights of the same name: a hash over a sample of all of them, whatever they are kept in."""
        ...

    @property
    def batches(self) -> bool:
        """Whether rows of a batch get what each would get alone: bit for bit in float32."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a generation; empty if the model names none."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Token that begins a text, or None; `encode` does not add it."""
        ...

    @property
    def width(self) -> int:
        """C, the size of a hidden state."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of tokens [...] int64: [..., C] in the decoder's dtype, as the model looks them up."""
        ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        logits: Logits = "last",
        watch: Watch | None = None,
    ) -> Tensor | None:
        """Runs new tokens through all layers. Keeps nothing.

        Args:
            tokens: [B, T] int64.
            positions: [B, T] int64, absolute, increasing along T.
            attend: called once a layer, in order.
            logits: "all" [B, T, V], "last" [B, 1, V] of the last token only, "none".
            watch: shown the hidden states of every layer just before its `attend`.

        Returns:
            Logits, float32, or None.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, no special tokens added.

        Raises:
            ModelError: the model came without a tokenizer.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out.

        Raises:
            ModelError: the model came without a tokenizer.
        """
        ...
