"""A lane of the mover: a queue of jobs and the worker threads that serve it, chunk by chunk.

Everything the mover and its workers share is behind one lock, held only to take a chunk and to book it; copies run
without it. Workers know the lane, not the mover, so that a forgotten mover can be collected and ends its threads.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import dataclass, field

import torch

from testbed.cache.jobs import Chunk, Job, JobQueue, State
from testbed.cache.pool import CacheError
from testbed.cache.traffic import Traffic
from testbed.cache.transfer import Staging, transfer

LOOK_S = 1.0  # how often a waiting thread looks whether the workers live


class MoverError(CacheError):
    """The mover can't go on: a worker died, or it was closed."""


@dataclass
class Shared:
    """What lanes and mover share.

    Attributes:
        device: of L0 and L1.
        traffic: by link.
        pid: of the process that the locks and workers are of.
        lock: of everything here and of all jobs' fields.
        ended: notified when a job ends or a worker dies.
        unreported: jobs that ended since they were last asked for, as far as somebody still holds them.
        closing: workers end after their chunk.
        failure: of a worker that died.
    """

    device: torch.device
    traffic: Traffic = field(default_factory=Traffic)
    unreported: weakref.WeakValueDictionary[int, Job] = field(default_factory=weakref.WeakValueDictionary)
    pid: int = field(init=False)
    closing: bool = False
    failure: BaseException | None = None
    lock: threading.RLock = field(init=False)
    ended: threading.Condition = field(init=False)

    def __post_init__(self) -> None:
        """Makes the locks."""
        self.renew()

    def renew(self) -> None:
        """Locks of this process: those a fork copied may be held by a thread that it did not copy."""
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.ended = threading.Condition(self.lock)

    def end(self, job: Job, state: State) -> None:
        """A job ends; the lock is held."""
        job.finished_s = time.perf_counter()
        job.state = state
        self.unreported[id(job)] = job
        self.ended.notify_all()


class Lane:
    """Jobs and their workers.

    Args:
        name: for threads and messages.
        workers: how many; with two, one reads a chunk while the other places or writes the one before. They read in
            turns, so that the urgent has the disk for itself and demands do not wait for writes.
        chunk_bytes: most that is copied before the best job is looked for again.
        shared: with the mover.
    """

    def __init__(self, name: str, workers: int, chunk_bytes: int, shared: Shared) -> None:
        self.name, self.workers, self.chunk_bytes, self.shared = name, workers, chunk_bytes, shared
        self.queue = JobQueue()
        self.open: dict[int, Job] = {}  # jobs that have not ended, by id
        self.begun: list[Chunk] = []
        self.threads: list[threading.Thread] = []
        self.work = threading.Condition(shared.lock)
        self.turn = threading.Lock()  # to choose a chunk and read it

    def submit(self, job: Job) -> None:
        """Takes a job in; the lock is held."""
        self._start()
        self.open[id(job)] = job
        self.queue.push(job)
        self.work.notify()

    def _start(self) -> None:
        """Threads are made when they are first needed."""
        if self.threads:
            return
        openmp_threads = torch.get_num_threads()
        for index in range(self.workers):
            ready = threading.Event()
            thread = threading.Thread(target=self._run, args=(ready,), name=f"mover-{self.name}-{index}", daemon=True)
            thread.start()
            self.threads.append(thread)
            ready.wait()
        torch.set_num_threads(openmp_threads)  # what a worker set is also what threads of others would begin with

    @property
    def dead(self) -> bool:
        """Whether a worker is gone that should be there."""
        return not self.shared.closing and any(not thread.is_alive() for thread in self.threads)

    # --- the worker's side -------------------------------------------------------------------------------------

    def _run(self, ready: threading.Event) -> None:
        try:
            try:
                # OpenMP keeps the number by thread: this one gets no team of its own beside the model's. Asked first,
                # since a thread's first question sets its number to everyone's.
                torch.get_num_threads()
                torch.set_num_threads(1)
            finally:
                ready.set()
            with torch.inference_mode():  # a thread has its own; the caches' tensors may have been made under it
                self._serve(Staging(self.shared.device, self.chunk_bytes), _Turn(self.turn))
        except BaseException as error:
            self._die(error)

    def _serve(self, staging: Staging, turn: _Turn) -> None:
        """Chunk after chunk until the lane closes."""
        staging.read_done = turn.give
        while True:
            turn.take()
            try:
                chunk = self._next()
                if chunk is None:
                    return
                self.copy(chunk, staging)
            finally:
                turn.give()

    def _next(self) -> Chunk | None:
        """The next chunk once there is one; None when the lane closes."""
        with self.shared.lock:
            while not self.shared.closing:
                chunk = self.queue.take(self.chunk_bytes)
                if chunk is not None:
                    self.begun.append(chunk)
                    now = time.perf_counter()
                    for job, _ in chunk.parts:
                        job.state = State.RUNNING
                        job.started_s = now if job.started_s is None else job.started_s
                    return chunk
                self.work.wait()
        return None

    def copy(self, chunk: Chunk, staging: Staging) -> None:
        """Copies a chunk and books it; errors of stores go to the jobs they belong to."""
        started = time.perf_counter()
        try:
            outcomes = _copy_parts(chunk, staging)
        except BaseException:
            with self.shared.lock:
                self.begun.remove(chunk)
            raise
        seconds = time.perf_counter() - started
        with self.shared.lock:
            self.begun.remove(chunk)
            total = sum(len(rows) for _, rows in chunk.parts)
            for (job, rows), (arrived, error) in zip(chunk.parts, outcomes, strict=True):
                self._book(job, arrived, seconds * len(rows) / total, error)

    def _book(self, job: Job, arrived: torch.Tensor, seconds: float, error: Exception | None) -> None:
        """Notes what one call did for a job and ends it if that was all; the lock is held."""
        job.running -= 1
        job.busy_s += seconds
        job.arrive(arrived)
        moved_bytes = len(arrived) * job.target.fmt.page_bytes
        job.bytes += moved_bytes
        if job.link:
            self.shared.traffic.moved(job.link, len(arrived), moved_bytes, seconds)
        if error is not None:
            job.error = job.error or error
            if not _names_pages(error):
                job.waiting = job.waiting[:0]
        self.settle(job)

    def settle(self, job: Job) -> None:
        """Ends a job of which nothing is left to do; the lock is held."""
        if not job.running and not len(job.waiting) and not job.ended:
            self.open.pop(id(job), None)
            self.shared.end(job, State.DONE if job.error is None else State.FAILED)

    def _die(self, error: BaseException) -> None:
        """The worker can't go on: all jobs of the lane fail, the next call of the mover says why."""
        with self.shared.lock:
            self.shared.failure = self.shared.failure or error
            self.fail_all(MoverError(f"a worker of the mover died: {type(error).__name__}: {error}"))

    # --- the end -------------------------------------------------------------------------------------------------

    def fail_all(self, error: Exception) -> None:
        """Every open job fails; the lock is held."""
        for job in list(self.open.values()):
            job.error, job.waiting = job.error or error, job.waiting[:0]
            self.open.pop(id(job), None)
            self.shared.end(job, State.FAILED)
        self.queue.clear()

    def adopt(self) -> None:
        """After a fork: this process has no workers, so what they had begun is to be done again."""
        self.threads, self.work, self.turn = [], threading.Condition(self.shared.lock), threading.Lock()
        for chunk in self.begun:
            for job, rows in chunk.parts:
                job.waiting = torch.cat((rows, job.waiting)).unique()
        self.begun = []
        self.queue.clear()
        for job in list(self.open.values()):
            job.running = 0
            if job.ended:
                self.open.pop(id(job), None)
                self.shared.unreported[id(job)] = job
            elif len(job.waiting):
                self.submit(job)
            else:
                self.settle(job)


