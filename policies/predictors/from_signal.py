"""A page matters as much as one signal says.

Several published methods are this and nothing else; which signal, and the paper, stands in their YAML:
h2o (`attention_mass`), tova (`last_mass`), quest (`query_bound`), attention_ema, bm25 (`retrieval`), embedding,
mlp (`core_score`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policies.base import Signals
from policies.checks import page_signal, require_name


@dataclass(frozen=True)
class FromSignal:
    """Score = the named signal, [L, Hk, N] or [N].

    Attributes:
        signal: its name.
    """

    signal: str

    def __post_init__(self) -> None:
        """Refuses a name that is none."""
        require_name(self, "signal")

    @property
    def needs(self) -> frozenset[str]:
        """The named signal."""
        return frozenset({self.signal})

    def score(self, signals: Signals) -> Tensor:
        """[L, Hk, N] float32."""
        return page_signal(signals, self.signal)
