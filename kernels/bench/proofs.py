"""The GPU's first stages: right beside the oracle, and a captured graph equal to the calls it was captured from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.api import append, attend
from kernels.bench.checks import Check, distance, make_check
from kernels.bench.context import Context
from kernels.bench.record import Row, Target
from kernels.bench.streams import make_paged
from kernels.pages import encode, page_format
from kernels.scoring import page_bounds, query_bound, top_pages

HALF_BOUND, FLOAT_BOUND = 1e-2, 1e-5


def correct(context: Context) -> Iterator[Row]:
    """Every format, in half and float32 arithmetic, and the features of the call, against the oracle."""
    compute, half = context.compute, context.half
    everything = (compute, "int8", "int4", "proto")
    plain = {(compute,): half, ("fp16",): torch.float16, ("fp32",): torch.float32}
    plain |= {everything: half} if context.dry else {(compute, name): half for name in ("int8", "int4", "proto")}
    sizes = ((64, 16),) if context.dry else ((128, 16), (64, 16), (128, 64))
    for d, p in sizes:
        for names, dtype in plain.items():
            check = make_check(names, context.checked, page_tokens=p, head_dim=d, group=context.group, seed=d + p)
            yield _judge(context, f"{'+'.join(names)} D{d} P{p}", check, dtype, want_mass=True)
    d, p = sizes[0]
    check = make_check(everything, context.checked, page_tokens=p, head_dim=d, group=context.group, seed=1)
    windows = torch.tensor([0, 5, 33, 1000] * len(context.checked), dtype=torch.int32)[: len(context.checked)]
    yield _judge(context, "mixed, sinks and windows", check, half, window_tokens=windows, sink_tokens=4, want_mass=True)
    lengths = tuple(max(n, 5) for n in context.checked)
    many = make_check(everything, lengths, page_tokens=p, head_dim=d, group=context.group, tokens=5, seed=2)
    slopes = torch.linspace(0.01, 0.4, many.q.shape[0] * context.group).view(many.q.shape[:2])
    yield _judge(context, "mixed, 5 query tokens, ALiBi", many, half, slopes=slopes)
    yield _alone(context, check)
    yield from _stores(context, d, p)


def _judge(context: Context, name: str, check: Check, dtype: torch.dtype, **options: Any) -> Row:
    """One case beside the oracle."""
    want = check.run("reference", torch.float32, **options)
    moved = {key: x.to(context.device) if isinstance(x, Tensor) else x for key, x in options.items()}
    error = distance(check.on(context.device).run("triton", dtype, **moved), want)
    bound = FLOAT_BOUND if dtype == torch.float32 else HALF_BOUND
    said = str(dtype).removeprefix("torch.")
    return Row("correct", f"{name}, {said} q", 0, error=error, targets=(Target("error", error, "1", bound, False),))


def _alone(context: Context, check: Check) -> Row:
    """A stream's result must not depend on the batch it is in."""
    there = check.on(context.device)
    whole = there.run("triton", context.half).out
    alone = torch.cat([there.only(s).run("triton", context.half).out for s in range(len(whole))])
    different = float((whole != alone).sum())
    return Row("correct", "stream alone or in a batch", 0, targets=(Target("differing", different, "1", 0, False),))


def _stores(context: Context, d: int, p: int) -> Iterator[Row]:
    """Stored bytes, key bounds, scores and choices of the device against those of the host."""
    rng, device = torch.Generator().manual_seed(3), context.device
    k, v = (torch.randn(40, p, d, generator=rng).bfloat16() for _ in range(2))
    for name in ("int8", "int4"):
        fmt = page_format(name, p, d)
        one, other = encode(fmt, k, v, "torch"), encode(fmt, k.to(device), v.to(device), "triton").cpu()
        yield _same("correct", f"encode {name}: bytes unlike the host's", one, other)
    lowest, highest = (x[None] for x in page_bounds(k.float()))
    q = torch.randn(1, context.group, 1, d, generator=rng)
    score = query_bound(q, lowest, highest, backend="reference")
    got = query_bound(q.to(device), lowest.to(device), highest.to(device), backend="triton").cpu()
    error = float((got - score).abs().max() / score.abs().max())
    yield Row("correct", "page bound", 0, error=error, targets=(Target("error", error, "1", FLOAT_BOUND, False),))
    count, wanted = (torch.tensor([n], dtype=torch.int32) for n in (40, 13))
    chosen = top_pages(score, count, wanted, 16, "reference")[0]
    found = top_pages(score.to(device), count.to(device), wanted.to(device), 16, "triton")[0].cpu()
    yield _same("correct", "top pages: columns unlike the reference", chosen, found)


def _same(case: str, name: str, one: Tensor, other: Tensor) -> Row:
    different = float((one != other).sum())
    return Row(case, name, 0, targets=(Target("differing", different, "1", 0, False),))


def graph(context: Context) -> Iterator[Row]:
    """Append and attend captured once and replayed on new inputs, against the same calls made one by one."""
    length = context.batch_tokens // 16
    count = min(8, context.batch)
    streams = context.streams([max(64, length // 64 * 64)] * count, 4)
    paged = make_paged(streams, (context.compute, "int8"), 16, 0, share=0.5)
    table, pool = paged.tables[0], paged.pools[0]
    own = table.pool[:, :1] == 0  # a float page of each stream takes the new token; the others' go to a spare one
    slot = torch.where(own, table.slot[:, :1], pool.pages - 1).contiguous()
    offset = torch.zeros(1, dtype=torch.int32, device=context.device)
    q = streams.q.to(context.half)
    k, v = (torch.zeros(count, 1, context.head_dim, dtype=context.half, device=context.device) for _ in range(2))

    def step() -> tuple[Tensor, Tensor]:
        append(k, v, slot, offset, pool, backend="triton")
        part = attend(q, table, paged.pools, paged.first, scale=0.1, want_mass=True, backend="triton")
        assert part.mass is not None
        return part.out, part.mass

    held = table.count.clone()
    again, kept = _captured(step) if not context.dry else (step, None)
    different = 0.0
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        for x in (q, k, v):
            x.copy_(torch.randn(x.shape, generator=rng))
        table.count.copy_(held - seed)  # a plan that changed under the graph
        expected = [x.clone() for x in step()]
        k_before = pool.slabs[0].clone()
        found = again()
        different += sum(float((one != other).sum()) for one, other in zip(expected, found, strict=True))
        different += float((pool.slabs[0] != k_before).sum())
    note = "" if kept is not None else "dry run: repeated, not captured"
    yield Row(
        "graph", "append + attend, replayed", 0, targets=(Target("differing", different, "1", 0, False),), note=note
    )


def _captured(step: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Callable[[], tuple[Tensor, Tensor]], object]:
    """A replay of the step, and the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = step()

    def replay() -> tuple[Tensor, Tensor]:
        captured.replay()
        torch.cuda.synchronize()
        return result

    return replay, captured
