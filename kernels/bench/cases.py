"""The CPU's cases: attention beside its rivals, and the parts of a decode step beside attention.

Each case is a function of `Bench` that yields rows; `CASES` names them. Targets are those of the kernels' issue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from kernels.api import attend
from kernels.bench.contenders import (
    PACKED,
    PLAIN_READ,
    our_formats,
    our_name,
    ours,
    padded_rivals,
    plain_read,
    torch_rivals,
)
from kernels.bench.record import Row, Target, l3_bytes
from kernels.bench.steps import a_token, append_contender, linears, score_contender
from kernels.bench.streams import Streams, make_paged, make_streams
from kernels.bench.timing import Contender, Times, take_turns, to_row

BF16_OVER_SDPA, INT8_OVER_SDPA, BF16_OF_READ, PROPORTION = 1.8, 3.6, 0.65, 0.2
MIXED_OVER_EXACT, SCORING_SHARE, APPEND_SHARE = 3.0, 0.15, 0.05
KEPT = 0.25  # share of pages that stay exact, or are kept by top-k


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        uniform, ragged: tokens of each stream.
        group, head_dim: G, D of both.
        page_tokens: page sizes timed, the house's first.
        cold_bytes: all copies of an input together hold at least this.
        layers, small_tokens: of the small model's step, 3 KV heads x G 3 x D 64.
        hidden, inner, vocabulary: of its linears.
        rounds, limit_s: of `take_turns`, per case and number of threads.
        compiled: whether FlexAttention is compiled and timed.
    """

    uniform: tuple[int, ...] = (8192,) * 8
    ragged: tuple[int, ...] = (32768,) * 2 + (1024,) * 6
    group: int = 4
    head_dim: int = 128
    page_tokens: tuple[int, ...] = (16, 32, 64)
    cold_bytes: int = 4 * l3_bytes()
    layers: int = 30
    small_tokens: int = 4096
    hidden: int = 576
    inner: int = 1536
    vocabulary: int = 49152
    rounds: int = 20
    limit_s: float = 45.0
    compiled: bool = True


TINY = Sizes((128, 128), (256, 64), 2, 64, (16, 32), 0, 2, 64, 64, 128, 256, 2, 5.0, False)


@dataclass(frozen=True)
class Bench:
    """What a case needs to know.

    Attributes:
        sizes: how large.
        threads: numbers of threads to time, one after the other on the same data.
    """

    sizes: Sizes
    threads: tuple[int, ...]

    def turns(self, contenders: Sequence[Contender]) -> Iterator[tuple[int, dict[str, Times]]]:
        """The times of all contenders, once for each number of threads."""
        for threads in self.threads:
            torch.set_num_threads(threads)
            yield threads, take_turns(contenders, self.sizes.rounds, self.sizes.limit_s)


def uniform(bench: Bench) -> Iterator[Row]:
    """Streams of one length: every format, page size and arithmetic of ours beside the rivals."""
    sizes = bench.sizes
    streams = make_streams(sizes.uniform, sizes.group, sizes.head_dim, 1)
    rivals = torch_rivals(streams, sizes.cold_bytes, sizes.compiled)
    variants = our_formats(streams, sizes.cold_bytes, sizes.page_tokens[1:])
    yield from _beside_rivals(bench, "uniform", streams, [*_own(bench, streams), *variants, *rivals])


def ragged(bench: Bench) -> Iterator[Row]:
    """Streams of different lengths: ours needs no padding; the rivals are bucketed, looped, or padded and masked."""
    sizes = bench.sizes
    streams = make_streams(sizes.ragged, sizes.group, sizes.head_dim, 2)
    rivals = torch_rivals(streams, sizes.cold_bytes) + padded_rivals(streams, sizes.cold_bytes, sizes.compiled)
    yield from _beside_rivals(bench, "ragged", streams, [*_own(bench, streams), *rivals])


