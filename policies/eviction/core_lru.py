"""The least useful page leaves first, of equally useful ones the oldest: the eviction of elastic attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policies.base import Signals, Tier
from policies.checks import require_choice
from policies.eviction.by_score import VICTIM_TIERS
from policies.ranks import places


@dataclass(frozen=True)
class CoreLru:
    """Rank = place by score, then by age.

    Attributes:
        victim: where a page that no longer fits goes: l2, l3 or dropped.
    """

    victim: str

    def __post_init__(self) -> None:
        """Refuses an unknown tier."""
        require_choice(self, "victim", VICTIM_TIERS)

    @property
    def needs(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    @property
    def victim_tier(self) -> Tier:
        """Where victims go."""
        return VICTIM_TIERS[self.victim]

    def rank(self, signals: Signals, score: Tensor) -> Tensor:
        """[L, Hk, N] float32 whole numbers, exact up to 2^24 pages."""
        return places(score).float()
