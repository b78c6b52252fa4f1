"""Agreement of head maps against scipy, exact enumeration and cases worked out by hand."""

from __future__ import annotations

from itertools import combinations, permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from torch import Tensor

from testbed.heads.agreement import (
    Agreement,
    AgreementError,
    agreement,
    chance_overlap,
    correlation,
    tied_at_cut,
    top_heads,
)

SCORES = arrays(np.float64, (4, 3), elements=st.sampled_from([0.0, 0.25, 0.5, 1.0, 7.0]))


def compared(a: object, b: object, permutations: int = 1999) -> Agreement:
    return agreement(torch.as_tensor(a), torch.as_tensor(b), permutations=permutations)


@settings(max_examples=30, deadline=None)
@given(SCORES, SCORES)
def test_rank_correlation_is_scipys_ties_included(a: np.ndarray, b: np.ndarray) -> None:
    found = compared(a, b, permutations=1).spearman.value
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        assert found == 0
    else:
        ranks = [stats.rankdata(x) for x in (a.ravel(), b.ravel())]
        assert found == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-12)
        assert found == pytest.approx(np.asarray(stats.spearmanr(a.ravel(), b.ravel()))[0], abs=1e-12)


def test_p_is_that_of_all_permutations() -> None:
    x, y = np.array([1.0, 2, 3, 4, 5, 6]), np.array([2.0, 1, 4, 3, 6, 5])
    every = [abs(np.corrcoef(each, y)[0, 1]) for each in permutations(x)]
    exact = np.mean(np.array(every) >= abs(np.corrcoef(x, y)[0, 1]) - 1e-12)
    found = correlation(x[None], y[None], np.random.default_rng(0), 4000)
    assert found.value == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert found.p == pytest.approx(exact, abs=0.012)  # 4 standard errors


def test_p_inside_rows_is_that_of_all_permutations_inside_rows() -> None:
    # Rows of very different spread: permuting across them would give another p.
    x, y = np.array([[0.0, 1, 2], [-30, 0, 30]]), np.array([[2.0, 1, 0], [-20, 0, 30]])

    def strength(rows: np.ndarray) -> float:
        return abs(np.corrcoef(rows.ravel(), y.ravel())[0, 1])

    every = [strength(np.array(rows)) for rows in product(permutations(x[0]), permutations(x[1]))]
    exact = np.mean(np.array(every) >= strength(x) - 1e-12)
    across = np.mean(
        [strength(np.array(each).reshape(2, 3)) >= strength(x) - 1e-12 for each in permutations(x.ravel())]
    )
    found = correlation(x, y, np.random.default_rng(0), 4000).p
    assert found == pytest.approx(exact, abs=0.025)
    assert abs(across - exact) > 0.05


def test_p_of_maps_that_have_nothing_in_common_is_uniform() -> None:
    chance = np.random.default_rng(3)
    p = [correlation(chance.random((1, 40)), chance.random((1, 40)), chance, 99).p for _ in range(200)]
    assert stats.kstest(p, "uniform").pvalue > 0.001


def test_inside_layers_only_heads_of_a_layer_change_places() -> None:
    layers = torch.arange(6.0)[:, None].expand(6, 8)
    chance = torch.Generator().manual_seed(1)
    jitter = [torch.rand(6, 8, generator=chance) * 0.9 for _ in range(3)]
    depth = compared(layers + jitter[0], layers + jitter[1])
    assert depth.spearman.value > 0.9
    assert depth.verdict() == "agree beyond chance about layers"
    heads = compared(layers + jitter[0], -layers + jitter[0])
    assert heads.verdict() == "agree beyond chance about the heads of a layer, but contradict each other about layers"
    both = compared(layers + jitter[0], layers + jitter[0] + 0.1 * jitter[2])
    assert both.verdict() == "agree beyond chance about layers and the heads of a layer"
    assert compared(jitter[0], jitter[1]).verdict() == "no agreement beyond chance"


def test_a_shared_error_level_asks_for_more() -> None:
    a = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7, 8]])
    b = torch.tensor([[2.0, 1, 4, 3, 8, 5, 7, 6]])
    found = compared(a, b)
    assert 0.002 < found.within.p < 0.05
    assert found.verdict() == "agree beyond chance about the heads of a layer"
    assert found.verdict(comparisons=100) == "no agreement beyond chance"


