"""The GPU's timed stages: bandwidth, ragged and mixed loads, what else a step does, and variants for a fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernels.api import Schedule
from kernels.bench.contenders import (
    COPY,
    PACKED,
    device_copy,
    flash_rivals,
    our_name,
    padded_rivals,
    torch_rivals,
)
from kernels.bench.context import SPLITS, Context
from kernels.bench.record import Row, Target
from kernels.bench.steps import a_token, append_contender, score_contender
from kernels.bench.streams import Streams, make_paged
from kernels.bench.timing import Contender, to_row
from kernels.cost import Variant

OF_COPY, INT8_OVER_BF16, INT4_OVER_BF16 = 0.8, 1.7, 2.8
FITTED = (("bf16",), ("int8",), ("int4",), ("bf16", "proto"))
MIXED_OVER_EXACT, PROPORTION, SCORING_SHARE, APPEND_SHARE, KEPT = 3.0, 0.2, 0.15, 0.05, 0.25
RIVALS = (PACKED, "sdpa bf16 enable_gqa, bucketed", "transformers sdpa", "sdpa bf16 packed, padded, mask")


def decode(context: Context) -> Iterator[Row]:
    """Bandwidth of the batch and of one long sequence, beside a copy, SDPA, FlashAttention and FlashInfer."""
    shapes = {
        f"{context.batch} x {context.batch_tokens}": (context.batch, context.batch_tokens, max(1, context.batch // 8)),
        f"8 x {context.single_tokens}": (8, context.single_tokens, 1),
    }
    if context.dry:
        shapes.popitem()
    for shape, (count, tokens, sequences) in shapes.items():
        streams = context.streams([tokens] * count, 5)
        mine = [context.ours(our_name(name, 16), streams, (name,)) for name in context.formats]
        first = our_name(context.compute)
        mine.append(context.ours(f"{first}, table sorted in the call", streams, (context.compute,), prepared=False))
        mine += [context.ours(our_name(name, 64), streams, (name,), 64) for name in context.formats]
        others = [c for c in torch_rivals(streams, context.cold_bytes) if c.name in RIVALS]
        others += flash_rivals(streams, sequences, 16, context.cold_bytes)
        yield from _beside(context, f"decode {shape}", streams, mine, others)


def _beside(
    context: Context, case: str, streams: Streams, mine: list[Contender], others: list[Contender]
) -> Iterator[Row]:
    """Rows with the targets of bandwidth and of the quantised formats."""
    copy = device_copy(context.copy_bytes, context.device)
    times = context.turns([*mine, *others, copy])
    truth = streams.truth()
    gbps = context.copy_bytes / (times[COPY].best_ms or float("nan")) / 1e6
    sdpa_ms = times[PACKED].best_ms
    bf16_ms = times[our_name(context.compute, 16)].best_ms
    for each in [*mine, *others]:
        row = to_row(case, each, times[each.name], 0, truth, gbps, sdpa_ms)
        targets = []
        if each.name == our_name(context.compute, 16) and row.of_read is not None:
            targets.append(Target("of copy bandwidth", row.of_read, "1", OF_COPY, True))
        for name, bound in (("int8", INT8_OVER_BF16), ("int4", INT4_OVER_BF16)):
            if each.name == our_name(name, 16) and row.ms and bf16_ms:
                targets.append(Target(f"x ours {context.compute}", bf16_ms / row.ms, "1", bound, True))
        yield replace(row, targets=tuple(targets))
    yield to_row(case, copy, times[COPY], 0, None, gbps)


def ragged(context: Context) -> Iterator[Row]:
    """Streams of different lengths in proportion to their bytes, and a quarter exact with prototypes for the rest."""
    tokens = max(64, context.batch_tokens // 4)
    even = context.streams([tokens] * context.batch, 6)
    few = max(1, context.batch // 4)
    uneven = context.streams([4 * tokens] * few + [max(64, tokens // 8)] * (context.batch - few), 7)
    mine = {
        (name, shape): context.ours(f"ours {name} {shape}", streams, (name,))
        for name in context.formats
        for shape, streams in (("uniform", even), ("ragged", uneven))
    }
    quarter = context.ours("ours 25% exact + prototypes", even, (context.compute, "proto"), share=KEPT)
    rivals = [*torch_rivals(uneven, context.cold_bytes), *padded_rivals(uneven, context.cold_bytes)]
    rivals = [each for each in rivals if each.name in RIVALS]
    every = [*mine.values(), quarter, *rivals]
    times = context.turns(every)
    sdpa_ms = times[PACKED].best_ms
    for each in every:
        row = to_row("ragged", each, times[each.name], 0, None, None, None if "uniform" in each.name else sdpa_ms)
        yield row
    for name in context.formats:
        pair = [mine[name, shape] for shape in ("ragged", "uniform")]
        slow, quick = (times[each.name].best_ms for each in pair)
        if slow and quick:
            ratio = slow / quick / (pair[0].read_bytes / pair[1].read_bytes)
            off = Target("|time ratio / byte ratio - 1|", abs(ratio - 1), "1", PROPORTION, False)
            yield Row("ragged", f"{name}: ragged / uniform", 0, targets=(off,), note=f"ratio {ratio:.3f}")
    exact_ms, mixed_ms = times[mine[context.compute, "uniform"].name].best_ms, times[quarter.name].best_ms
    if exact_ms and mixed_ms:
        gain = Target("x all exact", exact_ms / mixed_ms, "1", MIXED_OVER_EXACT, True)
        yield Row("ragged", "25% exact + prototypes", 0, targets=(gain,))


def store(context: Context) -> Iterator[Row]:
    """Append with upkeep and page scoring beside the attention of the same layer."""
    streams = context.streams([context.batch_tokens] * context.batch, 8)
    paged = make_paged(streams, (context.compute,), 16, context.cold_bytes)
    exact = context.over("all pages", streams, paged)
    score, narrowed = score_contender(streams, paged, 16, KEPT, context.cold_bytes, "triton")
    best = replace(paged, tables=narrowed)
    kept = context.over(f"best {KEPT:.0%} of the pages", streams, best)
    kept.read_bytes = int(kept.read_bytes * KEPT)
    added = append_contender(
        "append a token",
        context.batch,
        context.head_dim,
        16,
        context.cold_bytes,
        upkeep=True,
        device=context.device,
        backend="triton",
    )
    every = [exact, kept, score, added]
    times = context.turns(every)
    rows = [to_row("store", each, times[each.name], 0) for each in every]
    saved_ms = (rows[0].ms or 0.0) - (rows[1].ms or 0.0)
    yield from rows[:2]
    if rows[2].ms and saved_ms:
        share = Target("of the attention time saved", rows[2].ms / saved_ms, "1", SCORING_SHARE, False)
        rows[2] = replace(rows[2], targets=(share,))
    yield rows[2]
    rows[3] = a_token(rows[3], 16)
    if rows[3].ms and rows[0].ms:
        rows[3] = replace(rows[3], targets=(Target("of attention", rows[3].ms / rows[0].ms, "1", APPEND_SHARE, False),))
    yield rows[3]


def variants(context: Context) -> Iterator[Row]:
    """Tiles, warps, stages and splits, a few at a time with the default among them, for the scheduler's fit."""
    few = max(1, context.batch // 8)
    loads = {
        f"{context.batch} x {context.batch_tokens // 4}": [context.batch_tokens // 4 or 64] * context.batch,
        f"8 x {context.batch_tokens // 4}": [max(64, context.batch_tokens // 4)] * 8,
        "ragged": [context.batch_tokens] * few + [max(64, context.batch_tokens // 32)] * (context.batch - few),
    }
    loads = {name: [max(64, n) for n in lengths] for name, lengths in loads.items()}
    if context.dry:
        loads = {"ragged": loads["ragged"]}
    schedules = [Schedule(block_tokens=b, num_warps=w, num_stages=s) for b, w, s in context.tiles]
    schedules += [Schedule(split_tokens=n) for n in (SPLITS[:1] if context.dry else SPLITS)]
    for shape, lengths in loads.items():
        streams = context.streams(lengths, 9)
        for formats in ((context.compute, "proto"),) if context.dry else FITTED:
            paged = make_paged(streams, formats, 16, context.cold_bytes, share=KEPT)
            for start in range(1, len(schedules), 3):
                some = [schedules[0], *schedules[start : start + 3]]
                contenders = [
                    context.over(Variant("triton", replace(x, threads=1)).describe(), streams, paged, schedule=x)
                    for x in some
                ]
                times = context.turns(contenders)
                for each in contenders:
                    yield to_row(f"variants {'+'.join(formats)} {shape}", each, times[each.name], 0)
