"""Intervals and alarms: what a mean, a ratio or a difference over few samples is worth.

Everything is paired over the same samples. A bootstrap (scipy.stats.bootstrap, percentile) resamples whole
groups where samples share a context, because such samples are not independent. Where the bootstrap knows nothing
(all samples right), the Wilson interval of the proportion takes its place: 5 of 5 is not reported as certain.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

LEVEL = 0.95
RESAMPLES = 4000
CANNOT_DO = 0.5

Floats = NDArray[np.float64]


class StatsError(ValueError):
    """Samples from which nothing can be said."""


@dataclass(frozen=True)
class Estimate:
    """A value, its interval and the number of samples behind it.

    Attributes:
        value: the point estimate.
        ci: (low, high) at 95 %, or None where one sample, or one group of them, says nothing.
            Of proportions there Wilson's interval over samples stands in, as if they were independent.
        n: samples.
    """

    value: float
    ci: tuple[float, float] | None
    n: int


def mean(values: ArrayLike, seed: int = 0, groups: Sequence[Hashable] | None = None) -> Estimate:
    """Mean with its interval.

    Args:
        values: [n] finite.
        seed: of the bootstrap.
        groups: [n] what each sample shares with others (its context); whole groups are resampled.
    """
    x = _clean("values", values)
    return ratio(x, np.ones_like(x), seed, groups)


def proportion(values: ArrayLike, seed: int = 0, groups: Sequence[Hashable] | None = None) -> Estimate:
    """Mean of scores that are right (1) or wrong (0); where all or all groups are alike, with the Wilson interval.

    Takes what `mean` takes. Scores between 0 and 1 are allowed and get the interval of `mean`.
    """
    x = _clean("values", values)
    estimate = mean(x, seed, groups)
    if _is_binary(x) and _is_point(estimate.ci):
        return Estimate(estimate.value, wilson(int(x.sum()), len(x)), len(x))
    return estimate


def ratio(
    numerator: ArrayLike, denominator: ArrayLike, seed: int = 0, groups: Sequence[Hashable] | None = None
) -> Estimate:
    """Ratio of means of paired samples, mean(numerator) / mean(denominator), with its interval.

    Raises:
        StatsError: empty, of different lengths, not finite, or a denominator that sums to zero.
    """
    top, bottom = _clean("numerator", numerator), _clean("denominator", denominator)
    if len(top) != len(bottom):
        raise StatsError(f"numerator has {len(top)} samples, denominator {len(bottom)}; they must be paired")
    if bottom.sum() == 0:
        raise StatsError("denominator sums to zero: the ratio is not defined")
    value = float(top.sum() / bottom.sum())
    sums = _sum_by_group(np.stack([top, bottom]), groups)
    return Estimate(value, _bootstrap(sums, seed), len(top))


def delta(policy: ArrayLike, baseline: ArrayLike, seed: int = 0, groups: Sequence[Hashable] | None = None) -> Estimate:
    """Mean of policy - baseline over the same samples, with its interval."""
    a, b = _clean("policy", policy), _clean("baseline", baseline)
    if len(a) != len(b):
        raise StatsError(f"policy has {len(a)} samples, baseline {len(b)}; they must be paired")
    return ratio(a - b, np.ones_like(a), seed, groups)


def kept(
    policy: ArrayLike, full: ArrayLike, seed: int = 0, groups: Sequence[Hashable] | None = None
) -> Estimate | None:
    """Quality kept, mean(policy) / mean(full) over the same samples; None where full scored nothing."""
    a, b = _clean("policy", policy), _clean("full", full)
    if b.sum() == 0:
        return None
    estimate = ratio(a, b, seed, groups)
    if _is_point(estimate.ci) and _is_binary(a) and _is_binary(b) and a.sum() <= b.sum():
        return Estimate(estimate.value, wilson(int(a.sum()), int(b.sum())), len(a))
    return estimate


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927), by scipy."""
    interval = stats.binomtest(successes, n).proportion_ci(confidence_level=LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def significantly_greater(a: ArrayLike, b: ArrayLike) -> bool:
    """Whether a beats b over the same samples by the one-sided sign test at 2.5 % (exact, ties left out).

    Exact at any number of samples: fewer than six that differ can never be significant.
    """
    x, y = _clean("a", a), _clean("b", b)
    wins, losses = int((x > y).sum()), int((x < y).sum())
    if wins + losses == 0:
        return False
    return bool(stats.binomtest(wins, wins + losses, alternative="greater").pvalue <= (1 - LEVEL) / 2)


def alarms(policy: ArrayLike, full: ArrayLike) -> tuple[str, ...]:
    """One line for each reason not to trust a comparison of scores over the same samples."""
    a, b = _clean("policy", policy), _clean("full", full)
    found = []
    if b.mean() < CANNOT_DO:
        found.append(f"a task the full cache cannot do: its score is {b.mean():.2f}")
    if significantly_greater(a, b):
        found.append(
            f"sparse beats dense significantly ({a.mean():.2f} against {b.mean():.2f}): check task and full run"
        )
    return tuple(found)


def _bootstrap(sums: Floats, seed: int) -> tuple[float, float] | None:
    """Interval of sums[0].sum() / sums[1].sum() under resampling of columns; sums [2, groups]."""
    count = sums.shape[1]
    if count < 2:
        return None

    def statistic(top: Floats, bottom: Floats, axis: int = -1) -> Floats:
        # A resample may hold no denominator at all (full never right in it); it says nothing and is left out.
        with np.errstate(divide="ignore", invalid="ignore"):
            return top.sum(axis) / bottom.sum(axis)

    with warnings.catch_warnings(), np.errstate(invalid="ignore"):  # scipy's standard error of such resamples
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        result = stats.bootstrap(
            (sums[0], sums[1]),
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            confidence_level=LEVEL,
            method="percentile",
            rng=np.random.default_rng(seed),
        )
    drawn = result.bootstrap_distribution[np.isfinite(result.bootstrap_distribution)]
    if not len(drawn):
        return None
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _sum_by_group(x: Floats, groups: Sequence[Hashable] | None) -> Floats:
    """Sums by group, [k, n] -> [k, groups]."""
    if groups is None:
        return x
    if len(groups) != x.shape[1]:
        raise StatsError(f"groups has {len(groups)} entries for {x.shape[1]} samples")
    numbering = {group: at for at, group in enumerate(dict.fromkeys(groups))}
    member = np.zeros((len(groups), len(numbering)))
    member[np.arange(len(groups)), [numbering[group] for group in groups]] = 1.0
    return x @ member


def _clean(key: str, values: ArrayLike) -> Floats:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not len(x):
        raise StatsError(f"{key}: must be a non-empty list of numbers, not of shape {x.shape}")
    if not np.isfinite(x).all():
        raise StatsError(f"{key}: sample {int(np.flatnonzero(~np.isfinite(x))[0])} is not finite")
    return x


def _is_binary(x: Floats) -> bool:
    return bool(np.isin(x, (0.0, 1.0)).all())


def _is_point(ci: tuple[float, float] | None) -> bool:
    """Whether an interval is absent or a single point: resampling found nothing to vary."""
    return ci is None or math.isclose(ci[0], ci[1], abs_tol=1e-12)
