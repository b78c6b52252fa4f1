"""What budgets by class share: windows that slide in steps, the quota of special heads, one arena a class."""

from __future__ import annotations

import torch
from torch import Tensor

from policies.base import Head, PoolLayout, Share, Signals
from policies.checks import head_classes, require_whole


def check_classes(part: object, suffix: str) -> None:
    """The field `<class>_<suffix>` of every class is a whole number of at least 1."""
    for head in Head:
        require_whole(part, f"{head.name.lower()}_{suffix}", 1)


def class_share(signals: Signals, fmt: Tensor, window: Tensor, special_tokens: int, steps: dict[Head, int]) -> Share:
    """Windows make pages ineligible; SPECIAL heads get a quota instead, of tokens at the dearest format they use.

    Args:
        signals: with the classes.
        fmt: [L, Hk, N] int8, the format each page would get.
        window: [L, Hk] float64, newest tokens a head keeps; inf = all of them.
        special_tokens: what a SPECIAL head keeps beside its hot pages.
        steps: class -> tokens after which its window slides. It is counted from the length rounded down to that
            many, so that between two slides whatever comes is kept too; DENSE heads keep everything anyway.
    """
    classes = head_classes(signals)
    table = torch.tensor([steps.get(head, 1) for head in Head], device=signals.device)
    late = signals.length_tokens % table[classes.long()]  # [L, Hk], tokens since the window slid
    eligible = signals.age_tokens() < (window + late).unsqueeze(-1)
    dearest = signals.page_bytes.of(torch.stack((fmt.amin(-1), fmt.amax(-1)))).amax(0)
    pages = -(-(special_tokens + late) // signals.page_tokens)
    special = classes == Head.SPECIAL
    return Share(torch.where(special, dearest.double() * pages, torch.inf), eligible | special.unsqueeze(-1))


def class_pools(signals: Signals, part: object) -> PoolLayout:
    """An arena a class: its streams keep alike, so their pages come and go together."""
    blocks = tuple(getattr(part, f"{head.name.lower()}_block_pages") for head in Head)
    return PoolLayout(head_classes(signals), blocks)
