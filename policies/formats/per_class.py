"""A format by what kind a head is: the hierarchical compression of RedKnot as it is described."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Format, Head, Signals
from policies.checks import head_classes, require_choice, require_whole
from policies.formats.one import FORMATS

LAYERWISE = "layerwise"


@dataclass(frozen=True)
class PerClass:
    """Each class its format; `layerwise` is INT8 for the first layers, whose errors reach all others, then INT4.

    Attributes:
        local_format: of LOCAL heads: compute, int8, int4 or layerwise.
        global_format: of GLOBAL heads.
        special_format: of SPECIAL heads.
        dense_format: of DENSE heads.
        int8_layers: how many first layers `layerwise` keeps in INT8.
    """

    local_format: str
    global_format: str
    special_format: str
    dense_format: str
    int8_layers: int

    def __post_init__(self) -> None:
        """Refuses unknown formats."""
        for key in ("local_format", "global_format", "special_format", "dense_format"):
            require_choice(self, key, (*FORMATS, LAYERWISE))
        require_whole(self, "int8_layers", 0)

    @property
    def needs(self) -> frozenset[str]:
        """No signal beside the classes."""
        return frozenset()

    def choose(self, signals: Signals, score: Tensor) -> Tensor:
        """[L, Hk, N] int8 of `Format`."""
        layers = signals.shape[0]
        layer = torch.arange(layers, device=signals.device)
        layerwise = torch.where(layer < self.int8_layers, int(Format.INT8), int(Format.INT4))
        table = torch.empty(len(Head), layers, dtype=torch.int8, device=signals.device)
        named = {
            Head.LOCAL: self.local_format,
            Head.GLOBAL: self.global_format,
            Head.SPECIAL: self.special_format,
            Head.DENSE: self.dense_format,
        }
        for head, name in named.items():
            table[head] = layerwise if name == LAYERWISE else int(FORMATS[name])
        chosen = table[head_classes(signals).long(), layer.unsqueeze(-1)]
        return chosen.unsqueeze(-1).expand(signals.shape)
