"""Ranks: scale-free views of a signal, and the head classes that follow from one."""

from __future__ import annotations

import torch
from torch import Tensor

from policies.base import Head


def share_below(value: Tensor) -> Tensor:
    """The share of the other pages that each page beats: value [..., N] -> [..., N] float32 in [0, 1].

    Equal pages get the same rank and beat each other nowhere, so a signal that says nothing (all pages alike) ranks
    every page 0 instead of by accident of position.
    """
    pages = value.shape[-1]
    ordered, order = value.sort(dim=-1)
    place = torch.arange(pages, device=value.device)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    # A run of equal values shares the place of its first; one sort is all that costs here.
    first = torch.where(starts, place, 0).cummax(dim=-1).values
    return torch.empty_like(ordered).scatter_(-1, order, first.to(ordered.dtype)) / max(pages - 1, 1)


def places(value: Tensor) -> Tensor:
    """The place of each page in ascending order: value [..., N] -> [..., N] int64; the older of two equals first."""
    order = value.argsort(dim=-1, stable=True)
    ordinal = torch.arange(value.shape[-1], device=value.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, ordinal)


def split_heads(score: Tensor, local_quantile: float, global_quantile: float) -> Tensor:
    """Head classes by rank over all heads: score [L, Hk] -> [L, Hk] int8 of `Head`.

    The lowest `local_quantile` of the heads are LOCAL, those from `global_quantile` up GLOBAL, the rest SPECIAL.
    Equal heads are taken in the order of layer, then head.
    """
    place = places(score.flatten()).reshape(score.shape)
    heads = score.numel()
    classes = torch.full(score.shape, int(Head.SPECIAL), dtype=torch.int8, device=score.device)
    classes[place >= round(global_quantile * heads)] = int(Head.GLOBAL)
    classes[place < round(local_quantile * heads)] = int(Head.LOCAL)
    return classes
