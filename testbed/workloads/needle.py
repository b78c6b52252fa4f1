"""Needle in a haystack: lengths x depths x n, a seven-digit number to be copied from far back.

After github.com/gkamradt/LLMTest_NeedleInAHaystack and RULER's multi-key NIAH (arXiv:2404.06654), with the
question unseen while the context is prefilled and compressed. Several needles with different keys may share a
context, so that one prefill serves several questions; they are then asked about one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from testbed.workloads.base import (
    Decode,
    Encode,
    Sample,
    Split,
    WorkloadError,
    check_distinct,
    check_fraction,
    check_list,
    check_split,
    check_whole,
)
from testbed.workloads.haystack import Haystack, Text, documents, split_documents

# The splits share neither keys nor numbers, so that nothing calibrated can know an answer of the test. Keys are whole
# phrases: with one-word keys in one sentence pattern, SmolLM2-135M mixes up the needles of a context (6 of 9 right).
KEYS: dict[Split, tuple[str, ...]] = {
    "test": (
        "telephone number of the bakery",
        "entry code of the museum",
        "serial number of the camera",
        "account number of the farmer",
        "flight number of the pilot",
        "locker code of the swimmer",
        "ticket number of the tourist",
        "license number of the dentist",
    ),
    "calibration": (
        "order number of the plumber",
        "membership number of the golfer",
        "password of the librarian",
        "registration number of the truck",
        "badge number of the guard",
        "invoice number of the tailor",
        "case number of the lawyer",
        "room code of the hotel",
    ),
}
NUMBERS: dict[Split, tuple[int, int]] = {
    "test": (1_000_000, 6_999_999),
    "calibration": (7_000_000, 9_999_999),
}
SPLIT_SEED: dict[Split, int] = {"test": 0, "calibration": 1}


@dataclass(frozen=True)
class Needle:
    """The needle grid.

    Attributes:
        lengths: context lengths, needles included, exact to the token.
        depths: where needles go, as fractions of the context; moved to the nearest sentence.
        samples_per_cell: how often each cell of the grid is drawn.
        needles_per_context: needles of how many depths share one context, at most (fewer where there are fewer).
        needle: text of a needle with {key} and {number}.
        question: text of the next turn with {key}; the answer follows it directly.
        max_new_tokens: most tokens of an answer.
        split: which text, keys and numbers are used.
        text: documents by name, a text file or a folder; None for the essays.
    """

    lengths: Sequence[int] = (2048,)
    depths: Sequence[float] = (0.1, 0.5, 0.9)
    samples_per_cell: int = 1
    needles_per_context: int = 1
    needle: str = " The {key} is {number}."
    question: str = "\n\nWhat is the {key}? The {key} is"
    max_new_tokens: int = 10
    split: Split = "test"
    text: Text = None
    name: str = "needle"

    def __post_init__(self) -> None:
        """Checks what Hydra's instantiate does not."""
        for key in ("lengths", "depths"):
            object.__setattr__(self, key, check_list(f"workload.{key}", getattr(self, key)))
        for length in self.lengths:
            check_whole("workload.lengths", length, 1)
        for depth in self.depths:
            check_fraction("workload.depths", depth)
        for key in ("samples_per_cell", "needles_per_context", "max_new_tokens"):
            check_whole(f"workload.{key}", getattr(self, key), 1)
        check_split("workload.split", self.split)
        most = min(len(keys) for keys in KEYS.values())
        if self.needles_per_context > most:
            raise WorkloadError(
                f"workload.needles_per_context={self.needles_per_context}: at most {most}, one per key there is"
            )
        check_distinct("workload.lengths", self.lengths)
        check_distinct("workload.depths", self.depths)
        for key, holes in (("needle", ("{key}", "{number}")), ("question", ("{key}",))):
            if not isinstance(getattr(self, key), str):
                raise WorkloadError(f"workload.{key}={getattr(self, key)!r}: must be a text with {' and '.join(holes)}")
            missing = [hole for hole in holes if hole not in getattr(self, key)]
            if missing:
                raise WorkloadError(f"workload.{key}={getattr(self, key)!r}: lacks {' and '.join(missing)}")

    @property
    def max_length_tokens(self) -> int:
        """The longest context."""
        return max(self.lengths)

    @property
    def total_samples(self) -> int:
        """Questions in all."""
        return self.samples_per_cell * len(self.lengths) * len(self.depths)

    def samples(self, encode: Encode, decode: Decode, seed: int) -> Iterator[Sample]:
        """Round by round over the whole grid: a stopped run has seen every cell about equally often."""
        hay = Haystack.build(split_documents(documents(self.text), self.split), encode, decode)
        shared = self.needles_per_context
        groups = [self.depths[at : at + shared] for at in range(0, len(self.depths), shared)]
        for turn in range(self.samples_per_cell):
            for length in self.lengths:
                for depths in groups:
                    # Samples depend on their cell alone: adding a length or a round changes no other sample.
                    cell = [
                        seed,
                        SPLIT_SEED[self.split],
                        turn,
                        length,
                        *(round(1e6 * depth) for depth in depths),
                    ]
                    yield from self._context(hay, encode, length, depths, turn, np.random.default_rng(cell))

    def score(self, answer_text: str, sample: Sample) -> float:
        """1.0 if the first number of seven digits or more is the right one, whatever surrounds it."""
        return number_score(answer_text, sample.answer)

    def _context(
        self,
        hay: Haystack,
        encode: Encode,
        length: int,
        depths: Sequence[float],
        turn: int,
        rng: np.random.Generator,
    ) -> Iterator[Sample]:
        """The samples of one context of `length` tokens, one for each depth."""
        keys = [KEYS[self.split][at] for at in rng.permutation(len(KEYS[self.split]))[: len(depths)]]
        low, high = NUMBERS[self.split]
        numbers = [str(number) for number in rng.integers(low, high + 1, len(depths))]
        needles = [
            encode(self.needle.format(key=key, number=number)) for key, number in zip(keys, numbers, strict=True)
        ]
        plain = length - sum(map(len, needles))
        if plain < 0:
            raise WorkloadError(f"workload.lengths={length}: too short for needles of {length - plain} tokens")
        begin, stretch = hay.stretch(plain, rng, "workload.lengths")
        offsets = [hay.nearest_start(begin, plain, round(depth * plain)) for depth in depths]
        context, positions = insert(stretch, needles, offsets)
        context_id = f"{self.name}-{self.split}-{length}-{'_'.join(f'{d:g}' for d in depths)}-{turn}"
        for at, depth in enumerate(depths):
            yield Sample(
                id=f"{context_id}/{depth:g}-{at}",
                context_id=context_id,
                context_tokens=context,
                question_tokens=encode(self.question.format(key=keys[at])),
                answer=numbers[at],
                continuation_tokens=encode(f" {numbers[at]}"),
                meta={
                    "length_tokens": length,
                    "depth": float(depth),
                    "needle_position": positions[at],
                    "needle_tokens": len(needles[at]),
                    "haystack_position": begin,
                    "key": keys[at],
                },
            )


def number_score(answer_text: str, right: str) -> float:
    """1.0 if the first number of seven digits or more is the right one, whatever surrounds it."""
    found = re.search(r"\d{7,}", answer_text.replace(",", ""))
    return float(found is not None and found.group() == right)


def insert(
    stretch: Sequence[int], needles: Sequence[Sequence[int]], offsets: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The stretch with every needle at its offset, and the position at which each needle begins.

    Args:
        stretch: token ids.
        needles: token ids of each needle.
        offsets: positions in the stretch, in any order; equal ones keep the needles' order.
    """
    context: list[int] = []
    positions = [0] * len(needles)
    done = 0
    for at in sorted(range(len(needles)), key=lambda at: offsets[at]):
        context += stretch[done : offsets[at]]
        positions[at] = len(context)
        context += needles[at]
        done = offsets[at]
    return context + list(stretch[done:]), positions
