"""The partial result of attention and its merge: the joint between splits, tiers, formats and devices.

o = sum_i o_i 2^(s_i - s), s = log2 sum_i 2^s_i: associative, commutative and exact (FlashInfer, cascade.cuh;
base 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.guards import check_floats


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

    A part whose lse is -inf counts for nothing in that row, whatever its out holds, NaN included. A row whose lse is
    NaN or +inf in any part is NaN; a NaN in out alone spoils the elements it is in, unless its share rounds to 0. No
    row depends on another.

    Args:
        partials: at least one, all of the same shapes.

    Raises:
        ValueError: no partial at all, shapes that differ, integers.
    """
    if not partials:
        raise ValueError("merge of 0 partials: must be at least 1")
    first = partials[0]
    for i, p in enumerate(partials):
        if p.out.shape != first.out.shape or p.lse.shape != first.out.shape[:-1]:
            raise ValueError(
                f"merge partials[{i}] of out {tuple(p.out.shape)}, lse {tuple(p.lse.shape)}: must be "
                f"{tuple(first.out.shape)}, {tuple(first.out.shape[:-1])} like the first out"
            )
        check_floats(f"merge partials[{i}]", out=p.out, lse=p.lse)
    lse = torch.stack([p.lse for p in partials])
    top = lse.amax(0)
    # -inf minus -inf is NaN: an all-empty row is weighed against 0 instead. +inf minus +inf is NaN, as stated.
    weight = torch.exp2(lse - torch.where(top == -math.inf, 0.0, top))
    total = weight.sum(0)
    scale = torch.where(weight == 0, 0.0, weight / total)
    out = torch.zeros_like(first.out)
    for p, s in zip(partials, scale, strict=True):
        out = out + torch.where(s[..., None] == 0, 0.0, p.out * s[..., None])
    return Partial(out, torch.where(top == -math.inf, top, top + total.log2()))
