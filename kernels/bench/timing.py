"""Contenders that take turns: noise hits all of them, inputs are never in a cache, the shortest call counts.

On the host every call is timed by itself. On a GPU a contender's calls over all copies of its inputs are captured in
one graph and the graph is timed by events, so that neither the host nor a warm L2 is in the number.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kernels.bench.record import Row
from kernels.state import Partial

CALLS_A_TURN = 3  # the first brings the contender's own code back into the caches
SLOW_MS = 50.0  # a contender slower than this gets one call a turn, and fewer turns
SLOW_TURNS = 4


@dataclass
class Contender:
    """Something to time.

    Attributes:
        name: as in the table.
        calls: one a copy of the inputs, of the same work; each returns attention rows (see `rows_of`), or nothing.
        read_bytes: what a call must read.
        turns: which copy is next; contenders that read the same memory share it, so that none finds what another
            just read.
        note: for the table.
    """

    name: str
    calls: Sequence[Callable[[], object]]
    read_bytes: int
    turns: Iterator[int] = field(default_factory=itertools.count)
    note: str = ""

    def __call__(self) -> object:
        """The call on the next copy."""
        return self.calls[next(self.turns) % len(self.calls)]()


@dataclass(frozen=True)
class Times:
    """Milliseconds of each timed call, the least processor time, the first result or why there is none."""

    each_ms: tuple[float, ...]
    cpu_ms: float | None = None
    result: object = None
    failure: str = ""
    note: str = ""

    @property
    def best_ms(self) -> float | None:
        """The shortest call."""
        return min(self.each_ms) if self.each_ms else None


def take_turns(contenders: Sequence[Contender], rounds: int, limit_s: float, device: str = "cpu") -> dict[str, Times]:
    """Times contenders in turns until all rounds are done or the time is up, two rounds at least.

    A contender that raises is out, with its reason; rivals come from libraries that may not serve this machine. With no
    rounds at all the warm-up counts, the second call of each.
    """
    runners: dict[str, _Runner] = {}
    times: dict[str, list[float]] = {}
    found: dict[str, Times] = {}
    for each in contenders:
        if each.name in times:
            raise ValueError(f"contender {each.name!r} twice: names must differ")
        times[each.name] = []
        try:
            result = each.calls[0]()
            runners[each.name], note = _device_runner(each) if device == "cuda" else (_HostRunner(each), "")
            found[each.name] = Times((), None, result, note=note)
        except Exception as error:  # whatever a library of others raises
            found[each.name] = Times((), failure=f"{type(error).__name__}: {str(error).strip()[:300]}")
    end = time.monotonic() + limit_s
    for turn in range(rounds):
        if turn > 1 and time.monotonic() > end:
            break
        for name, runner in runners.items():
            slow = min([runner.warm_ms, *times[name]]) > SLOW_MS
            if not slow or turn < SLOW_TURNS:
                times[name] += [runner.time_ms() for _ in range(1 if slow else CALLS_A_TURN)]
    for name, runner in runners.items():
        times[name] = times[name] or [runner.warm_ms]
        if isinstance(runner, _HostRunner):
            found[name] = replace(found[name], cpu_ms=runner.cpu_ms)
    return {name: replace(one, each_ms=tuple(times[name])) for name, one in found.items()}


class _HostRunner:
    """Times single calls by the wall clock."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.warm_ms, self.cpu_ms = 0.0, math.inf
        self.warm_ms = self.time_ms()

    def time_ms(self) -> float:
        """One call; its processor time is noted aside."""
        started, cpu_started = time.perf_counter(), time.process_time()
        self.contender()
        cpu_ms, ms = 1e3 * (time.process_time() - cpu_started), 1e3 * (time.perf_counter() - started)
        self.cpu_ms = min(self.cpu_ms, cpu_ms)
        return ms


class _EventRunner:
    """Times a pass over all copies by events, launched one by one."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.warm_ms = 0.0
        self.warm_ms = self.time_ms()

    def launch(self) -> None:
        """All copies once."""
        for call in self.contender.calls:
            call()

    def time_ms(self) -> float:
        """One pass, over the number of calls in it."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.launch()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / len(self.contender.calls)


class _GraphRunner(_EventRunner):
    """Times a graph of one call a copy, by events."""

    def __init__(self, contender: Contender) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # as torch asks for: warmed up beside the stream that captures
            for call in contender.calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.kept = [call() for call in contender.calls]
        super().__init__(contender)

    def launch(self) -> None:
        """One replay."""
        self.graph.replay()


def _device_runner(contender: Contender) -> tuple[_EventRunner, str]:
    """A graph of the contender, or where it can't be captured its launches, with a note that says why."""
    try:
        return _GraphRunner(contender), ""
    except RuntimeError as error:
        return _EventRunner(contender), f"not in a graph: {str(error).strip()[:120]}"


_Runner = _HostRunner | _EventRunner


def rows_of(result: object, head_dim: int) -> Tensor:
    """Attention rows [S * G, D] float64 on the host, of whatever shape a contender returns them in."""
    if isinstance(result, Partial):
        result = result.out
    if isinstance(result, (list, tuple)):
        return torch.cat([rows_of(part, head_dim) for part in result])
    assert isinstance(result, Tensor)
    return result.detach().reshape(-1, head_dim).double().cpu()


def relative_error(result: object, truth: Tensor) -> float:
    """|out - truth| / |truth| over all rows; NaN where a row is NaN."""
    got = rows_of(result, truth.shape[-1])
    return float((got - truth).norm() / truth.norm())


def to_row(
    case: str,
    contender: Contender,
    times: Times,
    threads: int,
    truth: Tensor | None = None,
    read_gbps: float | None = None,
    sdpa_ms: float | None = None,
) -> Row:
    """The row of one contender.

    Args:
        case: its name.
        contender: who ran.
        times: what was found.
        threads: of the host.
        truth: [S * G, D] float64, what the first copy's call should return.
        read_gbps: what a plain read of memory reached in the same turns.
        sdpa_ms: what torch's packed SDPA took in the same turns.
    """
    best_ms = times.best_ms
    if best_ms is None:
        return Row(case, contender.name, threads, note=f"not run: {times.failure}")
    gbps = contender.read_bytes / best_ms / 1e6
    return Row(
        case,
        contender.name,
        threads,
        ms=best_ms,
        median_ms=statistics.median(times.each_ms),
        cpu_ms=times.cpu_ms,
        calls=len(times.each_ms),
        read_bytes=contender.read_bytes or None,
        of_read=gbps / read_gbps if read_gbps and contender.read_bytes else None,
        over_sdpa=sdpa_ms / best_ms if sdpa_ms else None,
        error=None if truth is None else relative_error(times.result, truth),
        note="; ".join(x for x in (contender.note, times.note) if x),
    )
