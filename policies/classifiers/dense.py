"""Identity of the classifier slot: nothing is known about any head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Head, Signals


@dataclass(frozen=True)
class Dense:
    """Every head is DENSE: the parts behind it keep everything."""

    @property
    def needs(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    def classify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8, all DENSE."""
        return torch.full(signals.shape[:2], int(Head.DENSE), dtype=torch.int8, device=signals.device)
