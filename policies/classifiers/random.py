"""Control: the same proportions of classes, dealt by chance. A classifier that does not beat it knows nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Signals
from policies.classifiers.retrieval import check_quantiles
from policies.ranks import split_heads


@dataclass(frozen=True)
class Random:
    """Classes by a random order of the heads, drawn from the sequence's seed.

    Attributes:
        local_quantile: share of the heads that become LOCAL.
        global_quantile: 1 - share of the heads that become GLOBAL.
    """

    local_quantile: float
    global_quantile: float

    def __post_init__(self) -> None:
        """Refuses quantiles outside [0, 1] or out of order."""
        check_quantiles(self, self.local_quantile, self.global_quantile)

    @property
    def needs(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    def classify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8 of `Head`, the same on every device."""
        layers, kv_heads, _ = signals.shape
        chance = torch.Generator().manual_seed(signals.seed)
        order = torch.randperm(layers * kv_heads, generator=chance).reshape(layers, kv_heads)
        return split_heads(order.to(signals.device), self.local_quantile, self.global_quantile)
