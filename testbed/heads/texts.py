"""Texts that heads are measured on, task by task; none of them belongs to the test split.

`text`: essays. `needle`: essays with numbers that are asked for. ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from testbed.heads.calibration import CalibrationError
from testbed.models.base import Decoder
from testbed.workloads.base import Sample
from testbed.workloads.needle import Needle
from testbed.workloads.text import Continuation

Span = tuple[int, int]
"""Tokens [begin, end)."""


@dataclass(frozen=True)
class Asking:
    """Rows of attention that a score looks at, and where their mass counts.

    Attributes:
        rows: positions, ascending; for copied answers the token before each answer token.
        spans: for each of them, the spans of tokens its mass is counted on.
    """

    rows: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]

    def __post_init__(self) -> None:
        """At least one row, ascending, each with its spans."""
        if not self.rows or len(self.rows) != len(self.spans) or list(self.rows) != sorted(self.rows):
            raise CalibrationError(f"{len(self.rows)} rows with {len(self.spans)} spans: one each, rows ascending")


@dataclass(frozen=True)
class CalibrationText:
    """One text.

    Attributes:
        task: which kind.
        tokens: of the whole text, questions and right answers included.
        roles: `policies.base.Role` of every token, or None.
        asks: measure -> the rows it looks at.
        context_tokens: tokens before the first question.
    """

    task: str
    tokens: list[int]
    roles: list[int] | None = None
    asks: Mapping[str, Asking] = field(default_factory=dict)
    context_tokens: int = 0


def texts(task: str, decoder: Decoder, length_tokens: int, samples: int, seed: int) -> list[CalibrationText]:
    """Texts of one task, the same ones for the same seed.

    Args:
        task: one of `TASKS`.
        decoder: whose tokenizer is used.
        length_tokens: of each text, questions and answers not counted.
        samples: how many.
        seed: of places, keys and numbers.

    Raises:
        CalibrationError: an unknown task, or nothing of that kind here.
    """
    if task not in TASKS:
        raise CalibrationError(f"task={task!r}: must be one of {', '.join(TASKS)}")
    return TASKS[task](decoder, length_tokens, samples, seed)


def plain(decoder: Decoder, length_tokens: int, samples: int, seed: int) -> list[CalibrationText]:
    """Stretches of essays."""
    work = Continuation(lengths=(length_tokens,), samples_per_length=samples, split="calibration")
    return [
        CalibrationText("text", sample.context_tokens, context_tokens=length_tokens)
        for sample in work.samples(decoder.encode, decoder.decode, seed)
    ]


def needles(decoder: Decoder, length_tokens: int, samples: int, seed: int) -> list[CalibrationText]:
    """Essays with a needle at each depth, then every question with its right answer."""
    work = Needle(
        (length_tokens,), samples_per_cell=samples, needles_per_context=len(Needle.depths), split="calibration"
    )
    drawn = work.samples(decoder.encode, decoder.decode, seed)
    return [copying(decoder, list(group)) for _, group in groupby(drawn, key=lambda sample: sample.context_id)]


def copying(decoder: Decoder, samples: Sequence[Sample]) -> CalibrationText:
    """The questions about one context, asked and answered one after the other.

    Raises:
        CalibrationError: the tokenizer writes the number differently in needle and answer, so nothing is copied.
    """
    tokens = list(samples[0].context_tokens)
    rows: list[int] = []
    spans: list[tuple[Span, ...]] = []
    for sample in samples:
        answer = decoder.encode(sample.answer)
        begin = int(sample.meta["needle_position"])
        needle = tokens[begin : begin + int(sample.meta["needle_tokens"])]
        offsets = [at for at in range(len(needle) - len(answer) + 1) if needle[at : at + len(answer)] == answer]
        if not offsets or sample.continuation_tokens[-len(answer) :] != answer:
            raise CalibrationError(
                f"the tokenizer of {decoder.name} splits {sample.answer!r} differently in needle and answer; choose "
                "another wording (workload.needle, workload.question)"
            )
        tokens += [*sample.question_tokens, *sample.continuation_tokens]
        rows += range(len(tokens) - len(answer) - 1, len(tokens) - 1)
        source = begin + offsets[-1]
        spans += [((source, source + len(answer)),)] * len(answer)
    asking = {"retrieval_score": Asking(tuple(rows), tuple(spans))}
    return CalibrationText("needle", tokens, None, asking, len(samples[0].context_tokens))


TASKS: Mapping[str, Callable[[Decoder, int, int, int], list[CalibrationText]]] = {
    "text": plain,
    "needle": needles,
}
