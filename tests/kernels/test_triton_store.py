"""Triton's page copies, encoder and append in the interpreter, against `kernels.pages` and plain torch.

TRITON_INTERPRET=1 python -m pytest -m interp tests/kernels/test_triton_store.py
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in its own process", allow_module_level=True)

from kernels import pages
from kernels.gpu import encode as gpu_encode
from kernels.gpu import store
from kernels.pages import FLOAT_DTYPES, page_format
from kernels.table import Pool

pytestmark = pytest.mark.interp


def tokens(count: int, page_tokens: int, head_dim: int, seed: int) -> torch.Tensor:
    """Rows with loud, offset and constant channels, as real keys have."""
    rng = torch.Generator().manual_seed(seed)
    loud = 1 + 9 * (torch.rand(head_dim, generator=rng) < 0.1)
    offset = 20 * (torch.rand(head_dim, generator=rng) < 0.1)
    x = torch.randn(count, page_tokens, head_dim, generator=rng) * loud + offset
    x[..., 3] = 0.7
    return x


def slabs(fmt: pages.PageFormat, number: int, slab_pages: int, seed: int) -> Pool:
    rng = torch.Generator().manual_seed(seed)
    made = (
        torch.randint(0, 256, (slab_pages, fmt.page_bytes), dtype=torch.uint8, generator=rng) for _ in range(number)
    )
    return Pool(fmt, tuple(made))


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["int4", "int8", "bf16", "proto"]),
    head_dim=st.sampled_from([64, 80]),
    number=st.integers(1, 3),
    slab_pages=st.integers(1, 5),
    wanted=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_pages_are_copied_byte_by_byte(
    name: str, head_dim: int, number: int, slab_pages: int, wanted: int, seed: int
) -> None:
    fmt = page_format(name, 16, head_dim)
    rng = torch.Generator().manual_seed(seed)
    source, target = slabs(fmt, number, slab_pages, seed), slabs(fmt, 2, 8, seed + 1)
    slots = torch.randint(0, source.pages, (wanted,), generator=rng)
    whole = torch.cat(source.slabs)
    assert torch.equal(store.gather(source, slots), whole[slots])
    places = torch.randperm(target.pages, generator=rng)[:wanted]
    want = torch.cat(target.slabs).index_copy(0, places, whole[slots])
    store.scatter(target, places, whole[slots])
    assert torch.equal(torch.cat(target.slabs), want)
    other = slabs(fmt, 2, 8, seed + 1)
    store.copy_pages(source, slots.int(), other, places)
    assert torch.equal(torch.cat(other.slabs), want)


def test_slots_outside_the_pool_are_skipped() -> None:
    fmt = page_format("int4", 16, 64)
    source, target = slabs(fmt, 2, 3, 0), slabs(fmt, 2, 2, 1)
    before = torch.cat(target.slabs)
    got = store.gather(source, torch.tensor([-1, 5, 6, 2**40]))
    assert torch.equal(
        got, torch.cat([torch.cat(source.slabs)[[0, 5, 0, 0]] * torch.tensor([[0], [1], [0], [0]])]).byte()
    )
    store.scatter(target, torch.tensor([-1, 4, 2**32 + 1, 3]), torch.ones(4, fmt.page_bytes, dtype=torch.uint8))
    assert torch.equal(torch.cat(target.slabs)[:3], before[:3])
    assert (target.slabs[1][1] == 1).all()


def test_copies_that_cannot_be_are_named() -> None:
    pool, other = slabs(page_format("int4", 16, 64), 1, 3, 0), slabs(page_format("int8", 16, 64), 1, 3, 0)
    two = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="int4 pages to int8"):
        store.copy_pages(pool, two, other, two)
    with pytest.raises(ValueError, match=r"target_slots \(1,\)"):
        store.copy_pages(pool, two, pool, two[:1])
    with pytest.raises(ValueError, match=r"source_slots torch\.float32"):
        store.gather(pool, two.float())
    odd = torch.zeros(3 * pool.fmt.page_bytes + 8, dtype=torch.uint8)[8:].view(3, -1)
    with pytest.raises(ValueError, match="aligned to 16"):
        store.gather(Pool(pool.fmt, (odd,)), two)


@pytest.mark.parametrize(("page_tokens", "head_dim"), [(16, 64), (32, 72), (64, 128), (16, 256)])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "int8", "int4"])
def test_encoded_bytes_are_those_of_the_definition(name: str, page_tokens: int, head_dim: int) -> None:
    fmt = page_format(name, page_tokens, head_dim)
    k, v = tokens(5, page_tokens, head_dim, 0), tokens(5, page_tokens, head_dim, 1)
    k[1], v[1] = 3.25, -3.25  # a constant page
    k[2] *= 1e-6
    assert torch.equal(gpu_encode.encode(fmt, k, v), pages.encode(fmt, k, v, "torch"))


@pytest.mark.parametrize("name", FLOAT_DTYPES)
def test_a_float_page_is_quantised_from_its_views(name: str) -> None:
    source, target = page_format(name, 16, 80), page_format("int4", 16, 80)
    k, v = tokens(4, 16, 80, 2), tokens(4, 16, 80, 3)
    blobs = pages.encode(source, k, v, "torch")
    arrays = pages.views(source, blobs)
    rounded = [x.to(FLOAT_DTYPES[name]).float() for x in (k, v)]
    got = gpu_encode.encode(target, arrays["k"].transpose(1, 2), arrays["v"])
    assert torch.equal(got, pages.encode(target, rounded[0], rounded[1], "torch"))


def test_bf16_rounds_to_nearest_even_and_keeps_nan_and_infinity() -> None:
    fmt = page_format("bf16", 16, 8)
    bits = torch.randint(-(2**31), 2**31 - 1, (64, 16, 8), generator=torch.Generator().manual_seed(0))
    bits[0, :4, 0] = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000])
    x = bits.to(torch.int32).view(torch.float32)
    x[1, 0] = float("nan")
    got = pages.decode(fmt, gpu_encode.encode(fmt, x, -x))
    for mine, theirs in zip(got, (x, -x), strict=True):
        assert torch.equal(mine.nan_to_num(123.0), theirs.bfloat16().float().nan_to_num(123.0))


def test_what_cannot_be_encoded_is_named() -> None:
    fmt, x = page_format("int8", 16, 64), torch.zeros(1, 16, 64)
    with pytest.raises(ValueError, match="'proto'"):
        gpu_encode.encode(page_format("proto", 16, 64), x, x)
    with pytest.raises(ValueError, match=r"encode v .*\(1, 15, 64\)"):
        gpu_encode.encode(fmt, x, x[:, 1:])
    with pytest.raises(ValueError, match=r"encode k torch\.float64"):
        gpu_encode.encode(fmt, x.double(), x)
