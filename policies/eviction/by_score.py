"""The least useful page leaves first; as `score` (it is dropped) the identity of the eviction slot."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policies.base import Signals, Tier
from policies.checks import require_choice

VICTIM_TIERS = {"l2": Tier.L2, "l3": Tier.L3, "dropped": Tier.DROPPED}


@dataclass(frozen=True)
class ByScore:
    """Rank = the predictor's score.

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
        """[L, Hk, N] float32."""
        return score
