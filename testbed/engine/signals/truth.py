"""`next_mass`: what the coming run would attend to under the full cache; for the oracle and for training."""

from __future__ import annotations

from torch import Tensor

from testbed.engine.signals.base import Observed, SignalContext, Source, fit_pages


class NextMass(Source):
    """The truth as it was told last; before the first run nothing is known and all pages are alike."""

    wants_truth = True

    def __init__(self, context: SignalContext) -> None:
        self._mass: Tensor | None = None

    def watch_truth(self, mass: Tensor) -> None:
        """Replaces it."""
        self._mass = mass

    def value(self, observed: Observed) -> Tensor:
        """[L, Hk, N] shares of attention."""
        return fit_pages(self._mass, observed.shape)
