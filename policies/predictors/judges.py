"""Rules, retrieval and attention history as judges of one page, with nothing learned.

Each judge ranks the pages of a stream from 0 to 1, so that no scale has to be matched; a page is core if one
judge is sure of it (max) or if they agree on average (mean). Works for any model; `hybrid` needs trained weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import PolicyError, Signals
from policies.checks import page_signal, require_choice, require_number, require_whole
from policies.predictors.rules import rule_score
from policies.ranks import share_below


@dataclass(frozen=True)
class Judges:
    """Weighted ranks of the rules, of `retrieval` (BM25 against the current turn) and of `attention_ema`.

    Attributes:
        combine: "max" or "mean" of the weighted ranks.
        rules_weight: of recency, sinks, system and last user turn, at least 0.
        retrieval_weight: of `retrieval`; it says nothing (0 everywhere) while no turn is known.
        attention_weight: of `attention_ema`.
        sink_tokens: tokens at the start that the rules count as sinks.
    """

    combine: str
    rules_weight: float
    retrieval_weight: float
    attention_weight: float
    sink_tokens: int

    def __post_init__(self) -> None:
        """Refuses negative weights and weights that are all 0."""
        require_choice(self, "combine", ("max", "mean"))
        for key in ("rules_weight", "retrieval_weight", "attention_weight"):
            require_number(self, key, 0)
        require_whole(self, "sink_tokens", 0)
        if self.rules_weight + self.retrieval_weight + self.attention_weight == 0:
            raise PolicyError("Judges: rules_weight, retrieval_weight and attention_weight are all 0: one must count")

    @property
    def needs(self) -> frozenset[str]:
        """The signals whose weight is not 0."""
        asked = {
            "role": self.rules_weight,
            "retrieval": self.retrieval_weight,
            "attention_ema": self.attention_weight,
        }
        return frozenset(name for name, weight in asked.items() if weight > 0)

    def score(self, signals: Signals) -> Tensor:
        """[L, Hk, N] float32, at most the largest weight (max) or 1 (mean)."""
        ranks = []
        if self.rules_weight > 0:
            ranks.append(rule_score(signals, self.sink_tokens) * self.rules_weight)
        for name, weight in (("retrieval", self.retrieval_weight), ("attention_ema", self.attention_weight)):
            if weight > 0:
                ranks.append(share_below(page_signal(signals, name, expand=False)) * weight)
        total = ranks[0]
        for rank in ranks[1:]:
            total = torch.maximum(total, rank) if self.combine == "max" else total + rank
        if self.combine == "mean":
            total = total / (self.rules_weight + self.retrieval_weight + self.attention_weight)
        return total.expand(signals.shape)
