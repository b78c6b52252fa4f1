"""One node of the twin: a compute stream, a duplex host link and a disk, replaying one log's decode steps.

A step waits for the transfers that the step before it started beside its compute, then starts its own, then
computes layer by layer; layer l waits for the pages that it demands. With a link to itself, layers that are all
alike make a flow shop whose length is known, sum of stages + (layers - 1) x longest stage (for one load x and
one compute c: L max(c, x) + min(c, x)), so such a step is one event. `coalesce=False` simulates every layer.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from math import ceil

from simpy import AllOf, Environment, Event

from testbed.sim.hardware import Hardware
from testbed.sim.links import DuplexLink, FairLink
from testbed.sim.work import DEVICE, Transfer, Work

Process = Generator[Event, object, None]
Hop = tuple[FairLink, str]  # a link and its name
MAX_CHUNKS = 64  # of one transfer over two hops: bounds the events of a step


@dataclass(frozen=True)
class Row:
    """One bar of the timeline: what `track` did from `start_us` for `us`."""

    track: str
    name: str
    start_us: float
    us: float
    step: int
    bytes: int = 0


@dataclass(frozen=True)
class StepTime:
    """One replayed step: its work and the time that it waited for moves.

    Attributes:
        move_keys: hardware numbers behind the waiting.
    """

    work: Work
    exposed_us: float
    move_keys: frozenset[str]


class Gate:
    """Counts the pieces that passed a hop; makes an event only for one who really has to wait."""

    def __init__(self, env: Environment) -> None:
        self.passed = 0
        self._env = env
        self._waiting: Event | None = None

    def let_pass(self) -> None:
        """One more piece is through."""
        self.passed += 1
        if self._waiting:
            waiting, self._waiting = self._waiting, None
            waiting.succeed()

    def wait(self) -> Event:
        """The next piece's event, for the one process behind the gate."""
        self._waiting = Event(self._env)
        return self._waiting


