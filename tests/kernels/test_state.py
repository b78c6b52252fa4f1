"""The merge: joining parts equals attending the whole, in any order."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import make_case

from kernels.api import PageTable, attend
from kernels.state import Partial, merge


def cut(table: PageTable, s: slice) -> PageTable:
    count = (table.count.clamp(max=s.stop) - s.start).clamp(min=0)
    return PageTable(table.pool[:, s], table.slot[:, s], table.page[:, s], count)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), at=st.lists(st.integers(0, 20), min_size=1, max_size=3), order=st.randoms())
def test_parts_join_to_the_whole(seed: int, at: list[int], order: Random) -> None:
    case = make_case(seed, ("fp32", "int8", "proto"), (0, 4, 321), tokens=2 * (seed % 2) + 1)
    whole = case.run("cpu")
    edges = [0, *sorted(at), case.table.pool.shape[1]]
    parts = [
        attend(case.q, cut(case.table, slice(a, b)), case.pools, case.first_position, scale=0.125)
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    order.shuffle(parts)
    joined = merge(parts)
    assert torch.allclose(joined.out, whole.out, atol=1e-5)
    assert torch.equal(joined.lse.isinf(), whole.lse.isinf())
    assert torch.allclose(joined.lse, whole.lse, atol=1e-5)
    nested = merge([merge(parts[:1]), merge(parts[1:])]) if len(parts) > 1 else joined
    assert torch.allclose(nested.out, joined.out, atol=1e-6)


def test_closed_form() -> None:
    one = Partial(torch.full((1, 1, 1, 2), 1.0), torch.tensor([[[3.0]]]))
    other = Partial(torch.full((1, 1, 1, 2), 5.0), torch.tensor([[[1.0]]]))
    got = merge([one, other])
    assert torch.allclose(got.out, torch.full((1, 1, 1, 2), (8 * 1 + 2 * 5) / 10))
    assert torch.allclose(got.lse, torch.tensor([[[math.log2(10)]]]))


def test_empty_parts_count_for_nothing_even_if_they_hold_nan() -> None:
    full = Partial(torch.full((1, 1, 1, 2), 2.0), torch.tensor([[[700.0]]]))
    none = Partial(torch.full((1, 1, 1, 2), float("nan")), torch.tensor([[[-math.inf]]]))
    assert torch.equal(merge([none, full, none]).out, full.out)
    assert torch.equal(merge([none, full]).lse, full.lse)
    both = merge([none, none])
    assert not both.out.any()
    assert (both.lse == -math.inf).all()
    with pytest.raises(ValueError, match="merge of 0"):
        merge([])


def random_parts(seed: int, parts: int, spread: float) -> list[Partial]:
    """Parts of 2 x 2 x 3 rows whose lse differ by up to `spread`, about a third of them empty."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(parts):
        lse = torch.randn(2, 2, 3, generator=rng) * spread
        lse[torch.rand(2, 2, 3, generator=rng) < 0.3] = -math.inf
        made.append(Partial(torch.randn(2, 2, 3, 8, generator=rng), lse))
    return made


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    parts=st.integers(1, 6),
    spread=st.sampled_from([0.1, 3.0, 100.0, 3000.0]),
    order=st.randoms(use_true_random=False),
)
def test_any_order_and_nesting_gives_the_float64_sum(seed: int, parts: int, spread: float, order: Random) -> None:
    made = random_parts(seed, parts, spread)
    lse = torch.stack([p.lse for p in made]).double()
    share = (lse * math.log(2)).softmax(0).nan_to_num(0.0)  # every part empty: softmax of -inf alone is NaN
    want = (share[..., None] * torch.stack([p.out for p in made]).double()).sum(0)
    want_lse = (lse * math.log(2)).logsumexp(0) / math.log(2)
    nested = list(made)
    order.shuffle(nested)
    while len(nested) > 1:  # joins neighbours at random until one is left
        at = order.randrange(len(nested) - 1)
        nested[at : at + 2] = [merge(nested[at : at + 2])]
    for got in (merge(made), merge(nested)):
        assert (got.out - want).abs().max() < 1e-5 * max(1.0, spread / 100)  # lse itself is rounded to 1e-7 of it
        assert torch.equal(got.lse.isinf(), want_lse.isinf())
        seen = ~want_lse.isinf()
        assert ((got.lse - want_lse)[seen].abs() <= 1e-6 * (1 + want_lse[seen].abs())).all()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    parts=st.integers(1, 4),
    where=st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 1), st.integers(0, 2)),
    bad=st.sampled_from([math.nan, math.inf]),
)
def test_a_spoiled_row_is_nan_and_no_other_changes(
    seed: int, parts: int, where: tuple[int, int, int, int], bad: float
) -> None:
    made = random_parts(seed, parts, 3.0)
    clean = merge(made)
    part, row = made[where[0] % parts], where[1:]
    part.lse[row] = bad
    got = merge(made)
    assert got.out[row].isnan().all()
    assert got.lse[row].isnan()
    got.out[row], got.lse[row] = clean.out[row], clean.lse[row]
    assert torch.equal(got.out, clean.out)
    assert torch.equal(got.lse, clean.lse)
    part.lse[row], part.out[row] = -math.inf, math.nan  # empty there: what it holds carries no meaning
    assert torch.isfinite(merge(made).out).all()


def test_shapes_that_differ_are_named() -> None:
    one = random_parts(0, 1, 1.0)[0]
    with pytest.raises(ValueError, match=r"partials\[1\] of out \(1, 2, 3, 8\)"):
        merge([one, Partial(one.out[:1], one.lse[:1])])
    with pytest.raises(ValueError, match=r"partials\[0\]"):
        merge([Partial(one.out, one.lse[:1])])
