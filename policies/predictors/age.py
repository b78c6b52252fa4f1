"""Identity of the predictor slot: the newer, the more it will matter (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Signals


@dataclass(frozen=True)
class Age:
    """Score = page index; sinks are hot and stay whatever their score."""

    @property
    def needs(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    def score(self, signals: Signals) -> Tensor:
        """[L, Hk, N] float32 page indices."""
        pages = torch.arange(signals.shape[2], dtype=torch.float32, device=signals.device)
        return pages.expand(signals.shape)
