"""First in, first out: the oldest page leaves first, whatever it is worth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Signals
from policies.eviction.victim import Victim


@dataclass(frozen=True)
class Fifo(Victim):
    """Rank = page index."""

    def rank(self, signals: Signals, score: Tensor) -> Tensor:
        """[L, Hk, N] float32."""
        pages = torch.arange(signals.shape[2], dtype=torch.float32, device=signals.device)
        return pages.expand(signals.shape)