def _own(bench: Bench, streams: Streams) -> list[Contender]:
    """Ours at the house's page size: half and float32 queries, pages in order and scattered, the portable backend."""
    cold, p = bench.sizes.cold_bytes, bench.sizes.page_tokens[0]
    found = []
    for name in ("bf16", "int8", "int4"):
        paged = make_paged(streams, (name,), p, cold)
        found += [
            ours(our_name(name, p), streams, paged),
            ours(f"{our_name(name, p)} fp32 q", streams, paged, torch.float32),
            ours(f"{our_name(name, p)} scattered", streams, make_paged(streams, (name,), p, cold, scattered=True)),
        ]
    return [*found, ours("ours torch backend bf16", streams, make_paged(streams, ("bf16",), p, 0), backend="torch")]


def _beside_rivals(bench: Bench, case: str, streams: Streams, contenders: list[Contender]) -> Iterator[Row]:
    """Rows of attention contenders with their targets."""
    p = bench.sizes.page_tokens[0]
    truth = streams.truth()
    reads = plain_read(streams.dense_bytes, bench.sizes.cold_bytes)
    for threads, times in bench.turns([*contenders, *reads]):
        gbps = _read_gbps(times, streams.dense_bytes)
        sdpa_ms = times[PACKED].best_ms
        rows = {c.name: to_row(case, c, times[c.name], threads, truth, gbps, sdpa_ms) for c in contenders}
        rows |= {c.name: to_row(case, c, times[c.name], threads, None, gbps) for c in reads}
        bf16, int8, int4 = (rows[our_name(name, p)] for name in ("bf16", "int8", "int4"))
        over = (("bf16", bf16, BF16_OVER_SDPA), ("int8", int8, INT8_OVER_SDPA))
        for name, row, bound in over:
            if row.over_sdpa is not None:
                rows[row.contender] = replace(row, targets=(Target(f"{name} x SDPA", row.over_sdpa, "1", bound, True),))
        if bf16.of_read is not None:
            share = Target("of plain read", bf16.of_read, "1", BF16_OF_READ, True)
            first = rows[bf16.contender]
            rows[bf16.contender] = replace(first, targets=(*first.targets, share))
        if int4.ms and int8.ms:
            of_int8 = Target("int4 / int8 ms", int4.ms / int8.ms, "1", 1.0, False)
            rows[int4.contender] = replace(int4, targets=(of_int8,))
        yield from rows.values()


def _read_gbps(times: Mapping[str, Times], total_bytes: int) -> float:
    """The better of the plain reads."""
    best = min(t.best_ms for name, t in times.items() if name.startswith(PLAIN_READ) and t.best_ms is not None)
    return total_bytes / best / 1e6


def proportion(bench: Bench) -> Iterator[Row]:
    """Ragged against uniform in the same rounds: time should follow bytes."""
    sizes, p = bench.sizes, bench.sizes.page_tokens[0]
    contenders = {}
    for shape, lengths in (("uniform", sizes.uniform), ("ragged", sizes.ragged)):
        streams = make_streams(lengths, sizes.group, sizes.head_dim, 3)
        for name in ("bf16", "int8", "int4"):
            paged = make_paged(streams, (name,), p, sizes.cold_bytes)
            contenders[name, shape] = ours(f"ours {name} {shape}", streams, paged)
    for threads, times in bench.turns(list(contenders.values())):
        for each in contenders.values():
            yield to_row("proportion", each, times[each.name], threads)
        for name in ("bf16", "int8", "int4"):
            pair = [contenders[name, shape] for shape in ("ragged", "uniform")]
            slow, quick = (times[each.name].best_ms for each in pair)
            if slow and quick:
                ratio = slow / quick / (pair[0].read_bytes / pair[1].read_bytes)
                off = Target("|time ratio / byte ratio - 1|", abs(ratio - 1), "1", PROPORTION, False)
                yield Row("proportion", f"{name}: ragged / uniform", threads, targets=(off,), note=f"ratio {ratio:.3f}")


