"""Mass that some positions put on some spans: copying a needle, repeating, matching brackets, following instructions.

After the retrieval score of Wu et al. 2024 (arXiv 2404.15574), with mass in place of the most attended token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from testbed.engine.signals.base import PrefillChunk, Source
from testbed.heads.measures.rows import BLOCK_ROWS, attention_rows
from testbed.heads.texts import Asking


class SpanMass(Source):
    """Watches one prefill; `mass` and `share` afterwards.

    Args:
        layers, kv_heads, group: L, Hk, G.
        asking: which rows count, and on which spans their mass is counted.
    """

    def __init__(self, layers: int, kv_heads: int, group: int, asking: Asking) -> None:
        self._rows = torch.tensor(asking.rows)
        self._spans = asking.spans
        self._sums = torch.zeros(layers, kv_heads, group)

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """Adds the rows inside this chunk."""
        inside = (self._rows >= chunk.start) & (self._rows < chunk.start + chunk.q.shape[1])
        for at in inside.nonzero().flatten().split(BLOCK_ROWS) if bool(inside.any()) else ():
            rows = self._rows[at]
            p = attention_rows(chunk, (rows - chunk.start).to(chunk.q.device))
            counted = self._counted(at, p.shape[-1]).to(p.device)
            self._sums[chunk.layer] += torch.einsum("hgrt,rt->hg", p, counted).cpu()

    def _counted(self, at: Tensor, keys: int) -> Tensor:
        """[R, K] float, 1 on the spans of each row."""
        out = torch.zeros(len(at), keys)
        for row, index in enumerate(at.tolist()):
            for begin, end in self._spans[index]:
                out[row, begin:end] = 1
        return out

    @property
    def mass(self) -> Tensor:
        """[L, Hk, G] in [0, 1], mean over the rows."""
        return self._sums / len(self._rows)

    @property
    def share(self) -> float:
        """Mean share of a row's tokens that are in its spans: the mass of a head that attends to all alike."""
        tokens = [sum(end - begin for begin, end in spans) for spans in self._spans]
        return float((torch.tensor(tokens) / (self._rows + 1.0)).mean())

    @property
    def ratio(self) -> Tensor:
        """[L, Hk, G], mass as a multiple of that share."""
        return self.mass / self.share
