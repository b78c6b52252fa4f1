"""Whole pages to stored form in one launch: the arithmetic of `kernels.pages.encode`, bit for bit.

One program per page and per array (keys, values). A row's elements are held as two halves, so that int4 packs
element i with element i + width / 2 without a shuffle. Compiled without fused multiply-add, whose single rounding
would give other codes than the definition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import launch, power_of_2
from kernels.gpu.spec import LOAD_128, Spec, Variant
from kernels.pages import FLOAT_DTYPES, LEVELS, PageFormat, page_format

FP32, BF16, FP16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SOURCE_TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Makes a float32 between 0 and 2^22 its nearest integer, ties to even, when added and taken off again.
ROUND = tl.constexpr(12582912.0)


@triton.jit
def bf16_bits(x):
    """Float32 to the bits of bfloat16, rounded to nearest even by integers: the interpreter's own cast truncates."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return tl.where(x != x, 0x7FC0, rounded >> 16).to(tl.int16)


@triton.jit
def store_float(address, x, mask, FORMAT: tl.constexpr):
    """Stores x at the element indices `address[1]` after byte address[0], in a float format."""
    base, index = address
    if FORMAT == BF16:
        tl.store(base.to(tl.pointer_type(tl.int16), bitcast=True) + index, bf16_bits(x), mask=mask)
    elif FORMAT == FP16:
        tl.store(base.to(tl.pointer_type(tl.float16), bitcast=True) + index, x.to(tl.float16), mask=mask)
    else:
        tl.store(base.to(tl.pointer_type(tl.float32), bitcast=True) + index, x, mask=mask)


@triton.jit
def divide(x, unit):
    """X / unit correctly rounded, 0 where the unit is not positive (a constant row)."""
    return tl.where(unit > 0, tl.div_rn(x, tl.where(unit > 0, unit, 1.0)), 0.0)


@triton.jit
def code_of(x, zero, step, LEVELS: tl.constexpr):
    """Nearest code of each element of a row, 0 to LEVELS."""
    code = tl.minimum(tl.maximum(divide(x - zero, step), 0.0), LEVELS)
    return ((code + ROUND) - ROUND).to(tl.int32)