@pytest.mark.parametrize(("heads", "taken"), [(6, 3), (7, 2), (5, 5), (8, 6)])
def test_chance_is_that_of_all_choices(heads: int, taken: int) -> None:
    first = set(range(taken))
    every = [len(first & set(other)) / len(first | set(other)) for other in combinations(range(heads), taken)]
    mean, high = chance_overlap(heads, taken)
    assert mean == pytest.approx(np.mean(every))
    assert np.mean(np.array(every) > high) <= 0.025 < np.mean(np.array(every) >= high)


@settings(max_examples=25, deadline=None)
@given(SCORES, st.integers(1, 12), st.integers(0, 9))
def test_the_top_is_as_large_as_asked_and_holds_what_is_above_the_cut(a: np.ndarray, taken: int, seed: int) -> None:
    scores = a.ravel()
    drawn = top_heads(scores, taken, 20, np.random.default_rng(seed))
    assert (drawn.sum(-1) == taken).all()
    cut = np.sort(scores)[-taken]
    assert drawn[:, scores > cut].all()
    assert not drawn[:, scores < cut].any()
    tied = tied_at_cut(scores, taken)
    assert tied == (0 if (scores >= cut).sum() == taken else (scores == cut).sum())
    assert (len(np.unique(drawn, axis=0)) == 1) or tied


def test_every_tied_head_is_as_likely() -> None:
    scores = np.array([0.0, 1, 1, 1, 1, 2])
    share = top_heads(scores, 3, 4000, np.random.default_rng(1)).mean(0)
    assert share == pytest.approx([0, 0.5, 0.5, 0.5, 0.5, 1], abs=0.04)


def test_a_map_with_many_heads_of_one_value_disagrees_with_itself() -> None:
    # 30 of 80 heads share the top value; 12 places. Two draws of 12 out of 30: the overlap chance gives there.
    scores = torch.cat([torch.ones(30), torch.linspace(0, 0.9, 50)]).reshape(8, 10)
    overlap = compared(scores, scores).overlaps[0]
    assert (overlap.heads, overlap.ties) == (12, (30, 30))
    assert overlap.jaccard == pytest.approx(chance_overlap(30, 12)[0], abs=0.03)
    assert overlap.low < overlap.jaccard < overlap.high
    strict = torch.arange(80.0).reshape(8, 10)
    assert compared(strict, strict).overlaps[0].jaccard == 1.0


def test_only_the_order_of_scores_counts_and_not_the_order_of_heads() -> None:
    chance = torch.Generator().manual_seed(5)
    a, b = torch.rand(6, 4, generator=chance), torch.rand(6, 4, generator=chance)
    plain, stretched = compared(a, b), compared(a.exp() * 100, b**3)
    assert plain == stretched
    layers, heads = torch.randperm(6, generator=chance), torch.randperm(4, generator=chance)
    moved = compared(a[layers][:, heads], b[layers][:, heads])
    assert moved.spearman.value == pytest.approx(plain.spearman.value)
    assert moved.within.value == pytest.approx(plain.within.value)
    assert moved.between.value == pytest.approx(plain.between.value)
    assert [one.jaccard for one in moved.overlaps] == [one.jaccard for one in plain.overlaps]


def test_overlap_beyond_chance_must_hold_however_ties_fall() -> None:
    strict = torch.arange(100.0).reshape(10, 10)
    assert compared(strict, strict).overlaps[0].beyond_chance
    tied = torch.where(strict > 50, 1.0, 0.0)
    assert not compared(tied, tied).overlaps[0].beyond_chance
    assert compared(tied, tied).overlaps[2].beyond_chance


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), r"2 layers x 3 heads and 3 x 2"),
        (torch.tensor([[0.0, 1], [torch.nan, 2]]), torch.zeros(2, 2), r"layer 1, head 0 is nan"),
        (torch.zeros(2, 2), torch.tensor([[0.0, torch.inf], [0, 2]]), r"layer 0, head 1 is inf"),
        (torch.zeros(4), torch.zeros(4), r"must be \[layers, heads\]"),
    ],
)
def test_what_cannot_be_compared_is_refused(a: Tensor, b: Tensor, error: str) -> None:
    with pytest.raises(AgreementError, match=error):
        agreement(a, b)
    with pytest.raises(AgreementError, match="share=0"):
        agreement(torch.eye(2), torch.eye(2), shares=(0.0,))
