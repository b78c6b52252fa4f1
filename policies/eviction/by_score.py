"""The least useful page leaves first; as `score` (it is dropped) the identity of the eviction slot."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policies.base import Signals
from policies.eviction.victim import Victim


@dataclass(frozen=True)
class ByScore(Victim):
    """Rank = the predictor's score."""

    def rank(self, signals: Signals, score: Tensor) -> Tensor:
        """[L, Hk, N] float32."""
        return score