class Node:
    """Replays steps; `rows`, `times` and the links' counters hold what happened."""

    def __init__(self, env: Environment, hardware: Hardware, layers: int, coalesce: bool = True) -> None:
        self.env = env
        self.hardware = hardware
        self.layers = layers
        self.coalesce = coalesce
        self.host = DuplexLink(
            env, hardware["host_read"], hardware["host_write"], hardware["host_both"], hardware["host_setup"]
        )
        self.disk_down = FairLink(env, hardware["disk_read"], hardware["disk_setup"])
        self.disk_up = FairLink(env, hardware["disk_write"], hardware["disk_setup"])
        self.rows: list[Row] = []
        self.times: list[StepTime] = []

    def links(self) -> dict[str, FairLink]:
        """Name -> link."""
        return {
            "host_read": self.host.down,
            "host_write": self.host.up,
            "disk_read": self.disk_down,
            "disk_write": self.disk_up,
        }

    def replay(self, works: Sequence[Work]) -> Process:
        """The process of one sequence: all its decode steps, then the drain of what still travels."""
        running: list[Event] = []
        earlier: tuple[Transfer, ...] = ()
        for work in works:
            start = self.env.now
            if running:
                yield AllOf(self.env, running)
            waited = self.env.now - start
            step = work.step.step
            running = []
            if self.hardware.overlap:
                running = [self.env.process(self._background(move, step)) for move in work.background]
                yield from self._overlapped(work, alone=not running)
            else:
                yield from self._serial(work)
            took = self.env.now - start - waited
            if waited:
                self.rows.append(Row("compute", "wait for moves", start, waited, step))
            self.rows.append(Row("compute", "decode step", start + waited, took, step))
            keys = self._move_keys(work, earlier)
            self.times.append(StepTime(work, waited + max(0.0, took - work.compute_us), keys))
            earlier = work.background
        if running:
            yield from self._drain(running)

    def _drain(self, running: list[Event]) -> Process:
        """What the last step started is waited for too, or the last step would move bytes for nothing."""
        start, last = self.env.now, self.times[-1]
        yield AllOf(self.env, running)
        us = self.env.now - start
        if us:
            self.rows.append(Row("compute", "drain", start, us, last.work.step.step))
            self.times[-1] = StepTime(last.work, last.exposed_us + us, last.move_keys)

    def _move_keys(self, work: Work, earlier: tuple[Transfer, ...]) -> frozenset[str]:
        """Hardware numbers of every link that the step may have waited for."""
        demand = (Transfer(tier, "L1", size) for tier, size in work.demand_bytes.items() if size)
        keys = set(work.repack.keys if work.repack.us else ())
        for move in (*demand, *work.background, *earlier):
            hops = self._route(move)
            keys.update(name for _, name in hops)
            keys.update(f"{name.split('_')[0]}_setup" for _, name in hops)
            keys.update({"host_both"} & {f"{name.split('_')[0]}_both" for _, name in hops})
            keys.update({"chunk"} if len(hops) > 1 else ())
        return frozenset(keys)

    def _overlapped(self, work: Work, alone: bool) -> Process:
        if work.repack.us:
            yield self.env.timeout(work.repack.us)
        demand = {tier: size for tier, size in work.demand_bytes.items() if size}
        if not demand:
            yield self.env.timeout(work.compute_us)
        elif self.coalesce and alone and len(demand) == 1:
            ((tier, size),) = demand.items()
            yield self.env.timeout(self._flow_shop(tier, size, work))
        else:
            yield from self._layer_by_layer(demand, work)

    def _flow_shop(self, tier: str, size: int, work: Work) -> float:
        """Length of a step whose demand has the links to itself; books the bytes."""
        stages = [work.compute_us / self.layers]
        for link, name in self._hops(tier):
            stages.append(link.setup_us + size / self.layers / link.rate_bytes_per_us)
            link.account(size, size / link.rate_bytes_per_us)
            us = stages[-1] * self.layers
            self.rows.append(Row(name, f"demand {tier}", self.env.now, us, work.step.step, size))
        return sum(stages) + (self.layers - 1) * max(stages)

    def _layer_by_layer(self, demand: dict[str, int], work: Work) -> Process:
        gates = []
        for tier, size in demand.items():
            gate = Gate(self.env)
            name = f"demand {tier}"
            self.env.process(self._carry(self._hops(tier), size, self.layers, gate, work.step.step, name))
            gates.append(gate)
        layer_us = work.compute_us / self.layers
        for layer in range(self.layers):
            for gate in gates:
                while gate.passed <= layer:
                    yield gate.wait()
            yield self.env.timeout(layer_us)

    def _hops(self, tier: str) -> list[Hop]:
        """Links from a tier to the device, in order, with their names."""
        host = (self.host.down, "host_read")
        return [host] if tier == "L2" else [(self.disk_down, "disk_read"), host]

    def _carry(self, hops: list[Hop], size: int, pieces: int, out: Gate, step: int, name: str) -> Process:
        """Carries size bytes in equal pieces over the hops, each hop one piece at a time, then through a gate."""
        sizes = _split(size, pieces)
        before: Gate | None = None
        for hop in hops[:-1]:
            behind = Gate(self.env)
            self.env.process(self._cross(hop, sizes, before, behind, step, name))
            before = behind
        yield from self._cross(hops[-1], sizes, before, out, step, name)

    def _cross(self, hop: Hop, sizes: list[int], before: Gate | None, behind: Gate, step: int, name: str) -> Process:
        link, track = hop
        start: float | None = None
        for index, size in enumerate(sizes):
            while before and before.passed <= index:
                yield before.wait()
            start = self.env.now if start is None else start
            yield link.transfer(size)
            behind.let_pass()
        if start is not None:
            self.rows.append(Row(track, name, start, self.env.now - start, step, sum(sizes)))

    def _background(self, move: Transfer, step: int) -> Process:
        """A prefetch or demotion: one message a hop, in chunks where there are two hops."""
        hops = self._route(move)
        chunks = 1 if len(hops) == 1 else min(MAX_CHUNKS, ceil(move.bytes / self.hardware["chunk"]))
        name = f"{move.source} to {move.target}"
        yield from self._carry(hops, move.bytes, chunks, Gate(self.env), step, name)

    def _route(self, move: Transfer) -> list[Hop]:
        up, disk_up = (self.host.up, "host_write"), (self.disk_up, "disk_write")
        if move.target in DEVICE:
            return self._hops(move.source)
        if move.source in DEVICE:
            return [up] if move.target == "L2" else [up, disk_up]
        return [disk_up] if move.target == "L3" else [(self.disk_down, "disk_read")]

    def _serial(self, work: Work) -> Process:
        """Where the same cores copy and compute: every move, then the step."""
        if work.repack.us:
            yield self.env.timeout(work.repack.us)
        demand = [Transfer(tier, "L1", size) for tier, size in work.demand_bytes.items() if size]
        for move in (*demand, *work.background):
            yield from self._background(move, work.step.step)
        yield self.env.timeout(work.compute_us)


def _split(size: int, pieces: int) -> list[int]:
    """Whole bytes in almost equal pieces that add up."""
    return [size * (index + 1) // pieces - size * index // pieces for index in range(pieces)]
