"""The contract of a workload: seeded samples of context, question and right answer, and their score.

A workload knows text and token ids, never a model, a cache or a policy. The engine prefills and compresses
the context before it looks at the question; samples that share a `context_id` share one prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

Encode = Callable[[str], list[int]]
"""Text to token ids, without special tokens."""
Decode = Callable[[list[int]], str]
"""Token ids to text, without special tokens."""

Split = Literal["test", "calibration"]
SPLITS: tuple[Split, ...] = ("test", "calibration")


class WorkloadError(ValueError):
    """A workload was given something it can't work with."""


@dataclass(frozen=True)
class Turn:
    """What was said between the context and the question.

    Attributes:
        tokens: what was said.
        role: code of `policies.base.Role`: a user's turn, a tool's result, an answer given.
        pause: whether the session lies idle afterwards, so that its memory is wanted for others.
    """

    tokens: list[int]
    role: int
    pause: bool = False

    def __post_init__(self) -> None:
        """A turn of nothing is refused."""
        if not self.tokens:
            raise WorkloadError("a turn without tokens: leave it out")


@dataclass(frozen=True)
class Sample:
    """One question about one context.

    Attributes:
        id: unique within the workload.
        context_id: equal ids mean equal context_tokens: prefill and compress once for all of them.
        context_tokens: what is prefilled and compressed, question unseen.
        question_tokens: the next turn; the first answer token follows its last one. May be empty for
            workloads without a task.
        answer: the right answer as text; empty for workloads without a task.
        continuation_tokens: text run token by token for KL and top-1 agreement; for tasks, the right answer.
        meta: plain JSON values for the record (length, depth, needle position, ...).
        roles: role code of every context token, or None.
        history: turns taken after the context and before the question, in order.
    """

    id: str
    context_id: str
    context_tokens: list[int]
    question_tokens: list[int]
    answer: str
    continuation_tokens: list[int] = field(default_factory=list)
    meta: Mapping[str, Any] = field(default_factory=dict)
    roles: list[int] | None = None
    history: tuple[Turn, ...] = ()

    def __post_init__(self) -> None:
        """An empty context or roles of another length are refused."""
        if not self.context_tokens:
            raise WorkloadError(f"sample {self.id!r}: context_tokens is empty")
        if self.roles is not None and len(self.roles) != len(self.context_tokens):
            raise WorkloadError(
                f"sample {self.id!r}: {len(self.roles)} roles for {len(self.context_tokens)} context tokens"
            )

    @property
    def history_tokens(self) -> int:
        """Tokens of the turns before the question."""
        return sum(len(turn.tokens) for turn in self.history)


@runtime_checkable
class Workload(Protocol):
    """Tasks with right answers, or plain text."""

    @property
    def name(self) -> str:
        """For tables and records."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """How many tokens an answer may take."""
        ...

    @property
    def total_samples(self) -> int:
        """How many samples `samples` yields, for progress bars."""
        ...

    @property
    def max_length_tokens(self) -> int:
        """The longest context of the workload, question and answer not included."""
        ...

    def samples(self, encode: Encode, decode: Decode, seed: int) -> Iterator[Sample]:
        """The samples, the same ones for the same seed; samples of one context follow each other.

        Raises:
            WorkloadError: the text does not suffice, or a length is beyond it.
        """
        ...

    def score(self, answer_text: str, sample: Sample) -> float | None:
        """0 to 1, or None where the workload has no task."""
        ...


def check_whole(key: str, value: object, least: int) -> None:
    """Raises `WorkloadError` naming key and value unless value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise WorkloadError(f"{key}={value!r}: must be a whole number of at least {least}")


def check_list(key: str, values: object) -> tuple[Any, ...]:
    """The values as a tuple; raises `WorkloadError` naming key and value unless they are a list with an entry."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
        raise WorkloadError(f"{key}={values!r}: must be a list with at least one entry")
    return tuple(values)


def check_distinct(key: str, values: Sequence[object]) -> None:
    """Raises `WorkloadError` if a value is there twice: its samples would be the same ones again."""
    if len(set(values)) < len(values):
        raise WorkloadError(f"{key}={list(values)!r}: holds a value twice, and with it the same samples twice")


def check_fraction(key: str, value: object) -> None:
    """Raises `WorkloadError` naming key and value unless value is a number in [0, 1]."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not 0.0 <= float(value) <= 1.0:  # type: ignore[arg-type]
        raise WorkloadError(f"{key}={value!r}: must be a number in [0, 1]")


def check_split(key: str, value: object) -> None:
    """Raises `WorkloadError` unless value is "test" or "calibration"."""
    if value not in SPLITS:
        raise WorkloadError(f"{key}={value!r}: must be one of {', '.join(SPLITS)}")
