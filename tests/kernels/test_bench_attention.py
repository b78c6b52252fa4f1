"""Timings (`pytest -m bench`) of single kernels, SmolLM2-135M's shape; `python -m kernels.bench` has the rivals."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from kernels.api import attend
from kernels.bench.contenders import plain_read
from kernels.bench.steps import append_contender, score_contender
from kernels.bench.streams import Paged, Streams, make_paged, make_streams
from kernels.bench.timing import Contender
from kernels.pages import encode, page_format
from kernels.prefill import chunk_attention

pytestmark = pytest.mark.bench
LAYERS, TOKENS, COLD_BYTES = 30, 4096, 128 << 20
Benchmark = Callable[..., Any]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def streams() -> Streams:
    return make_streams((TOKENS,) * 3, 3, 64, 0)


@cache
def layers(name: str) -> Paged:
    """One table a layer; no two share a page."""
    one = make_paged(streams(), (name,), 16, 0)
    return make_paged(streams(), (name,), 16, LAYERS * one.read_bytes)


def step(paged: Paged, q: torch.Tensor, backend: str | None = None) -> None:
    for table in paged.tables[:LAYERS]:
        attend(q, table, paged.pools, paged.first, scale=0.125, backend=backend)


def timed(benchmark: Benchmark, contender: Contender) -> None:
    benchmark(contender.__call__)
    if contender.read_bytes and benchmark.stats:  # type: ignore[attr-defined]
        gbps = contender.read_bytes / benchmark.stats["min"] / 1e9  # type: ignore[attr-defined]
        benchmark.extra_info["gb_per_s"] = round(gbps, 2)  # type: ignore[attr-defined]


@pytest.mark.benchmark(group="decode, 30 layers")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32-q", "bf16-q"])
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "proto"])
def test_bench_decode_all_layers(benchmark: Benchmark, name: str, dtype: torch.dtype) -> None:
    paged, q = layers(name), streams().q.to(dtype)
    timed(benchmark, Contender(name, [lambda: step(paged, q)], LAYERS * paged.read_bytes))


@pytest.mark.benchmark(group="decode, 30 layers, torch backend")
@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_bench_decode_torch_backend(benchmark: Benchmark, name: str) -> None:
    benchmark.pedantic(step, (layers(name), streams().q, "torch"), rounds=3)  # type: ignore[attr-defined]


@pytest.mark.benchmark(group="plain read, 128 MiB")
@pytest.mark.parametrize("which", [0, 1], ids=["fp32", "int64"])
def test_bench_plain_read(benchmark: Benchmark, which: int) -> None:
    timed(benchmark, plain_read(COLD_BYTES, 0)[which])


@pytest.mark.benchmark(group="call overhead")
def test_bench_call_overhead(benchmark: Benchmark) -> None:
    short = make_streams((64,) * 3, 3, 64, 1)
    paged = make_paged(short, ("bf16",), 64, 0)
    benchmark(lambda: attend(short.q, paged.tables[0], paged.pools, paged.first, scale=0.125))


@pytest.mark.benchmark(group="decode between linear layers")
@pytest.mark.parametrize("threads", [1, 2])
def test_bench_between_linear_layers(benchmark: Benchmark, threads: int) -> None:
    """Native and torch's own parallel work in turn, as in a decode step."""
    paged, q, weight, x = layers("bf16"), streams().q, torch.randn(1536, 576), torch.randn(1, 576)

    def both() -> None:
        for table in paged.tables[:LAYERS]:
            attend(q, table, paged.pools, paged.first, scale=0.125, backend="cpu")
            torch.nn.functional.linear(torch.nn.functional.linear(x, weight), weight.T)

    torch.set_num_threads(threads)
    benchmark(both)


@pytest.mark.benchmark(group="encode, 23,040 pages")
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_bench_encode(benchmark: Benchmark, name: str, backend: str) -> None:
    k, v = (torch.randn(LAYERS * 3 * TOKENS // 16, 16, 64) for _ in range(2))
    benchmark.pedantic(encode, (page_format(name, 16, 64), k, v, backend), rounds=5)  # type: ignore[attr-defined]


@pytest.mark.benchmark(group="append, 16 tokens")
@pytest.mark.parametrize("upkeep", [False, True], ids=["bare", "upkeep"])
def test_bench_append(benchmark: Benchmark, upkeep: bool) -> None:
    timed(benchmark, append_contender("append", 3, 64, 16, COLD_BYTES, upkeep=upkeep))


@pytest.mark.benchmark(group="page scores and top-k")
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_bench_scoring(benchmark: Benchmark, backend: str) -> None:
    timed(benchmark, score_contender(streams(), layers("bf16"), 16, 0.25, COLD_BYTES, backend)[0])


@pytest.mark.benchmark(group="prefill, one layer")
@pytest.mark.parametrize("chunk", [512, 1024, 4096])
def test_bench_prefill(benchmark: Benchmark, chunk: int) -> None:
    """The whole 4,096 tokens of one layer by chunks."""
    q, k, v = torch.randn(9, 4096, 64), torch.randn(3, 4096, 64), torch.randn(3, 4096, 64)

    def all_chunks() -> None:
        for end in range(chunk, 4097, chunk):
            chunk_attention(q[:, end - chunk : end], k[:, :end], v[:, :end], 0.125)

    benchmark.pedantic(all_chunks, rounds=3)  # type: ignore[attr-defined]


@pytest.mark.benchmark(group="prefill, one layer")
def test_bench_prefill_torch(benchmark: Benchmark) -> None:
    q, k, v = torch.randn(1, 9, 4096, 64), torch.randn(1, 3, 4096, 64), torch.randn(1, 3, 4096, 64)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    benchmark.pedantic(sdpa, (q, k, v), {"is_causal": True, "enable_gqa": True}, rounds=3)  # type: ignore[attr-defined]
