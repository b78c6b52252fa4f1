"""Identity of the prefetch slot: nothing is fetched before it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Signals


@dataclass(frozen=True)
class Nothing:
    """Fetches nothing."""

    @property
    def needs(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    def fetch(self, signals: Signals, score: Tensor, resident: Tensor) -> Tensor:
        """[L, Hk, N] bool, all False."""
        return torch.zeros(signals.shape, dtype=torch.bool, device=signals.device)
