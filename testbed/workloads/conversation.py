"""A conversation of several turns with pauses between them, asked about things said earlier.

Context: a system prompt, documents, a tool's result. Then in each turn the user tells something at some length and
asks a question; the answer is a seven-digit number as in `needle` (RULER's multi-key NIAH, arXiv:2404.06654) that
stood in a document, in the tool's result, or in what the user told two turns before. After each answer the session
lies idle, so that its pages may be put away and those that matter must be found again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from policies.base import Role
from testbed.workloads.base import (
    Decode,
    Encode,
    Sample,
    Split,
    Turn,
    WorkloadError,
    check_distinct,
    check_list,
    check_split,
    check_whole,
)
from testbed.workloads.haystack import Haystack, Text, documents, split_documents
from testbed.workloads.needle import KEYS, NUMBERS, SPLIT_SEED, insert, number_score

SYSTEM = "You are a careful assistant. Answer from what was said in this conversation, as briefly as you can."
DOCUMENT = "\n\nDocument {number}:\n"
TOOL = "\n\nResult of the search:\n"
USER = "\n\nUser:\n"
FACT = " The {key} is {number}."
QUESTION = "\n\nWhat is the {key}? The {key} is"
MOST_TURNS = min(map(len, KEYS.values())) - 2  # each turn tells one fact, the context tells two
ASKED_ABOUT = ("document", "tool")  # by the first questions; later ones are about what the user told


@dataclass
class _Text:
    """Tokens with their roles, growing."""

    tokens: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int], role: Role) -> None:
        self.tokens += tokens
        self.roles += [int(role)] * len(tokens)


@dataclass(frozen=True)
class Conversation:
    """Conversations whose questions are the samples; those of one conversation share the context.

    Attributes:
        lengths: context lengths, exact to the token: system prompt, documents, tool's result, headings.
        turns: questions a conversation.
        turn_tokens: tokens the user tells before each question, heading and fact included.
        documents: how many share the context with the tool's result, in parts of equal length.
        samples_per_length: conversations of each length.
        pause: whether the session lies idle after each answer.
        max_new_tokens: most tokens of an answer.
        split: which text, keys and numbers are used.
        text: documents by name, a text file or a folder; None for the essays.
    """

    lengths: Sequence[int] = (2048,)
    turns: int = 4
    turn_tokens: int = 128
    documents: int = 3
    samples_per_length: int = 1
    pause: bool = True
    max_new_tokens: int = 10
    split: Split = "test"
    text: Text = None
    name: str = "conversation"

    def __post_init__(self) -> None:
        """Checks what Hydra's instantiate does not."""
        object.__setattr__(self, "lengths", check_list("workload.lengths", self.lengths))
        for length in self.lengths:
            check_whole("workload.lengths", length, 1)
        check_distinct("workload.lengths", self.lengths)
        for key in ("turns", "turn_tokens", "documents", "samples_per_length", "max_new_tokens"):
            check_whole(f"workload.{key}", getattr(self, key), 1)
        if self.turns > MOST_TURNS:
            raise WorkloadError(f"workload.turns={self.turns}: at most {MOST_TURNS}, one fact is told in each")
        if not isinstance(self.pause, bool):
            raise WorkloadError(f"workload.pause={self.pause!r}: must be true or false")
        check_split("workload.split", self.split)

    @property
    def max_length_tokens(self) -> int:
        """The longest context."""
        return max(self.lengths)

    @property
    def total_samples(self) -> int:
        """Questions in all."""
        return self.turns * self.samples_per_length * len(self.lengths)

    def samples(self, encode: Encode, decode: Decode, seed: int) -> Iterator[Sample]:
        """Round by round over the lengths: a stopped run has seen every length about equally often."""
        hay = Haystack.build(split_documents(documents(self.text), self.split), encode, decode)
        for number in range(self.samples_per_length):
            for length in self.lengths:
                rng = np.random.default_rng([seed, SPLIT_SEED[self.split], number, length])
                yield from _Script(self, hay, encode, length, rng).samples(f"{length}-{number}")

    def score(self, answer_text: str, sample: Sample) -> float:
        """1.0 if the first number of seven digits or more is the right one."""
        return number_score(answer_text, sample.answer)


