"""Control: chance. A predictor that does not beat it knows nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Signals

_STEPS_A_SEED = 1_000_003  # a prime, so that (seed, step) pairs do not meet


@dataclass(frozen=True)
class Random:
    """Uniform scores, drawn anew at each step from the sequence's seed."""

    @property
    def needs(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    def score(self, signals: Signals) -> Tensor:
        """[L, Hk, N] float32 in [0, 1), the same on every device."""
        chance = torch.Generator().manual_seed(signals.seed * _STEPS_A_SEED + signals.step)
        return torch.rand(signals.shape, generator=chance).to(signals.device)
