"""The pages that will matter next, brought to the device while this step computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Signals
from policies.checks import require_whole
from policies.filling import best


@dataclass(frozen=True)
class NextStep:
    """The best-scored alive pages that are not on the device.

    Attributes:
        pages: most pages a stream fetches at one plan.
    """

    pages: int

    def __post_init__(self) -> None:
        """Refuses to fetch less than one page; `none` does that."""
        require_whole(self, "pages", 1)

    @property
    def needs(self) -> frozenset[str]:
        """No signal beside the score."""
        return frozenset()

    def fetch(self, signals: Signals, score: Tensor, resident: Tensor) -> Tensor:
        """[L, Hk, N] bool."""
        away = signals.held.alive & ~resident & ~signals.hot
        rows = away.flatten(0, -2)
        most = torch.full((len(rows),), self.pages, dtype=torch.int64, device=signals.device)
        return best(score.flatten(0, -2), rows, most).view(away.shape)
