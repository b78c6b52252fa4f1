"""The native CPU backend: hands tensors to the C++ library (attend.cpp, store.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.api import PageTable, Pool
from kernels.cpu.build import library
from kernels.pages import PageFormat
from kernels.state import Partial

SOURCE_IDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def attend(
    q: Tensor,
    table: PageTable,
    pools: Sequence[Pool],
    first_position: Tensor,
    scale: float,
    window_tokens: int = 0,
    slopes: Tensor | None = None,
    want_mass: bool = False,
) -> Partial:
    """As `kernels.api.attend`."""
    streams, group, tokens, head_dim = q.shape
    entries = table.pool.shape[1]
    q = q.float().contiguous()
    out, lse = torch.empty_like(q), torch.empty(streams, group, tokens)
    mass = torch.empty(streams, entries) if want_mass else None
    page_tokens = pools[0].fmt.page_tokens if pools else 16
    columns = [x if x.stride(1) == 1 else x.contiguous() for x in (table.pool, table.slot, table.page)]
    rows = [table.count.contiguous(), first_position.to(torch.int32).contiguous()]
    slopes = None if slopes is None else slopes.float().contiguous()
    shape = (streams, group, tokens, head_dim, entries, page_tokens, window_tokens, torch.get_num_threads())
    described = [number for pool in pools for number in pool.native]
    library().testbed_attend(
        ctypes.c_void_p(q.data_ptr()),
        (ctypes.c_int64 * 8)(*shape),
        (ctypes.c_void_p * 5)(*(x.data_ptr() for x in columns + rows)),
        (ctypes.c_int64 * 3)(*(x.stride(0) for x in columns)),
        (ctypes.c_int64 * len(described))(*described),
        ctypes.c_void_p(None if slopes is None else slopes.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_void_p(lse.data_ptr()),
        ctypes.c_void_p(None if mass is None else mass.data_ptr()),
        ctypes.c_float(scale),
    )
    return Partial(out, lse, mass)


def append(k: Tensor, v: Tensor, table_slot: Tensor, offset: Tensor, pool: Pool) -> None:
    """As `kernels.api.append`."""
    k, v = k.float().contiguous(), v.float().contiguous()
    slot, row = table_slot.to(torch.int32).contiguous(), offset.to(torch.int32).contiguous()
    library().testbed_append(
        *(ctypes.c_void_p(x.data_ptr()) for x in (k, v, slot, row)),
        *(ctypes.c_int64(n) for n in (*k.shape, pool.fmt.page_tokens, pool.fmt.format_id, pool.slab_pages)),
        ctypes.c_void_p(pool.slab_pointers.data_ptr()),
        ctypes.c_int64(pool.fmt.page_bytes),
    )


def encode(fmt: PageFormat, k: Tensor, v: Tensor) -> Tensor:
    """As `kernels.pages.encode`, every format but "proto"."""
    if k.dtype != v.dtype or k.dtype not in SOURCE_IDS:
        k, v = k.float(), v.float()
    blobs = torch.zeros(k.shape[0], fmt.page_bytes, dtype=torch.uint8)
    numbers = (SOURCE_IDS[k.dtype], fmt.format_id, k.shape[0], fmt.page_tokens, fmt.head_dim, fmt.page_bytes)
    library().testbed_encode(
        *(ctypes.c_void_p(x.data_ptr()) for x in (k, v, blobs)),
        (ctypes.c_int64 * 6)(*k.stride(), *v.stride()),
        *(ctypes.c_int64(n) for n in (*numbers, torch.get_num_threads())),
    )
    return blobs
