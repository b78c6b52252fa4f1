"""Append in one launch: new tokens and key bounds, and of each page that fills a sealed copy and a prototype.

One program per run of tokens of a stream that go to one page, so decoding takes one program per stream. The program
that fills a page reads it back after a barrier, as stored, and encodes it: no other program writes to that page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.encode import BF16, FP16, blocks, clear_padding, encode_array, store_float, warps
from kernels.gpu.launch import check_pool, launch, power_of_2
from kernels.gpu.spec import LOAD_128, Spec, Variant
from kernels.gpu.store import gather, page_address, scatter
from kernels.pages import PageFormat, page_format, views
from kernels.prototypes import encode_prototypes, make_prototypes
from kernels.table import Pool
from kernels.upkeep import Upkeep

BOUND_NAMES = (
    *("page_column", "column_stream", "lowest", "highest"),
    *("low_stream", "low_page", "high_stream", "high_page", "columns"),
)
FORMAT_OF = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@triton.jit
def rounded(x, FORMAT: tl.constexpr):
    """What float format FORMAT makes of float32 x, as float32."""
    if FORMAT == BF16:
        bits = x.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        return tl.where(x != x, x, near.to(tl.float32, bitcast=True))
    elif FORMAT == FP16:
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit
def as_floats(page, FORMAT: tl.constexpr):
    """The bytes of a float page as an array of its elements."""
    if FORMAT == BF16:
        return page.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    elif FORMAT == FP16:
        return page.to(tl.pointer_type(tl.float16), bitcast=True)
    else:
        return page.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def widen(bound, x, DOWN: tl.constexpr, D: tl.constexpr, BOUNDS: tl.constexpr):
    """Widens one bound of a page, D channels from address `bound`, by x [>= D]."""
    d = tl.arange(0, x.shape[0])
    before = tl.load(bound + d, mask=d < D, other=0.0).to(tl.float32)
    after = tl.minimum(before, x) if DOWN else tl.maximum(before, x)
    store_float((bound.to(tl.pointer_type(tl.uint8), bitcast=True), d), after, d < D, BOUNDS)


@triton.jit
def store_prototype(
    source,
    page,
    P: tl.constexpr,
    D: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Mean key and mean value of a full float page, and log2 P, to a "proto" page of one group."""
    d, p = tl.arange(0, BLOCK_D), tl.arange(0, P)
    keys = tl.load(source + d[:, None] * P + p[None, :], mask=d[:, None] < D, other=0.0).to(tl.float32)
    store_float((page, d), tl.sum(keys, 1) / P, d < D, BF16)
    values = tl.load(source + P * D + p[:, None] * D + d[None, :], mask=d[None, :] < D, other=0.0).to(tl.float32)
    store_float((page, D + d), tl.sum(values, 0) / P, d < D, BF16)
    LOG2_P: tl.constexpr = 4 if P == 16 else 5 if P == 32 else 6
    rest = tl.arange(0, 16)
    words = (page + 4 * D).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(words + rest, tl.where(rest == 0, LOG2_P * 1.0, 0.0), mask=rest < PAGE_BYTES // 4 - D)


@triton.jit
def last_of(slots, length, RUN: tl.constexpr):
    """The one slot of a run of tokens that is none of -1; -1 if all are."""
    i = tl.arange(0, RUN)
    return tl.max(tl.load(slots + i, mask=i < length, other=-1), 0)


PLAIN = ("pages", "slab_pages", "sealed_pages", "sealed_slab_pages", "proto_pages", "proto_slab")


@triton.jit(do_not_specialize=[*PLAIN, "offset_stream", "column_stream"])
def append_kernel(
    k,
    v,
    k_stream,
    k_token,
    k_channel,
    v_stream,
    v_token,
    v_channel,
    table_slot,
    offset,
    offset_stream,
    tokens,
    slabs,
    pages,
    slab_pages,
    page_column,
    column_stream,
    lowest,
    highest,
    low_stream,
    low_page,
    high_stream,
    high_page,
    columns,
    sealed_slot,
    sealed_slabs,
    sealed_pages,
    sealed_slab_pages,
    proto_slot,
    proto_slabs,
    proto_pages,
    proto_slab,
    FORMAT: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    BOUNDS: tl.constexpr,
    SEALED: tl.constexpr,
    SEALED_BYTES: tl.constexpr,
    PROTO_BYTES: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF_D: tl.constexpr,
):
    """Program (s, t) does the run of stream s that starts with token t; it leaves at once if none does.

    BOUNDS is the bounds' float format, SEALED the copy's format; -1 for none. PROTO_BYTES 0 for no prototype.
    A stride of 0 between streams: they share the row. Slots and columns out of range are skipped.
    """
    s, first = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slots = table_slot + s * tokens
    slot = tl.load(slots + first)
    before = tl.load(slots + first - 1, mask=first > 0, other=-1)
    if (slot == before) | (slot < 0) | (slot >= pages):
        return
    ahead = first + tl.arange(0, RUN)
    other = tl.load(slots + ahead, mask=ahead < tokens, other=-1) != slot
    length = tl.min(tl.where(other, tl.arange(0, RUN), RUN), 0)
    page = page_address(slabs, slot, slab_pages, PAGE_BYTES)
    d = tl.arange(0, BLOCK_D)
    least = tl.full([BLOCK_D], float("inf"), tl.float32)
    most = tl.full([BLOCK_D], float("-inf"), tl.float32)
    for start in range(0, RUN, BLOCK_T):
        i = start + tl.arange(0, BLOCK_T)
        row = tl.load(offset + s * offset_stream + first + i, mask=i < length, other=-1)[:, None]
        inside = (row >= 0) & (row < P) & (d < D)[None, :]
        at = (first + i).to(tl.int64)[:, None]
        keys = tl.load(k + s * k_stream + at * k_token + d[None, :] * k_channel, mask=inside, other=0.0).to(tl.float32)
        store_float((page, d[None, :] * P + row), keys, inside, FORMAT)
        if BOUNDS >= 0:
            kept = rounded(keys, FORMAT)
            counts = inside & (kept == kept)
            least = tl.minimum(least, tl.min(tl.where(counts, kept, float("inf")), 0))
            most = tl.maximum(most, tl.max(tl.where(counts, kept, float("-inf")), 0))
        values = tl.load(v + s * v_stream + at * v_token + d[None, :] * v_channel, mask=inside, other=0.0)
        store_float((page, P * D + row * D + d[None, :]), values.to(tl.float32), inside, FORMAT)
    if BOUNDS >= 0:
        column = tl.load(page_column + s * column_stream + first)
        if (column >= 0) & (column < columns):
            widen(lowest + s * low_stream + column.to(tl.int64) * low_page, least, True, D, BOUNDS)
            widen(highest + s * high_stream + column.to(tl.int64) * high_page, most, False, D, BOUNDS)
    if (SEALED >= 0) | (PROTO_BYTES > 0):
        # What follows reads, in other threads, what was just written.
        tl.debug_barrier()
        source = as_floats(page, FORMAT)
    if SEALED >= 0:
        to = last_of(sealed_slot + s * tokens + first, length, RUN)
        if (to >= 0) & (to < sealed_pages):
            copy = page_address(sealed_slabs, to, sealed_slab_pages, SEALED_BYTES)
            encode_array(source, P, 1, copy, 0, P, D, SEALED, BLOCK_D, BLOCK_P // 2)
            encode_array(source + P * D, D, 1, copy, 1, P, D, SEALED, BLOCK_P, HALF_D)
            clear_padding(copy, P, D, SEALED, SEALED_BYTES)
    if PROTO_BYTES > 0:
        to = last_of(proto_slot + s * tokens + first, length, RUN)
        if (to >= 0) & (to < proto_pages):
            store_prototype(source, page_address(proto_slabs, to, proto_slab, PROTO_BYTES), P, D, PROTO_BYTES, BLOCK_D)


def runs(fmt: PageFormat, tokens: int) -> dict[str, int]:
    """Most tokens a run may have, a power of two, and how many are written at a time."""
    most = min(fmt.page_tokens, power_of_2(tokens))
    return {"RUN": most, "BLOCK_T": min(most, 16)}


def append(k: Tensor, v: Tensor, table_slot: Tensor, offset: Tensor, pool: Pool, upkeep: Upkeep | None = None) -> None:
    """As `kernels.api.append`, in one launch that waits for nothing and can be captured in a CUDA graph.

    The new tokens of one page must be next to each other in the call. Slots and columns out of range are skipped.
    Prototypes of C > 1 groups take further launches after it, on the T // P + 1 pages a stream may fill at most.

    Raises:
        ValueError: slabs a kernel can't reach by 128-bit accesses, more than one device.
    """
    streams, tokens = table_slot.shape
    check_pool("pool", pool, k.device)
    if not streams or not tokens or not pool.pages:
        return
    fmt = pool.fmt
    arguments, constants = _upkeep_arguments(upkeep, k)
    launch(
        append_kernel,
        (streams, tokens),
        k.device,
        k,
        v,
        *k.stride(),
        *v.stride(),
        table_slot.contiguous(),
        offset.contiguous(),
        tokens if offset.dim() == 2 else 0,
        tokens,
        pool.slab_pointers,
        pool.pages,
        pool.slab_pages,
        **arguments,
        **constants,
        FORMAT=fmt.format_id,
        PAGE_BYTES=fmt.page_bytes,
        P=fmt.page_tokens,
        D=fmt.head_dim,
        **runs(fmt, tokens),
        **blocks(fmt),
        num_warps=warps(fmt),
        enable_fp_fusion=False,
    )
    if upkeep is not None and upkeep.prototypes is not None and upkeep.prototypes.fmt.groups > 1:
        _store_groups(table_slot, pool, upkeep)


def _upkeep_arguments(upkeep: Upkeep | None, k: Tensor) -> tuple[dict[str, Any], dict[str, int]]:
    """The kernel's arguments and constants for what is kept; None and -1 or 0 for what is not."""
    sealed_names = ("sealed_slot", "sealed_slabs", "sealed_pages", "sealed_slab_pages")
    proto_names = ("proto_slot", "proto_slabs", "proto_pages", "proto_slab")
    arguments: dict[str, Any] = dict.fromkeys((*BOUND_NAMES, *sealed_names, *proto_names))
    constants = {"BOUNDS": -1, "SEALED": -1, "SEALED_BYTES": 0, "PROTO_BYTES": 0}
    if upkeep is None:
        return arguments, constants
    low, high = upkeep.lowest, upkeep.highest
    if low is not None and high is not None and low.shape[1]:
        page = (upkeep.page.contiguous(), k.shape[1] if upkeep.page.dim() == 2 else 0)
        strides = (*low.stride()[:2], *high.stride()[:2])
        arguments |= zip(BOUND_NAMES, (*page, low, high, *strides, low.shape[1]), strict=True)
        constants["BOUNDS"] = FORMAT_OF[low.dtype]
    one_group = upkeep.prototypes is not None and upkeep.prototypes.fmt.groups == 1
    kept = (
        ("sealed", sealed_names, upkeep.sealed, upkeep.sealed_slot),
        ("prototypes", proto_names, upkeep.prototypes if one_group else None, upkeep.prototype_slot),
    )
    for key, its_names, target, slot in kept:
        if target is None or slot is None or not target.pages:
            continue
        check_pool(f"upkeep.{key}", target, k.device)
        values = (slot.contiguous(), target.slab_pointers, target.pages, target.slab_pages)
        arguments |= zip(its_names, values, strict=True)
        if key == "sealed":
            constants |= {"SEALED": target.fmt.format_id, "SEALED_BYTES": target.fmt.page_bytes}
        else:
            constants["PROTO_BYTES"] = target.fmt.page_bytes
    return arguments, constants


def _store_groups(table_slot: Tensor, pool: Pool, upkeep: Upkeep) -> None:
    """Prototypes of several groups of the pages filled; shapes do not depend on how many there are."""
    target, slots = upkeep.prototypes, upkeep.prototype_slot
    assert target is not None
    assert slots is not None
    most = min(table_slot.shape[1], table_slot.shape[1] // pool.fmt.page_tokens + 1)
    to, index = slots.topk(most, dim=1)
    page = torch.where(to >= 0, table_slot.gather(1, index), -1).flatten()
    arrays = views(pool.fmt, gather(pool, page))
    made = make_prototypes(arrays["k"].transpose(1, 2), arrays["v"], target.fmt.groups)
    scatter(target, to.flatten(), encode_prototypes(target.fmt, *made))


def _variant(
    source: str, page_tokens: int, head_dim: int, sealed: str | None, tokens: int = 1, kept: bool = True
) -> Variant:
    fmt = page_format(source, page_tokens, head_dim)
    copy = None if sealed is None else page_format(sealed, page_tokens, head_dim)
    proto = page_format("proto", page_tokens, head_dim)
    constants: dict[str, Any] = {
        "k_channel": 1,
        "v_channel": 1,
        "FORMAT": fmt.format_id,
        "PAGE_BYTES": fmt.page_bytes,
        "BOUNDS": 1 if kept else -1,
        "SEALED": -1 if copy is None else copy.format_id,
        "SEALED_BYTES": 0 if copy is None else copy.page_bytes,
        "PROTO_BYTES": proto.page_bytes if kept else 0,
        "P": page_tokens,
        "D": head_dim,
        **runs(fmt, tokens),
        **blocks(fmt),
    }
    if tokens == 1:
        constants["tokens"] = 1
    absent = () if kept else (*BOUND_NAMES, "proto_slot", "proto_slabs", "proto_pages", "proto_slab")
    if copy is None:
        absent += ("sealed_slot", "sealed_slabs", "sealed_pages", "sealed_slab_pages")
    constants |= dict.fromkeys(absent)
    signature = _signature(source, constants)
    divisible = {"k", "v", "k_stream", "v_stream", "lowest", "highest", "low_stream", "high_stream"}
    divisible |= {"low_page", "high_page"} | ({"k_token", "v_token"} if tokens > 1 else set())
    name = f"{source}-{sealed or 'plain'}-d{head_dim}-p{page_tokens}-t{tokens}"
    return Variant(
        name,
        signature,
        constants,
        frozenset(divisible - set(constants)),
        num_warps=warps(fmt),
        expects=frozenset({LOAD_128} if page_tokens == 64 else ()),
        options={"enable_fp_fusion": False},
    )


def _signature(source: str, constants: Mapping[str, Any]) -> dict[str, str]:
    """Triton types of the arguments, in order."""
    types = {"k": f"*{source}", "v": f"*{source}", "lowest": "*bf16", "highest": "*bf16"}
    types |= dict.fromkeys(("slabs", "sealed_slabs", "proto_slabs"), "*i64")
    types |= dict.fromkeys(("table_slot", "offset", "page_column", "sealed_slot", "proto_slot"), "*i32")
    return {key: "constexpr" if key in constants else types.get(key, "i32") for key in append_kernel.arg_names}


SPEC = Spec(
    "append",
    append_kernel,
    (
        _variant("bf16", 16, 128, None, kept=False),
        _variant("bf16", 16, 64, "int4"),
        _variant("bf16", 16, 128, "int8"),
        _variant("bf16", 32, 128, "int4"),
        _variant("bf16", 64, 128, "int8"),
        _variant("bf16", 16, 128, "int4", tokens=64),
        _variant("fp32", 64, 128, "int4", tokens=64),
    ),
)
