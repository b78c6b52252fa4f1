"""Control: classes at even distances over the depth of the model, whatever the heads do.

RedKnot's shipped parity map for Mistral-7B has its 5 global heads at (0,0), (6,3), (12,6), (19,2), (25,5): every 51st
of 256.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Head, Signals
from policies.checks import check_quantiles


@dataclass(frozen=True)
class Stride:
    """GLOBAL heads at even distances in the order of layer, then head; SPECIAL ones at even distances of those left.

    Attributes:
        local_quantile: share of the heads that become LOCAL.
        global_quantile: 1 - share of the heads that become GLOBAL.
    """

    local_quantile: float
    global_quantile: float

    def __post_init__(self) -> None:
        """Refuses quantiles outside [0, 1] or out of order."""
        check_quantiles(self)

    @property
    def needs(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    def classify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8 of `Head`."""
        layers, kv_heads, _ = signals.shape
        heads = layers * kv_heads
        local, below = round(self.local_quantile * heads), round(self.global_quantile * heads)
        classes = torch.full((heads,), int(Head.LOCAL), dtype=torch.int8, device=signals.device)
        classes[_even(heads, heads - below)] = int(Head.GLOBAL)
        left = (classes == Head.LOCAL).nonzero().squeeze(1)
        classes[left[_even(len(left), below - local)]] = int(Head.SPECIAL)
        return classes.reshape(layers, kv_heads)


def _even(places: int, wanted: int) -> list[int]:
    """So many of the places, at even distances from the first on."""
    return [round(at * places / wanted) for at in range(wanted)]
