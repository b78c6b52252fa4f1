"""Portable writing and moving of pages, for any device torch runs on.

Correct first: it selects by index, so on a GPU it waits for the device, and such a step can't be captured.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.pages import encode, views
from kernels.table import Pool
from kernels.upkeep import Upkeep

COPY_BYTES = 16 << 20


def append(k: Tensor, v: Tensor, table_slot: Tensor, offset: Tensor, pool: Pool, upkeep: Upkeep | None = None) -> None:
    """As `kernels.api.append`."""
    slab_of, row = table_slot.long() // pool.slab_pages, table_slot.long() % pool.slab_pages
    offsets = offset.long().expand(table_slot.shape)
    for i, slab in enumerate(pool.slabs):
        arrays = views(pool.fmt, slab)
        at = slab_of == i
        if bool(at.any()):
            arrays["k"][row[at], :, offsets[at]] = k[at].to(arrays["k"].dtype)
            arrays["v"][row[at], offsets[at]] = v[at].to(arrays["v"].dtype)
    if upkeep is None:
        return
    _widen(k.to(pool.fmt.fields["k"].dtype), upkeep)
    for target, slots in ((upkeep.sealed, upkeep.sealed_slot), (upkeep.prototypes, upkeep.prototype_slot)):
        if target is not None and slots is not None:
            seal(pool, table_slot, target, slots)


def _widen(k: Tensor, upkeep: Upkeep) -> None:
    """Widens the bounds of the pages that new keys [S, T, D] go to."""
    if upkeep.lowest is None or upkeep.highest is None or not k.numel():
        return
    keys = k.to(upkeep.lowest.dtype)
    column = upkeep.page.long().expand(keys.shape[:2])[..., None].expand(keys.shape)
    low, high = torch.where(keys.isnan(), math.inf, keys), torch.where(keys.isnan(), -math.inf, keys)
    upkeep.lowest.scatter_reduce_(1, column, low, "amin")
    upkeep.highest.scatter_reduce_(1, column, high, "amax")


def seal(pool: Pool, table_slot: Tensor, target: Pool, slots: Tensor) -> None:
    """Stores filled pages a second time.

    Args:
        pool: where the pages are.
        table_slot: [S, T] int32, where in it.
        target: pool of any format.
        slots: [S, T] int32, where in `target`, or -1 for no copy.
    """
    filled = slots >= 0
    if not bool(filled.any()):
        return
    source = views(pool.fmt, gather(pool, table_slot[filled].long()))
    scatter(target, slots[filled].long(), encode(target.fmt, source["k"].transpose(1, 2), source["v"], "torch"))


def gather(pool: Pool, slots: Tensor) -> Tensor:
    """As `kernels.api.gather`; a loop over the slabs touched."""
    out = torch.empty(len(slots), pool.fmt.page_bytes, dtype=torch.uint8, device=slots.device)
    slab = slots // max(pool.slab_pages, 1)
    for index in slab.unique().tolist():
        at = slab == index
        rows = (slots[at] % pool.slab_pages).to(pool.slabs[index].device)
        out[at] = pool.slabs[index][rows].to(out.device)
    return out


def scatter(pool: Pool, slots: Tensor, blobs: Tensor) -> None:
    """As `kernels.api.scatter`; a loop over the slabs touched."""
    slab = slots // max(pool.slab_pages, 1)
    for index in slab.unique().tolist():
        at = slab == index
        target = pool.slabs[index]
        target[(slots[at] % pool.slab_pages).to(target.device)] = blobs[at.to(blobs.device)].to(target.device)


def copy_pages(source: Pool, source_slots: Tensor, target: Pool, target_slots: Tensor) -> None:
    """As `kernels.api.copy_pages`, by way of a buffer of at most `COPY_BYTES`."""
    step = max(1, COPY_BYTES // source.fmt.page_bytes)
    for pages, places in zip(source_slots.split(step), target_slots.split(step), strict=True):
        scatter(target, places, gather(source, pages))
