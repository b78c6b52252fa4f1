"""Page formats: layout, error bounds, both encoders alike."""

from __future__ import annotations

import pickle

import pytest
import torch

from kernels.pages import (
    FLOAT_DTYPES,
    FORMAT_IDS,
    LEVELS,
    decode,
    encode,
    page_format,
    views,
)

SHAPES = [(16, 64), (32, 72), (64, 128), (16, 256)]


def keys(pages: int, page_tokens: int, head_dim: int, seed: int = 0) -> torch.Tensor:
    """Keys with loud and with offset channels, as real ones have."""
    rng = torch.Generator().manual_seed(seed)
    loud = 1 + 9 * (torch.rand(head_dim, generator=rng) < 0.1)
    offset = 20 * (torch.rand(head_dim, generator=rng) < 0.1)
    return torch.randn(pages, page_tokens, head_dim, generator=rng) * loud + offset


@pytest.mark.parametrize(("page_tokens", "head_dim"), SHAPES)
@pytest.mark.parametrize("name", FORMAT_IDS)
def test_fields_are_aligned_and_do_not_overlap(name: str, page_tokens: int, head_dim: int) -> None:
    fmt = page_format(name, page_tokens, head_dim, 3 if name == "proto" else 1)
    end = 0
    for field in fmt.fields.values():
        assert field.offset_bytes >= end
        assert field.offset_bytes % field.dtype.itemsize == 0
        end = field.offset_bytes + field.width_bytes
    assert end <= fmt.page_bytes < end + 64
    assert fmt.page_bytes % 64 == 0
    assert pickle.loads(pickle.dumps(fmt)) == fmt


def test_page_bytes() -> None:
    sizes = {name: page_format(name, 16, 64).page_bytes for name in FORMAT_IDS}
    assert sizes == {"fp32": 8192, "bf16": 4096, "fp16": 4096, "int8": 2240, "int4": 1216, "proto": 320}


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(("page_tokens", "head_dim"), SHAPES)
@pytest.mark.parametrize(("name", "dtype"), FLOAT_DTYPES.items())
def test_float_pages_hold_exactly_the_cast(
    name: str, dtype: torch.dtype, page_tokens: int, head_dim: int, backend: str
) -> None:
    k, v = keys(9, page_tokens, head_dim), keys(9, page_tokens, head_dim, 1)
    k[0, 0, :4] = torch.tensor([1e-7, -1e-6, 0.0, 60000.0])
    fmt = page_format(name, page_tokens, head_dim)
    got_k, got_v = decode(fmt, encode(fmt, k, v, backend), backend=backend)
    assert torch.equal(got_k, k.to(dtype).float())
    assert torch.equal(got_v, v.to(dtype).float())


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(("page_tokens", "head_dim"), SHAPES)
@pytest.mark.parametrize("name", LEVELS)
def test_no_element_is_off_by_more_than_half_a_step(name: str, page_tokens: int, head_dim: int, backend: str) -> None:
    k, v = keys(9, page_tokens, head_dim), keys(9, page_tokens, head_dim, 1)
    fmt = page_format(name, page_tokens, head_dim)
    blobs = encode(fmt, k, v, backend)
    got_k, got_v = decode(fmt, blobs, backend=backend)
    arrays = views(fmt, blobs)
    k_step = arrays["k_scale"].float() * arrays["header"][:, 0:1]
    v_step = arrays["v_scale"].float() * arrays["header"][:, 3:4]
    slack = 1e-5 * k.abs().max()
    assert ((got_k - k).abs() <= k_step[:, None] / 2 + slack).all()
    assert ((got_v - v).abs() <= v_step[:, :, None] / 2 + slack).all()
    # The coded grids cost at most a third of a step more than each row's own range would need.
    needed = (k.amax(1) - k.amin(1)) / LEVELS[name]
    grid = (arrays["header"][:, 2:3] / LEVELS[name]) + arrays["header"][:, 0:1]
    assert (k_step <= needed + grid * 1.001).all()


@pytest.mark.parametrize("name", [n for n in FORMAT_IDS if n != "proto"])
def test_encoders_agree(name: str) -> None:
    k, v = keys(200, 16, 64), keys(200, 16, 64, 1)
    fmt = page_format(name, 16, 64)
    one, other = (decode(fmt, encode(fmt, k, v, backend), backend=backend) for backend in ("torch", "cpu"))
    for a, b in zip(one, other, strict=True):
        steps = 0.0 if fmt.is_float else float((k.amax() - k.amin()) / LEVELS[name])
        assert (a - b).abs().max() <= steps
        assert ((a - b).abs() > 1e-4).float().mean() < 1e-3  # ties only


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_float_page_is_quantised_from_its_views(dtype: torch.dtype) -> None:
    name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    k, v = keys(20, 16, 64).to(dtype), keys(20, 16, 64, 1).to(dtype)
    source, target = page_format(name, 16, 64), page_format("int4", 16, 64)
    arrays = views(source, encode(source, k, v))
    strided = encode(target, arrays["k"].transpose(1, 2), arrays["v"], "cpu")
    assert torch.equal(strided, encode(target, k.float(), v.float(), "cpu"))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", LEVELS)
def test_constant_pages_are_exact(name: str, backend: str) -> None:
    fmt = page_format(name, 16, 64)
    k = torch.full((2, 16, 64), 3.25)
    got_k, got_v = decode(fmt, encode(fmt, k, -k, backend))
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, -k)


def test_views_write_in_place() -> None:
    fmt = page_format("bf16", 16, 64)
    slab = torch.zeros(3, fmt.page_bytes, dtype=torch.uint8)
    views(fmt, slab)["k"][1, :, 5] = 2.0
    k, v = decode(fmt, slab)
    assert (k[1, 5] == 2).all()
    assert k.sum() == 128
    assert not v.any()


def test_bad_formats_are_named() -> None:
    with pytest.raises(ValueError, match="name='int3'.*int4"):
        page_format("int3", 16, 64)
    with pytest.raises(ValueError, match="page_tokens=8"):
        page_format("bf16", 8, 64)
    with pytest.raises(ValueError, match="head_dim=60"):
        page_format("bf16", 16, 60)
    with pytest.raises(ValueError, match="groups=2"):
        page_format("bf16", 16, 64, 2)
    with pytest.raises(ValueError, match="encode"):
        encode(page_format("int8", 16, 64), torch.zeros(1, 15, 64), torch.zeros(1, 15, 64))
    with pytest.raises(ValueError, match="slab"):
        views(page_format("int8", 16, 64), torch.zeros(1, 15, dtype=torch.uint8))
