"""Ranks: scale-free views of a signal, and the head classes that follow from one."""

from __future__ import annotations

import torch
from torch import Tensor

from policies.plan import Head


def order_keys(value: Tensor, place: Tensor) -> Tensor:
    """Keys that no two pages of a row share, in the order of value, then place: [..., N] float32, [N] -> int64.

    place: whole numbers below 2^32, a page's place among equals; the key's low 32 bits.
    """
    bits = (value + 0.0).view(torch.int32)  # + 0.0 makes -0.0 a 0.0, its equal
    if bits.numel() and int(bits.min()) < 0:
        # The bits of floats order like whole numbers, once those of the negative ones are turned round.
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.long().bitwise_left_shift_(32).bitwise_or_(place)


def ascending(value: Tensor, place: int | None = None) -> Tensor:
    """Each row in ascending order; with a place it is enough that this one of each row has what belongs there.

    value, contiguous, may be overwritten. On the CPU numpy does it, whose sorting and selecting of plain values use
    vector instructions: at rows of 8192 it takes a fifth of the time of torch, which sorts indices along.
    """
    if value.device.type != "cpu":
        return value.sort(dim=-1).values
    if place is None:
        value.numpy().sort(axis=-1)
    else:
        value.numpy().partition(place, axis=-1)
    return value


def share_below(value: Tensor) -> Tensor:
    """The share of the other pages that each page beats: value [..., N] float32 -> [..., N] float32 in [0, 1].

    Equal pages get the same rank and beat each other nowhere, so a signal that says nothing (all pages alike) ranks
    every page 0 instead of by accident of position.
    """
    pages = value.shape[-1]
    place = torch.arange(pages, dtype=torch.int32, device=value.device)
    ordered = ascending(order_keys(value, place))
    bits = ordered >> 32
    starts = torch.ones_like(bits, dtype=torch.bool)
    torch.ne(bits[..., 1:], bits[..., :-1], out=starts[..., 1:])
    # A run of equal values shares the place of its first.
    first = (starts * place).cummax(dim=-1).values
    share = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    return share.scatter_(-1, ordered & 0xFFFFFFFF, first.float()) / max(pages - 1, 1)


def places(value: Tensor) -> Tensor:
    """The place of each page in ascending order: value [..., N] float32 -> int32; the older of equals first."""
    ordinal = torch.arange(value.shape[-1], dtype=torch.int32, device=value.device)
    order = ascending(order_keys(value, ordinal)) & 0xFFFFFFFF
    return torch.empty(value.shape, dtype=torch.int32, device=value.device).scatter_(
        -1, order, ordinal.expand(value.shape)
    )


def split_heads(score: Tensor, local_quantile: float, global_quantile: float) -> Tensor:
    """Head classes by rank over all heads: score [L, Hk] -> [L, Hk] int8 of `Head`.

    The lowest `local_quantile` of the heads are LOCAL, those from `global_quantile` up GLOBAL, the rest SPECIAL.
    Equal heads are taken in the order of layer, then head.
    """
    place = places(score.flatten().float()).reshape(score.shape)
    heads = score.numel()
    classes = torch.full(score.shape, int(Head.SPECIAL), dtype=torch.int8, device=score.device)
    classes[place >= round(global_quantile * heads)] = int(Head.GLOBAL)
    classes[place < round(local_quantile * heads)] = int(Head.LOCAL)
    return classes
