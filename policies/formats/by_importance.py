"""Bits where they matter: a head's precision by how much is lost when the head is cut short."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Format, PolicyError, Signals
from policies.checks import head_signal, require_name, require_number
from policies.ranks import places


@dataclass(frozen=True)
class ByImportance:
    """The heads of highest importance in compute dtype, the next in INT8, the others in INT4.

    Equal heads are taken in the order of layer, then head, the later the finer.

    Attributes:
        importance: signal [L, Hk].
        compute_share: share of the heads kept in compute dtype, in [0, 1].
        int8_share: share of the heads kept in INT8; the two together are at most 1.
    """

    importance: str
    compute_share: float
    int8_share: float

    def __post_init__(self) -> None:
        """Refuses shares that are none or too much."""
        require_name(self, "importance")
        require_number(self, "compute_share", 0, 1)
        require_number(self, "int8_share", 0, 1)
        if self.compute_share + self.int8_share > 1:
            raise PolicyError(
                f"ByImportance.compute_share={self.compute_share}, int8_share={self.int8_share}: at most 1 together"
            )

    @property
    def needs(self) -> frozenset[str]:
        """The importance."""
        return frozenset({self.importance})

    def choose(self, signals: Signals, score: Tensor) -> Tensor:
        """[L, Hk, N] int8 of `Format`."""
        importance = head_signal(signals, self.importance)
        place = places(importance.flatten()).reshape(importance.shape)
        heads = importance.numel()
        compute = round(self.compute_share * heads)
        int8 = round((self.compute_share + self.int8_share) * heads)
        chosen = torch.full(importance.shape, int(Format.INT4), dtype=torch.int8, device=importance.device)
        chosen[place >= heads - int8] = int(Format.INT8)
        chosen[place >= heads - compute] = int(Format.COMPUTE)
        return chosen.unsqueeze(-1).expand(signals.shape)