class _Script:
    """One conversation in the making."""

    def __init__(
        self, work: Conversation, hay: Haystack, encode: Encode, length: int, rng: np.random.Generator
    ) -> None:
        self.work, self.hay, self.encode, self.length, self.rng = work, hay, encode, length, rng
        told = work.turns + len(ASKED_ABOUT)
        self.keys = [KEYS[work.split][at] for at in rng.permutation(len(KEYS[work.split]))[:told]]
        low, high = NUMBERS[work.split]
        self.numbers = [str(number) for number in rng.integers(low, high + 1, told)]
        self.facts = [encode(FACT.format(key=k, number=n)) for k, n in zip(self.keys, self.numbers, strict=True)]
        self.positions: list[int] = []  # of each fact told so far, in the whole conversation

    def samples(self, name: str) -> Iterator[Sample]:
        """One a question."""
        work, encode = self.work, self.encode
        context = self._context()
        context_id = f"{work.name}-{work.split}-{name}"
        history: list[Turn] = []
        length = len(context.tokens)
        for at in range(work.turns):
            history.append(self._told(at, length))
            length += work.turn_tokens
            question = encode(QUESTION.format(key=self.keys[at]))
            answer = encode(f" {self.numbers[at]}")
            yield Sample(
                id=f"{context_id}/{at}",
                context_id=context_id,
                context_tokens=context.tokens,
                question_tokens=question,
                answer=self.numbers[at],
                continuation_tokens=answer,
                meta={
                    "length_tokens": self.length,
                    "turn": at,
                    "asked_about": ASKED_ABOUT[at] if at < len(ASKED_ABOUT) else "user",
                    "needle_position": self.positions[at],
                    "needle_tokens": len(self.facts[at]),
                    "distance_tokens": length - self.positions[at],
                    "key": self.keys[at],
                },
                roles=context.roles,
                history=tuple(history),
            )
            history.append(Turn(question, int(Role.USER)))
            history.append(Turn(answer, int(Role.GENERATED), work.pause))
            length += len(question) + len(answer)

    def _context(self) -> _Text:
        """System prompt, documents, tool's result; the first fact in a document, the second in the result."""
        encode, count = self.encode, self.work.documents
        system = encode(SYSTEM)
        headings = [encode(DOCUMENT.format(number=at + 1)) for at in range(count)] + [encode(TOOL)]
        fixed = len(system) + sum(map(len, headings)) + len(self.facts[0]) + len(self.facts[1])
        plain = self.length - fixed
        if plain < len(headings):
            raise WorkloadError(
                f"workload.lengths={self.length}: too short for {count} documents; at least {fixed + len(headings)}"
            )
        context = _Text()
        context.add(system, Role.SYSTEM)
        chosen = int(self.rng.integers(count))
        for at, heading in enumerate(headings):
            tokens = plain // len(headings) + (plain % len(headings) if at == count else 0)
            role = Role.RESULT if at == count else Role.DOCUMENT
            fact = 1 if at == count else 0 if at == chosen else None
            body, offset = self._stretch(tokens, fact)
            if fact is not None:
                self.positions.append(len(context.tokens) + len(heading) + offset)
            context.add([*heading, *body], role)
        return context

    def _told(self, at: int, length: int) -> Turn:
        """What the user tells in a turn that begins at position `length`."""
        fact, heading = at + len(ASKED_ABOUT), self.encode(USER)
        plain = self.work.turn_tokens - len(heading) - len(self.facts[fact])
        if plain < 0:
            raise WorkloadError(
                f"workload.turn_tokens={self.work.turn_tokens}: too short for a fact of {len(self.facts[fact])} tokens "
                f"and a heading of {len(heading)}"
            )
        body, offset = self._stretch(plain, fact)
        self.positions.append(length + len(heading) + offset)
        return Turn([*heading, *body], int(Role.USER))

    def _stretch(self, tokens: int, fact: int | None) -> tuple[list[int], int]:
        """Text of that many tokens, a fact put between two of its sentences, and where it stands."""
        begin, stretch = self.hay.stretch(tokens, self.rng, "workload.lengths")
        if fact is None:
            return stretch, 0
        offset = self.hay.nearest_start(begin, tokens, int(self.rng.integers(tokens + 1)))
        body, (position,) = insert(stretch, [self.facts[fact]], [offset])
        return body, position