@triton.jit
def quantise(low, high, codes, scale, zero, header, A: tl.constexpr, B: tl.constexpr, LEVELS: tl.constexpr):
    """Rows A of B elements, given as halves low, high [>= A, >= B / 2] float32, to codes at four byte addresses.

    As `kernels.pages._quantise_into`: step and lowest value of a row are 8-bit codes on grids of the page.
    """
    a, b = tl.arange(0, low.shape[0]), tl.arange(0, low.shape[1])
    row = a < A
    inside = row[:, None] & (b < B // 2)[None, :]
    least = tl.min(tl.where(inside, tl.minimum(low, high), float("inf")), 1)
    most = tl.max(tl.where(inside, tl.maximum(low, high), float("-inf")), 1)
    base = tl.min(least, 0)
    zero_unit = tl.div_rn(tl.max(tl.where(row, least, float("-inf")), 0) - base, 255.0)
    zero_code = tl.minimum(tl.maximum(tl.floor(divide(least - base, zero_unit)), 0.0), 255.0)
    lowest = base + zero_code * zero_unit
    needed = tl.div_rn(most - lowest, LEVELS * 1.0)
    step_unit = tl.div_rn(tl.max(tl.where(row, needed, float("-inf")), 0), 255.0)
    step_code = tl.minimum(tl.maximum(tl.ceil(divide(needed, step_unit)), 0.0), 255.0)
    step = step_code * step_unit
    first = code_of(low, lowest[:, None], step[:, None], LEVELS)
    second = code_of(high, lowest[:, None], step[:, None], LEVELS)
    if LEVELS == 15:
        at = codes + a[:, None] * (B // 2) + b[None, :]
        tl.store(at, (first | (second << 4)).to(tl.uint8), mask=inside)
    else:
        at = codes + a[:, None] * B + b[None, :]
        tl.store(at, first.to(tl.uint8), mask=inside)
        tl.store(at + B // 2, second.to(tl.uint8), mask=inside)
    tl.store(scale + a, step_code.to(tl.int32).to(tl.uint8), mask=row)
    tl.store(zero + a, zero_code.to(tl.int32).to(tl.uint8), mask=row)
    head = header.to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(head, step_unit)
    tl.store(head + 1, base)
    tl.store(head + 2, zero_unit)


@triton.jit
def load_halves(source, along_a, along_b, A: tl.constexpr, B: tl.constexpr, BLOCK_A: tl.constexpr, HALF: tl.constexpr):
    """The first and second half of each row of a strided array [A, B], as float32 [BLOCK_A, HALF] each."""
    a, b = tl.arange(0, BLOCK_A)[:, None], tl.arange(0, HALF)[None, :]
    inside = (a < A) & (b < B // 2)
    at = source + a * along_a + b * along_b
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return low, tl.load(at + (B // 2) * along_b, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def encode_array(
    source,
    along_a,
    along_b,
    page,
    V: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_A: tl.constexpr,
    HALF: tl.constexpr,
):
    """One array of a page, [A, B] = [D, P] of the keys or [P, D] of the values, to its place after byte `page`."""
    A: tl.constexpr = P if V else D
    B: tl.constexpr = D if V else P
    low, high = load_halves(source, along_a, along_b, A, B, BLOCK_A, HALF)  # pyright: ignore[reportGeneralTypeIssues]
    if FORMAT <= FP16:
        a, b = tl.arange(0, BLOCK_A)[:, None], tl.arange(0, HALF)[None, :]
        inside = (a < A) & (b < B // 2)
        first = V * P * D + a * B + b
        store_float((page, first), low, inside, FORMAT)
        store_float((page, first + B // 2), high, inside, FORMAT)
    else:
        LEVELS: tl.constexpr = 255 if FORMAT == 3 else 15
        BYTES: tl.constexpr = P * D if FORMAT == 3 else P * D // 2
        scale = page + 2 * BYTES + 24 + V * 2 * D
        quantise(low, high, page + V * BYTES, scale, scale + A, page + 2 * BYTES + 12 * V, A, B, LEVELS)


@triton.jit
def clear_padding(page, P: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, PAGE_BYTES: tl.constexpr):
    """Zeroes what the arrays of a quantised page leave of its last 64 bytes."""
    if FORMAT > FP16:
        USED: tl.constexpr = (2 * P * D if FORMAT == 3 else P * D) + 24 + 2 * D + 2 * P
        at = tl.arange(0, 64)
        tl.store(page + USED + at, tl.zeros([64], tl.uint8), mask=at < PAGE_BYTES - USED)


@triton.jit
def encode_kernel(
    k,
    v,
    out,
    k_page,
    k_token,
    k_channel,
    v_page,
    v_token,
    v_channel,
    P: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF_D: tl.constexpr,
):
    """Program (m, 0): keys of page m; (m, 1): values. Strides in elements."""
    m = tl.program_id(0).to(tl.int64)
    page = tl.multiple_of(out + m * PAGE_BYTES, 16)
    if tl.program_id(1) == 0:
        encode_array(k + m * k_page, k_channel, k_token, page, 0, P, D, FORMAT, BLOCK_D, BLOCK_P // 2)
        clear_padding(page, P, D, FORMAT, PAGE_BYTES)
    else:
        encode_array(v + m * v_page, v_token, v_channel, page, 1, P, D, FORMAT, BLOCK_P, HALF_D)


def blocks(fmt: PageFormat) -> dict[str, int]:
    """Tile sides, powers of two, that cover a page's tokens, channels and half its channels."""
    half = power_of_2(fmt.head_dim // 2)
    return {"BLOCK_P": fmt.page_tokens, "BLOCK_D": power_of_2(fmt.head_dim), "HALF_D": half}


def warps(fmt: PageFormat) -> int:
    """Warps that keep a page's tile at 32 elements a thread or below."""
    return 4 if fmt.page_tokens * fmt.head_dim <= 2048 else 8


def encode(fmt: PageFormat, k: Tensor, v: Tensor) -> Tensor:
    """As `kernels.pages.encode`, bit for bit equal to its torch code; no "proto".

    Args:
        fmt: target format, float or quantised.
        k: [M, P, D] float keys, finite, of any strides.
        v: [M, P, D] float values, likewise.

    Returns:
        [M, page_bytes] uint8.

    Raises:
        ValueError: another format, shape or device.
    """
    if fmt.name not in FLOAT_DTYPES and fmt.name not in LEVELS:
        raise ValueError(f"encode to {fmt.name!r}: must be one of {', '.join((*FLOAT_DTYPES, *LEVELS))}")
    want = (k.shape[0], fmt.page_tokens, fmt.head_dim)
    for name, x in (("k", k), ("v", v)):
        if x.shape != want or x.device != k.device:
            raise ValueError(f"encode {name} {tuple(x.shape)} on {x.device}: must be {list(want)} on {k.device}")
    if k.dtype != v.dtype or k.dtype not in SOURCE_TYPES:
        k, v = k.float(), v.float()
    out = torch.empty(len(k), fmt.page_bytes, dtype=torch.uint8, device=k.device)
    if not len(k):
        return out
    launch(
        encode_kernel,
        (len(k), 2),
        k.device,
        k,
        v,
        out,
        *k.stride(),
        *v.stride(),
        P=fmt.page_tokens,
        D=fmt.head_dim,
        FORMAT=fmt.format_id,
        PAGE_BYTES=fmt.page_bytes,
        **blocks(fmt),
        num_warps=warps(fmt),
        enable_fp_fusion=False,
    )
    return out


def _variant(source: str, name: str, page_tokens: int, head_dim: int) -> Variant:
    fmt = page_format(name, page_tokens, head_dim)
    constants = {
        "P": page_tokens,
        "D": head_dim,
        "FORMAT": fmt.format_id,
        "PAGE_BYTES": fmt.page_bytes,
        **blocks(fmt),
        "k_token": 1,
        "v_channel": 1,
    }
    strides = ("k_page", "k_channel", "v_page", "v_token")
    signature = {"k": f"*{source}", "v": f"*{source}", "out": "*u8"}
    for key in ("k_page", "k_token", "k_channel", "v_page", "v_token", "v_channel"):
        signature[key] = "i32" if key in strides else "constexpr"
    signature |= dict.fromkeys((x for x in constants if x not in signature), "constexpr")
    divisible = frozenset({"k", "v", "out", *strides})
    return Variant(
        f"{source}-{name}-d{head_dim}-p{page_tokens}",
        signature,
        constants,
        divisible,
        num_warps=warps(fmt),
        expects=frozenset({LOAD_128} if page_tokens == 64 else ()),
        options={"enable_fp_fusion": False},
    )


SPEC = Spec(
    "encode",
    encode_kernel,
    (
        _variant("bf16", "int8", 16, 64),
        _variant("bf16", "int8", 64, 128),
        _variant("bf16", "int4", 16, 128),
        _variant("bf16", "int4", 32, 64),
        _variant("fp32", "int4", 64, 128),
        _variant("fp32", "bf16", 16, 128),
    ),
)
