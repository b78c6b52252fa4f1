"""Intervals against closed forms and against simulation of their coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.results import stats


def test_wilson_against_its_formula() -> None:
    """Wilson 1927 with z = 1.959964; 9 of 10 is the textbook case (0.596, 0.982)."""
    z, n, successes = 1.959963985, 10, 9
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert stats.wilson(9, 10) == pytest.approx((centre - half, centre + half))
    assert stats.wilson(9, 10) == pytest.approx((0.596, 0.982), abs=1e-3)


def test_all_right_is_not_certain() -> None:
    # Wilson's lower end for n of n is n / (n + z^2).
    for n in (1, 5, 20):
        estimate = stats.proportion([1.0] * n)
        assert estimate.value == 1.0
        assert estimate.ci == pytest.approx((n / (n + 3.841459), 1.0))
    assert stats.kept([1] * 8, [1] * 8).ci == pytest.approx((8 / (8 + 3.841459), 1.0))  # type: ignore[union-attr]


def test_only_a_proportion_is_taken_for_one() -> None:
    """A mean KL of exactly zero is no 0 of n."""
    assert stats.mean([0.0] * 5).ci == (0.0, 0.0)
    assert stats.proportion([0.0] * 5).ci == stats.wilson(0, 5)
    assert stats.proportion([1, 0, 1, 1]) == stats.mean([1, 0, 1, 1])
    assert stats.proportion([0.5] * 5) == stats.mean([0.5] * 5)


def test_mean_interval_against_the_normal_one() -> None:
    x = np.random.default_rng(1).normal(3.0, 2.0, 400)
    estimate = stats.mean(x)
    half = 1.96 * x.std() / math.sqrt(400)
    assert estimate.value == pytest.approx(x.mean())
    assert estimate.ci == pytest.approx((x.mean() - half, x.mean() + half), abs=0.15 * half)


def test_coverage_of_the_mean_is_what_it_says() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for trial in range(200):
        low, high = stats.mean(rng.exponential(1.0, 60), seed=trial).ci or (0.0, 0.0)
        hits += low <= 1.0 <= high
    # A percentile bootstrap of 60 skewed samples covers about 93 %; binomial noise of 200 trials is 2 %.
    assert 0.87 <= hits / 200 <= 0.99


def test_grouped_samples_are_not_independent() -> None:
    """Ten contexts of ten equal samples are worth ten samples: the interval is sqrt(10) wider."""
    values = np.repeat(np.random.default_rng(3).normal(size=10), 10)
    groups = np.repeat(np.arange(10), 10).tolist()
    low, high = stats.mean(values, groups=groups).ci or (0.0, 0.0)
    naive_low, naive_high = stats.mean(values).ci or (0.0, 0.0)
    assert (high - low) / (naive_high - naive_low) == pytest.approx(math.sqrt(10), rel=0.15)


def test_one_group_says_nothing_about_spread() -> None:
    assert stats.mean([1.0, 0.5, 0.75], groups=["a"] * 3) == stats.Estimate(0.75, None, 3)
    assert stats.proportion([1, 0, 1], groups=["a"] * 3).ci == stats.wilson(2, 3)


def test_ratio_of_means() -> None:
    top, bottom = np.array([10.0, 20.0, 33.0]), np.array([5.0, 10.0, 15.0])
    estimate = stats.ratio(top, bottom)
    assert estimate.value == pytest.approx(63 / 30)
    assert estimate.ci is not None
    assert 2.0 <= estimate.ci[0] <= estimate.ci[1] <= 2.2  # no sample's own ratio is outside


def test_pairing_removes_what_both_share() -> None:
    rng = np.random.default_rng(4)
    hard = rng.normal(0, 10, 50)
    a, b = hard + 1 + rng.normal(0, 0.1, 50), hard + rng.normal(0, 0.1, 50)
    low, high = stats.delta(a, b).ci or (0.0, 0.0)
    assert 0.9 < low < high < 1.1


def test_kept_is_the_paired_ratio() -> None:
    estimate = stats.kept([1, 0, 1, 1], [1, 1, 1, 1])
    assert estimate is not None
    assert estimate.value == 0.75
    assert stats.kept([0, 0], [0, 0]) is None
    # Full right in one of two: resamples without it have no ratio and are left out, not NaN.
    odd = stats.kept([1, 0], [1, 0])
    assert odd is not None
    assert odd.ci is not None
    assert np.isfinite(odd.ci).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.integers(0, 2**32))
def test_interval_holds_the_value_and_repeats(values: list[float], seed: int) -> None:
    estimate = stats.mean(values, seed)
    assert estimate == stats.mean(values, seed)
    assert estimate.n == len(values)
    if estimate.ci is not None:
        low, high = estimate.ci
        assert min(values) - 1e-6 <= low <= high <= max(values) + 1e-6


def test_single_sample_has_no_interval() -> None:
    assert stats.mean([0.3]) == stats.Estimate(0.3, None, 1)


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")], [[1.0]]])
def test_bad_samples_are_refused(values: list[float]) -> None:
    with pytest.raises(stats.StatsError):
        stats.mean(values)


def test_unpaired_samples_are_refused() -> None:
    with pytest.raises(stats.StatsError, match="policy has 2 samples, baseline 3"):
        stats.delta([1, 2], [1, 2, 3])
    with pytest.raises(stats.StatsError, match="sums to zero"):
        stats.ratio([1.0], [0.0])
    with pytest.raises(stats.StatsError, match="groups has 1 entries for 2"):
        stats.mean([1.0, 2.0], groups=["a"])


def test_sign_test_needs_six() -> None:
    """Exact one-sided sign test at 2.5 %: 2^-5 > .025 > 2^-6."""
    assert not stats.significantly_greater([1] * 5, [0] * 5)
    assert stats.significantly_greater([1] * 6, [0] * 6)
    assert not stats.significantly_greater([1] * 6 + [0], [0] * 6 + [1])  # 6 of 7: p = 8/128
    assert stats.significantly_greater([1] * 6 + [1] * 50, [0] * 6 + [1] * 50)
    assert not stats.significantly_greater([1, 1], [1, 1])


def test_alarms() -> None:
    assert stats.alarms([1] * 10, [1] * 10) == ()
    (cannot,) = stats.alarms([0] * 10, [1] * 4 + [0] * 6)
    assert "the full cache cannot do" in cannot
    assert stats.alarms([0] * 10, [1] * 5 + [0] * 5) == ()
    (beats,) = stats.alarms([1] * 12, [1] * 6 + [0] * 6)
    assert "sparse beats dense significantly" in beats
