"""Heads by where their attention falls on ordinary text, as RedKnot is described (not as it is published).

The description also measures attention entropy but decides nothing by it, so it is not asked for here.
Measurably worse than `retrieval` (DESIGN, traps): kept to show the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Head, Signals
from policies.checks import head_signal, require_number


@dataclass(frozen=True)
class Described:
    """LOCAL if `head_local_ratio` is above its threshold, else GLOBAL if `head_long_range` is, else SPECIAL.

    Attributes:
        local_ratio: least share of attention inside the local window that makes a head LOCAL, in [0, 1].
        long_range: least share of attention far away that makes a head GLOBAL, in [0, 1].
    """

    local_ratio: float
    long_range: float

    def __post_init__(self) -> None:
        """Refuses thresholds outside [0, 1]."""
        require_number(self, "local_ratio", 0, 1)
        require_number(self, "long_range", 0, 1)

    @property
    def needs(self) -> frozenset[str]:
        """Both measurements, each [L, Hk]."""
        return frozenset({"head_local_ratio", "head_long_range"})

    def classify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8 of `Head`."""
        is_local = head_signal(signals, "head_local_ratio") > self.local_ratio
        is_global = head_signal(signals, "head_long_range") > self.long_range
        classes = torch.where(is_global, int(Head.GLOBAL), int(Head.SPECIAL))
        return torch.where(is_local, int(Head.LOCAL), classes).to(torch.int8)
