"""The least useful page leaves first, of equally useful ones the oldest: the eviction of elastic attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policies.base import Signals
from policies.eviction.victim import Victim
from policies.ranks import places


@dataclass(frozen=True)
class CoreLru(Victim):
    """Rank = place by score, then by age."""

    def rank(self, signals: Signals, score: Tensor) -> Tensor:
        """[L, Hk, N] float32 whole numbers, exact up to 2^24 pages."""
        return places(score).float()
