"""Timings (`pytest -m bench`): decode attention by format beside a plain read, append, encode, prefill chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.api import PageTable, Pool, append, attend
from kernels.pages import encode, page_format
from kernels.prefill import chunk_attention

pytestmark = pytest.mark.bench
LAYERS, STREAMS, PAGES, GROUP, HEAD_DIM = 30, 3, 256, 3, 64
Benchmark = Callable[..., Any]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def decode_case(name: str) -> tuple[torch.Tensor, list[PageTable], Pool, torch.Tensor]:
    """SmolLM2-135M at 4,096 tokens: one table a layer, all pages of one format."""
    rng = torch.Generator().manual_seed(0)
    total = LAYERS * STREAMS * PAGES
    k, v = (torch.randn(total, 16, HEAD_DIM, generator=rng) for _ in range(2))
    fmt = page_format(name, 16, HEAD_DIM, 2 if name == "proto" else 1)
    pool = Pool(fmt, (encode(fmt, k, v),))
    page = torch.arange(PAGES, dtype=torch.int32).repeat(STREAMS, 1)
    slots = torch.arange(total, dtype=torch.int32).view(LAYERS, STREAMS, PAGES)
    kind, count = torch.zeros(STREAMS, PAGES, dtype=torch.int8), torch.full((STREAMS,), PAGES, dtype=torch.int32)
    q = torch.randn(STREAMS, GROUP, 1, HEAD_DIM, generator=rng)
    first = torch.full((STREAMS,), PAGES * 16 - 1, dtype=torch.int32)
    return q, [PageTable(kind, slot, page, count) for slot in slots], pool, first


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "int8", "int4", "proto"])
def test_bench_decode_all_layers(benchmark: Benchmark, name: str, backend: str) -> None:
    q, tables, pool, first = decode_case(name)

    def step() -> None:
        for table in tables:
            attend(q, table, (pool,), first, scale=0.125, backend=backend)

    benchmark(step)
    read_bytes = pool.pages * pool.fmt.page_bytes
    benchmark.extra_info["gb_per_s"] = round(read_bytes / benchmark.stats["min"] / 1e9, 2)  # type: ignore[attr-defined]


def test_bench_plain_read(benchmark: Benchmark) -> None:
    x = torch.randn(24 << 20)
    benchmark(x.sum)
    benchmark.extra_info["gb_per_s"] = round(x.nbytes / benchmark.stats["min"] / 1e9, 2)  # type: ignore[attr-defined]


def test_bench_call_overhead(benchmark: Benchmark) -> None:
    q, tables, pool, first = decode_case("bf16")
    short = PageTable(*(x[:, :1] for x in (tables[0].pool, tables[0].slot, tables[0].page)), torch.ones(3).int())
    benchmark(lambda: attend(q, short, (pool,), first, scale=0.125))


@pytest.mark.parametrize("threads", [1, 2])
def test_bench_between_linear_layers(benchmark: Benchmark, threads: int) -> None:
    """Native and torch's own parallel work in turn, as in a decode step."""
    q, tables, pool, first = decode_case("bf16")
    weight, x = torch.randn(1536, 576), torch.randn(1, 576)

    def step() -> None:
        for table in tables:
            attend(q, table, (pool,), first, scale=0.125, backend="cpu")
            torch.nn.functional.linear(torch.nn.functional.linear(x, weight), weight.T)

    torch.set_num_threads(threads)
    benchmark(step)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_bench_encode(benchmark: Benchmark, name: str, backend: str) -> None:
    k, v = (torch.randn(LAYERS * STREAMS * PAGES, 16, HEAD_DIM) for _ in range(2))
    benchmark.pedantic(encode, (page_format(name, 16, HEAD_DIM), k, v, backend), rounds=5)  # type: ignore[attr-defined]


def test_bench_append(benchmark: Benchmark) -> None:
    fmt = page_format("bf16", 16, HEAD_DIM)
    pool = Pool(fmt, (torch.zeros(STREAMS, fmt.page_bytes, dtype=torch.uint8),))
    k, slot = torch.randn(STREAMS, 1, HEAD_DIM), torch.arange(STREAMS, dtype=torch.int32)[:, None]
    benchmark(append, k, k, slot, torch.zeros(1, dtype=torch.int32), pool)


@pytest.mark.parametrize("chunk", [512, 1024, 4096])
def test_bench_prefill(benchmark: Benchmark, chunk: int) -> None:
    """The whole 4,096 tokens of one layer by chunks."""
    q, k, v = torch.randn(9, 4096, 64), torch.randn(3, 4096, 64), torch.randn(3, 4096, 64)

    def step() -> None:
        for end in range(chunk, 4097, chunk):
            chunk_attention(q[:, end - chunk : end], k[:, :end], v[:, :end], 0.125)

    benchmark.pedantic(step, rounds=3)  # type: ignore[attr-defined]


def test_bench_prefill_torch(benchmark: Benchmark) -> None:
    q, k, v = torch.randn(1, 9, 4096, 64), torch.randn(1, 3, 4096, 64), torch.randn(1, 3, 4096, 64)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    benchmark.pedantic(sdpa, (q, k, v), {"is_causal": True, "enable_gqa": True}, rounds=3)  # type: ignore[attr-defined]
