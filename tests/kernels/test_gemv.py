"""Linears with bf16 weights against float64, in native code and in torch."""

from __future__ import annotations

import pytest
import torch

from kernels.api import choose_backend
from kernels.gemv import BLOCK_ELEMENTS, NATIVE_ROWS, gemv_bf16

SHAPES = [(5, 3), (64, 16), (65, 576), (130, 37), (3, 1536)]
MANY = BLOCK_ELEMENTS // 1024 + 5  # outputs in more than one block


def case(rows: tuple[int, ...], outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(outputs * inputs)
    x, bias = torch.randn(*rows, inputs, generator=rng), torch.randn(outputs, generator=rng)
    return x, torch.randn(outputs, inputs, generator=rng).bfloat16(), bias


def close_to_float64(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, got: torch.Tensor) -> None:
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # What float32 sums of that many products may lose, by the size of the products.
    most = (x.double().abs() @ weight.double().abs().T) * 2**-24 * (3 + x.shape[-1] / 16) + 1e-6
    assert got.dtype == torch.float32
    assert got.shape == exact.shape
    assert bool(((got - exact).abs() <= most).all())


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [(1,), (1, 2), (3,), (1, 4), (2, 3), (NATIVE_ROWS,), (NATIVE_ROWS + 1,)])
def test_equals_float64(rows: tuple[int, ...], outputs: int, inputs: int, backend: str) -> None:
    if backend == "cpu" and choose_backend() != "cpu":
        pytest.skip("no C++ compiler")
    x, weight, bias = case(rows, outputs, inputs)
    close_to_float64(x, weight, None, gemv_bf16(x, weight, None, backend))
    close_to_float64(x, weight, bias, gemv_bf16(x, weight, bias, backend))


@pytest.mark.parametrize("rows", [2, 40])
def test_many_outputs_and_rows_that_lie_apart(rows: int) -> None:
    x, weight, bias = case((1024,), MANY, 1024)
    x = x.T[:rows]  # strides 1, 1024
    close_to_float64(x, weight, bias, gemv_bf16(x, weight, bias))


def test_a_row_depends_neither_on_other_rows_nor_on_threads() -> None:
    x, weight, bias = case((NATIVE_ROWS,), 300, 577)
    together = gemv_bf16(x, weight, bias)
    alone = torch.stack([gemv_bf16(row, weight, bias) for row in x])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    threaded = gemv_bf16(x, weight, bias)
    torch.set_num_threads(before)
    assert torch.equal(together, threaded)
    assert torch.equal(together, alone)


def test_extremes_pass_through() -> None:
    x = torch.zeros(1, 32)
    weight = torch.zeros(4, 32, dtype=torch.bfloat16)
    x[0, 5], x[0, 6] = 1.0, 1.0
    weight[0, 5], weight[1, 6] = float("inf"), float("nan")
    weight[2, 5], weight[3, 6] = -3.0e38, 1e-40
    out = gemv_bf16(x, weight)[0]
    assert out[0] == float("inf")
    assert out[1].isnan()
    assert out[2] == float(weight[2, 5])
    assert out[3] == float(weight[3, 6])


def test_no_rows() -> None:
    _, weight, _ = case((1,), 8, 16)
    assert gemv_bf16(torch.zeros(0, 16), weight).shape == (0, 8)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(1, 4), torch.zeros(3, 4)),
        (torch.zeros(1, 4).bfloat16(), torch.zeros(3, 4).bfloat16()),
        (torch.zeros(1, 5), torch.zeros(3, 4).bfloat16()),
        (torch.zeros(1, 4), torch.zeros(4, 3).bfloat16().T),
    ],
)
def test_what_does_not_fit_is_refused(x: torch.Tensor, weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="linear"):
        gemv_bf16(x, weight)
