"""Measures of attention heads, from the model's own attention on calibration text.

* `retrieval_score`: mass that the positions which produce a copied answer put on its source (after Wu et al. 2024,
  arXiv 2404.15574), maximum over the query group, mean over samples.
* `head_entropy`, `head_local_ratio`, `head_long_range`: row entropy (bits / log2 of the row's length), mass within the
  last `local_window_tokens` and beyond `long_range_tokens`, mean over rows, group and texts. Rows shorter than
  the long range are left out: their mass is near by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from testbed.engine.signals.base import PrefillChunk, Source

QUERY_BLOCK = 128  # rows of attention held at once


def attention_rows(chunk: PrefillChunk, rows: Tensor) -> Tensor:
    """Probabilities of some queries of a chunk over all keys so far: rows [R] -> [Hk, G, R, start + T] float32."""
    geometry = chunk.geometry
    q = chunk.q[:, rows].unflatten(0, (geometry.kv_heads, geometry.group)).float()
    logits = torch.einsum("hgrd,htd->hgrt", q, chunk.k.float()) * geometry.scale[chunk.layer]
    query = (chunk.start + rows).unsqueeze(1)
    key = torch.arange(chunk.k.shape[1], device=q.device).unsqueeze(0)
    if geometry.slopes is not None:
        slopes = geometry.slopes.view(geometry.kv_heads, geometry.group, 1, 1)
        logits = logits + slopes * key
    hidden = key > query
    window = geometry.window_tokens[chunk.layer]
    if window:
        hidden = hidden | (key <= query - window)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


class CopyMass(Source):
    """Watches one prefill of context, questions and answers; `score` afterwards.

    Args:
        layers, kv_heads: L, Hk.
        asking: positions whose next token is an answer token.
        sources: for each of them, [begin, end) of the text it copies from.
    """

    def __init__(self, layers: int, kv_heads: int, asking: Sequence[int], sources: Sequence[tuple[int, int]]) -> None:
        self.asking, self.sources = torch.tensor(list(asking)), torch.tensor(list(sources))
        self._mass: Tensor | None = None  # [L, Hk, G]
        self._shape = (layers, kv_heads)

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """Adds the asking positions inside this chunk."""
        here = (self.asking >= chunk.start) & (self.asking < chunk.start + chunk.q.shape[1])
        if not bool(here.any()):
            return
        p = attention_rows(chunk, (self.asking[here] - chunk.start).to(chunk.q.device)).cpu()
        key = torch.arange(p.shape[-1])
        span = self.sources[here]
        inside = (key >= span[:, :1]) & (key < span[:, 1:])
        if self._mass is None:
            self._mass = torch.zeros(*self._shape, p.shape[1])
        self._mass[chunk.layer] += (p * inside).sum((-2, -1)) / len(self.asking)

    @property
    def score(self) -> Tensor:
        """[L, Hk] in [0, 1], of the best head of each group."""
        return torch.zeros(self._shape) if self._mass is None else self._mass.amax(-1)


@dataclass
class _Sums:
    entropy: Tensor
    local: Tensor
    far: Tensor
    rows: int = 0


class Shape(Source):
    """Watches one prefill of plain text; `measures` afterwards."""

    def __init__(self, layers: int, kv_heads: int, local_window_tokens: int, long_range_tokens: int) -> None:
        self.local_window_tokens, self.long_range_tokens = local_window_tokens, long_range_tokens
        self._sums = [_Sums(torch.zeros(kv_heads), torch.zeros(kv_heads), torch.zeros(kv_heads)) for _ in range(layers)]

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """Adds all rows long enough, block by block."""
        first = min(max(0, self.long_range_tokens - chunk.start), chunk.q.shape[1])
        for rows in torch.arange(first, chunk.q.shape[1], device=chunk.q.device).split(QUERY_BLOCK):
            if len(rows):
                self._add(chunk, rows)

    def _add(self, chunk: PrefillChunk, rows: Tensor) -> None:
        p = attention_rows(chunk, rows)
        query = (chunk.start + rows).unsqueeze(1)
        distance = query - torch.arange(p.shape[-1], device=p.device)
        bits = -(p * p.clamp(min=1e-30).log2()).sum(-1) / (query.flatten() + 1.0).log2()
        sums = self._sums[chunk.layer]
        sums.entropy += bits.mean(1).sum(-1).cpu()
        sums.local += (p * (distance < self.local_window_tokens)).sum(-1).mean(1).sum(-1).cpu()
        sums.far += (p * (distance >= self.long_range_tokens)).sum(-1).mean(1).sum(-1).cpu()
        sums.rows += len(rows)

    def measures(self) -> dict[str, Tensor]:
        """Name -> [L, Hk] in [0, 1]."""
        names = {"head_entropy": "entropy", "head_local_ratio": "local", "head_long_range": "far"}
        return {
            name: torch.stack([getattr(sums, key) / max(sums.rows, 1) for sums in self._sums])
            for name, key in names.items()
        }
