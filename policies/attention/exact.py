"""Identity of the attention slot: what is on the device is read exactly, the rest not at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Mode, Signals


@dataclass(frozen=True)
class Exact:
    """Resident pages EXACT, others SKIP."""

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
        return resident.to(torch.int8) * int(Mode.EXACT)
