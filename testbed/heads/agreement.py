"""Whether two head maps agree beyond chance: rank correlation, overlap of their top heads, and what ties leave open.

Spearman's correlation with average ranks and its permutation test; the Jaccard overlap of the heads that each map puts
on top, with what chance gives (hypergeometric, exact) and with the spread that ties leave: a map that gives many heads
one value has no top 15 %, only the one its reader happens to draw (DuoAttention: 110 of Mistral's 256 gates are 1.0).
Where maps rise with depth alike, they agree without telling two heads of a layer apart; so layers, and heads inside
layers, are tested by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

SHARES = (0.15, 0.25, 0.5)
DRAWS = 200  # of the ties
PERMUTATIONS = 1999
LEVEL = 0.05
_CHUNK = 500  # permutations held at once

Floats = NDArray[np.float64]


class AgreementError(ValueError):
    """Maps that can't be compared."""


@dataclass(frozen=True)
class Overlap:
    """How far two maps put the same heads on top.

    Attributes:
        share: part of the heads taken from the top of each map.
        heads: how many that are.
        jaccard: common heads / heads in either, mean over draws of the ties.
        low, high: 2.5 % and 97.5 % point over the draws; alike where ties don't straddle the cut.
        chance: what two independent maps give on average.
        chance_high: what they exceed in 2.5 % of the cases.
        ties: of each map, heads of the value at the cut, where that value is on both sides of it; else 0.
    """

    share: float
    heads: int
    jaccard: float
    low: float
    high: float
    chance: float
    chance_high: float
    ties: tuple[int, int]

    @property
    def beyond_chance(self) -> bool:
        """Whether the overlap is more than chance gives, however the ties fall."""
        return self.low > self.chance_high


@dataclass(frozen=True)
class Correlation:
    """A rank correlation and its two-sided p-value by permutation; 0 and 1 where a map says one thing only."""

    value: float
    p: float

    def sign(self, level: float) -> int:
        """1 or -1 where it is significant at that level, else 0."""
        return 0 if self.p > level else int(np.sign(self.value))


@dataclass(frozen=True)
class Agreement:
    """What two maps have in common.

    Attributes:
        heads: how many they are about.
        spearman: over all heads, average ranks for ties; its test permutes heads freely.
        within: of the ranks less the mean rank of their layer; its test permutes heads inside layers.
        between: of the mean ranks of layers; its test permutes layers.
        overlaps: one for each of the shares asked for.
    """

    heads: int
    spearman: Correlation
    within: Correlation
    between: Correlation
    overlaps: tuple[Overlap, ...]

    def verdict(self, comparisons: int = 1) -> str:
        """In words, the error level shared by so many comparisons (Bonferroni).

        Heads of a layer are alike in many maps, so the free permutation alone finds too much: what counts is whether
        layers, or the heads inside layers, are ordered alike.
        """
        level = LEVEL / comparisons
        signs = {"layers": self.between.sign(level), "the heads of a layer": self.within.sign(level)}
        alike, opposed = ([about for about, sign in signs.items() if sign == wanted] for wanted in (1, -1))
        words = []
        if alike:
            words.append(f"agree beyond chance about {' and '.join(alike)}")
        if opposed:
            words.append(f"contradict each other about {' and '.join(opposed)}")
        return ", but ".join(words) or "no agreement beyond chance"


def agreement(
    a: Tensor, b: Tensor, shares: tuple[float, ...] = SHARES, seed: int = 0, permutations: int = PERMUTATIONS
) -> Agreement:
    """Compares two maps of one model.

    Args:
        a: [L, Hk] finite; the higher, the more of the context a head needs.
        b: the same heads' scores by another map.
        shares: of the heads, each above 0 and at most 1.
        seed: of permutations and ties.
        permutations: of each test.

    Raises:
        AgreementError: maps of another shape, or a score that is no number.
    """
    x, y = (_checked(scores) for scores in (a, b))
    if x.shape != y.shape:
        raise AgreementError(
            f"maps of {x.shape[0]} layers x {x.shape[1]} heads and {y.shape[0]} x {y.shape[1]} can't be compared"
        )
    chance = np.random.default_rng(seed)
    x, y = (stats.rankdata(scores, axis=None).reshape(scores.shape) for scores in (x, y))
    means = [ranks.mean(-1, keepdims=True) for ranks in (x, y)]
    spearman = correlation(x.reshape(1, -1), y.reshape(1, -1), chance, permutations)
    within = correlation(x - means[0], y - means[1], chance, permutations)
    between = correlation(means[0].T, means[1].T, chance, permutations)
    overlaps = tuple(_overlap(x.ravel(), y.ravel(), share, chance) for share in shares)
    return Agreement(x.size, spearman, within, between, overlaps)


