"""The further from the device, the fewer bits: what leaves is compressed on the way, and comes back as it is then."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Format, PolicyError, Signals, Tier
from policies.checks import require_choice
from policies.formats.one import FORMATS


@dataclass(frozen=True)
class ByTier:
    """A format for each tier; precision is lost on the way down and not won back on the way up.

    Attributes:
        l1: of pages on the device that never left it: compute, int8 or int4.
        l2: of pages in host memory, at least as coarse as l1.
        l3: of pages in the archive, at least as coarse as l2.
    """

    l1: str
    l2: str
    l3: str

    def __post_init__(self) -> None:
        """Refuses unknown formats, and a tier that would be finer than the one before."""
        for key in ("l1", "l2", "l3"):
            require_choice(self, key, FORMATS)
        if not FORMATS[self.l1] <= FORMATS[self.l2] <= FORMATS[self.l3]:
            raise PolicyError(
                f"ByTier: l1={self.l1}, l2={self.l2}, l3={self.l3}: must not get finer from l1 to l3 "
                f"({', '.join(FORMATS)} from fine to coarse)"
            )

    @property
    def needs(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    def choose(self, signals: Signals, score: Tensor) -> Tensor:
        """[L, Hk, N] int8 of `Format`: that of L1."""
        return torch.full(signals.shape, int(FORMATS[self.l1]), dtype=torch.int8, device=signals.device)

    def in_tier(self, tier: Tier) -> Format:
        """The finest a page is kept at in L2 or L3; see `policies.base.Compressing`."""
        return FORMATS[self.l3 if tier == Tier.L3 else self.l2]
