"""Moves pages between tiers while the step goes on: a queue by urgency, worker threads, waits that are counted.

Demand goes before prefetch before demotion, then the lower layer, then what came first. Large jobs go in chunks, so
that a demand waits for one chunk at most; small neighbouring jobs between the same stores go in one call. Memory and
file have lanes of their own. On a GPU the copies run on side streams and `wait` orders the step's stream behind them.

    mover = Mover("cpu")
    mover.submit(job := Job(Priority.PREFETCH, 3, archive, slots, pool, new_slots))
    ...                                 # compute
    stalled_s = mover.wait([job])       # 0.0 if it had arrived; job.error says what failed
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from testbed.cache.archive import FilePool
from testbed.cache.jobs import Chunk, Job, LaneName, Priority, State
from testbed.cache.lanes import LOOK_S, Lane, MoverError, Shared, stop
from testbed.cache.traffic import Traffic
from testbed.cache.transfer import Staging

__all__ = ["Job", "LaneName", "Mover", "MoverError", "Priority", "State"]

# Some half a millisecond of memory's time and a few of a disk's: what a demand may have to wait for.
CHUNK_BYTES = {LaneName.MEMORY: 4 << 20, LaneName.FILE: 2 << 20}
WORKERS = {LaneName.MEMORY: 1, LaneName.FILE: 2}
CAUSES = {Priority.DEMAND: "demand", Priority.PREFETCH: "prefetch_late", Priority.DEMOTE: "room"}
CLOSE_S = 30.0  # patience with a copy that hangs in the operating system
EXIT_S = 5.0


class Mover:
    """Runs jobs. Its methods are for one thread, the one that owns the cache.

    Args:
        device: of L0 and L1.
        overlap: False: `submit` copies at once, on the calling thread, and counts that as stall.
        chunk_bytes: most that is copied before the most urgent job is looked for again; None = what suits the lane.

    Attributes:
        traffic: bytes of jobs with a link, stalls; of all caches that share the mover.
        staging: of the calling thread.
    """

    def __init__(
        self, device: torch.device | str = "cpu", overlap: bool = True, chunk_bytes: int | None = None
    ) -> None:
        if chunk_bytes is not None and chunk_bytes < 1:
            raise ValueError(f"chunk_bytes={chunk_bytes!r}: must be positive, or None")
        self.device, self.overlap = torch.device(device), overlap
        sizes = {name: size if chunk_bytes is None else chunk_bytes for name, size in CHUNK_BYTES.items()}
        self.staging = Staging(self.device, sizes[LaneName.FILE], side_stream=False)
        self._shared = Shared(self.device)
        self._lanes = {name: Lane(name.value, WORKERS[name], sizes[name], self._shared) for name in LaneName}
        self._end = weakref.finalize(self, _end_workers, self._shared, tuple(self._lanes.values()))

    @property
    def traffic(self) -> Traffic:
        """See the class."""
        return self._shared.traffic

    def submit(self, job: Job) -> None:
        """Takes a job in; it runs as soon as nothing more urgent does.

        Raises:
            MoverError: the mover is closed, a worker has died, or the job was submitted before.
        """
        self._check()
        if job.submitted_s is not None:
            raise MoverError(f"a job of {job.pages} pages was submitted twice")
        job.submitted_s = time.perf_counter()
        if self.device.type == "cuda":
            job.ready = torch.cuda.Event()
            job.ready.record(torch.cuda.current_stream(self.device))
        lane = self._lane(job)
        if not job.pages:
            with self._shared.lock:
                self._shared.end(job, State.DONE)
        elif self.overlap:
            with self._shared.lock:
                lane.submit(job)
        else:
            self._run(job, lane)

    def _lane(self, job: Job) -> Lane:
        """By the job, or by its stores."""
        if job.lane is not None:
            return self._lanes[job.lane]
        in_file = isinstance(job.source, FilePool) or isinstance(job.target, FilePool)
        return self._lanes[LaneName.FILE if in_file else LaneName.MEMORY]

    def _run(self, job: Job, lane: Lane) -> None:
        """Copies a job on the calling thread."""
        started = job.started_s = time.perf_counter()
        with self._shared.lock:
            lane.open[id(job)] = job
            job.state, job.running = State.RUNNING, 1
            chunk = Chunk([(job, job.waiting)])
            job.waiting = job.waiting[:0]
            lane.begun.append(chunk)
        try:
            lane.copy(chunk, self.staging)
        except BaseException:
            with self._shared.lock:
                if not job.ended:
                    lane.open.pop(id(job), None)
                    job.error = MoverError("the copy was interrupted")
                    self._shared.end(job, State.FAILED)
            raise
        finally:
            self.traffic.stalled(CAUSES[job.asked], time.perf_counter() - started)

    def escalate(self, job: Job) -> None:
        """Makes a job as urgent as a demand; one that ended stays as it is."""
        self._check()
        with self._shared.lock:
            if not job.ended and job.priority != Priority.DEMAND:
                job.priority = Priority.DEMAND
                lane = self._lane(job)
                if len(job.waiting):
                    lane.queue.push(job)
                    lane.work.notify()

    def cancel(self, job: Job, keep: Tensor | None = None) -> bool:
        """Takes a job back, or those of its pages that are not in `keep` [M] bool.

        Returns:
            True if nothing of what was taken back had been begun; else False and nothing has changed. A job of which
            no page is left ends as cancelled, or as done if some of its pages were copied before.
        """
        self._check()
        with self._shared.lock:
            if job.ended or job.submitted_s is None:
                return False
            kept = torch.zeros(job.pages, dtype=torch.bool) if keep is None else keep
            begun = torch.ones(job.pages, dtype=torch.bool)
            begun[job.waiting] = False
            if bool((begun & ~kept).any()):
                return False
            job.waiting = job.waiting[kept[job.waiting]]
            lane = self._lane(job)
            if not len(job.waiting) and job.state == State.QUEUED:
                lane.open.pop(id(job), None)
                self._shared.end(job, State.CANCELLED)
            else:
                lane.settle(job)
            return True

    def wait(self, jobs: Iterable[Job]) -> float:
        """Waits until jobs have ended; those that have not become demands.

        The seconds go into `traffic.stall_s` by what each job was when it was submitted. Never raises for a failed job:
        look at `job.error`. Beside a GPU the current stream waits for the copies, not the host.

        Returns:
            Seconds the caller waited; 0.0 if all had ended.

        Raises:
            MoverError: a worker has died, or a job was never submitted.
        """
        jobs = list(jobs)
        late = [job for job in jobs if not job.ended]
        self._check(dead_is_fine=not late)
        for job in late:
            self.escalate(job)
        return self._await_all(jobs)

    def _await_all(self, jobs: list[Job]) -> float:
        """Seconds until all have ended."""
        late = sorted((job for job in jobs if not job.ended), key=lambda job: (job.asked, job.layer))
        total = sum(map(self._await, late), 0.0)
        for job in jobs:
            self._order_behind(job)
        return total

    def _await(self, job: Job) -> float:
        started = time.perf_counter()
        try:
            with self._shared.lock:
                while not job.ended:
                    if job.submitted_s is None:
                        raise MoverError("waiting for a job that was never submitted")
                    if not self._shared.ended.wait(LOOK_S):
                        self._check()
        finally:
            seconds = time.perf_counter() - started
            self.traffic.stalled(CAUSES[job.asked], seconds)
        return seconds

    def _order_behind(self, job: Job) -> None:
        """CUDA: what the step launches from here on follows the job's copies."""
        for event in job.events:
            torch.cuda.current_stream(self.device).wait_event(event)

    def finished(self) -> list[Job]:
        """Jobs that ended since the last call and whose copies are done, in the order they ended.

        Only those that somebody holds beside the mover.
        """
        self._check(dead_is_fine=True)
        with self._shared.lock:
            held = self._shared.unreported
            jobs = sorted((job for job in list(held.values()) if job.done), key=lambda job: job.finished_s or 0.0)
            for job in jobs:
                held.pop(id(job), None)
        return jobs

    def drain(self) -> float:
        """Waits for all jobs, which keep their order: seconds waited, counted as by `wait`."""
        self._check()
        with self._shared.lock:
            jobs = [job for lane in self._lanes.values() for job in lane.open.values()]
        return self._await_all(jobs)

    def close(self) -> None:
        """Takes back what was not begun, waits for the chunks under way, ends the workers. Safe to call twice.

        Jobs of which a part was copied fail.

        Raises:
            MoverError: a copy hangs in the operating system; its thread is left behind.
        """
        self._own()
        with self._shared.lock:
            self._shared.closing = True
            for lane in self._lanes.values():
                for job in list(lane.open.values()):
                    if job.state == State.QUEUED:
                        job.waiting = job.waiting[:0]
                        lane.open.pop(id(job), None)
                        self._shared.end(job, State.CANCELLED)
        ended = stop(self._shared, tuple(self._lanes.values()), CLOSE_S)
        with self._shared.lock:
            for lane in self._lanes.values():
                lane.fail_all(MoverError("the mover was closed before the job was done"))
        self._end.detach()
        if not ended:
            raise MoverError(f"a copy did not end within {CLOSE_S:g} s; its thread is left behind")

    def _check(self, dead_is_fine: bool = False) -> None:
        """Refuses to go on where nobody would do the work."""
        self._own()
        if dead_is_fine:
            return
        if self._shared.closing:
            raise MoverError("the mover is closed")
        failure = self._shared.failure
        if failure is None and any(lane.dead for lane in self._lanes.values()):
            with self._shared.lock:
                failure = self._shared.failure = self._shared.failure or RuntimeError("its thread is gone")
                for lane in self._lanes.values():
                    lane.fail_all(MoverError(f"a worker of the mover died: {failure}"))
        if failure is not None:
            raise MoverError(f"a worker of the mover died: {type(failure).__name__}: {failure}") from failure

    def _own(self) -> None:
        """In a child of `os.fork` there are no workers and the locks may be held for ever: makes them anew."""
        if self._shared.pid != os.getpid():
            self._shared.renew()
            with self._shared.lock:
                for lane in self._lanes.values():
                    lane.adopt()


def _end_workers(shared: Shared, lanes: tuple[Lane, ...]) -> None:
    """When the mover is collected or the interpreter ends; a child process that did not use it has no workers."""
    if shared.pid == os.getpid():
        stop(shared, lanes, EXIT_S)
