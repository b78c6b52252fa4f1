"""Heads by where their attention falls, as RedKnot is described (not as it is published).

The description measures on ordinary text, where retrieval heads look local until they are needed: on SmolLM2 that map
is no better than chance (`python -m testbed.heads verdict`). Which signals the two rules read stands in the YAML, so
that the same rules can read what is measured where a model copies (described_fixed.yaml). The description also measures
attention entropy but decides nothing by it, so it is not asked for here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Head, Signals
from policies.checks import head_signal, require_name, require_number


@dataclass(frozen=True)
class Described:
    """LOCAL if the local measure is above its threshold, else GLOBAL if the far one is, else SPECIAL.

    Attributes:
        local_measure: signal [L, Hk] in [0, 1], the share of attention inside the local window.
        local_ratio: threshold; a head above it is LOCAL.
        far_measure: signal [L, Hk] in [0, 1], the share of attention far away.
        long_range: threshold; a head above it, and not LOCAL, is GLOBAL.
    """

    local_measure: str
    local_ratio: float
    far_measure: str
    long_range: float

    def __post_init__(self) -> None:
        """Refuses thresholds outside [0, 1] and names that are none."""
        for key in ("local_measure", "far_measure"):
            require_name(self, key)
        for key in ("local_ratio", "long_range"):
            require_number(self, key, 0, 1)

    @property
    def needs(self) -> frozenset[str]:
        """Both measures."""
        return frozenset({self.local_measure, self.far_measure})

    def classify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8 of `Head`."""
        is_local = head_signal(signals, self.local_measure) > self.local_ratio
        is_global = head_signal(signals, self.far_measure) > self.long_range
        classes = torch.where(is_global, int(Head.GLOBAL), int(Head.SPECIAL))
        return torch.where(is_local, int(Head.LOCAL), classes).to(torch.int8)