def mixed(bench: Bench) -> Iterator[Row]:
    """A quarter of the pages exact, the others by one prototype each, against all exact."""
    sizes, p = bench.sizes, bench.sizes.page_tokens[0]
    for shape, lengths in (("uniform", sizes.uniform), ("ragged", sizes.ragged)):
        streams = make_streams(lengths, sizes.group, sizes.head_dim, 4)
        exact = ours("all exact bf16", streams, make_paged(streams, ("bf16",), p, sizes.cold_bytes))
        mixes = [
            ours(
                f"{KEPT:.0%} {name} + prototypes{said}",
                streams,
                make_paged(streams, (name, "proto"), p, sizes.cold_bytes, share=KEPT),
                dtype,
            )
            for name, dtype, said in (
                ("bf16", torch.bfloat16, ""),
                ("int8", torch.bfloat16, ""),
                ("bf16", torch.float32, " fp32 q"),
            )
        ]
        for threads, times in bench.turns([exact, *mixes]):
            yield to_row(f"mixed {shape}", exact, times[exact.name], threads)
            for i, each in enumerate(mixes):
                row = to_row(f"mixed {shape}", each, times[each.name], threads)
                ratio = _ratio(times[exact.name].best_ms, row.ms)
                targets = (Target("x all exact", ratio, "1", MIXED_OVER_EXACT, True),) if i == 0 else ()
                yield replace(row, targets=targets, note=f"{ratio:.2f} x all exact")


def mass(bench: Bench) -> Iterator[Row]:
    """What the softmax mass of each page costs."""
    sizes, p = bench.sizes, bench.sizes.page_tokens[0]
    streams = make_streams(sizes.uniform, sizes.group, sizes.head_dim, 5)
    pairs = {}
    for name in ("bf16", "int8", "int4"):
        paged = make_paged(streams, (name,), p, sizes.cold_bytes)
        pairs[name] = [ours(f"{name}{said}", streams, paged, want_mass=said != "") for said in ("", " with mass")]
    for threads, times in bench.turns([each for pair in pairs.values() for each in pair]):
        for without, together in pairs.values():
            yield to_row("mass", without, times[without.name], threads)
            row = to_row("mass", together, times[together.name], threads)
            more = _ratio(row.ms, times[without.name].best_ms) - 1
            yield replace(row, note=f"{more:+.1%} for the mass")


def scoring(bench: Bench) -> Iterator[Row]:
    """Bounds of all pages, the best quarter, its table: against the attention time that saves."""
    sizes, p = bench.sizes, bench.sizes.page_tokens[0]
    for shape, lengths in (("uniform", sizes.uniform), ("ragged", sizes.ragged)):
        streams = make_streams(lengths, sizes.group, sizes.head_dim, 6)
        paged = make_paged(streams, ("bf16",), p, sizes.cold_bytes)
        exact = ours("all pages", streams, paged)
        score, narrowed = score_contender(streams, paged, p, KEPT, sizes.cold_bytes)
        kept = ours(f"best {KEPT:.0%} of the pages", streams, replace(paged, tables=narrowed))
        kept.read_bytes = int(kept.read_bytes * KEPT)
        for threads, times in bench.turns([exact, kept, score]):
            rows = [to_row(f"scoring {shape}", each, times[each.name], threads) for each in (exact, kept, score)]
            saved_ms = (rows[0].ms or 0.0) - (rows[1].ms or 0.0)
            share = Target("of the attention time saved", _ratio(rows[2].ms, saved_ms), "1", SCORING_SHARE, False)
            yield from (rows[0], rows[1], replace(rows[2], targets=(share,)))


def append_step(bench: Bench) -> Iterator[Row]:
    """One token with key bounds, and of a page that fills its int8 copy and prototype: against the step it is part of.

    Time is that of the 16 tokens of a page, filling included, over 16. The small model's step counts its linears
    (gemv_bf16) and attention only, so the share is on the high side.
    """
    sizes, p = bench.sizes, bench.sizes.page_tokens[0]
    streams = make_streams(sizes.uniform, sizes.group, sizes.head_dim, 7)
    attention = ours("attention bf16, one layer", streams, make_paged(streams, ("bf16",), p, sizes.cold_bytes))
    small = make_streams((sizes.small_tokens,) * 3, 3, 64, 8)
    small_step = [
        _layers(bench, small, "bf16", torch.float32),
        linears(sizes.layers, sizes.hidden, sizes.inner, sizes.vocabulary),
    ]
    cold = sizes.cold_bytes
    large = append_contender("append a token, 8 heads x 128", len(sizes.uniform), sizes.head_dim, p, cold, upkeep=True)
    little = append_contender("append a token, 3 heads x 64", 3, 64, p, cold, upkeep=True)
    bare = append_contender("append a token, 3 heads x 64, bare", 3, 64, p, cold, upkeep=False)
    for threads, times in bench.turns([attention, *small_step, large, little, bare]):
        rows = {c.name: to_row("append", c, times[c.name], threads) for c in (attention, *small_step)}
        for each in (large, little, bare):
            rows[each.name] = a_token(to_row("append", each, times[each.name], threads), p)
        step_ms = sum(rows[each.name].ms or 0.0 for each in small_step)
        shares = {
            large.name: ("of attention, one layer", _ratio(rows[large.name].ms, rows[attention.name].ms)),
            little.name: ("of a small model's step", _ratio(rows[little.name].ms, step_ms) * sizes.layers),
        }
        for name, (what, share) in shares.items():
            rows[name] = replace(rows[name], targets=(Target(what, share, "1", APPEND_SHARE, False),))
        yield from rows.values()