class _Turn:
    """A worker's hold on its lane's turn."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock, self._held = lock, False

    def take(self) -> None:
        """Waits for it."""
        self._lock.acquire()
        self._held = True

    def give(self) -> None:
        """Lets the next worker choose; a second time does nothing."""
        if self._held:
            self._held = False
            self._lock.release()


def stop(shared: Shared, lanes: tuple[Lane, ...], patience_s: float) -> bool:
    """Ends the workers after their chunk: whether all of them did in time."""
    shared.closing = True
    if not any(lane.threads for lane in lanes):
        return True
    with shared.lock:
        for lane in lanes:
            lane.work.notify_all()
    end = time.monotonic() + patience_s
    for lane in lanes:
        for thread in lane.threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for lane in lanes for thread in lane.threads)


Outcome = tuple[torch.Tensor, Exception | None]  # rows that arrived, what went wrong


def _copy_parts(chunk: Chunk, staging: Staging) -> list[Outcome]:
    """Copies all parts in one call; if that fails each by itself, so that an error stays with its job."""
    if len(chunk.parts) > 1:
        first = chunk.parts[0][0]
        source, target = (torch.cat(each) for each in zip(*(job.slots(rows) for job, rows in chunk.parts), strict=True))
        try:
            _wait_ready(chunk, staging)
            transfer(first.source, source, first.target, target, staging)
            _mark_event(chunk, staging)
        except Exception:
            return [_copy_part(job, rows, staging) for job, rows in chunk.parts]
        return [(rows, None) for _, rows in chunk.parts]
    return [_copy_part(job, rows, staging) for job, rows in chunk.parts]


def _copy_part(job: Job, rows: torch.Tensor, staging: Staging) -> Outcome:
    """Copies rows of a job; pages that an error names are left out and the others copied."""
    chunk, found = Chunk([(job, rows)]), None
    while len(rows):
        source, target = job.slots(rows)
        try:
            _wait_ready(chunk, staging)
            transfer(job.source, source, job.target, target, staging)
            _mark_event(chunk, staging)
        except Exception as error:
            found = found or error
            left = _without(rows, job, error)
            if len(left) == len(rows):
                break
            rows = left
        else:
            return rows, found
    return rows[:0], found


def _names_pages(error: Exception) -> bool:
    """Whether an error is about some pages only, which it names by their slots in the source."""
    return isinstance(getattr(error, "slots", None), torch.Tensor)


def _without(rows: torch.Tensor, job: Job, error: Exception) -> torch.Tensor:
    """Rows but those whose source slots the error names."""
    if not _names_pages(error):
        return rows
    return rows[~torch.isin(job.source_slots[rows], error.slots)]  # pyright: ignore[reportAttributeAccessIssue]


def _wait_ready(chunk: Chunk, staging: Staging) -> None:
    """CUDA: the side stream begins after what was on the step's stream when the jobs were submitted."""
    if staging.stream is not None:
        for job, _ in chunk.parts:
            if job.ready is not None:
                staging.stream.wait_event(job.ready)


def _mark_event(chunk: Chunk, staging: Staging) -> None:
    """CUDA: an event after the copies, one for all jobs of the call."""
    if staging.stream is not None:
        event = torch.cuda.Event()
        event.record(staging.stream)
        for job, _ in chunk.parts:
            job.events.append(event)
