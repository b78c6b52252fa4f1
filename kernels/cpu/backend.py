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
SIZES = ctypes.c_int64 * 17
POINTERS = ctypes.c_void_p * 11


def attend(
    q: Tensor,
    table: PageTable,
    pools: Sequence[Pool],
    first_position: Tensor,
    options: Options,
) -> Partial:
    """As `kernels.api.attend`.

    Raises:
        ValueError: the table lists what is not there.
        MemoryError: no room for the splits' results.
    """
    streams, group, tokens, head_dim = q.shape
    schedule, window, dtype = options.schedule, options.window_tokens, q.dtype
    q = q.float().contiguous()
    out, lse = torch.empty_like(q), torch.empty(streams, group, tokens)
    mass = torch.empty(table.pool.shape) if options.want_mass else None
    pool, slot, page = (x if x.stride(1) == 1 else x.contiguous() for x in (table.pool, table.slot, table.page))
    count, first = table.count.contiguous(), first_position.contiguous()
    slopes = None if options.slopes is None else options.slopes.float().contiguous()
    windows = window.contiguous() if isinstance(window, Tensor) else None
    half = schedule.arithmetic == "half" or (schedule.arithmetic == "auto" and dtype != torch.float32)
    sizes = (
        *(streams, group, tokens, head_dim),
        table.pool.shape[1],
        pools[0].fmt.page_tokens if pools else PAGE_TOKENS[0],
        *(pool.stride(0), slot.stride(0), page.stride(0)),
        options.sink_tokens,
        0 if isinstance(window, Tensor) else window,
        schedule.threads or torch.get_num_threads(),
        schedule.split_tokens,
        schedule.item_splits,
        half,
        dtype == torch.bfloat16,
        len(pools),
    )
    tensors = (q, pool, slot, page, count, first, windows, slopes, out, lse, mass)
    described = [number for source in pools for number in source.native]
    faulty = library().testbed_attend(
        SIZES(*sizes),
        POINTERS(*(None if x is None else x.data_ptr() for x in tensors)),
        (ctypes.c_int64 * len(described))(*described),
        options.scale,
    )
    if faulty:
        table.check(pools)
    return Partial(out, lse, mass)


def encode(fmt: PageFormat, k: Tensor, v: Tensor, threads: int | None = None) -> Tensor:
    """As `kernels.pages.encode`, every format but "proto"."""
    if k.dtype != v.dtype or k.dtype not in SOURCE_IDS:
        k, v = k.float(), v.float()
    blobs = torch.zeros(k.shape[0], fmt.page_bytes, dtype=torch.uint8)
    numbers = (SOURCE_IDS[k.dtype], fmt.format_id, k.shape[0], fmt.page_tokens, fmt.head_dim, fmt.page_bytes)
    strides = EIGHT(*k.stride(), *v.stride())
    pointers = (k.data_ptr(), v.data_ptr(), blobs.data_ptr(), strides)
    library().testbed_encode(*pointers, *numbers, threads or torch.get_num_threads())
    return blobs


def transcode(source: PageFormat, blobs: Tensor, target: PageFormat, threads: int | None = None) -> Tensor:
    """As `kernels.pages.transcode`, every format but "proto"."""
    blobs = blobs.contiguous()
    out = torch.zeros(len(blobs), target.page_bytes, dtype=torch.uint8)
    formats = (source.format_id, source.page_bytes, target.format_id, target.page_bytes)
    sizes = (len(blobs), target.page_tokens, target.head_dim, threads or torch.get_num_threads())
    library().testbed_transcode(blobs.data_ptr(), out.data_ptr(), *formats, *sizes)
    return out
