"""Checksums against the formula in Python's own integers, and the promise about flipped bits."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.cache.archive.checksum import checksums, coefficients, plain_checksums

MODULUS = 1 << 64


def by_hand(page: bytes) -> int:
    """The formula of checksum.py, word by word; the coefficients are SplitMix64's own, made odd."""
    total, state = 0, 0
    for i in range(0, len(page), 8):
        state = (state + 0x9E3779B97F4A7C1B) % MODULUS
        z = state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
        z = (z ^ z >> 27) * 0x94D049BB133111EB % MODULUS
        word = int.from_bytes(page[i : i + 8], "little")
        total += (word ^ word >> 32) * ((z ^ z >> 31) | 1)
    total %= MODULUS
    return total - MODULUS if total >= MODULUS // 2 else total


@settings(max_examples=100, deadline=None)
@given(pages=st.integers(0, 5), words=st.integers(1, 70), seed=st.integers(0, 2**32 - 1))
def test_native_and_numpy_give_the_formula(pages: int, words: int, seed: int) -> None:
    blobs = torch.randint(0, 256, (pages, 8 * words), generator=torch.manual_seed(seed), dtype=torch.uint8)
    want = [by_hand(blob.numpy().tobytes()) for blob in blobs]
    assert checksums(blobs).tolist() == want
    assert plain_checksums(blobs.numpy()).tolist() == want


def test_many_pages_of_real_size_agree() -> None:
    blobs = torch.randint(0, 256, (700, 4096), generator=torch.manual_seed(0), dtype=torch.uint8)
    native = checksums(blobs)
    assert np.array_equal(native.numpy(), plain_checksums(blobs.numpy()))
    assert native[5] == by_hand(blobs[5].numpy().tobytes())
    assert len(native.unique()) == 700


@pytest.mark.parametrize("content", [0, 255, None])
def test_every_single_flipped_bit_changes_the_sum(content: int | None) -> None:
    page = torch.randint(0, 256, (1, 1216), generator=torch.manual_seed(1), dtype=torch.uint8)
    if content is not None:
        page.fill_(content)
    flipped = page.repeat(8 * 1216, 1)
    bits = torch.arange(8 * 1216)
    flipped[bits, bits // 8] ^= (1 << bits % 8).to(torch.uint8)
    assert not bool((checksums(flipped) == checksums(page)).any())


def test_coefficients_keep_the_promise_about_two_bits() -> None:
    """Odd, and neither equal nor each other's negative modulo 2^32, up to pages of 256 KiB."""
    table = coefficients(32768)
    assert bool((table % 2 == 1).all())
    low = (table & np.uint64(0xFFFFFFFF)).astype(np.int64)
    assert len(np.unique(np.minimum(low, (1 << 32) - low))) == len(low)


@settings(max_examples=300, deadline=None)
@given(first=st.integers(0, 8 * 4096 - 1), second=st.integers(0, 8 * 4096 - 1), seed=st.integers(0, 99))
def test_two_flipped_bits_change_the_sum(first: int, second: int, seed: int) -> None:
    page = torch.randint(0, 256, (1, 4096), generator=torch.manual_seed(seed), dtype=torch.uint8)
    other = page.clone()
    for bit in {first, second}:
        other[0, bit // 8] ^= 1 << bit % 8
    assert checksums(page) != checksums(other)


@pytest.mark.parametrize("top", [63, 31, 30, 62])
def test_the_highest_bits_of_two_words_do_not_cancel(top: int) -> None:
    """They do in a plain sum of products, where each adds half the modulus."""
    page = torch.zeros(1, 4096, dtype=torch.uint8)
    words = torch.arange(512)
    flipped = page.repeat(512, 1).view(torch.int64)
    value = (1 << top) - (MODULUS if top == 63 else 0)
    flipped[words, words] = value
    flipped[words, (words + 7) % 512] = value
    assert not bool((checksums(flipped.view(torch.uint8)) == checksums(page)).any())


@pytest.mark.parametrize(
    "blobs", [torch.zeros(2, 12, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8), torch.zeros(2, 8)]
)
def test_other_shapes_are_refused(blobs: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="page_bytes a multiple of 8"):
        checksums(blobs)


def test_pages_with_gaps_are_summed_as_if_without() -> None:
    wide = torch.randint(0, 256, (6, 128), generator=torch.manual_seed(0), dtype=torch.uint8)
    assert torch.equal(checksums(wide[::2, :64]), checksums(wide[::2, :64].clone()))


def test_without_a_compiler_the_sums_are_the_same() -> None:
    code = """
import torch
from testbed.cache.archive.checksum import checksums
from testbed.cache.archive.native import try_library
assert try_library() is None
print(checksums(torch.arange(256).to(torch.uint8).view(2, 128)).tolist())
"""
    environment = {"PATH": "", "CXX": "", "PYTHONPATH": ".", "TESTBED_CACHE": "/proc/none"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    blobs = torch.arange(256).to(torch.uint8).view(2, 128)
    assert done.stdout.strip() == str([by_hand(blob.numpy().tobytes()) for blob in blobs]), done.stderr
