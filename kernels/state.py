"""The partial result of attention and its merge: the joint between splits, tiers, formats and devices.

o = sum_i o_i 2^(s_i - s), s = log2 sum_i 2^s_i: associative, commutative and exact (FlashInfer, cascade.cuh;
base 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Partial:
    """Normalised attention over some of the keys.

    Attributes:
        out: [S, G, T, D] float32; 0 where nothing is visible.
        lse: [S, G, T] float32, log-sum-exp in base 2; -inf where nothing is visible.
        mass: [S, N] float32 softmax mass of each table entry, mean over the G*T rows, or None.
    """

    out: Tensor
    lse: Tensor
    mass: Tensor | None = None


def merge(partials: Sequence[Partial]) -> Partial:
    """Attention over the union of disjoint key sets; mass is dropped, since tables differ.

    Args:
        partials: at least one, all of the same shapes; empty ones (lse -inf) count for nothing; a row that is
            NaN in one is NaN.

    Raises:
        ValueError: no partial at all.
    """
    if not partials:
        raise ValueError("merge of 0 partials: must be at least 1")
    if len(partials) == 1:
        return Partial(partials[0].out, partials[0].lse)
    lse = torch.stack([p.lse for p in partials])
    top = lse.amax(0)
    # -inf minus -inf is NaN: an all-empty row is weighed against 0 instead.
    weight = torch.exp2(lse - torch.where(top.isinf(), 0.0, top))
    total = weight.sum(0)
    scale = torch.where(weight == 0, 0.0, weight / total)
    out = torch.zeros_like(partials[0].out)
    for p, s in zip(partials, scale, strict=True):
        out = out + torch.where(s[..., None] == 0, 0.0, p.out * s[..., None])
    return Partial(out, torch.where(top.isinf(), top, top + total.log2()))
