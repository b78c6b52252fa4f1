"""What all eviction parts share: where a page that no longer fits goes."""

from __future__ import annotations

from dataclasses import dataclass

from policies.base import Tier
from policies.checks import require_choice

VICTIM_TIERS = {"l2": Tier.L2, "l3": Tier.L3, "dropped": Tier.DROPPED}


@dataclass(frozen=True)
class Victim:
    """Base of the eviction parts, which add `rank` and, if they read any, their signals.

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
