"""Least recently used: the page that was attended longest ago leaves first."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policies.base import Signals
from policies.checks import page_signal
from policies.eviction.victim import Victim


@dataclass(frozen=True)
class Lru(Victim):
    """Rank = `last_access` [L, Hk, N]: the step at which the page last had more than its even share of the mass."""

    @property
    def needs(self) -> frozenset[str]:
        """When each page was last used."""
        return frozenset({"last_access"})

    def rank(self, signals: Signals, score: Tensor) -> Tensor:
        """[L, Hk, N] float32."""
        return page_signal(signals, "last_access")
