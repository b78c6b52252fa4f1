"""Classes that follow the text: another classifier's, corrected while decoding by what heads turn out to attend to.

Two thresholds apart from each other (hysteresis) keep a head from changing to and fro, and running means of many steps
stand behind both. Pages that a head dropped while it was LOCAL do not come back: it keeps what it has from then on, and
the record says what it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Classifier, Head, PolicyError, Signals
from policies.checks import head_classes, head_signal, require_number

LIVE = ("head_far_now", "head_edge_now", "head_drift")


@dataclass(frozen=True)
class Monitored:
    """A LOCAL head that looks at the far end of its window turns GLOBAL; a GLOBAL one that looks no farther, LOCAL.

    Attributes:
        base: says what heads are at first.
        enter: least running share at the window's edge that turns a LOCAL or SPECIAL head GLOBAL, in [0, 1].
        leave: greatest running far share at which a GLOBAL head turns LOCAL, in [0, 1], below `enter`.
        settled: greatest drift, up or down, at which a head may turn LOCAL: not while it is changing.
    """

    base: Classifier
    enter: float
    leave: float
    settled: float

    def __post_init__(self) -> None:
        """Refuses a base that is no classifier and thresholds without room between them."""
        for key in ("enter", "leave", "settled"):
            require_number(self, key, 0, 1)
        if self.leave >= self.enter:
            raise PolicyError(f"Monitored.leave={self.leave}: must be below enter={self.enter}")
        if not isinstance(self.base, Classifier):
            raise PolicyError(f"Monitored.base={self.base!r}: must be a classifier")

    @property
    def needs(self) -> frozenset[str]:
        """The base's signals and the running ones."""
        return self.base.needs | frozenset(LIVE)

    def classify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8 of `Head`, the base's."""
        for name in LIVE:
            head_signal(signals, name)
        return self.base.classify(signals)

    def reclassify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8 of `Head`: the classes in force, where the running shares crossed a threshold changed."""
        now = head_classes(signals)
        far, edge, drift = (head_signal(signals, name) for name in LIVE)
        rising = ((now == Head.LOCAL) | (now == Head.SPECIAL)) & (edge >= self.enter)
        falling = (now == Head.GLOBAL) & (far <= self.leave) & (edge < self.enter) & (drift.abs() <= self.settled)
        changed = torch.where(rising, int(Head.GLOBAL), now)
        return torch.where(falling, int(Head.LOCAL), changed).to(torch.int8)
