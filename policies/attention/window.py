"""Only sinks and a window are read, whatever else is kept (StreamingLLM's mask, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Mode, Signals
from policies.checks import require_whole


@dataclass(frozen=True)
class Window:
    """Hot pages and those that touch the last tokens EXACT if resident, others SKIP.

    Attributes:
        window_tokens: length of the window.
    """

    window_tokens: int

    def __post_init__(self) -> None:
        """Refuses an empty window."""
        require_whole(self, "window_tokens", 1)

    @property
    def needs(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    @property
    def prototype_share(self) -> float:
        """No prototypes."""
        return 0.0

    def modes(self, signals: Signals, score: Tensor, resident: Tensor, spare_bytes: Tensor) -> Tensor:
        """[L, Hk, N] int8 of `Mode`."""
        near = signals.hot | (signals.age_tokens() < self.window_tokens)
        return (resident & near).to(torch.int8) * int(Mode.EXACT)
