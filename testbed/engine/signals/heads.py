"""Signals about heads, measured once per model (`python -m testbed.heads analyse`): [L, Hk], no pages."""

from __future__ import annotations

from torch import Tensor

from testbed.engine.signals.base import Observed, SignalContext, SignalError, Source


class HeadMeasure(Source):
    """One calibrated measure of every head."""

    def __init__(self, context: SignalContext, measure: str) -> None:
        measures = context.head_measures()
        if measure not in measures:
            raise SignalError(f"the head map has no measure {measure!r}; it has {', '.join(sorted(measures))}")
        self._values = measures[measure]

    def value(self, observed: Observed) -> Tensor:
        """[L, Hk] float32."""
        if tuple(self._values.shape) != observed.shape[:2]:
            raise SignalError(
                f"the head map is for {tuple(self._values.shape)} layers x KV heads, the model has {observed.shape[:2]}"
            )
        return self._values
