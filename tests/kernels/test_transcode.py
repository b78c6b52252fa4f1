"""Pages of one format as pages of another: bit for bit what decoding and encoding them gives, on any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.api import PageTable, Pool, attend, choose_backend
from kernels.pages import FLOAT_DTYPES, decode, encode, page_format, transcode

FORMATS = ("fp32", "bf16", "fp16", "int8", "int4")


def rows(pages: int, page_tokens: int, head_dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """Loud, offset and constant channels; a constant page, a tiny one, one with a NaN."""
    rng = torch.Generator().manual_seed(seed)
    loud = 1 + 9 * (torch.rand(head_dim, generator=rng) < 0.1)
    offset = 20 * (torch.rand(head_dim, generator=rng) < 0.1)
    k, v = (torch.randn(pages, page_tokens, head_dim, generator=rng) * loud + offset for _ in range(2))
    k[..., 3] = 0.7
    if pages > 3:
        k[1], v[1] = 3.25, -3.25
        k[2], v[2] = 1e-6 * k[2], 1e-6 * v[2]
        k[3, 5, 2] = float("nan")
    return k, v


@settings(max_examples=40, deadline=None)
@given(
    source=st.sampled_from(FORMATS),
    target=st.sampled_from([*FORMATS, "proto"]),
    shape=st.sampled_from([(16, 8), (16, 64), (32, 72), (64, 128)]),
    pages=st.sampled_from([0, 1, 5, 130]),
    threads=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 99),
)
def test_equals_decode_and_encode(
    source: str, target: str, shape: tuple[int, int], pages: int, threads: int | None, seed: int
) -> None:
    if choose_backend() != "cpu":
        pytest.skip("no C++ compiler")
    here, there = page_format(source, *shape), page_format(target, *shape, 3 if target == "proto" else 1)
    blobs = encode(here, *rows(pages, *shape, seed), "torch")
    keys, values = decode(here, blobs, backend="torch")
    finite = ~keys.isnan().flatten(1).any(1)
    native = decode(here, blobs, backend="cpu", threads=threads)
    for mine, its in zip(native, (keys, values), strict=True):
        assert torch.equal(mine.nan_to_num(7.0), its.nan_to_num(7.0))
    for dtype in FLOAT_DTYPES.values():
        small = decode(here, blobs, dtype, "cpu", threads)
        assert torch.equal(small[1], values.to(dtype))
        assert torch.equal(small[0].nan_to_num(7.0), keys.to(dtype).nan_to_num(7.0))
    got = transcode(here, blobs, there, "cpu", threads)
    want = blobs if here == there else encode(there, keys, values, "torch")
    # Which NaN a page holds, and what lies beside it, is the backend's affair; that nothing else changes is not.
    assert torch.equal(got[finite], want[finite])
    if target != "proto" and len(got) > 3:
        assert torch.equal(decode(there, got)[0].isnan(), decode(there, want, backend="torch")[0].isnan())
    assert torch.equal(transcode(here, blobs, there, "torch")[finite], want[finite])


def test_a_quantised_page_loses_half_a_step_more_at_most() -> None:
    """bf16 to int8 to int4 against the bf16 values: a step of the row, half for each rounding, and the grids' own."""
    k, v = rows(3, 16, 64, 0)
    formats = [page_format(name, 16, 64) for name in ("bf16", "int8", "int4")]
    first = encode(formats[0], k, v)
    last = transcode(formats[1], transcode(formats[0], first, formats[1]), formats[2])
    for exact, got, token_axis in zip(decode(formats[0], first), decode(formats[2], last), (1, 2), strict=True):
        span = exact.amax(token_axis, keepdim=True) - exact.amin(token_axis, keepdim=True)
        spans = span.flatten(1).amax(1)[:, None, None]  # codes of steps and lowest values lie on grids of the page
        allowed = 0.51 * span * (1 / 15 + 1 / 255) + spans * (1 / 255 + 1 / 15 / 255) * 2 + 1e-6
        assert bool(((got - exact).abs() <= allowed).all())


def test_what_cannot_be_is_refused() -> None:
    bf16, proto = page_format("bf16", 16, 64), page_format("proto", 16, 64)
    blobs = torch.zeros(1, bf16.page_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="proto"):
        transcode(proto, torch.zeros(1, proto.page_bytes, dtype=torch.uint8), bf16)
    with pytest.raises(ValueError, match="P=16, D=64 to int8 of P=32, D=64"):
        transcode(bf16, blobs, page_format("int8", 32, 64))
    with pytest.raises(ValueError, match="slab"):
        transcode(bf16, blobs[:, :-64], page_format("int8", 16, 64))
    assert transcode(bf16, blobs, bf16) is blobs


def test_workers_encode_while_attention_runs() -> None:
    """Three threads with one native thread each, beside attention on this one: all as without the others."""
    fmt, small = page_format("bf16", 16, 64), page_format("int4", 16, 64)
    k, v = rows(64, 16, 64, 1)
    k[3] = 0.5
    blobs = encode(fmt, k, v)
    pools = [Pool(fmt, (blobs,))]
    entries = torch.arange(64)[None].int()
    table = PageTable(torch.zeros(1, 64, dtype=torch.int8), entries, entries.clone(), torch.tensor([64]).int())
    q = torch.randn(1, 3, 1, 64, generator=torch.Generator().manual_seed(0))
    first = torch.tensor([64 * 16 - 1]).int()
    want = transcode(fmt, blobs, small)
    alone = attend(q, table, pools, first, scale=0.125)

    def work(_: int) -> bool:
        same = True
        for _ in range(20):
            same &= torch.equal(transcode(fmt, blobs, small, threads=1), want)
            same &= torch.equal(encode(small, *decode(fmt, blobs, threads=1), threads=1), want)
        return same

    with ThreadPoolExecutor(3) as workers:
        jobs = workers.map(work, range(3))
        for _ in range(50):
            beside = attend(q, table, pools, first, scale=0.125)
            assert torch.equal(beside.out, alone.out)
        assert all(jobs)


def test_a_threads_own_number_of_threads_is_not_the_models() -> None:
    """`torch.set_num_threads` on a worker binds that worker, and of the others only those that start later."""
    before = torch.get_num_threads()

    def bind() -> int:
        torch.set_num_threads(3)
        return torch.get_num_threads()

    try:
        with ThreadPoolExecutor(1) as worker:
            assert worker.submit(bind).result() == 3
            assert torch.get_num_threads() == before
            assert worker.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)
