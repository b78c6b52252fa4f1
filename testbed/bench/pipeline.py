"""Do moves hide behind compute? A layer pipeline through the mover beside its closed form.

L layers, each of which reads pages that a transfer of length x brings and then computes for c. All transfers are asked
for at the start, the worker serves them by layer, so the first is exposed and then the longer of the two rules:

    T = x + L max(c, x) - max(c, x) + c = L max(c, x) + min(c, x)

Compute is a real kernel, the same number of calls in every layer; its length and the transfer's are those of runs of
their own, that take turns with the pipeline. Transfers come from a store that sleeps to a stated bandwidth (so that
x / c is exact and a busy machine bends it least), and from another pool in memory. There both sides contend for the
machine, which the closed form knows nothing of: its rows have no bound, those of the stall do. Rows are medians over
rounds of ratios, each within one round.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.pages import PageFormat, page_format
from testbed.bench.base import Options, Row, at_most, within
from testbed.cache.mover import Job, LaneName, Mover, Priority
from testbed.cache.pool import SlabPool
from testbed.cache.transfer import Source

CASE = "pipeline"
RATIOS = (0.25, 0.5, 0.9, 1.0, 1.5, 3.0)
LAYERS, TRANSFER_S, ROUNDS = 24, 4e-3, 9
QUICK_LAYERS, QUICK_ROUNDS = 3, 1
SLOW_PAGES, POOL_PAGES = 32, 2048  # a layer's transfer: 128 KiB and 8 MiB of bf16 pages of 16 tokens
SLAB_PAGES = 128
CLOSED_FORM, EXPOSED = (0.9, 1.1), 0.05


class SlowStore:
    """Pages in memory whose reads take as long as a stated bandwidth says; the reader sleeps, the processor is free.

    Args:
        fmt: of the pages.
        pages: held.
        bytes_per_s: of reads; one begun early pays for one that ended late.
    """

    def __init__(self, fmt: PageFormat, pages: int, bytes_per_s: float) -> None:
        self.fmt, self.bytes_per_s = fmt, bytes_per_s
        self.blobs = torch.randint(0, 256, (pages, fmt.page_bytes), dtype=torch.uint8)
        self._free_s = 0.0

    def read(self, slots: Tensor) -> Tensor:
        """Blobs at slots [M]."""
        now = time.perf_counter()
        # A sleep that overran is made good, an idle store saves nothing up.
        begun = self._free_s if now - self._free_s < 1e-3 else now
        self._free_s = begun + len(slots) * self.fmt.page_bytes / self.bytes_per_s
        blobs = self.blobs[slots]
        time.sleep(max(0.0, self._free_s - time.perf_counter()))
        return blobs


@dataclass(frozen=True)
class Timed:
    """One round: seconds of the pipeline, of a layer's compute and of a layer's transfer alone; seconds waited."""

    total_s: float
    compute_s: float
    transfer_s: float
    waited_s: float

    def of_closed_form(self, layers: int) -> float:
        """T over L max(c, x) + min(c, x)."""
        c, x = self.compute_s, self.transfer_s
        return self.total_s / (layers * max(c, x) + min(c, x))


class Pipeline:
    """L layers over one source and one target.

    Args:
        source: where pages come from.
        target: where they go; both hold L * pages.
        layers: L.
        pages: a layer's.
    """

    def __init__(self, source: Source, target: SlabPool, layers: int, pages: int) -> None:
        self.source, self.target, self.layers = source, target, layers
        self.slots = torch.arange(layers * pages).view(layers, pages)
        self.places = torch.randperm(layers * pages, generator=torch.Generator().manual_seed(0)).view(layers, pages)
        self.weight, self.state = torch.randn(256, 256), torch.randn(16, 256)
        self.calls = 1
        self.mover = Mover()

    def compute(self) -> None:
        """A layer's work."""
        for _ in range(self.calls):
            torch.mm(self.state, self.weight)

    def set_compute(self, seconds: float) -> None:
        """As many calls as take about that long."""
        self.calls = 64
        best = min(self.time_compute(1) for _ in range(5))
        self.calls = max(1, round(64 * seconds / best))

    def time_compute(self, layers: int) -> float:
        """Seconds of a layer's compute alone."""
        started = time.perf_counter()
        for _ in range(layers):
            self.compute()
        return (time.perf_counter() - started) / layers

    def submit(self) -> list[Job]:
        """All layers' transfers."""
        lane = LaneName.FILE if isinstance(self.source, SlowStore) else LaneName.MEMORY
        jobs = [
            Job(Priority.PREFETCH, layer, self.source, self.slots[layer], self.target, self.places[layer], lane=lane)
            for layer in range(self.layers)
        ]
        for job in jobs:
            self.mover.submit(job)
        return jobs

    def time_transfers(self) -> float:
        """Seconds of a layer's transfer alone."""
        started = time.perf_counter()
        self.submit()
        self.mover.drain()
        return (time.perf_counter() - started) / self.layers

    def round(self) -> Timed:
        """Transfers alone, compute alone, both together, compute alone again: a machine's speed drifts."""
        transfer_s, before_s = self.time_transfers(), self.time_compute(self.layers)
        started, waited = time.perf_counter(), 0.0
        for job in self.submit():
            waited += self.mover.wait([job])
            self.compute()
        total_s = time.perf_counter() - started
        return Timed(total_s, (before_s + self.time_compute(self.layers)) / 2, transfer_s, waited)


