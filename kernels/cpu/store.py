"""The native CPU backend: writing and moving pages (store.cpp), scores of pages (score.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import torch_store
from kernels.cpu.build import library
from kernels.table import Pool
from kernels.upkeep import Upkeep


def append(k: Tensor, v: Tensor, table_slot: Tensor, offset: Tensor, pool: Pool, upkeep: Upkeep | None = None) -> None:
    """As `kernels.api.append`."""
    if upkeep is not None:
        torch_store.append(k, v, table_slot, offset, pool, upkeep)
        return
    k, v = k.float().contiguous(), v.float().contiguous()
    slot, row = table_slot.to(torch.int32).contiguous(), offset.to(torch.int32).contiguous()
    sizes = (*k.shape, pool.fmt.page_tokens, pool.fmt.format_id, pool.slab_pages)
    pointers = (k.data_ptr(), v.data_ptr(), slot.data_ptr(), row.data_ptr())
    library().testbed_append(*pointers, *sizes, pool.slab_pointers.data_ptr(), pool.fmt.page_bytes)


def gather(pool: Pool, slots: Tensor) -> Tensor:
    """As `kernels.api.gather`."""
    slots = slots.to(torch.int64).contiguous()
    out = torch.empty(len(slots), pool.fmt.page_bytes, dtype=torch.uint8)
    numbers = (pool.slab_pointers.data_ptr(), pool.slab_pages, pool.fmt.page_bytes, slots.data_ptr(), len(slots))
    library().testbed_gather(*numbers, out.data_ptr())
    return out


def scatter(pool: Pool, slots: Tensor, blobs: Tensor) -> None:
    """As `kernels.api.scatter`."""
    slots, blobs = slots.to(torch.int64).contiguous(), blobs.contiguous()
    numbers = (pool.slab_pointers.data_ptr(), pool.slab_pages, pool.fmt.page_bytes, slots.data_ptr(), len(slots))
    library().testbed_scatter(*numbers, blobs.data_ptr())
