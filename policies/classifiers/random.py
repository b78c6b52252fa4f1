"""Controls: the same proportions of classes, dealt by chance. A classifier that does not beat them knows nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Signals
from policies.checks import check_quantiles, require_choice
from policies.ranks import split_heads

AMONG = ("heads", "layers")


@dataclass(frozen=True)
class Random:
    """Classes by a random order of the heads, drawn from the sequence's seed.

    Attributes:
        local_quantile: share of the heads that become LOCAL.
        global_quantile: 1 - share of the heads that become GLOBAL.
        among: what the classes are dealt to: heads, wherever they are, or layers, each getting the same number of
            each class as far as the numbers go.
    """

    local_quantile: float
    global_quantile: float
    among: str

    def __post_init__(self) -> None:
        """Refuses quantiles outside [0, 1] or out of order."""
        check_quantiles(self)
        require_choice(self, "among", AMONG)

    @property
    def needs(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    def classify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8 of `Head`, the same on every device."""
        layers, kv_heads, _ = signals.shape
        chance = torch.Generator().manual_seed(signals.seed)
        if self.among == "heads":
            order = torch.randperm(layers * kv_heads, generator=chance).reshape(layers, kv_heads)
        else:
            # The first of every layer, layers in random order, then the second of every layer, and so on.
            within = torch.rand(layers, kv_heads, generator=chance).argsort(1)
            order = within * layers + torch.randperm(layers, generator=chance).unsqueeze(1)
        return split_heads(order.to(signals.device), self.local_quantile, self.global_quantile)