def correlation(x: Floats, y: Floats, chance: np.random.Generator, permutations: int) -> Correlation:
    """Pearson's correlation of x and y [rows, n], and how often it is as large when x is permuted inside its rows."""
    x, y = x - x.mean(), (y - y.mean()).ravel()
    length = np.sqrt((x**2).sum() * (y**2).sum())
    if length < 1e-9:  # of ranks, which are whole or half numbers: constant but for rounding
        return Correlation(0.0, 1.0)
    value = float(x.ravel() @ y / length)
    extreme = 0
    for begin in range(0, permutations, _CHUNK):
        count = min(_CHUNK, permutations - begin)
        drawn = chance.permuted(np.broadcast_to(x, (count, *x.shape)), axis=-1).reshape(count, -1)
        extreme += int((np.abs(drawn @ y / length) >= abs(value) - 1e-12).sum())
    return Correlation(value, (extreme + 1) / (permutations + 1))


def chance_overlap(heads: int, taken: int) -> tuple[float, float]:
    """Jaccard overlap of two independent draws of `taken` out of `heads`: its mean and 97.5 % point, both exact."""
    common = np.arange(max(0, 2 * taken - heads), taken + 1)
    mean = float((stats.hypergeom.pmf(common, heads, taken, taken) * common / (2 * taken - common)).sum())
    high = float(stats.hypergeom.ppf(1 - LEVEL / 2, heads, taken, taken))
    return mean, high / (2 * taken - high)


def tied_at_cut(scores: Floats, taken: int) -> int:
    """Heads of the value at the cut, if some of them are above it and some below; else 0. scores: [n]."""
    at_cut = np.sort(scores)[len(scores) - taken]
    tied = int((scores == at_cut).sum())
    places = taken - int((scores > at_cut).sum())
    return tied if tied > places else 0


def top_heads(scores: Floats, taken: int, draws: int, chance: np.random.Generator) -> NDArray[np.bool_]:
    """Which heads are on top, with ties broken anew in each draw: scores [n] -> [draws, n]."""
    place = stats.rankdata(scores, method="dense")
    keys = place + chance.random((draws, len(scores)))  # a fraction of one place, so only equals change order
    cut = np.partition(keys, len(scores) - taken, axis=-1)[:, len(scores) - taken, None]
    return keys >= cut


def _overlap(x: Floats, y: Floats, share: float, chance: np.random.Generator) -> Overlap:
    if not 0 < share <= 1:
        raise AgreementError(f"share={share!r}: must be above 0 and at most 1")
    taken = max(1, round(share * len(x)))
    tops = [top_heads(scores, taken, DRAWS, chance) for scores in (x, y)]
    common = (tops[0] & tops[1]).sum(-1)
    jaccard = common / (2 * taken - common)
    low, high = np.quantile(jaccard, [LEVEL / 2, 1 - LEVEL / 2])
    ties = tied_at_cut(x, taken), tied_at_cut(y, taken)
    return Overlap(share, taken, float(jaccard.mean()), float(low), float(high), *chance_overlap(len(x), taken), ties)


def _checked(scores: Tensor) -> Floats:
    values = scores.double().numpy()
    if values.ndim != 2 or not values.size:
        raise AgreementError(f"scores of shape {values.shape}: must be [layers, heads]")
    bad = ~np.isfinite(values)
    if bad.any():
        layer, head = (int(at[0]) for at in bad.nonzero())
        raise AgreementError(f"the score of layer {layer}, head {head} is {values[layer, head]}, no number")
    return values
