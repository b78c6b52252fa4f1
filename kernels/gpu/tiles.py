"""A tile of keys and values from pages of any format, as the operands of two matrix products.

Tokens of a tile may stand in any order, as long as all of its arrays agree; a page's tokens stay together. Channels
of values stand in two halves of BLOCK_D / 2 columns each, the first D / 2 channels and the rest, because that is how
two of them share a byte in int4. Nothing is written back to memory: codes become numbers in registers.

The hints on addresses are what makes loads 128 bits wide: a page begins at a multiple of 16 bytes, and all of its
tokens share that address.
"""

from __future__ import annotations

import triton
import triton.language as tl

# One function for all formats, told apart at compile time: fp32 0, bf16 1, fp16 2, int8 3, int4 4, proto 5.
FP32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
FP16 = tl.constexpr(2)
INT8 = tl.constexpr(3)
INT4 = tl.constexpr(4)
PROTO = tl.constexpr(5)
SPEC = ()


@triton.jit
def to_dot(x, DOT: tl.constexpr):
    """Numbers of a page in the type of the products."""
    if x.dtype == DOT:
        return x
    # Through float32: between two 16-bit types there is no direct way, nor any from bf16 in the interpreter.
    return x.to(tl.float32).to(DOT)


@triton.jit
def typed(base, KIND: tl.constexpr):
    """The base as a pointer to the elements of a float page."""
    if KIND == FP32:
        return base.to(tl.pointer_type(tl.float32))
    elif KIND == FP16:
        return base.to(tl.pointer_type(tl.float16))
    else:
        return base.to(tl.pointer_type(tl.bfloat16))


