"""Heads by what they retrieve: the attention mass that a copied answer puts on its source.

A head that looks local on ordinary text may still be the one that fetches a fact from afar, so the measurement is
taken where retrieval happens (Wu et al. 2024, "Retrieval Head Mechanistically Explains Long-Context Factuality",
arXiv 2404.15574). On SmolLM2-135M it keeps needles that the map by local ratio loses.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policies.base import PolicyError, Signals
from policies.checks import head_signal, require_number
from policies.ranks import split_heads


@dataclass(frozen=True)
class Retrieval:
    """Classes by the rank of `retrieval_score` [L, Hk] in [0, 1], measured once per model.

    Attributes:
        local_quantile: share of the heads, lowest score first, that become LOCAL.
        global_quantile: heads from this quantile up become GLOBAL; those between the two are SPECIAL.
    """

    local_quantile: float
    global_quantile: float

    def __post_init__(self) -> None:
        """Refuses quantiles outside [0, 1] or out of order."""
        check_quantiles(self, self.local_quantile, self.global_quantile)

    @property
    def needs(self) -> frozenset[str]:
        """The calibrated score."""
        return frozenset({"retrieval_score"})

    def classify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8 of `Head`."""
        score = head_signal(signals, "retrieval_score")
        return split_heads(score, self.local_quantile, self.global_quantile)


def check_quantiles(part: object, local_quantile: float, global_quantile: float) -> None:
    """Both in [0, 1] and in order.

    Raises:
        PolicyError: they are not.
    """
    require_number(part, "local_quantile", 0, 1)
    require_number(part, "global_quantile", 0, 1)
    if local_quantile > global_quantile:
        raise PolicyError(
            f"{type(part).__name__}.local_quantile={local_quantile}: must be at most global_quantile={global_quantile}"
        )
