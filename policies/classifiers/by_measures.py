"""Heads by the larger of several measures: the classifier of RedKnot as it is published, and as it could be.

Published (RedKnot 51b1737, head_profiler.py): global = the top 15 % by max(prefix_shift, edge_mass), all others local.
The two have different scales, so the raw maximum is decided by the larger of them; ranks put them on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import PolicyError, Signals
from policies.checks import check_quantiles, head_signal, require_choice
from policies.ranks import share_below, split_heads

COMBINE = ("value", "rank")


@dataclass(frozen=True)
class ByMeasures:
    """Classes by the rank of a maximum over measures [L, Hk], low values LOCAL; equal heads by layer, then head.

    Attributes:
        measures: names of the signals, two or more.
        combine: what the maximum is taken of: value (as it is) or rank (the share of heads a head beats).
        local_quantile: share of the heads, lowest first, that become LOCAL.
        global_quantile: heads from this quantile up become GLOBAL; those between the two are SPECIAL.
    """

    measures: Sequence[str]
    combine: str
    local_quantile: float
    global_quantile: float

    def __post_init__(self) -> None:
        """Refuses quantiles outside [0, 1] or out of order, and names that are none."""
        names = self.measures
        is_list = isinstance(names, Sequence) and not isinstance(names, str) and len(names) > 1
        if not is_list or not all(isinstance(name, str) and name.isidentifier() for name in names):
            raise PolicyError(f"ByMeasures.measures={names!r}: must be a list of two or more names of measures")
        object.__setattr__(self, "measures", tuple(names))
        require_choice(self, "combine", COMBINE)
        check_quantiles(self)

    @property
    def needs(self) -> frozenset[str]:
        """The measures."""
        return frozenset(self.measures)

    def classify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8 of `Head`."""
        values = torch.stack([head_signal(signals, name).flatten() for name in self.measures])
        if self.combine == "rank":
            values = share_below(values)
        best = values.amax(0).reshape(signals.shape[:2])
        return split_heads(best, self.local_quantile, self.global_quantile)