def run(options: Options) -> list[Row]:
    """The closed form and the exposed stall, for every ratio and both kinds of source."""
    fmt = page_format("bf16", 16, 64)
    layers, rounds = (QUICK_LAYERS, QUICK_ROUNDS) if options.quick else (LAYERS, ROUNDS)
    rows: list[Row] = []
    target = _pool(fmt, layers * POOL_PAGES)
    store = SlowStore(fmt, layers * SLOW_PAGES, SLOW_PAGES * fmt.page_bytes / TRANSFER_S)
    slow = Pipeline(store, target, layers, SLOW_PAGES)
    rows += _measure("slow store", slow, TRANSFER_S, rounds)
    memory = Pipeline(_pool(fmt, layers * POOL_PAGES), target, layers, POOL_PAGES)
    rows += _measure("another pool", memory, min(memory.time_transfers() for _ in range(5)), rounds)
    for one in (slow, memory):
        one.mover.close()
    return rows


def _pool(fmt: PageFormat, pages: int) -> SlabPool:
    """A full pool of some bytes."""
    pool = SlabPool(fmt, SLAB_PAGES, torch.device("cpu"))
    slots = pool.allocate(pages)
    pool.write(slots, torch.randint(0, 256, (len(slots), fmt.page_bytes), dtype=torch.uint8))
    return pool


def _measure(name: str, pipeline: Pipeline, transfer_s: float, rounds: int) -> list[Row]:
    """Rounds over all ratios in turns; a row of the closed form each, of the stall where compute covers transfers."""
    found: dict[float, list[Timed]] = {ratio: [] for ratio in RATIOS}
    calls = {}
    for ratio in RATIOS:
        pipeline.set_compute(transfer_s / ratio)
        calls[ratio] = pipeline.calls
    for _ in range(rounds):
        for ratio in RATIOS:
            pipeline.calls = calls[ratio]
            found[ratio].append(pipeline.round())
    rows = []
    for ratio, timed in found.items():
        label = f"{name}, x/c = {ratio:g}"
        value = statistics.median(one.of_closed_form(pipeline.layers) for one in timed)
        what = f"{label}: T over closed form"
        judged = isinstance(pipeline.source, SlowStore)
        rows.append(within(CASE, what, value, *CLOSED_FORM) if judged else Row(CASE, what, value))
        if ratio < 1:
            stall = statistics.median(one.waited_s / one.total_s for one in timed)
            rows.append(at_most(CASE, f"{label}: exposed stall of the step", stall, EXPOSED))
    return rows
