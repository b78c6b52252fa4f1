"""Checksums of pages: 64 bits, native, with the same result from numpy where there is no compiler.

A page is words x_i of 64 bits; its sum is that of (x_i ^ x_i >> 32) * c_i modulo 2^64 with odd coefficients c_i from a
fixed stream (multilinear hashing; Lemire and Kaser, Strongly universal string hashing is fast, 2013). Xor-shift and the
product with an odd number are bijections, so any change within one word is detected for sure, and so is any pair of
flipped bits: the coefficients are distinct, and none is another's negative, modulo 2^32. Other changes go unseen with
odds of about 2^-64 (2^-32 at worst, if only the highest bits of words differ).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from testbed.cache.archive.native import try_library

SEED = 0x9E3779B97F4A7C1B  # the first from the golden ratio on whose coefficients keep the promise above up to 256 KiB
BLOCK_BYTES = 1 << 20  # of pages that numpy sums at once, so that what lies between fits the cache


@lru_cache(maxsize=32)
def coefficients(words: int) -> np.ndarray:
    """[words] uint64, odd: SplitMix64 (Steele et al., Fast splittable pseudorandom number generators, 2014)."""
    x = (np.arange(1, words + 1, dtype=np.uint64) * np.uint64(SEED)).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    table = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    table.setflags(write=False)
    return table


def checksums(blobs: Tensor) -> Tensor:
    """Sums of pages: blobs [M, page_bytes] uint8 on the host, page_bytes a multiple of 8 -> [M] int64.

    Raises:
        ValueError: another type, place or width.
    """
    if blobs.dtype != torch.uint8 or blobs.dim() != 2 or blobs.device.type != "cpu" or blobs.shape[1] % 8:
        raise ValueError(
            f"checksums of {list(blobs.shape)} {blobs.dtype} on {blobs.device}: must be [M, page_bytes] uint8 on the "
            f"host, page_bytes a multiple of 8"
        )
    blobs = blobs.contiguous()
    native = try_library()
    if native is None:
        return torch.from_numpy(plain_checksums(blobs.numpy()))
    table = coefficients(blobs.shape[1] // 8)
    out = torch.empty(len(blobs), dtype=torch.int64)
    native.testbed_checksum(blobs.data_ptr(), *blobs.shape, table.ctypes.data, out.data_ptr())
    return out


def plain_checksums(blobs: np.ndarray) -> np.ndarray:
    """`checksums` in numpy: [M, page_bytes] uint8 -> [M] int64."""
    count, width = blobs.shape
    table, out = coefficients(width // 8), np.empty(count, dtype=np.int64)
    step = max(1, BLOCK_BYTES // max(width, 1))
    for start in range(0, count, step):
        x = np.ascontiguousarray(blobs[start : start + step]).view(np.uint64)
        out[start : start + step] = ((x ^ (x >> np.uint64(32))) * table).sum(1, dtype=np.uint64).view(np.int64)
    return out
