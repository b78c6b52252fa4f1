"""Linears of float32 activations and bf16 weights, summed in float32, on a CPU.

Weights that are exactly bf16 lose nothing by staying so, and take half the memory and, in a decode step that is
bound by reading them, half the time. Few rows run in native code; many rows are a matrix library's business, which
gets the weights widened by blocks of outputs that stay in the cache.

    y = gemv_bf16(x, weight)          # x [..., K] float32, weight [N, K] bf16 -> y [..., N] float32
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.api import choose_backend
from kernels.guards import check_int, check_like

NATIVE_ROWS = 16  # beyond, widening costs less than native products
BACKENDS = ("cpu", "torch", None)
BLOCK_ELEMENTS = 2 << 20  # weights widened at once


def gemv_bf16(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    backend: str | None = None,
    native_rows: int = NATIVE_ROWS,
) -> Tensor:
    """`torch.nn.functional.linear` of the widened weight, without holding that.

    Args:
        x: [..., K] float32.
        weight: [N, K] bf16, contiguous.
        bias: [N] float32.
        backend: "cpu" or "torch", None for the fastest.
        native_rows: up to so many rows go to native code, where a row's result is bitwise that of the row alone. 64 is
            good for batches that must be so: for 17 to 64 rows that takes 1.2 to 1.8 times what the library does.

    Returns:
        [..., N] float32; a row's result does not depend on the number of threads.

    Raises:
        ValueError: shapes, types, devices or strides that don't match, K = 0, another backend.
    """
    _check(x, weight, bias, backend)
    check_int("native_rows", native_rows, 0)
    rows = x.numel() // weight.shape[1]
    if 0 < rows <= native_rows and weight.device.type == "cpu" and choose_backend(backend) == "cpu":
        out = _native(x, weight, rows)
    else:
        out = _widened(x, weight)
    return out if bias is None else out.add_(bias)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None) -> None:
    """Native code reads what the pointers say."""
    if weight.dim() != 2 or not weight.shape[1] or not x.dim():
        raise ValueError(f"linear x {tuple(x.shape)}, weight {tuple(weight.shape)}: must be [..., K] and [N, K], K > 0")
    inputs = weight.shape[1]
    if x.dtype != torch.float32 or weight.dtype != torch.bfloat16 or x.shape[-1] != inputs:
        raise ValueError(
            f"linear x {x.dtype} {tuple(x.shape)}, weight {weight.dtype} {tuple(weight.shape)}: "
            "must be float32 [..., K] and bfloat16 [N, K]"
        )
    if not weight.is_contiguous():
        raise ValueError(f"linear weight of strides {weight.stride()}: must be contiguous")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != torch.float32):
        raise ValueError(f"linear bias {bias.dtype} {tuple(bias.shape)}: must be float32 [{weight.shape[0]}]")
    check_like("linear", "x", x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    if backend not in BACKENDS:
        raise ValueError(f"linear backend={backend!r}: must be 'cpu', 'torch' or None")


def _native(x: Tensor, weight: Tensor, rows: int) -> Tensor:
    from kernels.cpu.build import library

    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    pointers = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
    library().testbed_gemv(*pointers, rows, *weight.shape, torch.get_num_threads())
    return out


def _widened(x: Tensor, weight: Tensor) -> Tensor:
    """By blocks of outputs."""
    outputs, inputs = weight.shape
    step = max(1, BLOCK_ELEMENTS // inputs)
    if step >= outputs:
        return linear(x, weight.float())
    return torch.cat([linear(x, block.float()) for block in weight.split(step)], -1)
