"""Recall with ties, sums over documents, paired tests: against enumeration and scipy."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from testbed.predictor.agents import PHASES
from testbed.predictor.recall import SHARES, RecallError, caught
from testbed.predictor.tally import Slice, Tallies, sign_flips


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans()), min_size=1, max_size=6),
    st.sampled_from([0.05, 0.3, 0.5, 1.0]),
)
def test_expected_catch_over_all_orders_of_ties(pages: list[tuple[int, int, bool]], share: float) -> None:
    candidates = [at for at, (_, _, is_candidate) in enumerate(pages) if is_candidate]
    kept = min(len(candidates), max(1, math.ceil(share * len(candidates) - 1e-9)))
    sums = []
    for order in permutations(candidates):  # a stable sort of each order draws the ties
        best = sorted(order, key=lambda at: -pages[at][0])[:kept]
        sums.append(sum(pages[at][1] for at in best))
    score, mass = (torch.tensor([[float(page[i]) for page in pages]]) for i in (0, 1))
    got = caught(score, mass, torch.tensor([page[2] for page in pages]), (share,))
    assert float(got.mass[0, 0]) == pytest.approx(np.mean(sums) if candidates else 0.0)
    assert float(got.total[0]) == sum(pages[at][1] for at in candidates)


def test_a_score_that_says_nothing_catches_its_share() -> None:
    mass = torch.rand(5, 40, generator=torch.Generator().manual_seed(0))
    got = caught(torch.zeros(5, 40), mass, torch.ones(40, dtype=torch.bool))
    assert torch.allclose(got.recall, torch.tensor(SHARES, dtype=torch.float64).expand(5, -1))


def test_nan_is_no_score() -> None:
    score = torch.tensor([[1.0, torch.nan, 2.0]])
    with pytest.raises(RecallError, match="1 of its candidate pages are NaN"):
        caught(score, torch.ones(1, 3), torch.ones(3, dtype=torch.bool))
    caught(score, torch.ones(1, 3), torch.tensor([True, False, True]))


@pytest.mark.parametrize("n", [3, 8])
def test_sign_flips_are_fisher_s(n: int) -> None:
    x = np.random.default_rng(n).normal(0.5, 1.0, n)
    right = stats.permutation_test(
        (x,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    assert sign_flips(x) == pytest.approx(right.pvalue)
    assert sign_flips(np.full(10, 0.1)) == 2 / 2**10
    assert sign_flips(np.full(20, 0.1)) < 1e-3


def test_tallies_are_means_over_rows_then_documents() -> None:
    layers, heads, pages = 3, 2, 30
    generator = torch.Generator().manual_seed(1)
    tallies, flat = Tallies(layers), []
    for document in "abc":
        for phase in (0, 3, 3):
            score, mass = torch.rand(2, layers * heads, pages, generator=generator)
            mass[1] = 0.0  # a row without mass has no recall
            got = caught(score, mass, torch.ones(pages, dtype=torch.bool))
            tallies.tally("x", document).add(got, layers, phase, "sparse")
            tallies.tally("best", document).add(caught(mass, mass, torch.ones(pages).bool()), layers, phase, "sparse")
            flat.append((document, phase, got))
    of = {d: [g.recall[:, 1] for name, phase, g in flat if name == d and phase == 3] for d in "abc"}
    rows = {d: torch.cat(found) for d, found in of.items()}
    expected = {d: float(found[~found.isnan()].mean()) for d, found in rows.items()}
    where = Slice("sparse", phase=3)
    assert tallies.by_document("x", 0.10, where) == pytest.approx(expected)
    estimate = tallies.mean("x", 0.10, where)
    assert estimate is not None
    assert estimate.value == pytest.approx(np.mean(list(expected.values())))
    of_layer = tallies.by_document("x", 0.10, Slice("sparse", layer=2))
    second = {d: torch.cat([g.recall[4:, 1] for name, _, g in flat if name == d]) for d in "abc"}
    assert of_layer == pytest.approx({d: float(found.mean()) for d, found in second.items()})
    weighted = tallies.weighted("x", 0.25, Slice("sparse"))
    assert weighted is not None
    assert weighted.value == pytest.approx(
        float(sum(g.mass[:, 2].sum() for *_, g in flat) / sum(g.total.sum() for *_, g in flat))
    )
    assert tallies.mean("x", 0.10, Slice("full")) is None
    assert tallies.by_document("x", 0.10, Slice("sparse", phase=PHASES.index("retrieval"))) == {}


def test_comparison_and_closed_gap() -> None:
    tallies = Tallies(1)
    for document, (low, mid, high) in {"a": (0, 3, 4), "b": (1, 3, 5), "c": (0, 2, 4), "d": (1, 4, 5)}.items():
        for name, worth in (("low", low), ("mid", mid), ("high", high)):
            mass = torch.zeros(1, 20)
            mass[0, 0], mass[0, 1] = worth, 10 - worth
            got = caught(-torch.arange(20.0).view(1, -1), mass, torch.ones(20, dtype=torch.bool))  # page 0 is put first
            tallies.tally(name, document).add(got, 1, 0, "full")
    where = Slice("full")
    compared = tallies.compare("mid", "low", 0.05, where)
    assert compared is not None
    assert compared.difference.value == pytest.approx((3 + 2 + 2 + 3) / 40)
    assert compared.p == 2 / 2**4
    assert not compared.significant
    closed = tallies.closed("mid", "low", "high", 0.05, where)
    assert closed is not None
    assert closed.value == pytest.approx(10 / 16)
