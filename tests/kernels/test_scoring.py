"""Scores of pages against the definition in float64, the best pages against sorting, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import make_case
from torch import Tensor

from kernels.api import PageTable, attend
from kernels.scoring import mean_key_score, narrow, page_bounds, query_bound, top_pages, update_mass

BACKENDS = ("cpu", "torch", "reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
backends = pytest.mark.parametrize("backend", BACKENDS)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pages_of(seed: int, streams: int, total: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Bounds [S, N, D] whose pages do not lie one behind the other."""
    rng = torch.Generator().manual_seed(seed)
    low = torch.randn(total, streams, head_dim, generator=rng)
    high = low + torch.rand(total, streams, head_dim, generator=rng)
    return low.to(dtype).transpose(0, 1), high.to(dtype).transpose(0, 1)


@backends
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    total=st.integers(1, 9),
    group=st.integers(1, 5),
    tokens=st.integers(1, 3),
    head_dim=st.sampled_from([8, 40, 64, 80, 128]),
    dtype=st.sampled_from(DTYPES),
    query_dtype=st.sampled_from(DTYPES),
)
def test_scores_are_those_of_the_definition(
    backend: str,
    seed: int,
    total: int,
    group: int,
    tokens: int,
    head_dim: int,
    dtype: torch.dtype,
    query_dtype: torch.dtype,
) -> None:
    count = ints(total, total // 2, 0)
    low, high = (x.clone() for x in pages_of(seed, 3, total, head_dim, dtype))
    q = torch.randn(3, tokens, group, head_dim, generator=torch.Generator().manual_seed(seed)).to(query_dtype)
    q = q.transpose(1, 2)
    for s, n in enumerate(count.tolist()):
        low[s, n:], high[s, n:] = math.nan, math.nan  # never read
    rows, a, b = q.flatten(1, 2)[:, :, None].double(), low[:, None].double(), high[:, None].double()
    every = torch.maximum(rows * a, rows * b).sum(3)
    want = every.amax(1)
    size = torch.maximum((rows * a).abs(), (rows * b).abs()).sum(3).amax(1)
    held = torch.arange(total) < count[:, None]
    got = query_bound(q, low, high, count, backend)
    assert got.dtype == torch.float32
    assert ((got - want).abs() <= 1e-5 * size)[held].all()
    assert (got[~held] == -math.inf).all()
    each = query_bound(q, low, high, count, backend, each_row=True)
    assert each.shape == every.shape
    shown = held.unsqueeze(1).expand_as(each)
    assert ((each - every).abs() <= 1e-5 * size.unsqueeze(1))[shown].all()
    assert (each[~shown] == -math.inf).all()
    got = mean_key_score(q, low, count, backend)
    want = (rows * a).sum(3).amax(1)
    assert ((got - want).abs() <= 1e-5 * size)[held].all()
    assert (got[~held] == -math.inf).all()


@backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_holds_for_every_key(dtype: torch.dtype, backend: str) -> None:
    rng = torch.Generator().manual_seed(1)
    k = torch.randn(2, 6, 16, 64, generator=rng).to(dtype)
    q = torch.randn(2, 3, 2, 64, generator=rng)
    low, high = (x.view(2, 6, 64) for x in page_bounds(k.flatten(0, 1)))
    best = torch.einsum("sgtd,snpd->snpgt", q.double(), k.double()).flatten(2).amax(2)
    got = query_bound(q, low, high, backend=backend)
    assert (got >= best - 1e-4).all()
    mean = k.float().mean(2)
    assert (mean_key_score(q, mean, backend=backend) <= got + 1e-4).all()


@backends
def test_nan_rows_take_no_part_and_empty_pages_rank_last(backend: str) -> None:
    low, high = pages_of(0, 2, 5, 16, torch.bfloat16)
    low, high = low.clone(), high.clone()
    low[:, 3], high[:, 3] = math.inf, -math.inf
    q = torch.randn(2, 3, 1, 16, generator=torch.Generator().manual_seed(0))
    q[0, 1, 0, 4] = math.nan
    q[1] = math.nan
    got = query_bound(q, low, high, backend=backend)
    want = query_bound(q[:1, [0, 2]], low[:1], high[:1], backend=backend)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    assert got[0, 3] == -math.inf
    assert got[0, [0, 1, 2, 4]].isfinite().all()
    assert (got[1] == -math.inf).all()
    each = query_bound(q, low, high, backend=backend, each_row=True)
    assert torch.equal(each.amax(1), got)
    assert (each[0, 1] == -math.inf).all()
    assert (mean_key_score(q, low, backend=backend)[1] == -math.inf).all()


@pytest.mark.parametrize(
    "score",
    [
        query_bound,
        lambda *given: query_bound(*given, each_row=True),
        lambda q, a, b, *rest: mean_key_score(q, a, *rest),
    ],
    ids=["best row", "each row", "mean key"],
)
def test_a_stream_scores_the_same_in_any_batch(score: Callable[..., Tensor]) -> None:
    low, high = pages_of(3, 4, 1201, 80, torch.bfloat16)
    q = torch.randn(4, 3, 2, 80, generator=torch.Generator().manual_seed(3))
    count = ints(1201, 7, 600, 513)
    together = score(q, low, high, count, "cpu")
    torch.testing.assert_close(together, score(q, low, high, count, "reference"), rtol=1e-5, atol=1e-4)
    for s in range(4):
        one = slice(s, s + 1)
        assert torch.equal(score(q[one], low[one], high[one], count[one], "cpu"), together[one])


def test_no_pages_and_no_streams_are_no_trouble() -> None:
    for backend in BACKENDS:
        q = torch.zeros(2, 1, 1, 8)
        assert query_bound(q, torch.zeros(2, 0, 8), torch.zeros(2, 0, 8), ints(0, 0), backend).shape == (2, 0)
        columns, number = top_pages(torch.zeros(2, 0), ints(0, 0), ints(1, 3), 3, backend)
        assert (columns == -1).all()
        assert number.tolist() == [0, 0]
        columns, number = top_pages(torch.zeros(0, 4), ints(), ints(), 3, backend)
        assert columns.shape == (0, 3)


def best_by_sorting(values: list[float], k: int) -> list[int]:
    """The definition: highest first, NaN after everything, ties by column."""
    order = sorted(
        range(len(values)), key=lambda i: (math.isnan(values[i]), -values[i] if values[i] == values[i] else 0, i)
    )
    return sorted(order[:k])


few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38])
values = st.lists(few | st.floats(width=32), max_size=40) | st.lists(st.floats(width=32), max_size=40)


