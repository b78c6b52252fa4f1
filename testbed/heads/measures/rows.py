"""Attention probabilities of some queries of a prefill, the only place where they exist as a matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from testbed.engine.signals.base import PrefillChunk

BLOCK_ROWS = 128  # of attention held at once


def attention_rows(chunk: PrefillChunk, rows: Tensor, first_key: int = 0) -> Tensor:
    """Probabilities of some queries of a chunk over the keys that the last of them sees.

    Args:
        chunk: one layer of a prefill.
        rows: [R] ascending indices into the chunk's queries.
        first_key: keys before it are left out, and the rows are shares of what is left.

    Returns:
        [Hk, G, R, K] float32, K = start + rows[-1] + 1 - first_key.
    """
    geometry = chunk.geometry
    end = chunk.start + int(rows[-1]) + 1
    q = chunk.q[:, rows].unflatten(0, (geometry.kv_heads, geometry.group)).float() * geometry.scale[chunk.layer]
    k = chunk.k[:, first_key:end].float()
    logits = (q.flatten(1, 2) @ k.mT).unflatten(1, (geometry.group, len(rows)))
    query = (chunk.start + rows).unsqueeze(1)
    key = torch.arange(first_key, end, device=q.device).unsqueeze(0)
    if geometry.slopes is not None:
        logits += geometry.slopes.to(q.device).view(geometry.kv_heads, geometry.group, 1, 1) * key
    hidden = key > query
    window = geometry.window_tokens[chunk.layer]
    if window:
        hidden = hidden | (key <= query - window)
    return logits.masked_fill_(hidden, -torch.inf).softmax(-1)


def row_blocks(first: int, total: int, rows: int) -> Iterator[tuple[int, int]]:
    """Blocks [begin, end) of rows to look at: all of them if they are few, else every k-th, counted from the end.

    Args:
        first: the first row that may be looked at.
        total: rows of the text.
        rows: about how many to look at, at most; one block at least.
    """
    blocks = [
        (max(first, begin), min(begin + BLOCK_ROWS, total))
        for begin in range(first // BLOCK_ROWS * BLOCK_ROWS, total, BLOCK_ROWS)
    ]
    step = -(-len(blocks) // max(1, rows // BLOCK_ROWS))
    yield from blocks[(len(blocks) - 1) % step :: step] if blocks else ()
