"""Prefix shift: how much an unrelated text in front changes where a head looks within the text behind it.

RedKnot (51b1737, `head_profiler.py`) takes 1 - cosine of the two attention matrices of the text, alone and behind the
prefix, clamped to [0, 1]. `head_prefix_shift_published` is that. `head_prefix_shift` mends two faults: rows behind the
prefix are made to sum to 1 again after the prefix is cut off, and tokens that the tokenizer writes differently at the
seam are left out (what both tokenisations end with is compared), instead of being found by the difference in length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from testbed.engine.signals.base import PrefillChunk, Source
from testbed.heads.calibration import CalibrationError
from testbed.heads.measures.rows import BLOCK_ROWS, attention_rows

NAMES = ("head_prefix_shift", "head_prefix_shift_published")


class Kept(Source):
    """Keeps queries and keys of the text alone: 2 bytes or 4 for each of T x (Hq + Hk) x D numbers a layer."""

    def __init__(self, layers: int) -> None:
        self._queries: list[list[Tensor]] = [[] for _ in range(layers)]
        self._last: list[PrefillChunk | None] = [None] * layers

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """Keeps a chunk."""
        self._queries[chunk.layer].append(chunk.q.clone())
        self._last[chunk.layer] = chunk

    def whole(self, layer: int) -> PrefillChunk:
        """One layer of the whole text as one chunk."""
        last = self._last[layer]
        assert last is not None
        q = torch.cat(self._queries[layer], 1)
        return PrefillChunk(layer, q, last.lse, last.k, 0, last.total, last.geometry)


class Shift(Source):
    """Watches the prefill of prefix and text together; `measures` afterwards.

    Args:
        alone: layer by layer, the text alone.
        behind_tokens: how far behind its own place the text stands here.
        seam_tokens: tokens at the text's beginning that are written differently here.
    """

    def __init__(self, alone: Sequence[PrefillChunk], behind_tokens: int, seam_tokens: int) -> None:
        self._alone, self._behind, self._seam = alone, behind_tokens, seam_tokens
        geometry = alone[0].geometry
        # Of corrected and published: products of the two matrices, squares of the first, of the second.
        self._sums = torch.zeros(2, 3, geometry.layers, geometry.kv_heads, geometry.group, dtype=torch.float64)

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """Adds the text's rows inside this chunk."""
        stop = chunk.start + chunk.q.shape[1]
        for begin in range(max(self._behind, chunk.start), stop, BLOCK_ROWS):
            self._add(chunk, torch.arange(begin, min(begin + BLOCK_ROWS, stop), device=chunk.q.device))

    def _add(self, chunk: PrefillChunk, rows: Tensor) -> None:
        """Adds rows at these positions of prefix and text."""
        alone, here, own = self._alone[chunk.layer], rows - chunk.start, rows - self._behind
        published = attention_rows(alone, own), attention_rows(chunk, here)[..., self._behind :]
        self._count(1, chunk.layer, *published)
        late = own >= self._seam
        if bool(late.any()):
            first = attention_rows(alone, own[late], self._seam)
            self._count(0, chunk.layer, first, attention_rows(chunk, here[late], self._behind + self._seam))

    def _count(self, which: int, layer: int, a: Tensor, b: Tensor) -> None:
        for at, (x, y) in enumerate(((a, b), (a, a), (b, b))):
            self._sums[which, at, layer] += (x * y).sum((-2, -1)).double().cpu()

    def measures(self) -> dict[str, Tensor]:
        """Name -> [L, Hk, G] in [0, 1]."""
        shift = (1 - self._sums[:, 0] / (self._sums[:, 1] * self._sums[:, 2]).sqrt()).clamp(0, 1).float()
        return dict(zip(NAMES, shift, strict=True))


def seam(text: Sequence[int], joined: Sequence[int]) -> tuple[int, int]:
    """Where a text stands behind a prefix, found by the tokens that both end with.

    Args:
        text: token ids of the text alone.
        joined: token ids of prefix and text.

    Returns:
        How far behind its own place the text stands, and how many of its first tokens are written differently.

    Raises:
        CalibrationError: they end differently, or nothing is left of the prefix.
    """
    same = 0
    while same < min(len(text), len(joined)) and text[-1 - same] == joined[-1 - same]:
        same += 1
    if not same or len(joined) <= len(text):
        raise CalibrationError(
            "prefix shift: the tokenizer leaves no common end of a text and the same text behind one"
        )
    return len(joined) - len(text), len(text) - same
