"""What holds for any text without looking at it: the beginning and the recent past matter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Signals
from policies.checks import require_whole


@dataclass(frozen=True)
class Rules:
    """1 for pages with sink tokens, else how recent the page is, from 0 (oldest) to 1 (newest).

    Attributes:
        sink_tokens: tokens at the start that count as sinks.
    """

    sink_tokens: int

    def __post_init__(self) -> None:
        """Refuses a negative number of sinks."""
        require_whole(self, "sink_tokens", 0)

    @property
    def needs(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    def score(self, signals: Signals) -> Tensor:
        """[L, Hk, N] float32 in [0, 1]."""
        return rule_score(signals, self.sink_tokens).expand(signals.shape)


def rule_score(signals: Signals, sink_tokens: int) -> Tensor:
    """[N] float32 in [0, 1]: the rules say the same for every stream."""
    pages = signals.shape[2]
    index = torch.arange(pages, dtype=torch.float32, device=signals.device)
    return torch.where(index * signals.page_tokens < sink_tokens, 1.0, index / max(pages - 1, 1))
