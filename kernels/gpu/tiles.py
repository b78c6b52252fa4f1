"""Tiles of keys and values from pages of any format, as the operands of two matrix products.

Nothing is written back to memory: codes become numbers in registers on their way to the tensor cores, and scales go
into the queries and the probabilities, which are small, not into the codes, which are many.

The columns of a tile need not be in the order of its tokens, and channels need not be in theirs, as long as all arrays
agree. Quantised tiles make use of that. Four codes lie in one word, but belong to four columns of a matrix operand
that one thread holds eight apart: number them so (`word_order`), and a thread reads words instead of bytes. Two
nibbles of a byte stand half a page (or half a head) apart.

The hints on addresses are what makes loads 128 bits wide: a page begins at a multiple of 16 bytes, and all of its
tokens share that address.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# In compiled functions plain numbers are constexpr too.

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
        if DOT == tl.bfloat16:  # noqa: SIM300 - DOT is no constant to the reader
            return (code ^ 0x80).to(tl.int8, bitcast=True).to(DOT)
        elif DOT == tl.float16:  # noqa: SIM300 - DOT is no constant to the reader
            return (code.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
        else:
            return code.to(tl.float32) - 128.0
    elif DOT == tl.bfloat16:  # noqa: SIM300 - DOT is no constant to the reader
        return (code.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
    elif DOT == tl.float16:  # noqa: SIM300 - DOT is no constant to the reader
        return (code.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    else:
        return code.to(tl.float32) - 8.0


@triton.jit
def page_address(address, entry, valid, PER_PAGE: tl.constexpr):
    """[n] int64 bytes from the base to each column's page."""
    at = tl.load(address + entry, mask=valid, other=0)
    return tl.max_constancy(tl.multiple_of(at, 16), PER_PAGE)


