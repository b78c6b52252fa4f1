"""A progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

QUIET_S = 30.0  # plain lines: how far a phase is, at most this often


class Progress:
    """One bar that moves through the phases of a run; use it as a context manager."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        self._bar = Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console, transient=True)
        self._live = self._console.is_terminal
        self._task = self._bar.add_task("starting", total=None)
        self._what, self._said_s = "", time.monotonic()

    def __enter__(self) -> Progress:
        """Shows the bar, if this is a terminal."""
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Takes the bar away."""
        if self._live:
            self._bar.stop()

    def start(self, what: str, total: float | None = None) -> None:
        """A new phase of `total` units (None: unknown)."""
        self._bar.reset(self._task, description=what, total=total, start=True)
        if not self._live and what != self._what:
            self._say(f"{what} ...")
        self._what = what

    def advance(self, units: float) -> None:
        """Some units more."""
        self._bar.advance(self._task, units)
        self._go_on()

    def fraction(self, what: str, done: float) -> None:
        """A phase of which only the done fraction is known."""
        if what != self._what:
            self.start(what, 1.0)
        self._bar.update(self._task, completed=done)
        self._go_on()

    def _go_on(self) -> None:
        """Without a terminal a long phase says how far it is."""
        if not self._live and time.monotonic() - self._said_s > QUIET_S:
            self._say(f"{self._what} ... {self._bar.tasks[self._task].percentage:.0f}%")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False)
        self._said_s = time.monotonic()

    def note(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, markup=False)
