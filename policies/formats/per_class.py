"""A format by what kind a head is: the hierarchical compression of RedKnot as it is described."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Format, Head, Signals
from policies.checks import head_classes, require_choice, require_whole
from policies.formats.one import FORMATS

# Name -> format of the first layers, whose errors reach all others, and of the rest.
LAYERWISE = {
    "layerwise": (Format.INT8, Format.INT4),
    "layerwise_int8": (Format.COMPUTE, Format.INT8),
}


@dataclass(frozen=True)
class PerClass:
    """Each class its format; the layerwise ones are finer in the first layers, whose errors reach all others.

    Attributes:
        local_format: of LOCAL heads: compute, int8, int4, layerwise (INT8 in the first layers, then INT4) or
            layerwise_int8 (compute dtype in the first layers, then INT8).
        global_format: of GLOBAL heads.
        special_format: of SPECIAL heads.
        dense_format: of DENSE heads.
        first_layers: how many first layers the layerwise formats keep finer.
    """

    local_format: str
    global_format: str
    special_format: str
    dense_format: str
    first_layers: int

    def __post_init__(self) -> None:
        """Refuses unknown formats."""
        for key in ("local_format", "global_format", "special_format", "dense_format"):
            require_choice(self, key, (*FORMATS, *LAYERWISE))
        require_whole(self, "first_layers", 0)

    @property
    def needs(self) -> frozenset[str]:
        """No signal beside the classes."""
        return frozenset()

    def choose(self, signals: Signals, score: Tensor) -> Tensor:
        """[L, Hk, N] int8 of `Format`."""
        layers = signals.shape[0]
        layer = torch.arange(layers, device=signals.device)
        table = torch.empty(len(Head), layers, dtype=torch.int8, device=signals.device)
        named = {
            Head.LOCAL: self.local_format,
            Head.GLOBAL: self.global_format,
            Head.SPECIAL: self.special_format,
            Head.DENSE: self.dense_format,
        }
        for head, name in named.items():
            first, rest = LAYERWISE[name] if name in LAYERWISE else (FORMATS[name], FORMATS[name])
            table[head] = torch.where(layer < self.first_layers, int(first), int(rest))
        chosen = table[head_classes(signals).long(), layer.unsqueeze(-1)]
        return chosen.unsqueeze(-1).expand(signals.shape)
