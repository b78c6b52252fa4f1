"""Triton's page scores and top pages in the interpreter, against the float64 and the plain-Python definitions.

TRITON_INTERPRET=1 python -m pytest -m interp tests/kernels/test_triton_score.py
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in its own process", allow_module_level=True)

from kernels.gpu import score as gpu_score
from kernels.scoring import mean_key_score, page_bounds, query_bound, top_pages

pytestmark = pytest.mark.interp
NAN, INF = float("nan"), float("inf")


def draw(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


@settings(max_examples=16, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9)),
    pages=st.sampled_from([1, 31, 64, 65, 150]),
    head_dim=st.sampled_from([8, 64, 80, 128]),
    # bfloat16 products are wrong in the interpreter, which is why none of bf16 x bf16 stand here.
    dtypes=st.sampled_from(
        [("float32", "bfloat16"), ("float32", "float32"), ("float16", "float16"), ("bfloat16", "float16")]
    ),
    counted=st.booleans(),
    two=st.booleans(),
    seed=st.integers(0, 99),
)
def test_scores_are_those_of_the_definition(
    shape: tuple[int, int, int],
    pages: int,
    head_dim: int,
    dtypes: tuple[str, str],
    counted: bool,
    two: bool,
    seed: int,
) -> None:
    streams, group, tokens = shape
    query, bounds = (getattr(torch, name) for name in dtypes)
    q = draw((streams, tokens, head_dim, group), seed).to(query).permute(0, 3, 1, 2)
    low, high = (x.unflatten(0, (streams, pages)) for x in page_bounds(draw((streams * pages, 4, head_dim), seed + 1)))
    low, high = low.to(bounds), high.to(bounds)
    count = None
    if counted:
        count = (torch.arange(streams, dtype=torch.int32) * 37) % (pages + 1)
        beyond = torch.arange(pages) >= count[:, None]
        low[beyond], high[beyond] = NAN, NAN
    arrays = (low, high) if two else (high,)
    score = query_bound if two else mean_key_score
    got, want = (score(q, *arrays, count, backend=name) for name in ("triton", "reference"))
    size = q.float().norm(dim=3).amax((1, 2)) * high.float().nan_to_num(0).norm(dim=2).amax(1)
    assert torch.equal(got.isinf(), want.isinf())
    assert ((got - want).nan_to_num(0).abs() <= 1e-6 * size[:, None] + 1e-6).all()


def test_a_row_or_page_without_number_takes_no_part() -> None:
    q, low, high = draw((2, 2, 1, 64), 0), -draw((2, 5, 64), 1).abs(), draw((2, 5, 64), 2).abs()
    q[0, 1, 0, 7], q[1, :, :, 3] = NAN, NAN
    low[0, 2], high[0, 2] = INF, -INF
    for dtype in (torch.float32, torch.float16):
        got = query_bound(q.to(dtype), low.to(dtype), high.to(dtype), backend="triton")
        want = query_bound(q.to(dtype), low.to(dtype), high.to(dtype), backend="reference")
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-4)
        assert (got[1] == -INF).all()
        assert got[0].isinf().nonzero().flatten().tolist() == [2]
        each = query_bound(q.to(dtype), low.to(dtype), high.to(dtype), backend="triton", each_row=True)
        want = query_bound(q.to(dtype), low.to(dtype), high.to(dtype), backend="reference", each_row=True)
        assert each.shape == (2, 2, 5)
        assert torch.allclose(each, want, rtol=1e-5, atol=1e-4)
        assert (each[0, 1] == -INF).all()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.lists(
            st.one_of(
                st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 1e-45, 3.4e38]),
                st.floats(width=32, allow_nan=False, allow_infinity=False),
            ),
            max_size=40,
        ),
        min_size=1,
        max_size=3,
    ),
    more=st.integers(0, 5),
    width=st.integers(0, 50),
    wanted=st.lists(st.integers(0, 50), min_size=3, max_size=3),
)
def test_the_best_pages_are_those_of_the_definition(
    rows: list[list[float]], more: int, width: int, wanted: list[int]
) -> None:
    pages = max(map(len, rows)) + more
    score = torch.tensor([[*row, *[INF] * (pages - len(row))] for row in rows]).view(len(rows), pages)
    count = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    k = torch.tensor([min(x, width) for x in wanted[: len(rows)]], dtype=torch.int32)
    got, want = (top_pages(score, count, k, width, backend=name) for name in ("triton", "reference"))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("kind", ["distinct", "alike", "few values"])
def test_rows_longer_than_a_tile(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_score, "ONE_TILE", 64)
    monkeypatch.setattr(gpu_score, "TILE", 64)
    score = draw((3, 300), 0)
    if kind == "alike":
        score = torch.ones_like(score)
    elif kind == "few values":
        score = score.round()
    count, k = torch.tensor([300, 257, 5], dtype=torch.int32), torch.tensor([130, 1, 70], dtype=torch.int32)
    got, want = (top_pages(score, count, k, 140, backend=name) for name in ("triton", "reference"))
    assert torch.equal(got[0], want[0])
    assert got[1].tolist() == [130, 1, 5]


def test_numbers_out_of_range_are_cut_on_a_device() -> None:
    """The host looks before it calls; on a device that would wait, so the kernel may get anything."""
    score = torch.arange(8.0)[None].repeat(4, 1)
    count, k = (torch.tensor(x, dtype=torch.int32) for x in ([99, -1, 8, 3], [4, 4, -7, 99]))
    columns, number = gpu_score.top_pages(score, count, k, 5)
    assert number.tolist() == [4, 0, 0, 3]
    assert columns.tolist() == [[4, 5, 6, 7, -1], [-1] * 5, [-1] * 5, [0, 1, 2, -1, -1]]
    q, high = torch.ones(1, 1, 1, 8), torch.ones(1, 3, 8)
    got = gpu_score.page_scores(q, high, None, torch.tensor([7], dtype=torch.int32))
    assert got.tolist() == [[8.0, 8.0, 8.0]]
    assert gpu_score.page_scores(q, high, None, torch.tensor([-1], dtype=torch.int32)).tolist() == [[-math.inf] * 3]


def test_nothing_to_score() -> None:
    count = torch.zeros(2, dtype=torch.int32)
    columns, number = top_pages(torch.zeros(2, 0), count, count + 1, 3, backend="triton")
    assert columns.tolist() == [[-1] * 3] * 2
    assert number.tolist() == [0, 0]
    assert top_pages(torch.zeros(2, 4), count, count, 0, backend="triton")[0].shape == (2, 0)
    assert query_bound(torch.ones(2, 1, 1, 8), *(torch.zeros(2, 0, 8),) * 2, backend="triton").shape == (2, 0)
