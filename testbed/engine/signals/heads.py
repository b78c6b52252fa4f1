"""Signals about heads, measured once per model (`python -m testbed.heads analyse`): [L, Hk], no pages."""

from __future__ import annotations

from torch import Tensor

from testbed.engine.signals.base import Observed, SignalContext, SignalError, Source
from testbed.heads.formats import load
from testbed.heads.imported import FormatError, ImportedMap


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


class ImportedHeads(Source):
    """What somebody else's head map says of every head: its class or its window.

    Args:
        context: of all sources; its decoder, where there is one, tells which map fits.
        path: a RedKnot, DuoAttention or HeadKV file, or `file:measure` of a head map of ours.
        what: "classes", as codes of `Head`, or "window_tokens": of every local head, 0 = the whole context.
        global_share: for files of scores, how many of the heads are GLOBAL, the rest LOCAL; None = the file's own rule.
    """

    def __init__(self, context: SignalContext, path: str | None, what: str, global_share: float | None = None) -> None:
        if not isinstance(path, str):
            raise SignalError(
                f"the signal of an imported head map has path={path!r}: name its file, e.g. "
                f"+signals.{'head_imported' if what == 'classes' else 'head_window_tokens'}.path=FILE"
            )
        self._path, self._what, self._share = path, what, global_share
        self._values: Tensor | None = None
        # Told before anything runs: a file that can't be read and, where the model is known, one that isn't for it.
        if context.decoder is None:
            self._imported()
        else:
            geometry = context.decoder.geometry
            self._values = self._read(geometry.layers, geometry.kv_heads, context.decoder.name)

    def value(self, observed: Observed) -> Tensor:
        """[L, Hk] float32."""
        if self._values is None:
            self._values = self._read(*observed.shape[:2], "the model")
        return self._values

    def _read(self, layers: int, kv_heads: int, model: str) -> Tensor:
        imported = self._imported()
        try:
            if imported.per_query:
                imported = imported.per_kv_head(kv_heads)
            imported.check_shape(layers, kv_heads, model)
            return (imported.head_classes(self._share) if self._what == "classes" else imported.windows()).float()
        except FormatError as error:
            raise SignalError(str(error)) from error

    def _imported(self) -> ImportedMap:
        try:
            return load(self._path)
        except FormatError as error:
            raise SignalError(str(error)) from error
