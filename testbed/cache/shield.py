"""Ctrl-C and a polite kill wait until a cache is consistent again: pages half-moved could not even be closed."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Answer = TypeVar("Answer")
SIGNALS = FIRST, _ = signal.SIGINT, signal.SIGTERM


class _Later:
    """A handler that notes the first signal and lets the second one through, should the disk hang."""

    def __init__(self, number: int) -> None:
        self.number, self.seen = number, False
        self.before = signal.getsignal(number)
        self.frame: FrameType | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            self.act(frame)
        self.seen, self.frame = True, frame

    def act(self, frame: FrameType | None) -> None:
        """Does what the signal does otherwise."""
        if callable(self.before):
            self.before(self.number, frame)
        elif self.before == signal.SIG_DFL:
            signal.signal(self.number, signal.SIG_DFL)
            signal.raise_signal(self.number)


def shielded(change: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """A function that changes a cache and that signals do not interrupt; what they ask for happens once it is done."""

    @functools.wraps(change)
    def whole(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
        # Handlers are the main thread's affair, and within one shield another has nothing to do.
        if threading.current_thread() is not threading.main_thread() or isinstance(signal.getsignal(FIRST), _Later):
            return change(*args, **kwargs)
        later = [each for each in map(_Later, SIGNALS) if each.before is not None]
        for each in later:
            signal.signal(each.number, each)
        try:
            return change(*args, **kwargs)
        finally:
            for each in later:
                signal.signal(each.number, each.before)
            for each in later:
                if each.seen:
                    each.act(each.frame)

    return whole
