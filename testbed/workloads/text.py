"""Plain text without a task: a stretch to prefill and compress, and its continuation to compare distributions on.

For KL divergence and top-1 agreement against the full cache, which need no right answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from testbed.workloads.base import (
    Decode,
    Encode,
    Sample,
    Split,
    check_distinct,
    check_list,
    check_split,
    check_whole,
)
from testbed.workloads.haystack import Haystack, Text, documents, split_documents
from testbed.workloads.needle import SPLIT_SEED


@dataclass(frozen=True)
class Continuation:
    """Stretches of text and what follows them.

    Attributes:
        lengths: context lengths, exact to the token.
        continuation_tokens: tokens after the context, run with the compressed cache.
        samples_per_length: stretches of each length.
        split: which documents are used.
        text: documents by name, a text file or a folder; None for the essays.
    """

    lengths: Sequence[int] = (2048,)
    continuation_tokens: int = 64
    samples_per_length: int = 1
    split: Split = "test"
    text: Text = None
    name: str = "text"

    def __post_init__(self) -> None:
        """Checks what Hydra's instantiate does not."""
        object.__setattr__(self, "lengths", check_list("workload.lengths", self.lengths))
        for length in self.lengths:
            check_whole("workload.lengths", length, 1)
        check_distinct("workload.lengths", self.lengths)
        for key in ("continuation_tokens", "samples_per_length"):
            check_whole(f"workload.{key}", getattr(self, key), 1)
        check_split("workload.split", self.split)

    @property
    def total_samples(self) -> int:
        """Stretches in all."""
        return self.samples_per_length * len(self.lengths)

    @property
    def max_length_tokens(self) -> int:
        """The longest context."""
        return max(self.lengths)

    @property
    def max_new_tokens(self) -> int:
        """As many as the continuation has."""
        return self.continuation_tokens

    def samples(self, encode: Encode, decode: Decode, seed: int) -> Iterator[Sample]:
        """Round by round over the lengths."""
        hay = Haystack.build(split_documents(documents(self.text), self.split), encode, decode)
        for turn in range(self.samples_per_length):
            for length in self.lengths:
                rng = np.random.default_rng([seed, SPLIT_SEED[self.split], turn, length])
                begin, stretch = hay.stretch(length + self.continuation_tokens, rng, "workload.lengths + continuation")
                name = f"{self.name}-{self.split}-{length}-{turn}"
                yield Sample(
                    id=name,
                    context_id=name,
                    context_tokens=stretch[:length],
                    question_tokens=[],
                    answer="",
                    continuation_tokens=stretch[length:],
                    meta={"length_tokens": length, "haystack_position": begin},
                )

    def score(self, answer_text: str, sample: Sample) -> None:
        """There is no task, so there is no score."""
        return None
