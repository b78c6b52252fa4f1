"""How the kernels that store and score are launched: on the tensors' own device, with nothing left to chance."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from kernels.table import Pool

ALIGN_BYTES = 16


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Starts a @triton.jit kernel on `device`; Triton alone would take the current one. Waits for nothing."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **constants)


def check_pool(name: str, pool: Pool, device: torch.device) -> None:
    """Refuses a pool whose pages a kernel on `device` can't reach by 128-bit accesses.

    Raises:
        ValueError: naming the pool, and what is allowed.
    """
    if pool.slabs and pool.device != device:
        raise ValueError(f"{name} on {pool.device}: must be on {device}")
    for slab in pool.slabs:
        if slab.data_ptr() % ALIGN_BYTES:
            raise ValueError(f"{name}: slab at {slab.data_ptr():#x} must be aligned to {ALIGN_BYTES} bytes")


def power_of_2(least: int) -> int:
    """The smallest power of two that is `least` (1 or more) or more."""
    return 1 << (least - 1).bit_length()
