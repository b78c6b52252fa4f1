"""The core-token predictor of elastic attention: rules give candidates, the learned network ranks them.

The score is the trained estimate of each page's log mass at the coming step. Sinks, the last tokens and what the user
locked come before everything. Other pages that matter by rule, the current turn and what a tool call needs, are worth
`rule_nats` more: a weight and no trump, since a turn may be long, and on held-out agents' sessions a rule that always
wins costs more recall than all else together. `judges` is the predictor for models without trained weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policies.base import Signals
from policies.checks import page_signal, require_name, require_number, require_whole
from policies.predictors.rules import RULE_SIGNALS, core_pages, fixed_pages


@dataclass(frozen=True)
class Hybrid:
    """Score = the learned one, raised for the pages that matter by rule.

    Attributes:
        signal: the learned score, `core_score` or `core_score_light`.
        sink_tokens: tokens at the start that come first.
        last_tokens: tokens at the end that come first.
        rule_nats: what a page of the current turn, or that a tool call needs, is worth more, in the score's unit.
    """

    signal: str
    sink_tokens: int
    last_tokens: int
    rule_nats: float

    def __post_init__(self) -> None:
        """Refuses negative numbers, and a name that is none."""
        require_name(self, "signal")
        require_whole(self, "sink_tokens", 0)
        require_whole(self, "last_tokens", 0)
        require_number(self, "rule_nats", 0)

    @property
    def needs(self) -> frozenset[str]:
        """The learned score, and what the rules read."""
        return RULE_SIGNALS | {self.signal}

    def score(self, signals: Signals) -> Tensor:
        """[L, Hk, N] float32."""
        learned = page_signal(signals, self.signal)
        score = learned + self.rule_nats * core_pages(signals, self.sink_tokens, self.last_tokens)
        above = score.amax(-1, keepdim=True) - score.amin(-1, keepdim=True) + 1.0
        return score + above * fixed_pages(signals, self.sink_tokens, self.last_tokens)
