"""Choosing the next token: greedy, or sampled from a seeded generator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Sampler = Callable[[Tensor], int]
"""Logits [V] to a token."""


def greedy(logits: Tensor) -> int:
    """The most likely token, the lowest id among equals."""
    return int(logits.argmax())


def sampled(temperature: float, top_p: float = 1.0, seed: int = 0) -> Sampler:
    """Nucleus sampling (Holtzman et al. 2020, arXiv 1904.09751).

    Args:
        temperature: above 0.
        top_p: probability mass of the tokens drawn from, in (0, 1].
        seed: of the generator; the same seed draws the same tokens.

    Raises:
        ValueError: a value out of its range.
    """
    if not temperature > 0.0 or temperature == float("inf"):
        raise ValueError(f"temperature={temperature!r}: must be finite and above 0")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p={top_p!r}: must be in (0, 1]")
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: Tensor) -> int:
        p, token = (logits.float().cpu() / temperature).softmax(-1).sort(descending=True, stable=True)
        p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)
        return int(token[torch.multinomial(p, 1, generator=generator)])

    return draw