@triton.jit
def centred(code, KIND: tl.constexpr, DOT: tl.constexpr):
    """Codes less half their range, exact in any type; bytes go by arithmetic on the bits, not one at a time."""
    if KIND == INT8:
        if DOT == tl.bfloat16:
            return (code ^ 0x80).to(tl.int8, bitcast=True).to(DOT)
        elif DOT == tl.float16:
            return (code.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
        else:
            return code.to(tl.float32) - 128.0
    elif DOT == tl.bfloat16:
        return (code.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
    elif DOT == tl.float16:
        return (code.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    else:
        return code.to(tl.float32) - 8.0


@triton.jit
def page_address(address, entry, valid, PER_PAGE: tl.constexpr):
    """[n] int64 bytes from the base to each column's page."""
    at = tl.load(address + entry, mask=valid, other=0)
    return tl.max_constancy(tl.multiple_of(at, 16), PER_PAGE)


@triton.jit
def load_keys(
    base,
    address,
    first,
    last,
    KIND: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
):
    """[BLOCK_D, BLOCK_N] keys of entries first to last - 1, as many as fit; 0 beyond."""
    d = tl.arange(0, BLOCK_D)
    channel = d < D
    if KIND <= FP16:
        n = tl.arange(0, BLOCK_N)
        valid = first + n // P < last
        ITEM_SHIFT: tl.constexpr = 2 if KIND == FP32 else 1
        at = (page_address(address, first + n // P, valid, P) >> ITEM_SHIFT) + n % P
        at = tl.max_contiguous(tl.multiple_of(at, 16 >> ITEM_SHIFT), P)
        where = typed(base, KIND) + at[None, :] + (d * P)[:, None]
        if BLOCK_D == D:
            keys = tl.load(where, mask=valid[None, :], other=0.0)
        else:
            keys = tl.load(where, mask=channel[:, None] & valid[None, :], other=0.0)
        return to_dot(keys, DOT)
    else:
        # Bytes of codes a channel: P, or P / 2 with token j in the low half and j + P / 2 in the high half.
        WIDTH: tl.constexpr = P if KIND == INT8 else P // 2
        BYTES_N: tl.constexpr = BLOCK_N if KIND == INT8 else BLOCK_N // 2
        n = tl.arange(0, BYTES_N)
        valid = first + n // WIDTH < last
        at = page_address(address, first + n // WIDTH, valid, WIDTH) + n % WIDTH
        at = tl.max_contiguous(tl.multiple_of(at, 16), WIDTH)
        where = base + at[None, :] + (d * WIDTH)[:, None]
        codes = tl.load(where, mask=channel[:, None] & valid[None, :], other=0)
        if KIND == INT4:
            codes = tl.reshape(tl.join(codes & 15, codes >> 4), [BLOCK_D, BLOCK_N])
        step, low = key_scales(base, address, first, last, KIND, P, D, BLOCK_D, BLOCK_N)
        return centred(codes, KIND, DOT) * step.to(DOT) + low.to(DOT)


@triton.jit
def key_scales(
    base,
    address,
    first,
    last,
    KIND: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Step and value of the middle code of every channel, [BLOCK_D, BLOCK_N] float32, alike within a page."""
    PAGES: tl.constexpr = BLOCK_N // P
    HEADER: tl.constexpr = 2 * P * D if KIND == INT8 else P * D
    MIDDLE: tl.constexpr = 128 if KIND == INT8 else 8
    n = tl.arange(0, PAGES)
    valid = first + n < last
    at = tl.multiple_of(tl.load(address + first + n, mask=valid, other=0), 16)
    header = base.to(tl.pointer_type(tl.float32)) + ((at + HEADER) >> 2)
    step_unit = tl.load(header, mask=valid, other=0.0)
    lowest = tl.load(header + 1, mask=valid, other=0.0)
    zero_unit = tl.load(header + 2, mask=valid, other=0.0)
    d = tl.arange(0, BLOCK_D)
    codes = base + (at + (HEADER + 24))[None, :] + d[:, None]
    inside = (d < D)[:, None] & valid[None, :]
    step = tl.load(codes, mask=inside, other=0).to(tl.float32) * step_unit[None, :]
    low = tl.load(codes + D, mask=inside, other=0).to(tl.float32) * zero_unit[None, :] + lowest[None, :]
    low += MIDDLE * step
    step = tl.reshape(tl.broadcast_to(step[:, :, None], [BLOCK_D, PAGES, P]), [BLOCK_D, BLOCK_N])
    low = tl.reshape(tl.broadcast_to(low[:, :, None], [BLOCK_D, PAGES, P]), [BLOCK_D, BLOCK_N])
    return step, low


@triton.jit
def load_values(
    base,
    address,
    first,
    last,
    token,
    seen,
    KIND: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
):
    """[BLOCK_N, BLOCK_D] values, 0 where nobody sees the token; codes less half their range if quantised."""
    n = tl.arange(0, BLOCK_N)
    at = page_address(address, first + n // P, first + n // P < last, P)
    HALF: tl.constexpr = D // 2
    BLOCK_HALF: tl.constexpr = BLOCK_D // 2
    if KIND <= INT8:
        c = tl.arange(0, BLOCK_D)
        ITEM_SHIFT: tl.constexpr = 2 if KIND == FP32 else (1 if KIND <= FP16 else 0)
        row = (at >> ITEM_SHIFT) + (P * D + token * D)
        if BLOCK_D == D:
            channel = c
            inside = seen[:, None]
        else:
            channel = (c // BLOCK_HALF) * HALF + c % BLOCK_HALF
            inside = seen[:, None] & (c % BLOCK_HALF < HALF)[None, :]
        if KIND == INT8:
            codes = tl.load(base + row[:, None] + channel[None, :], mask=inside, other=128)
            return centred(codes, KIND, DOT)
        else:
            return to_dot(tl.load(typed(base, KIND) + row[:, None] + channel[None, :], mask=inside, other=0.0), DOT)
    else:
        c = tl.arange(0, BLOCK_HALF)
        row = at + (P * HALF + token * HALF)
        inside = seen[:, None] & (c < HALF)[None, :]
        codes = tl.load(base + row[:, None] + c[None, :], mask=inside, other=0x88)
        both = tl.join(centred(codes & 15, KIND, DOT), centred(codes >> 4, KIND, DOT))
        return tl.reshape(tl.permute(both, [0, 2, 1]), [BLOCK_N, BLOCK_D])


@triton.jit
def value_scales(
    base,
    address,
    first,
    last,
    token,
    KIND: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Step and value of the middle code of every token, [BLOCK_N] float32."""
    HEADER: tl.constexpr = 2 * P * D if KIND == INT8 else P * D
    MIDDLE: tl.constexpr = 128 if KIND == INT8 else 8
    n = tl.arange(0, BLOCK_N)
    valid = first + n // P < last
    at = page_address(address, first + n // P, valid, P)
    header = base.to(tl.pointer_type(tl.float32)) + ((at + HEADER) >> 2)
    codes = base + at + (HEADER + 24 + 2 * D) + token
    step = tl.load(codes, mask=valid, other=0).to(tl.float32) * tl.load(header + 3, mask=valid, other=0.0)
    low = tl.load(codes + P, mask=valid, other=0).to(tl.float32) * tl.load(header + 5, mask=valid, other=0.0)
    return step, low + tl.load(header + 4, mask=valid, other=0.0) + MIDDLE * step


@triton.jit
def load_prototypes(
    base,
    address,
    origin,
    first,
    last,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMN_BITS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Keys [BLOCK_D, BLOCK_N], values [BLOCK_N, BLOCK_D] and log2 counts [BLOCK_N], -inf beyond a page's own rows."""
    HALF: tl.constexpr = D // 2
    BLOCK_HALF: tl.constexpr = BLOCK_D // 2
    n = tl.arange(0, BLOCK_N)
    entry = first + n // ROWS
    valid = entry < last
    at = page_address(address, entry, valid, ROWS)
    rows = (tl.load(origin + entry, mask=valid, other=0) >> COLUMN_BITS) + 1
    row = n % ROWS
    valid = valid & (row < rows)
    counts = base.to(tl.pointer_type(tl.float32)) + (at >> 2) + rows * D + row
    log2_count = tl.load(counts, mask=valid, other=float("-inf"))
    # An empty prototype may hold anything.
    valid = valid & (log2_count > float("-inf"))
    d = tl.arange(0, BLOCK_D)
    start = typed(base, PROTO) + (at >> 1)[:, None] + (row * D)[:, None]
    keys = tl.load(start + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    channel = (d // BLOCK_HALF) * HALF + d % BLOCK_HALF
    inside = valid[:, None] & (d % BLOCK_HALF < HALF)[None, :]
    values = tl.load(start + (rows * D)[:, None] + channel[None, :], mask=inside, other=0.0)
    return tl.trans(to_dot(keys, DOT)), to_dot(values, DOT), tl.where(valid, log2_count, float("-inf"))
