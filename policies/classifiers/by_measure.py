"""Heads by the rank of one measure; which measure, and the paper, stands in the YAML.

The same two quantiles mean the same number of heads of each class, so classifiers that rank by different measures meet
at equal bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policies.base import Signals
from policies.checks import check_quantiles, head_signal, require_choice, require_name
from policies.ranks import split_heads

ENDS = ("low", "high")


@dataclass(frozen=True)
class ByMeasure:
    """Classes by the rank of one calibrated measure [L, Hk]; equal heads are taken in the order of layer, then head.

    Attributes:
        measure: name of the signal.
        local_quantile: share of the heads, from the local end, that become LOCAL.
        global_quantile: heads from this quantile up become GLOBAL; those between the two are SPECIAL.
        local_end: which values are local ones: low or high.
    """

    measure: str
    local_quantile: float
    global_quantile: float
    local_end: str

    def __post_init__(self) -> None:
        """Refuses quantiles outside [0, 1] or out of order, and names that are none."""
        require_name(self, "measure")
        check_quantiles(self)
        require_choice(self, "local_end", ENDS)

    @property
    def needs(self) -> frozenset[str]:
        """The measure."""
        return frozenset({self.measure})

    def classify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8 of `Head`."""
        value = head_signal(signals, self.measure)
        score = -value if self.local_end == "high" else value
        return split_heads(score, self.local_quantile, self.global_quantile)