def overhead(bench: Bench) -> Iterator[Row]:
    """A call that has next to nothing to do."""
    streams = make_streams((64,) * 3, 3, 64, 9)
    contenders = [
        ours(f"one page a stream, {said}", streams, make_paged(streams, ("bf16",), 64, 0), dtype)
        for said, dtype in (("fp32 q", torch.float32), ("bf16 q", torch.bfloat16))
    ]
    dense = torch_rivals(streams, 0)[0]
    dense.name = "sdpa bf16 packed, 64 tokens"
    for threads, times in bench.turns([*contenders, dense]):
        yield from (to_row("overhead", each, times[each.name], threads) for each in (*contenders, dense))


def smollm2(bench: Bench) -> Iterator[Row]:
    """All layers of SmolLM2-135M's attention, 4,096 tokens, beside torch's over the same keys."""
    sizes = bench.sizes
    streams = make_streams((sizes.small_tokens,) * 3, 3, 64, 10)
    contenders = [
        _layers(bench, streams, name, dtype)
        for name in ("bf16", "int8", "int4")
        for dtype in (torch.float32, torch.bfloat16)
    ]
    layers = [make_streams((sizes.small_tokens,) * 3, 3, 64, seed).buckets() for seed in range(sizes.layers)]

    def dense() -> None:
        for layer in layers:
            for q, k, v in layer:
                torch.nn.functional.scaled_dot_product_attention(q, k, v)

    rival = Contender("sdpa bf16 packed, all layers", [dense], sizes.layers * streams.dense_bytes)
    reads = plain_read(sizes.layers * streams.dense_bytes, 0)
    for threads, times in bench.turns([*contenders, rival, *reads]):
        gbps = _read_gbps(times, reads[0].read_bytes)
        sdpa_ms = times[rival.name].best_ms
        for each in (*contenders, rival, *reads):
            over = None if each in reads else sdpa_ms
            yield to_row("smollm2", each, times[each.name], threads, None, gbps, over)


def _layers(bench: Bench, streams: Streams, name: str, dtype: torch.dtype) -> Contender:
    """One call a layer, each layer's pages its own: no copies needed, a pass over all is far above the cache."""
    layers, p = bench.sizes.layers, bench.sizes.page_tokens[0]
    one = make_paged(streams, (name,), p, 0)
    paged = make_paged(streams, (name,), p, layers * one.read_bytes)
    q: Tensor = streams.q.to(dtype)

    def step() -> None:
        for table in paged.tables[:layers]:
            attend(q, table, paged.pools, paged.first, scale=streams.head_dim**-0.5)

    said = "fp32 q" if dtype == torch.float32 else "bf16 q"
    return Contender(f"ours {name}, {said}, {layers} layers", [partial(step)], layers * one.read_bytes)


def _ratio(one: float | None, other: float | None) -> float:
    """One over other; NaN where either is missing, which meets no target."""
    return one / other if one is not None and other else float("nan")


Case = Callable[[Bench], Iterator[Row]]
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "uniform": uniform,
        "ragged": ragged,
        "proportion": proportion,
        "mixed": mixed,
        "mass": mass,
        "scoring": scoring,
        "append": append_step,
        "overhead": overhead,
        "smollm2": smollm2,
    }
)
