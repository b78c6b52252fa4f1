"""What heads are measured on, and how: conf/calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from testbed.workloads.base import check_list, check_whole

Tick = Callable[[float], None]
"""Told how much of a group of measures is done, 0 to 1."""


class CalibrationError(ValueError):
    """Heads can't be measured as asked."""


@dataclass(frozen=True)
class CalibrationConfig:
    """What heads are measured on; built by Hydra from conf/calibration.

    Attributes:
        needle_lengths: contexts of the retrieval score; each at depths .1, .5 and .9.
        needle_samples_per_cell: how often each.
        text_tokens, text_samples: plain text of the other measures, and text of the other tasks.
        rows: rows of attention looked at in a text at most: every k-th block of 128, the last one included.
        local_window_tokens: what counts as near.
        long_range_tokens: what counts as far.
        sink_tokens: first tokens that every head keeps.
        edge_window_tokens: the window of the edge mass.
        shift_tokens, prefix_tokens, prefixes: text and prefixes of the prefix shift; one sample is one text.
        gate_tokens, gate_steps: contexts that gates are trained on, and steps of it (`testbed.heads.gates`).
        seed: of texts and needles.
    """

    needle_lengths: tuple[int, ...] = (1024, 2048)
    needle_samples_per_cell: int = 2
    text_tokens: int = 2048
    text_samples: int = 3
    rows: int = 1024
    local_window_tokens: int = 128
    long_range_tokens: int = 512
    sink_tokens: int = 4
    edge_window_tokens: int = 512
    shift_tokens: int = 1024
    prefix_tokens: int = 256
    prefixes: int = 2
    gate_tokens: int = 512
    gate_steps: int = 80
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks ranges; lists from YAML become tuples."""
        object.__setattr__(self, "needle_lengths", check_list("calibration.needle_lengths", self.needle_lengths))
        for length in self.needle_lengths:
            check_whole("calibration.needle_lengths", length, 64)
        for key in (
            "needle_samples_per_cell",
            "text_tokens",
            "text_samples",
            "rows",
            "local_window_tokens",
            "long_range_tokens",
            "edge_window_tokens",
            "shift_tokens",
            "prefix_tokens",
            "prefixes",
            "gate_tokens",
            "gate_steps",
        ):
            check_whole(f"calibration.{key}", getattr(self, key), 1)
        for key in ("sink_tokens", "seed"):
            check_whole(f"calibration.{key}", getattr(self, key), 0)
        windows = {
            "long_range_tokens": self.long_range_tokens,
            "local_window_tokens": self.local_window_tokens,
            "edge_window_tokens + sink_tokens": self.edge_window_tokens + self.sink_tokens,
        }
        for key, window in windows.items():
            if window >= self.text_tokens:
                raise CalibrationError(
                    f"calibration.{key}={window}: must be below text_tokens={self.text_tokens}, "
                    "a text shorter than the window shows nothing beyond it"
                )

    @property
    def first_row(self) -> int:
        """The first row with something in the long range and beyond window and sinks: shorter ones are left out."""
        return max(self.long_range_tokens, self.local_window_tokens, self.edge_window_tokens + self.sink_tokens)
