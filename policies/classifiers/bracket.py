"""A classifier of one's own: for code, the heads that find opening brackets choose what they keep.

A bracket may have been opened far behind any window, but few brackets are open at a time: a head that matches them
needs few pages, from anywhere. Everything else stays as the retrieval score has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Head, Signals
from policies.checks import check_quantiles, head_signal, require_number
from policies.ranks import split_heads


@dataclass(frozen=True)
class Bracket:
    """Classes by `retrieval_score`; LOCAL heads with a high `head_bracket` become SPECIAL.

    Attributes:
        bracket_score: least share of attention that a closing bracket puts on its opening one, in [0, 1].
        local_quantile: share of the heads with the lowest retrieval score that are LOCAL, bracket heads or not.
        global_quantile: heads from here up are GLOBAL; those between the two are SPECIAL.
    """

    bracket_score: float
    local_quantile: float
    global_quantile: float

    def __post_init__(self) -> None:
        """Refuses numbers out of range."""
        require_number(self, "bracket_score", 0, 1)
        check_quantiles(self)

    @property
    def needs(self) -> frozenset[str]:
        """Both measures, each [L, Hk]."""
        return frozenset({"head_bracket", "retrieval_score"})

    def classify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8 of `Head`."""
        classes = split_heads(head_signal(signals, "retrieval_score"), self.local_quantile, self.global_quantile)
        finds = head_signal(signals, "head_bracket") >= self.bracket_score
        return torch.where(finds & (classes == Head.LOCAL), int(Head.SPECIAL), classes).to(torch.int8)
