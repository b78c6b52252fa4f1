"""Attention of a text's last tokens over its context, in full and cut down to sinks and a window.

As the testbed compresses: the context is prefilled once under full attention and the question unseen; what a head
keeps of it matters for the tokens that come after. So the context's keys and values are the full cache's, and only the
rows of the rest (question and answer, or the end of a text) see less.

    text = cut(decoder, tokens, context_tokens, asking)
    rows = Rows(text, decoder.geometry, sink_tokens=4, window_tokens=128)
    logits = decoder.forward(text.rest, text.positions, rows.full, "all")
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from testbed.engine import divergence
from testbed.engine.prefill import ContextError, prefill
from testbed.heads.calibration import CalibrationConfig, CalibrationError
from testbed.heads.texts import CalibrationText, texts
from testbed.models.base import Decoder, Geometry


@dataclass(frozen=True)
class Cut:
    """A text cut in two: a context that ran, and the rest that is run over it again and again.

    Attributes:
        keys, values: of the context, per layer [Hk, S, D] in the decoder's dtype.
        rest: [1, T] int64 tokens after the context.
        asking: [n] indices into the rest; the next token of each is asked for.
        right: [n] int64, those next tokens.
    """

    keys: list[Tensor]
    values: list[Tensor]
    rest: Tensor
    asking: Tensor
    right: Tensor

    @property
    def context_tokens(self) -> int:
        """S."""
        return self.keys[0].shape[1] if self.keys else 0

    @property
    def positions(self) -> Tensor:
        """[1, T] int64, absolute."""
        start, tokens = self.context_tokens, self.rest.shape[1]
        return torch.arange(start, start + tokens, device=self.rest.device).unsqueeze(0)


def cut(decoder: Decoder, tokens: Sequence[int], context_tokens: int, asking: Sequence[int]) -> Cut:
    """Prefills the context of a text.

    Args:
        decoder: the model.
        tokens: the whole text.
        context_tokens: S, of which the context is; 0 for none.
        asking: positions, none in the context and none the text's last, whose next token is asked for.

    Raises:
        ValueError: nothing asked, or outside of the rest.
        ContextError: longer than the model's limit.
    """
    if not asking or min(asking) < context_tokens or max(asking) >= len(tokens) - 1:
        raise ValueError(
            f"asking={list(asking)}: must be positions from context_tokens={context_tokens} to the last but one of "
            f"{len(tokens)}"
        )
    ids = torch.tensor(list(tokens), device=decoder.device)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    if context_tokens:
        context = prefill(decoder, tokens[:context_tokens], decoder.dtype)
        # Tensors made in inference mode can't be saved for a backward pass.
        keys, values = ([part.clone() for part in side] for side in (context.keys, context.values))
    at = torch.tensor(list(asking), device=decoder.device)
    return Cut(keys, values, ids[context_tokens:].unsqueeze(0), at - context_tokens, ids[at + 1])


def needle_texts(decoder: Decoder, config: CalibrationConfig) -> list[CalibrationText]:
    """The needle texts of a configuration, as the retrieval score's."""
    return [
        text
        for length in config.needle_lengths
        for text in texts("needle", decoder, length, config.needle_samples_per_cell, config.seed)
    ]


def cut_text(decoder: Decoder, text: CalibrationText, rows: int) -> Cut:
    """Cuts before the questions and asks for the answers; of a text without questions, asks for its last tokens.

    Args:
        decoder: the model.
        text: the text.
        rows: how many tokens of a text without questions.

    Raises:
        CalibrationError: the text is beyond the model's limit.
    """
    asking = text.asks.get("retrieval_score")
    last = len(text.tokens) - 1
    start = text.context_tokens if asking else max(0, last - rows)
    try:
        return cut(decoder, text.tokens, start, asking.rows if asking else range(start, last))
    except ContextError as error:
        raise CalibrationError(f"calibration: a text of task {text.task}: {error}") from error


class Rows:
    """Two `Attend`s over a cut text, differentiable, any number of sequences that share the context."""

    def __init__(self, text: Cut, geometry: Geometry, sink_tokens: int, window_tokens: int) -> None:
        """Both see what the model lets them see.

        Args:
            text: the text.
            geometry: the model's.
            sink_tokens: first tokens that a restricted head keeps.
            window_tokens: keys a restricted row sees besides, itself included.
        """
        self.text, self.geometry = text, geometry
        self.sink_tokens, self.window_tokens = sink_tokens, window_tokens
        self._biases: dict[tuple[int, bool], Tensor] = {}

    def full(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Everything, as the model does: q [B, Hq, T, D], k and v [B, Hk, T, D] of the rest -> [B, Hq, T, D]."""
        return self._attend(layer, q, *self.with_context(layer, k, v), self.bias(layer, restricted=False))

    def restricted(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Sinks and window only, every head."""
        return self._attend(layer, q, *self.with_context(layer, k, v), self.bias(layer, restricted=True))

    def both(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """`full` and `restricted`."""
        return self.full(layer, q, k, v), self.restricted(layer, q, k, v)

    def with_context(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of context and rest, [B, Hk, S + T, D] each."""
        if not self.text.keys:
            return k, v
        past = (side[layer].to(k.dtype).expand(len(k), -1, -1, -1) for side in (self.text.keys, self.text.values))
        past_k, past_v = past
        return torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)

    def bias(self, layer: int, restricted: bool) -> Tensor:
        """[1 or Hk, G * T, S + T] float32 to add to the scaled scores: 0 or ALiBi where a row sees, else -inf."""
        window = self.geometry.window_tokens[layer]
        if (window, restricted) not in self._biases:
            self._biases[window, restricted] = self._bias(window, restricted)
        return self._biases[window, restricted]

    def _bias(self, window: int, restricted: bool) -> Tensor:
        geometry = self.geometry
        query = self.text.positions[0, :, None]
        key = torch.arange(self.text.context_tokens + len(query), device=query.device)
        hidden = key > query
        if window:
            hidden = hidden | (key <= query - window)
        if restricted:
            hidden = hidden | ((key >= self.sink_tokens) & (key <= query - self.window_tokens))
        bias = torch.zeros(hidden.shape, device=query.device).masked_fill(hidden, -math.inf)
        if geometry.slopes is None:
            return bias.repeat(geometry.group, 1).unsqueeze(0)
        slopes = geometry.slopes.to(bias).view(geometry.kv_heads, geometry.group, 1, 1)
        return (bias + slopes * (key - query)).flatten(1, 2)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """The query group as rows, so that keys are not repeated."""
        packed = q.float().reshape(len(q), self.geometry.kv_heads, -1, q.shape[-1])
        scale = self.geometry.scale[layer]
        out = F.scaled_dot_product_attention(packed, k.float(), v.float(), attn_mask=bias.unsqueeze(0), scale=scale)
        return out.reshape(q.shape).to(q.dtype)


def kl_nats(full: Tensor, other: Tensor) -> Tensor:
    """KL(full || other) of logits [..., V]: [...] nats, not below 0."""
    return divergence.kl_nats(full.float().log_softmax(-1), other.float().log_softmax(-1)).clamp(min=0.0)


def loss_nats(logits: Tensor, right: Tensor) -> Tensor:
    """Negative log-likelihood of the right tokens [n] under logits [..., n, V]: [..., n] nats."""
    return -logits.float().log_softmax(-1).gather(-1, right.expand(logits.shape[:-1]).unsqueeze(-1)).squeeze(-1)
