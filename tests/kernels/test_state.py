"""The merge: joining parts equals attending the whole, in any order."""

from __future__ import annotations

import math

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
def test_parts_join_to_the_whole(seed: int, at: list[int], order: object) -> None:
    case = make_case(seed, ("fp32", "int8", "proto"), (0, 4, 321), tokens=2 * (seed % 2) + 1)
    whole = case.run("cpu")
    edges = [0, *sorted(at), case.table.pool.shape[1]]
    parts = [
        attend(case.q, cut(case.table, slice(a, b)), case.pools, case.first_position, scale=0.125)
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    order.shuffle(parts)  # type: ignore[attr-defined]
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
