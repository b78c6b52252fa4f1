"""Recall counted by document, layer, phase and circumstance, and what can be said of it: means, intervals, tests.

Documents are what is independent here: steps of one text are not. So every interval resamples documents, and every
test is paired over them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch
from torch import Tensor

from testbed.predictor.agents import PHASES
from testbed.predictor.recall import SHARES, Caught
from testbed.results import stats
from testbed.results.stats import Estimate

CASES: tuple[str, ...] = ("full", "sparse", "held", "contribution")
"""full: the session is the full cache's. sparse: it attends to few pages. held: sparse, and scores are those of the
window's first step. contribution: full, and what counts is the absolute contribution to the next logit."""


@dataclass
class Tally:
    """One predictor on one document.

    Attributes:
        recall: [L, phases, cases, K] float64, sum over rows (a head at a step).
        rows: [L, phases, cases] rows counted.
        mass, total: [L, phases, cases, K] and [L, phases, cases], what was caught and what there was.
    """

    recall: Tensor
    rows: Tensor
    mass: Tensor
    total: Tensor

    @staticmethod
    def empty(layers: int) -> Tally:
        """Nothing counted yet."""
        shape = (layers, len(PHASES), len(CASES))
        tables = (torch.zeros(*shape, *more, dtype=torch.float64) for more in ((len(SHARES),), (), (len(SHARES),), ()))
        return Tally(*tables)

    def add(self, caught: Caught, layers: int, phase: int, case: str) -> None:
        """Counts one step: rows of `caught` are all heads, layer by layer; those without mass are left out."""
        at = CASES.index(case)
        there = caught.total > 0
        recall = torch.where(there.unsqueeze(-1), caught.recall, 0.0)
        self.recall[:, phase, at] += recall.view(layers, -1, len(SHARES)).sum(1)
        self.rows[:, phase, at] += there.view(layers, -1).sum(1)
        self.mass[:, phase, at] += caught.mass.view(layers, -1, len(SHARES)).sum(1)
        self.total[:, phase, at] += caught.total.view(layers, -1).sum(1)


@dataclass(frozen=True)
class Slice:
    """Which rows are looked at; None = all layers, all phases."""

    case: str
    layer: int | None = None
    phase: int | None = None

    def of(self, table: Tensor) -> Tensor:
        """Sum of a table [L, phases, cases, ...] over the slice: [...]."""
        table = table[:, :, CASES.index(self.case)]
        table = table.sum(0) if self.layer is None else table[self.layer]
        return table.sum(0) if self.phase is None else table[self.phase]


@dataclass
class Tallies:
    """All predictors on all documents.

    Attributes:
        layers: L.
        counted: (predictor, document) -> its tally.
    """

    layers: int
    counted: dict[tuple[str, str], Tally] = field(default_factory=dict)

    def tally(self, predictor: str, document: str) -> Tally:
        """That one, empty at first."""
        return self.counted.setdefault((predictor, document), Tally.empty(self.layers))

    @property
    def documents(self) -> list[str]:
        """In the order they came."""
        return list(dict.fromkeys(document for _, document in self.counted))

    @property
    def predictors(self) -> list[str]:
        """In the order they came."""
        return list(dict.fromkeys(predictor for predictor, _ in self.counted))

    def by_document(self, predictor: str, share: float, where: Slice) -> dict[str, float]:
        """Mean recall over the rows of each document that has any in the slice."""
        out = {}
        for document in self.documents:
            tally = self.counted[predictor, document]
            rows = float(where.of(tally.rows))
            if rows > 0:
                out[document] = float(where.of(tally.recall)[SHARES.index(share)]) / rows
        return out

    def mean(self, predictor: str, share: float, where: Slice) -> Estimate | None:
        """Mean over documents with its interval; None where no document has rows."""
        values = list(self.by_document(predictor, share, where).values())
        return stats.mean(values) if values else None

    def weighted(self, predictor: str, share: float, where: Slice) -> Estimate | None:
        """Share of all mass that is caught, so that heads which attend to candidates much count more."""
        tallies = [self.counted[predictor, document] for document in self.documents]
        total = [float(where.of(tally.total)) for tally in tallies]
        mass = [float(where.of(tally.mass)[SHARES.index(share)]) for tally in tallies]
        return stats.ratio(mass, total) if sum(total) > 0 else None

    def compare(self, better: str, than: str, share: float, where: Slice) -> Compared | None:
        """Paired over documents; None where there are none."""
        first, second = self.by_document(better, share, where), self.by_document(than, share, where)
        if not first:
            return None
        a, b = [first[name] for name in first], [second[name] for name in first]
        return Compared(better, than, stats.delta(a, b), sign_flips(np.subtract(a, b)))

    def closed(self, predictor: str, low: str, high: str, share: float, where: Slice) -> Estimate | None:
        """How much of the way from `low` to `high` a predictor goes: 0 = no better than low, 1 = as good as high."""
        mine, lower, upper = (self.by_document(name, share, where) for name in (predictor, low, high))
        gained = [mine[name] - lower[name] for name in mine]
        room = [upper[name] - lower[name] for name in mine]
        return stats.ratio(gained, room) if sum(room) > 0 else None


@dataclass(frozen=True)
class Compared:
    """A paired comparison.

    Attributes:
        better, than: predictors.
        difference: mean of better - than.
        p: two-sided, by exact sign flips.
    """

    better: str
    than: str
    difference: Estimate
    p: float

    @property
    def significant(self) -> bool:
        """Whether `better` is better at 5 %."""
        return self.difference.value > 0 and self.p < 0.05


MOST_EXACT = 16
DRAWS = 1 << MOST_EXACT


def sign_flips(differences: np.ndarray, seed: int = 0) -> float:
    """Two-sided p of the mean difference being 0, if each difference could as well have the other sign (Fisher 1935).

    Exact up to `MOST_EXACT` differences, else over `DRAWS` drawn signs. With n differences it can't be below 2 / 2^n.
    """
    n = len(differences)
    if n <= MOST_EXACT:
        signs = np.array(list(product((1.0, -1.0), repeat=n)))
    else:
        signs = np.random.default_rng(seed).choice((1.0, -1.0), (DRAWS, n))
        signs[0] = 1.0  # what was observed is one of the draws
    flipped = np.abs(signs @ differences)
    return float((flipped >= abs(differences.sum()) - 1e-12).mean())
