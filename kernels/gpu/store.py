"""Copies of whole pages between the slabs of two pools, or between slabs and one run of bytes, 128 bits at a time.

One program copies a part of one page. Slots stay on the device: nothing waits for the host, and the launch can be
captured in a CUDA graph. Works on any format, since a page is a blob.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import check_pool, launch
from kernels.gpu.spec import LOAD_128, Spec, Variant
from kernels.table import Pool

BLOCK_WORDS = 1024


@triton.jit
def page_address(slabs, slot, slab_pages, PAGE_BYTES: tl.constexpr):
    """Address of one page: [] pointer to bytes, aligned to 16. `slabs` are the addresses of the pool's slabs."""
    base = tl.load(slabs + slot // slab_pages) + (slot % slab_pages).to(tl.int64) * PAGE_BYTES
    return tl.multiple_of(base.to(tl.pointer_type(tl.uint8)), 16)


@triton.jit(do_not_specialize=["source_pages", "source_slab_pages", "target_pages", "target_slab_pages"])
def copy_kernel(
    source,
    source_slot,
    source_pages,
    source_slab_pages,
    target,
    target_slot,
    target_pages,
    target_slab_pages,
    PAGE_BYTES: tl.constexpr,
    FROM_SLOTS: tl.constexpr,
    TO_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Page m: source slot to target slot; without slots the page's number is its slot.

    A target outside its pool is left alone, a source outside its pool reads as zeros.
    """
    m = tl.program_id(0)
    to = tl.load(target_slot + m) if TO_SLOTS else m
    if (to < 0) | (to >= target_pages):
        return
    slot = tl.load(source_slot + m) if FROM_SLOTS else m
    inside = (slot >= 0) & (slot < source_pages)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read = page_address(source, tl.where(inside, slot, 0).to(tl.int32), source_slab_pages, PAGE_BYTES)
    write = page_address(target, to.to(tl.int32), target_slab_pages, PAGE_BYTES)
    # One comparison: a block's mask joined with a scalar's is no mask to the interpreter of Triton 3.9.
    readable = word < tl.where(inside, PAGE_BYTES // 4, 0)
    x = tl.load(read.to(tl.pointer_type(tl.int32), bitcast=True) + word, mask=readable, other=0)
    tl.store(write.to(tl.pointer_type(tl.int32), bitcast=True) + word, x, mask=word < PAGE_BYTES // 4)


def gather(pool: Pool, slots: Tensor) -> Tensor:
    """As `kernels.api.gather`, without waiting for the device: a slot outside the pool gives zeros."""
    out = torch.empty(len(slots), pool.fmt.page_bytes, dtype=torch.uint8, device=slots.device)
    _copy(pool, slots, Pool(pool.fmt, (out,)), None)
    return out


def scatter(pool: Pool, slots: Tensor, blobs: Tensor) -> None:
    """As `kernels.api.scatter`, without waiting for the device: a slot outside the pool is skipped."""
    _copy(Pool(pool.fmt, (blobs.contiguous(),)), None, pool, slots)


def copy_pages(source: Pool, source_slots: Tensor, target: Pool, target_slots: Tensor) -> None:
    """Copies pages between the slabs of two pools of one format on one device, with no buffer in between.

    Args:
        source: pages to read.
        source_slots: [M] int32 or int64; outside the pool: reads as zeros.
        target: pages to write; may be the source if no page is both read and written.
        target_slots: [M] int32 or int64, each once; outside the pool: skipped.

    Raises:
        ValueError: formats, shapes, types or devices that don't match, a slab not aligned to 16 bytes.
    """
    if source.fmt != target.fmt:
        raise ValueError(f"copy of {source.fmt.name} pages to {target.fmt.name}: must be one format")
    if source_slots.shape != target_slots.shape:
        raise ValueError(
            f"source_slots {tuple(source_slots.shape)}, target_slots {tuple(target_slots.shape)}: must be [M] each"
        )
    _copy(source, source_slots, target, target_slots)


def _copy(source: Pool, source_slots: Tensor | None, target: Pool, target_slots: Tensor | None) -> None:
    """Launches the copy; None for slots 0, 1, 2, ..., of which one of the two at most."""
    slots = target_slots if source_slots is None else source_slots
    assert slots is not None
    for name, x in (("source_slots", source_slots), ("target_slots", target_slots)):
        if x is not None and (x.dim() != 1 or x.dtype not in (torch.int32, torch.int64) or x.device != slots.device):
            raise ValueError(f"{name} {x.dtype} {tuple(x.shape)} on {x.device}: must be int32 or int64 [M], one device")
    check_pool("source pool", source, slots.device)
    check_pool("target pool", target, slots.device)
    if not len(slots) or not target.pages:
        return
    if not source.pages:
        raise ValueError(f"copy of {len(slots)} pages from a pool of 0: must hold them")
    page_bytes = source.fmt.page_bytes
    launch(
        copy_kernel,
        (len(slots), -(-page_bytes // (4 * BLOCK_WORDS))),
        slots.device,
        source.slab_pointers,
        None if source_slots is None else source_slots.contiguous(),
        source.pages,
        source.slab_pages,
        target.slab_pointers,
        None if target_slots is None else target_slots.contiguous(),
        target.pages,
        target.slab_pages,
        PAGE_BYTES=page_bytes,
        FROM_SLOTS=source_slots is not None,
        TO_SLOTS=target_slots is not None,
        BLOCK=BLOCK_WORDS,
        num_warps=4,
    )


def _variant(name: str, page_bytes: int, from_slots: bool, to_slots: bool) -> Variant:
    signature = {
        "source": "*i64",
        "source_slot": "*i64" if from_slots else "constexpr",
        "source_pages": "i32",
        "source_slab_pages": "i32",
        "target": "*i64",
        "target_slot": "*i64" if to_slots else "constexpr",
        "target_pages": "i32",
        "target_slab_pages": "i32",
        **dict.fromkeys(("PAGE_BYTES", "FROM_SLOTS", "TO_SLOTS", "BLOCK"), "constexpr"),
    }
    constants = {"PAGE_BYTES": page_bytes, "FROM_SLOTS": from_slots, "TO_SLOTS": to_slots, "BLOCK": BLOCK_WORDS}
    constants |= {key: None for key in ("source_slot", "target_slot") if signature[key] == "constexpr"}
    return Variant(name, signature, constants, num_warps=4, expects=frozenset({LOAD_128}))


SPEC = Spec(
    "store",
    copy_kernel,
    (
        _variant("gather-2240", 2240, True, False),
        _variant("scatter-1216", 1216, False, True),
        _variant("copy-8192", 8192, True, True),
    ),
)