@backends
@settings(max_examples=150, deadline=None)
@given(rows=st.lists(values, min_size=1, max_size=4), data=st.data())
def test_the_best_pages_are_those_of_a_sort(backend: str, rows: list[list[float]], data: st.DataObject) -> None:
    width = data.draw(st.integers(0, 45))
    k = data.draw(st.lists(st.integers(0, width), min_size=len(rows), max_size=len(rows)))
    total = max(map(len, rows)) + 2
    score = torch.full((len(rows), 2 * total), math.nan)[:, :total]  # rows lie apart
    for s, row in enumerate(rows):
        score[s, : len(row)] = torch.tensor(row)
        score[s, len(row) :] = math.inf  # beyond the count: must not be chosen
    columns, number = top_pages(score, ints(*map(len, rows)), ints(*k), width, backend)
    assert columns.dtype == number.dtype == torch.int32
    for s, row in enumerate(rows):
        want = best_by_sorting(score[s, : len(row)].tolist(), k[s])
        assert columns[s].tolist() == want + [-1] * (width - len(want))
        assert int(number[s]) == len(want)


@pytest.mark.parametrize("kind", ["normal", "equal", "few", "rising", "falling"])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_the_best_of_many_pages(backend: str, kind: str) -> None:
    rng = torch.Generator().manual_seed(5)
    score = torch.randn(2, 20_000, generator=rng)
    if kind == "equal":
        score[:] = 2.5
    elif kind == "few":
        score = score.round()
    elif kind != "normal":
        score = score.sort(dim=1, descending=kind == "falling").values
    count, k = ints(20_000, 12_345), ints(5_000, 1)
    columns, number = top_pages(score, count, k, 5_000, backend)
    for s, n in enumerate(count.tolist()):
        want = score[s, :n].sort(descending=True, stable=True).indices[: int(k[s])].sort().values
        assert columns[s, : int(number[s])].tolist() == want.tolist()
    assert number.tolist() == [5_000, 1]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_narrowed_table_attends_the_chosen_pages(backend: str) -> None:
    case = make_case(7, ("bf16", "int8", "proto"), (300, 0, 70, 33))
    total = case.table.pool.shape[1]
    score = torch.randn(4, total, generator=torch.Generator().manual_seed(7))
    columns, number = top_pages(score, case.table.count, ints(3, 2, 40, 1), 40, backend)
    table = narrow(case.table, columns, number, backend)
    assert table.count.tolist() == [3, 0, 5, 1]
    for s, n in enumerate(table.count.tolist()):
        for name in ("pool", "slot", "page"):
            full, cut = getattr(case.table, name)[s].tolist(), getattr(table, name)[s].tolist()
            assert cut[:n] == [full[i] for i in columns[s, :n].tolist()]
    table.check(case.pools)
    options = {"scale": 0.125, "backend": "reference", "want_mass": True}
    part = attend(case.q, table, case.pools, case.first_position, **options)
    # The same pages in a table of their own, made by hand.
    keep = [columns[s, :n].tolist() for s, n in enumerate(number.tolist())]
    by_hand = [torch.zeros(4, 40, dtype=x.dtype) for x in (case.table.pool, case.table.slot, case.table.page)]
    for mine, x in zip(by_hand, (case.table.pool, case.table.slot, case.table.page), strict=True):
        for s, chosen in enumerate(keep):
            mine[s, : len(chosen)] = x[s, chosen]
    want = attend(
        case.q, PageTable(by_hand[0], by_hand[1], by_hand[2], number), case.pools, case.first_position, **options
    )
    assert torch.equal(part.out, want.out)
    assert torch.equal(part.lse, want.lse)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_narrow_refuses_what_is_not_in_the_table(backend: str) -> None:
    case = make_case(7, ("bf16",), (40, 20))
    total = case.table.pool.shape[1]
    with pytest.raises(ValueError, match="columns"):
        narrow(case.table, ints(0, total).view(2, 1), ints(1, 1), backend)
    with pytest.raises(ValueError, match="columns"):
        narrow(case.table, ints(-1, 0).view(2, 1), ints(1, 1), backend)
    with pytest.raises(ValueError, match="number"):
        narrow(case.table, ints(0, 1).view(2, 1), ints(1, 2), backend)
    with pytest.raises(ValueError, match="columns"):
        narrow(case.table, ints(0, 1), ints(1, 1), backend)
    with pytest.raises(ValueError, match="number"):
        narrow(case.table, ints(0, 1).view(2, 1), ints(1), backend)
    kept = narrow(case.table, ints(0, 1).view(2, 1), ints(0, 1), backend)
    assert kept.count.tolist() == [0, 1]


