"""One format for all pages; as `compute` the identity of the format slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Format, Signals
from policies.checks import require_choice

FORMATS = {"compute": Format.COMPUTE, "int8": Format.INT8, "int4": Format.INT4}


@dataclass(frozen=True)
class One:
    """Every page outside the hot ring in the same format.

    Attributes:
        format: compute, int8 or int4.
    """

    format: str

    def __post_init__(self) -> None:
        """Refuses an unknown format."""
        require_choice(self, "format", FORMATS)

    @property
    def needs(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    def choose(self, signals: Signals, score: Tensor) -> Tensor:
        """[L, Hk, N] int8 of `Format`."""
        return torch.full(signals.shape, int(FORMATS[self.format]), dtype=torch.int8, device=signals.device)
