"""Least recently used: the page that was attended longest ago leaves first."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policies.base import Signals, Tier
from policies.checks import page_signal, require_choice
from policies.eviction.by_score import VICTIM_TIERS


@dataclass(frozen=True)
class Lru:
    """Rank = `last_access` [L, Hk, N]: the step at which the page last had more than its even share of the mass.

    Attributes:
        victim: where a page that no longer fits goes: l2, l3 or dropped.
    """

    victim: str

    def __post_init__(self) -> None:
        """Refuses an unknown tier."""
        require_choice(self, "victim", VICTIM_TIERS)

    @property
    def needs(self) -> frozenset[str]:
        """When each page was last used."""
        return frozenset({"last_access"})

    @property
    def victim_tier(self) -> Tier:
        """Where victims go."""
        return VICTIM_TIERS[self.victim]

    def rank(self, signals: Signals, score: Tensor) -> Tensor:
        """[L, Hk, N] float32."""
        return page_signal(signals, "last_access")