@triton.jit
def word_order(x, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """[A, WIDTH] with column (WIDTH / LANES) a + b moved to LANES b + a; as it is if there are no more than LANES."""
    if WIDTH > LANES:
        x = tl.reshape(x, [x.shape[0], LANES, WIDTH // LANES])
        x = tl.reshape(tl.permute(x, [0, 2, 1]), [x.shape[0], WIDTH])
    return x


@triton.jit
def from_word_order(x, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """The inverse of `word_order`."""
    if WIDTH > LANES:
        x = tl.reshape(x, [x.shape[0], WIDTH // LANES, LANES])
        x = tl.reshape(tl.permute(x, [0, 2, 1]), [x.shape[0], WIDTH])
    return x


@triton.jit
def halves(low, high, WIDTH: tl.constexpr):
    """[A, 2 * WIDTH]: first all of `low`, then all of `high`."""
    return tl.reshape(tl.permute(tl.join(low, high), [0, 2, 1]), [low.shape[0], 2 * WIDTH])


@triton.jit
def place_of_column(n, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr):
    """Which page of the tile a column belongs to, and which of the page's tokens it is."""
    if KIND == INT8:
        if BLOCK_N > LANES:
            n = n % LANES * (BLOCK_N // LANES) + n // LANES
        return n // ROWS, n % ROWS
    elif KIND == INT4:
        BYTES: tl.constexpr = BLOCK_N // 2
        half = n // BYTES
        n = n % BYTES
        if BYTES > LANES:
            n = n % LANES * (BYTES // LANES) + n // LANES
        return n // (ROWS // 2), n % (ROWS // 2) + half * (ROWS // 2)
    else:
        return n // ROWS, n % ROWS


@triton.jit
def sum_by_page(p, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr):
    """[M, BLOCK_N] -> [M, pages of the tile]."""
    PAGES: tl.constexpr = BLOCK_N // ROWS
    if KIND == INT4:
        BYTES: tl.constexpr = BLOCK_N // 2
        p = tl.sum(tl.reshape(p, [p.shape[0], 2, BYTES]), 1)
        return tl.sum(tl.reshape(from_word_order(p, BYTES, LANES), [p.shape[0], PAGES, ROWS // 2]), 2)
    else:
        if KIND == INT8:
            p = from_word_order(p, BLOCK_N, LANES)
        return tl.sum(tl.reshape(p, [p.shape[0], PAGES, ROWS]), 2)


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
    LANES: tl.constexpr,
    DOT: tl.constexpr,
):
    """[BLOCK_D, BLOCK_N] keys of entries first to last - 1, as many as fit; centred codes if quantised."""
    d = tl.arange(0, BLOCK_D)
    # Bytes of codes a channel: P, or P / 2 with token j in the low half and j + P / 2 in the high half.
    WIDTH: tl.constexpr = P // 2 if KIND == INT4 else P
    COLUMNS: tl.constexpr = BLOCK_N // 2 if KIND == INT4 else BLOCK_N
    ITEM_SHIFT: tl.constexpr = 2 if KIND == FP32 else (1 if KIND <= FP16 else 0)
    n = tl.arange(0, COLUMNS)
    valid = first + n // WIDTH < last
    at = (page_address(address, first + n // WIDTH, valid, WIDTH) >> ITEM_SHIFT) + n % WIDTH
    at = tl.max_contiguous(tl.multiple_of(at, 16 >> ITEM_SHIFT), WIDTH)
    inside = valid[None, :]
    if BLOCK_D != D:
        inside = inside & (d < D)[:, None]
    if KIND <= FP16:
        keys = tl.load(typed(base, KIND) + at[None, :] + (d * WIDTH)[:, None], mask=inside, other=0.0)
        return to_dot(keys, DOT)
    elif KIND == INT8:
        codes = tl.load(base + at[None, :] + (d * WIDTH)[:, None], mask=inside, other=0)
        return word_order(centred(codes, KIND, DOT), COLUMNS, LANES)
    else:
        codes = tl.load(base + at[None, :] + (d * WIDTH)[:, None], mask=inside, other=0)
        low = word_order(centred(codes & 15, KIND, DOT), COLUMNS, LANES)
        return halves(low, word_order(centred(codes >> 4, KIND, DOT), COLUMNS, LANES), COLUMNS)


@triton.jit
def fold_key_scales(
    q,
    base,
    address,
    first,
    last,
    replica,
    KIND: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
):
    """Queries [M, BLOCK_D] times the steps of the page that each row looks at, and their product with its middle, [M].

    q . key = (q * step) . (code - middle) + q . (lowest + middle * step)
    """
    HEADER: tl.constexpr = 2 * P * D if KIND == INT8 else P * D
    MIDDLE: tl.constexpr = 128 if KIND == INT8 else 8
    valid = (first + replica < last) & (replica < BLOCK_N // P)
    at = tl.multiple_of(tl.load(address + first + replica, mask=valid, other=0), 16)
    header = base.to(tl.pointer_type(tl.float32)) + ((at + HEADER) >> 2)
    step_unit = tl.load(header, mask=valid, other=0.0)
    lowest = tl.load(header + 1, mask=valid, other=0.0)
    zero_unit = tl.load(header + 2, mask=valid, other=0.0)
    d = tl.arange(0, BLOCK_D)
    codes = base + tl.multiple_of(at + (HEADER + 24), 8)[:, None] + d[None, :]
    inside = valid[:, None]
    if BLOCK_D != D:
        inside = inside & (d < D)[None, :]
    step = tl.load(codes, mask=inside, other=0).to(tl.float32) * step_unit[:, None]
    zero = tl.load(codes + D, mask=inside, other=0).to(tl.float32) * zero_unit[:, None]
    wide = q.to(tl.float32)
    # Summed by a product with ones, since what feeds a product is fetched ahead.
    ones = tl.full([BLOCK_D, 16], 1.0, DOT)
    middle = tl.dot((wide * (zero + MIDDLE * step + lowest[:, None])).to(DOT), ones, input_precision="ieee")
    middle = tl.max(middle, 1)
    return (wide * step).to(DOT), middle


@triton.jit
def load_values(
    base,
    address,
    entry,
    valid,
    token,
    seen,
    KIND: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LANES: tl.constexpr,
    DOT: tl.constexpr,
):
    """[BLOCK_N, BLOCK_D] values, 0 where nobody sees the token; centred codes if quantised.

    Channels stand in two halves of BLOCK_D / 2 columns, the first D / 2 and the rest; of codes, in the order of words.
    """
    at = tl.load(address + entry, mask=valid, other=0)
    HALF: tl.constexpr = D // 2
    BLOCK_HALF: tl.constexpr = BLOCK_D // 2
    ITEM_SHIFT: tl.constexpr = 2 if KIND == FP32 else (1 if KIND <= FP16 else 0)
    if KIND == INT4:
        c = tl.arange(0, BLOCK_HALF)
        LINE: tl.constexpr = HALF
        row = at + (P * HALF + token * HALF)
    else:
        c = tl.arange(0, BLOCK_D)
        LINE: tl.constexpr = D << ITEM_SHIFT
        row = (at >> ITEM_SHIFT) + (P * D + token * D)
    ALIGN: tl.constexpr = 16 if LINE % 16 == 0 else (8 if LINE % 8 == 0 else 4)
    row = tl.multiple_of(row, ALIGN >> ITEM_SHIFT)
    inside = seen[:, None]
    if BLOCK_D != D:
        inside = inside & (c % BLOCK_HALF < HALF)[None, :]
        c = c // BLOCK_HALF * HALF + c % BLOCK_HALF
    # Of codes, what other=0 gives is not 0 once centred, but the probabilities of unseen tokens are.
    if KIND <= FP16:
        return to_dot(tl.load(typed(base, KIND) + row[:, None] + c[None, :], mask=inside, other=0.0), DOT)
    elif KIND == INT8:
        codes = tl.load(base + row[:, None] + c[None, :], mask=inside, other=0)
        return word_order(centred(codes, KIND, DOT), BLOCK_D, LANES)
    else:
        codes = tl.load(base + row[:, None] + c[None, :], mask=inside, other=0)
        low = centred(codes & 15, KIND, DOT)
        return word_order(halves(low, centred(codes >> 4, KIND, DOT), BLOCK_HALF), BLOCK_D, LANES)


@triton.jit
def value_scales(base, address, entry, valid, token, KIND: tl.constexpr, P: tl.constexpr, D: tl.constexpr):
    """Step and value of the middle code of every token, [BLOCK_N] float32."""
    HEADER: tl.constexpr = 2 * P * D if KIND == INT8 else P * D
    MIDDLE: tl.constexpr = 128 if KIND == INT8 else 8
    at = tl.load(address + entry, mask=valid, other=0)
    header = base.to(tl.pointer_type(tl.float32)) + ((at + HEADER) >> 2)
    # Whole words, since single bytes can't be fetched ahead.
    words = base.to(tl.pointer_type(tl.uint32)) + ((at + (HEADER + 24 + 2 * D)) >> 2) + token // 4
    shift = (token % 4 * 8).to(tl.uint32)
    step_code = (tl.load(words, mask=valid, other=0) >> shift) & 255
    zero_code = (tl.load(words + P // 4, mask=valid, other=0) >> shift) & 255
    step = step_code.to(tl.float32) * tl.load(header + 3, mask=valid, other=0.0)
    low = zero_code.to(tl.float32) * tl.load(header + 5, mask=valid, other=0.0)
    return step, low + tl.load(header + 4, mask=valid, other=0.0) + MIDDLE * step


@triton.jit
def load_prototypes(
    base,
    address,
    origin,
    entry,
    valid,
    row,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMN_BITS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Keys [BLOCK_D, BLOCK_N], values [BLOCK_N, BLOCK_D] and log2 counts [BLOCK_N], -inf beyond a page's own rows."""
    HALF: tl.constexpr = D // 2
    BLOCK_HALF: tl.constexpr = BLOCK_D // 2
    at = tl.load(address + entry, mask=valid, other=0)
    rows = (tl.load(origin + entry, mask=valid, other=0) >> COLUMN_BITS) + 1
    valid = valid & (row < rows)
    counts = base.to(tl.pointer_type(tl.float32)) + (at >> 2) + rows * D + row
    log2_count = tl.load(counts, mask=valid, other=float("-inf"))
    # An empty prototype may hold anything.
    valid = valid & (log2_count > float("-inf"))
    d = tl.arange(0, BLOCK_D)
    key_row = tl.multiple_of((at >> 1) + row * D, 8)
    keys = tl.load(
        typed(base, PROTO) + key_row[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0
    )
    channel = d
    inside = valid[:, None]
    if BLOCK_D != D:
        channel = d // BLOCK_HALF * HALF + d % BLOCK_HALF
        inside = inside & (d % BLOCK_HALF < HALF)[None, :]
    value_row = tl.multiple_of(key_row + rows * D, 8)
    values = tl.load(typed(base, PROTO) + value_row[:, None] + channel[None, :], mask=inside, other=0.0)
    return tl.trans(to_dot(keys, DOT)), to_dot(values, DOT), tl.where(valid, log2_count, float("-inf"))
