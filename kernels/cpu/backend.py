"""The native CPU backend: hands tensors to the C++ library (attend.cpp, store.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.cpu.build import library
from kernels.pages import FLOAT_DTYPES, FORMAT_IDS, PAGE_TOKENS, PageFormat
from kernels.state import Partial
from kernels.table import PageTable, Pool

if TYPE_CHECKING:
    from kernels.api import Options

SOURCE_IDS = {dtype: FORMAT_IDS[name] for name, dtype in FLOAT_DTYPES.items()}
EIGHT = ctypes.c_int64 * 8
SIX = ctypes.c_void_p * 6


def attend(
    q: Tensor,
    table: PageTable,
    pools: Sequence[Pool],
    first_position: Tensor,
    options: Options,
) -> Partial:
    """As `kernels.api.attend`."""
    streams, group, tokens, head_dim = q.shape
    entries = table.pool.shape[1]
    q = q.float().contiguous()
    out, lse = torch.empty_like(q), torch.empty(streams, group, tokens)
    mass = torch.empty(streams, entries) if options.want_mass else None
    page_tokens = pools[0].fmt.page_tokens if pools else PAGE_TOKENS[0]
    pool, slot, page = (x if x.stride(1) == 1 else x.contiguous() for x in (table.pool, table.slot, table.page))
    count, first = table.count.contiguous(), first_position.to(torch.int32).contiguous()
    slopes = None if options.slopes is None else options.slopes.float().contiguous()
    window = options.window_tokens
    windows = window.contiguous() if isinstance(window, Tensor) else torch.full((streams,), window, dtype=torch.int32)
    threads = options.schedule.threads or torch.get_num_threads()
    shape = (streams, group, tokens, head_dim, entries, page_tokens, options.sink_tokens, threads)
    described = [number for source in pools for number in source.native]
    library().testbed_attend(
        q.data_ptr(),
        EIGHT(*shape),
        SIX(*(x.data_ptr() for x in (pool, slot, page, count, first, windows))),
        EIGHT(pool.stride(0), slot.stride(0), page.stride(0)),
        (ctypes.c_int64 * len(described))(*described),
        None if slopes is None else slopes.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        None if mass is None else mass.data_ptr(),
        options.scale,
    )
    return Partial(out, lse, mass)


def encode(fmt: PageFormat, k: Tensor, v: Tensor) -> Tensor:
    """As `kernels.pages.encode`, every format but "proto"."""
    if k.dtype != v.dtype or k.dtype not in SOURCE_IDS:
        k, v = k.float(), v.float()
    blobs = torch.zeros(k.shape[0], fmt.page_bytes, dtype=torch.uint8)
    numbers = (SOURCE_IDS[k.dtype], fmt.format_id, k.shape[0], fmt.page_tokens, fmt.head_dim, fmt.page_bytes)
    strides = EIGHT(*k.stride(), *v.stride())
    pointers = (k.data_ptr(), v.data_ptr(), blobs.data_ptr(), strides)
    library().testbed_encode(*pointers, *numbers, torch.get_num_threads())
    return blobs
