"""First in, first out: the oldest page leaves first, whatever it is worth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Signals, Tier
from policies.checks import require_choice
from policies.eviction.by_score import VICTIM_TIERS


@dataclass(frozen=True)
class Fifo:
    """Rank = page index.

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
        pages = torch.arange(signals.shape[2], dtype=torch.float32, device=signals.device)
        return pages.expand(signals.shape)
