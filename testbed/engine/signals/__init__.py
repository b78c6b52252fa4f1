"""Signals of the real path: one source a file, one YAML each in conf/signal/.

A source watches prefill, turns and steps as far as it needs to and answers with one array. Only the sources that
the policy's parts declare are built.
"""

from testbed.engine.signals.base import (
    Observed,
    PrefillChunk,
    PrefillWatcher,
    SignalContext,
    SignalError,
    SignalSource,
    StepView,
    build_sources,
)

__all__ = [
    "Observed",
    "PrefillChunk",
    "PrefillWatcher",
    "SignalContext",
    "SignalError",
    "SignalSource",
    "StepView",
    "build_sources",
]
