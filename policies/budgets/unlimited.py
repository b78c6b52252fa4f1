"""Identity of the budget slot: no stream has a limit of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Share, Signals


@dataclass(frozen=True)
class Unlimited:
    """Infinite quota, every page eligible. A device budget still holds: `policies.base.fit` cuts what is over it."""

    @property
    def needs(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    def share(self, signals: Signals, fmt: Tensor) -> Share:
        """Everything for everyone."""
        quota = torch.full(signals.shape[:2], torch.inf, dtype=torch.float64, device=signals.device)
        return Share(quota, torch.ones(signals.shape, dtype=torch.bool, device=signals.device))
