"""The core-token predictor of elastic attention: rules give candidates, the learned network ranks them.

Pages that matter by rule come first, the others after them; within both the trained estimate of the mass that each
page will draw at the coming step decides. `judges` is the predictor for models without trained weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policies.base import Signals
from policies.checks import page_signal, require_whole
from policies.predictors.rules import RULE_SIGNALS, core_pages


@dataclass(frozen=True)
class Hybrid:
    """Score = `core_score`, raised above all others of its stream for the pages that are core by rule.

    Attributes:
        sink_tokens: tokens at the start that are core.
        last_tokens: tokens at the end that are core.
    """

    sink_tokens: int
    last_tokens: int

    def __post_init__(self) -> None:
        """Refuses negative numbers."""
        require_whole(self, "sink_tokens", 0)
        require_whole(self, "last_tokens", 0)

    @property
    def needs(self) -> frozenset[str]:
        """The learned score, and what the rules read."""
        return RULE_SIGNALS | {"core_score"}

    def score(self, signals: Signals) -> Tensor:
        """[L, Hk, N] float32."""
        learned = page_signal(signals, "core_score")
        spread = learned.amax(-1, keepdim=True) - learned.amin(-1, keepdim=True) + 1.0
        return learned + spread * core_pages(signals, self.sink_tokens, self.last_tokens)
