"""A job of the mover: pages that go from one store to another, how far it is, and the order jobs are served in."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import Enum, IntEnum

import torch
from torch import Tensor

from testbed.cache.transfer import Source, Target


class Priority(IntEnum):
    """Who goes first."""

    DEMAND = 0  # attention needs it now
    PREFETCH = 1  # it may be needed soon
    DEMOTE = 2  # it makes room


class State(Enum):
    """How far a job is."""

    QUEUED = "queued"  # nothing of it was begun
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # see `Job.error`, `Job.arrived`
    CANCELLED = "cancelled"  # nothing of it was copied


class LaneName(Enum):
    """Which workers serve a job, so that a slow disk holds up no copy in memory."""

    MEMORY = "memory"
    FILE = "file"


@dataclass(eq=False)
class Job:
    """Pages to copy. The mover writes the fields from `state` on; what they say while it runs may be stale.

    Attributes:
        priority: as it is now; see `Mover.escalate`.
        layer: whose attention reads the pages; jobs of one priority go by layer.
        source, source_slots: [M] int64, kept until the job is done.
        target, target_slots: [M] int64, reserved before it is submitted.
        link: for `Mover.traffic`, e.g. "L2>L1"; "" = not counted there.
        lane: None = by the stores, files to the file lane.
        state, error: how it ended.
        bytes: copied so far, as the target stores them.
        busy_s: workers' time spent on it.
        submitted_s, started_s, finished_s: by `time.perf_counter`.
        asked: its priority when it was submitted.
        ready: CUDA: what the copies must wait for.
        events: CUDA: pass when the pages are on the device.
    """

    priority: Priority
    layer: int
    source: Source
    source_slots: Tensor
    target: Target
    target_slots: Tensor
    link: str = ""
    lane: LaneName | None = None
    state: State = field(default=State.QUEUED, init=False)
    error: Exception | None = field(default=None, init=False)
    bytes: int = field(default=0, init=False)
    busy_s: float = field(default=0.0, init=False)
    submitted_s: float | None = field(default=None, init=False)
    started_s: float | None = field(default=None, init=False)
    finished_s: float | None = field(default=None, init=False)
    asked: Priority = field(init=False)
    ready: torch.cuda.Event | None = field(default=None, init=False, repr=False)
    events: list[torch.cuda.Event] = field(default_factory=list, init=False, repr=False)
    waiting: Tensor = field(init=False, repr=False)  # [m] int64, rows of pages that were not begun
    running: int = field(default=0, init=False, repr=False)  # chunks under way
    _some: Tensor | None = field(default=None, init=False, repr=False)  # [M] bool, if pages came in several calls
    _all: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuses what is no list of moves."""
        self.priority = self.asked = Priority(self.priority)
        for name in ("source_slots", "target_slots"):
            slots = getattr(self, name)
            if slots.dtype != torch.int64 or slots.dim() != 1 or slots.shape != self.source_slots.shape:
                raise ValueError(
                    f"job.{name} {slots.dtype} {tuple(slots.shape)}: must be int64 [M], one M for source and target"
                )
        self.waiting = torch.arange(len(self.source_slots))

    @property
    def pages(self) -> int:
        """M, with those that were cancelled."""
        return len(self.source_slots)

    def slots(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Slots of rows [m], of source and target."""
        if len(rows) == self.pages:
            return self.source_slots, self.target_slots
        where = _compact(rows)
        return self.source_slots[where], self.target_slots[where]

    def arrive(self, rows: Tensor) -> None:
        """Notes that rows [m] were copied."""
        if len(rows) == self.pages:
            self._all = True  # no tensor: a worker that calls torch hands the interpreter's lock to and fro
        elif len(rows):
            if self._some is None:
                self._some = torch.zeros(self.pages, dtype=torch.bool)
            self._some[_compact(rows)] = True

    @property
    def arrived(self) -> Tensor:
        """[M] bool: the pages that were copied; of a failed job they are right all the same."""
        if self._some is not None:
            return self._some
        return torch.full((self.pages,), self._all)

    @property
    def ended(self) -> bool:
        """Whether the mover will not touch it again; beside a GPU its last copies may be on their way."""
        return self.state in (State.DONE, State.FAILED, State.CANCELLED)

    @property
    def done(self) -> bool:
        """Whether it ended, well or not, and no copy of it is on its way."""
        return self.ended and all(event.query() for event in self.events)

    @property
    def order(self) -> tuple[int, int]:
        """Jobs with less go first."""
        return self.priority, self.layer

    def follows(self, other: Job) -> bool:
        """Whether both can be copied in one call: their stores and urgency are the same."""
        return self.source is other.source and self.target is other.target and self.order == other.order


def _compact(rows: Tensor) -> slice | Tensor:
    """Ascending rows [m] as a slice if they are consecutive, which spares an index."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first == len(rows) - 1 else rows


@dataclass(eq=False)
class Chunk:
    """Rows of jobs that one worker copies in one call."""

    parts: list[tuple[Job, Tensor]]


class JobQueue:
    """Jobs that have pages to begin, best first; not locked.

    A job may lie in it several times after it was escalated: entries that no longer tell its priority are passed over.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Job]] = []
        self._count = 0

    def push(self, job: Job) -> None:
        """Adds a job by its present priority; the order of pushing decides between equals."""
        self._count += 1
        heapq.heappush(self._heap, (*job.order, self._count, job))

    def take(self, chunk_bytes: int) -> Chunk | None:
        """Rows of the best job and, if it ends there, of jobs that follow it alike; None if there is nothing."""
        first = self._best()
        if first is None:
            return None
        room = max(1, chunk_bytes // max(first.source.fmt.page_bytes, first.target.fmt.page_bytes))
        chunk, job = Chunk([]), first
        while job is not None and room and (job is first or job.follows(first)):
            rows = job.waiting[:room]
            chunk.parts.append((job, rows))
            job.waiting, room = job.waiting[len(rows) :], room - len(rows)
            job.running += 1
            job = self._best()
        return chunk

    def _best(self) -> Job | None:
        while self._heap:
            priority, layer, _, job = self._heap[0]
            if len(job.waiting) and job.order == (priority, layer):
                return job
            heapq.heappop(self._heap)
        return None

    def clear(self) -> None:
        """Forgets all jobs."""
        self._heap.clear()