def test_mass_moves_towards_the_newest() -> None:
    ema, mass = torch.tensor([[0.5, 0.0]]), torch.tensor([[0.1, 1.0]])
    update_mass(ema, mass, 0.75)
    torch.testing.assert_close(ema, torch.tensor([[0.4, 0.25]]))
    update_mass(ema, mass, 0.0)
    torch.testing.assert_close(ema, mass)
    for decay in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="decay"):
            update_mass(ema, mass, decay)
    with pytest.raises(ValueError, match="mass"):
        update_mass(ema, mass[:, :1], 0.5)
    with pytest.raises(ValueError, match="ema"):
        update_mass(ema.double(), mass, 0.5)


Q = torch.zeros(2, 1, 1, 8)
PAGES = torch.zeros(2, 3, 8)


@backends
@pytest.mark.parametrize(
    ("q", "low", "high", "count", "named"),
    [
        (Q[0], PAGES, PAGES, None, "q "),
        (Q.double(), PAGES, PAGES, None, "q "),
        (Q[:, :0], PAGES, PAGES, None, "q "),
        (Q, PAGES[:, :, :4], PAGES[:, :, :4], None, "lowest"),
        (Q, PAGES[:1], PAGES[:1], None, "lowest"),
        (Q, PAGES.int(), PAGES.int(), None, "lowest"),
        (Q, PAGES, PAGES[:, :2], None, "highest"),
        (Q, PAGES, PAGES.half(), None, "highest"),
        (Q, PAGES, PAGES.to("meta"), None, "highest on meta"),
        (Q, PAGES, PAGES, ints(1, 1).long(), "count"),
        (Q, PAGES, PAGES, ints(1), "count"),
        (Q, PAGES, PAGES, ints(1, 4), "count"),
        (Q, PAGES, PAGES, ints(-1, 3), "count"),
    ],
)
def test_scores_of_the_wrong_shape_are_refused(
    q: Tensor, low: Tensor, high: Tensor, count: Tensor | None, named: str, backend: str
) -> None:
    with pytest.raises(ValueError, match=named):
        query_bound(q, low, high, count, backend)


@backends
@pytest.mark.parametrize(
    ("score", "count", "k", "width", "named"),
    [
        (torch.zeros(2, 3).double(), ints(1, 1), ints(1, 1), 3, "score"),
        (torch.zeros(2), ints(1, 1), ints(1, 1), 3, "score"),
        (torch.zeros(2, 3), ints(1), ints(1, 1), 3, "count"),
        (torch.zeros(2, 3), ints(1, 1), ints(1, 1).long(), 3, "k "),
        (torch.zeros(2, 3), ints(1, 4), ints(1, 1), 3, "count 1 to 4"),
        (torch.zeros(2, 3), ints(-1, 3), ints(1, 1), 3, "count -1 to 3"),
        (torch.zeros(2, 3), ints(1, 1), ints(1, 3), 2, "k 1 to 3"),
        (torch.zeros(2, 3), ints(1, 1), ints(1, -3), 2, "k -3 to 1"),
        (torch.zeros(2, 3), ints(1, 1), ints(0, 0), -1, "width"),
        (torch.zeros(2, 3), ints(1, 1).to("meta"), ints(0, 0), 1, "count on meta"),
    ],
)
def test_impossible_choices_are_refused(
    score: Tensor, count: Tensor, k: Tensor, width: int, named: str, backend: str
) -> None:
    with pytest.raises(ValueError, match=named):
        top_pages(score, count, k, width, backend)
