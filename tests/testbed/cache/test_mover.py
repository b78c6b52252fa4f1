"""The mover: bytes arrive whatever the order, the urgent goes first, what is taken back was not begun, faults stay put.

Stores are memory that can be told to wait, to be slow and to fail; copies, queues and threads are the real ones.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import warm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.pages import PageFormat, page_format
from testbed.cache.mover import Job, LaneName, Mover, MoverError, Priority, State
from testbed.cache.pool import SlabPool

FMT = page_format("int8", 16, 64)
ROOT = Path(__file__).parents[3]
DEMAND, PREFETCH, DEMOTE = Priority


class PagesBroken(OSError):
    """As the archive's: names slots."""

    def __init__(self, slots: Tensor) -> None:
        super().__init__(f"{len(slots)} pages")
        self.slots = slots


class Memory:
    """A store that can wait, be slow, fail; it notes which slots were read in one call."""

    def __init__(self, pages: int, fill: bool = True, fmt: PageFormat = FMT) -> None:
        self.fmt = fmt
        self.blobs = torch.zeros(pages, fmt.page_bytes, dtype=torch.uint8)
        if fill:
            self.blobs.random_(1, 255, generator=torch.Generator().manual_seed(pages))
        self.gate = threading.Event()
        self.gate.set()
        self.reading = threading.Event()
        self.calls: list[list[int]] = []
        self.delay_s = 0.0
        self.fault: Callable[[Tensor], BaseException | None] = lambda slots: None

    def read(self, slots: Tensor) -> Tensor:
        self.calls.append(slots.tolist())
        self.reading.set()
        assert self.gate.wait(30)
        time.sleep(self.delay_s)
        if (error := self.fault(slots)) is not None:
            raise error
        return self.blobs[slots]

    def write(self, slots: Tensor, blobs: Tensor) -> None:
        self.blobs[slots] = blobs


@pytest.fixture
def mover() -> Iterator[Mover]:
    one = Mover(chunk_bytes=4 * FMT.page_bytes)
    yield one
    one.close()


def make(priority: Priority, source: Memory, slots: list[int], target: Memory, layer: int = 0, **more: object) -> Job:
    index = torch.tensor(slots, dtype=torch.int64)
    return Job(priority, layer, source, index, target, index.clone(), **more)  # pyright: ignore[reportArgumentType]


def held(mover: Mover, source: Memory, target: Memory, slot: int = 0) -> Job:
    """A job whose copy is under way and waits for `source.gate`."""
    source.gate.clear()
    source.reading.clear()
    job = make(DEMAND, source, [slot], target)
    mover.submit(job)
    assert source.reading.wait(30)
    return job


def copied(job: Job, rows: Tensor | None = None) -> bool:
    assert isinstance(job.source, Memory)
    assert isinstance(job.target, Memory)
    rows = torch.arange(job.pages) if rows is None else rows
    return torch.equal(job.target.blobs[job.target_slots[rows]], job.source.blobs[job.source_slots[rows]])


# --- any interleaving --------------------------------------------------------------------------------------------

ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from(list(Priority)), st.integers(0, 3), st.integers(0, 9), st.booleans()),
    st.tuples(st.sampled_from(["escalate", "cancel", "trim", "wait", "finished"]), st.integers(0, 99)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTIONS, min_size=1, max_size=25), st.integers(1, 5), st.booleans(), st.sampled_from([0.0, 0.0003]))
def test_any_interleaving_moves_every_byte_once(
    actions: list[tuple], chunk_pages: int, overlap: bool, delay_s: float
) -> None:
    total = 10 * len(actions)
    sources, targets = [Memory(total) for _ in range(2)], [Memory(total, fill=False) for _ in range(2)]
    sources[1].delay_s = delay_s
    mover = Mover(overlap=overlap, chunk_bytes=chunk_pages * FMT.page_bytes)
    places = torch.randperm(total, generator=torch.Generator().manual_seed(total))
    jobs: list[Job] = []
    kept: dict[int, Tensor] = {}
    reported: list[Job] = []
    used, waited = 0, 0.0
    for action, *more in actions:
        if action == "submit":
            priority, layer, pages, in_file = more
            lane = LaneName.FILE if in_file else LaneName.MEMORY
            slots = torch.arange(used, used + pages)
            job = Job(priority, layer, sources[in_file], slots, targets[in_file], places[slots], "a>b", lane)
            used += pages
            jobs.append(job)
            kept[id(job)] = torch.ones(pages, dtype=torch.bool)
            mover.submit(job)
            assert overlap or job.done
        elif action == "finished":
            reported += mover.finished()
        elif jobs:
            job = jobs[more[0] % len(jobs)]
            if action == "escalate":
                mover.escalate(job)
            elif action == "wait":
                waited += mover.wait([job])
                assert job.done
            elif action == "cancel":
                if mover.cancel(job):
                    kept[id(job)][:] = False
                    assert job.state is State.CANCELLED
            else:
                keep = torch.rand(job.pages, generator=torch.Generator().manual_seed(more[0])) < 0.5
                if mover.cancel(job, keep):
                    kept[id(job)] &= keep
    waited += mover.drain()
    reported += mover.finished()
    mover.close()
    touched = [torch.zeros(total, dtype=torch.bool) for _ in range(2)]
    for job in jobs:
        keep = kept[id(job)]
        assert job.done
        assert job.error is None
        assert torch.equal(job.arrived, keep)
        assert job.bytes == int(keep.sum()) * FMT.page_bytes
        assert copied(job, keep.nonzero().flatten())
        touched[targets.index(job.target)][job.target_slots[keep]] = True  # pyright: ignore[reportArgumentType]
    for target, mark in zip(targets, touched, strict=True):
        assert not target.blobs[~mark].any()
    assert len(reported) == len(set(map(id, reported))) == len(jobs)
    pages = sum(int(keep.sum()) for keep in kept.values())
    assert mover.traffic.links.get("a>b", {"pages": 0})["pages"] == pages
    if overlap:
        assert mover.traffic.total_stall_s == pytest.approx(waited)


# --- who goes first ----------------------------------------------------------------------------------------------

JOBS = st.lists(st.tuples(st.sampled_from(list(Priority)), st.integers(0, 3), st.integers(1, 6)), max_size=12)


@settings(max_examples=100, deadline=None)
@given(JOBS, st.sets(st.integers(0, 11), max_size=3))
def test_urgent_jobs_go_first(jobs: list[tuple[Priority, int, int]], urgent: set[int]) -> None:
    """What waits goes by priority, layer, order of submission; one that was escalated comes after its equals."""
    mover = Mover(chunk_bytes=2 * FMT.page_bytes)
    source, target = Memory(100), Memory(100, fill=False)
    held(mover, source, target, slot=99)
    made, first = [], 0
    for priority, layer, pages in jobs:
        made.append(make(priority, source, list(range(first, first + pages)), target, layer))
        first += pages
        mover.submit(made[-1])
    ranks = {id(job): (job.priority, job.layer, number) for number, job in enumerate(made)}
    for number in sorted(urgent):
        if number < len(made) and made[number].priority != DEMAND:
            mover.escalate(made[number])
            ranks[id(made[number])] = (DEMAND, made[number].layer, len(made) + number)
    source.gate.set()
    mover.drain()
    mover.close()
    read = [slot for call in source.calls[1:] for slot in call]
    expected = sorted(made, key=lambda job: ranks[id(job)])
    assert read == [slot for job in expected for slot in job.source_slots.tolist()]
    assert all(len(call) <= 2 for call in source.calls)


def test_a_demand_waits_for_one_chunk(mover: Mover) -> None:
    source, target = Memory(64), Memory(64, fill=False)
    source.gate.clear()
    big = make(DEMOTE, source, list(range(40)), target)
    mover.submit(big)
    assert source.reading.wait(30)
    demand = make(DEMAND, source, [50, 51], target, layer=7)
    mover.submit(demand)
    source.gate.set()
    mover.wait([demand])
    assert source.calls[1] == [50, 51]
    mover.drain()
    assert copied(big)
    assert copied(demand)


def test_neighbours_go_in_one_call(mover: Mover) -> None:
    source, target, other = Memory(64), Memory(64, fill=False), Memory(64, fill=False)
    held(mover, source, target, slot=60)
    for slot in range(6):
        mover.submit(make(PREFETCH, source, [slot], target, layer=1))
    mover.submit(make(PREFETCH, source, [6], other, layer=1))
    mover.submit(make(PREFETCH, source, [7], other, layer=2))
    mover.submit(make(DEMOTE, source, [8], other, layer=2))
    source.gate.set()
    mover.drain()
    assert source.calls == [[60], [0, 1, 2, 3], [4, 5], [6], [7], [8]]


def test_a_slow_file_holds_up_no_memory(mover: Mover) -> None:
    file, source, target = Memory(8), Memory(8), Memory(8, fill=False)
    file.gate.clear()
    slow = make(DEMAND, file, [0, 1], target, lane=LaneName.FILE)
    fast = make(DEMOTE, source, [2, 3], target)
    mover.submit(slow)
    assert file.reading.wait(30)
    mover.submit(fast)
    mover.wait([fast])
    assert mover.finished() == [fast]
    assert not slow.ended
    file.gate.set()
    mover.wait([slow])
    assert mover.finished() == [slow]
    assert mover.finished() == []


def test_a_file_is_read_in_turns_while_pages_are_placed(mover: Mover) -> None:
    """The next read waits for the one before, but not for its pages to be placed."""

    class Slow(Memory):
        def write(self, slots: Tensor, blobs: Tensor) -> None:
            assert placing.wait(30)
            super().write(slots, blobs)

    placing = threading.Event()
    source, target, other = Memory(8), Slow(8, fill=False), Memory(8, fill=False)
    source.gate.clear()
    jobs = [make(DEMAND, source, [i], to, layer=i, lane=LaneName.FILE) for i, to in enumerate((target, other))]
    for job in jobs:
        mover.submit(job)
    assert source.reading.wait(30)
    time.sleep(0.05)
    assert source.calls == [[0]]
    source.gate.set()
    mover.wait([jobs[1]])
    assert not jobs[0].ended
    placing.set()
    mover.wait([jobs[0]])
    assert source.calls == [[0], [1]]
    assert all(copied(job) for job in jobs)


def test_files_go_to_their_lane_by_themselves(tmp_path: Path) -> None:
    """A page file's jobs are not in the way of memory's: told from the store."""
    from testbed.cache.archive import FilePool

    mover = Mover()
    file = FilePool.__new__(FilePool)
    memory = SlabPool(FMT, 8, torch.device("cpu"))
    slots = torch.zeros(1, dtype=torch.int64)
    lanes = [
        mover._lane(Job(DEMAND, 0, a, slots, b, slots)).name
        for a, b in ((file, memory), (memory, file), (memory, memory))
        if setattr(file, "fmt", FMT) is None
    ]
    assert lanes == ["file", "file", "memory"]


# --- taking back -------------------------------------------------------------------------------------------------


def test_what_was_not_begun_can_be_taken_back(mover: Mover) -> None:
    source, target = Memory(64), Memory(64, fill=False)
    running = held(mover, source, target, slot=60)
    queued, trimmed = make(PREFETCH, source, [0, 1], target), make(PREFETCH, source, [2, 3, 4], target, layer=1)
    mover.submit(queued)
    mover.submit(trimmed)
    assert mover.cancel(queued)
    assert not mover.cancel(queued)
    assert mover.cancel(trimmed, torch.tensor([True, False, True]))
    assert not mover.cancel(running)
    source.gate.set()
    mover.drain()
    assert (queued.state, trimmed.state, running.state) == (State.CANCELLED, State.DONE, State.DONE)
    assert source.calls == [[60], [2, 4]]
    assert trimmed.arrived.tolist() == [True, False, True]
    assert not target.blobs[torch.tensor([0, 1, 3])].any()
    assert mover.wait([queued]) == 0.0


def test_of_a_running_job_the_rest_can_be_taken_back(mover: Mover) -> None:
    source, target = Memory(64), Memory(64, fill=False)
    source.gate.clear()
    job = make(PREFETCH, source, list(range(10)), target)
    mover.submit(job)
    assert source.reading.wait(30)
    assert not mover.cancel(job)
    assert not mover.cancel(job, torch.arange(10) != 3)  # in the chunk under way
    assert mover.cancel(job, torch.arange(10) < 4)
    source.gate.set()
    mover.wait([job])
    assert job.state is State.DONE
    assert job.arrived.tolist() == [True] * 4 + [False] * 6
    assert not target.blobs[4:10].any()


# --- waiting -----------------------------------------------------------------------------------------------------


def test_waits_are_counted_by_what_was_asked(mover: Mover) -> None:
    source, target = Memory(64), Memory(64, fill=False)
    source.delay_s = 0.03
    seconds = {}
    for priority, cause in ((DEMAND, "demand"), (PREFETCH, "prefetch_late"), (DEMOTE, "room")):
        job = make(priority, source, [priority], target)
        started = time.perf_counter()
        mover.submit(job)
        seconds[cause] = mover.wait([job])
        assert 0.015 < seconds[cause] <= time.perf_counter() - started
        assert mover.wait([job]) == 0.0
        assert job.asked == priority
        assert job.busy_s >= 0.03
    assert mover.traffic.stall_s == pytest.approx(seconds)


def test_what_arrived_meanwhile_costs_nothing(mover: Mover) -> None:
    source, target = Memory(64), Memory(64, fill=False)
    job = make(PREFETCH, source, [1], target)
    mover.submit(job)
    end = time.monotonic() + 30
    while not job.done and time.monotonic() < end:
        time.sleep(0.001)
    assert mover.wait([job]) == 0.0
    assert mover.traffic.total_stall_s == 0.0


def test_waiting_makes_a_prefetch_urgent(mover: Mover) -> None:
    source, target = Memory(64), Memory(64, fill=False)
    held(mover, source, target, slot=60)
    others = [make(PREFETCH, source, [slot], target, layer=0) for slot in range(3)]
    wanted = make(PREFETCH, source, [9], target, layer=5)
    for job in (*others, wanted):
        mover.submit(job)
    threading.Timer(0.05, source.gate.set).start()
    mover.wait([wanted])
    assert source.calls[1] == [9]
    assert (wanted.priority, wanted.asked) == (DEMAND, PREFETCH)


def test_ctrl_c_while_waiting_leaves_the_mover_whole(mover: Mover) -> None:
    source, target = Memory(64), Memory(64, fill=False)
    job = held(mover, source, target)
    threading.Timer(0.1, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        mover.wait([job])
    assert mover.traffic.stall_s["demand"] > 0.01
    more = make(DEMAND, source, [5], target)
    mover.submit(more)
    source.gate.set()
    mover.drain()
    assert copied(job)
    assert copied(more)


# --- faults ------------------------------------------------------------------------------------------------------


def test_an_error_stays_with_its_job(mover: Mover) -> None:
    source, target = Memory(64), Memory(64, fill=False)
    running = held(mover, source, target, slot=60)
    source.fault = lambda slots: OSError("broken") if 2 in slots.tolist() else None
    jobs = [make(PREFETCH, source, [slot], target) for slot in range(4)]
    for job in jobs:
        mover.submit(job)
    source.gate.set()
    mover.drain()
    assert [job.state for job in jobs] == [State.DONE, State.DONE, State.FAILED, State.DONE]
    assert isinstance(jobs[2].error, OSError)
    assert not jobs[2].arrived.any()
    assert all(copied(job) for job in (running, *jobs[:2], jobs[3]))
    assert mover.finished() == [running, *jobs]
    after = make(DEMAND, source, [8], target)
    mover.submit(after)
    mover.wait([after])
    assert copied(after)


def test_pages_an_error_names_cost_no_others(mover: Mover) -> None:
    source, target = Memory(64), Memory(64, fill=False)
    bad = torch.tensor([1, 6])

    def fault(slots: Tensor) -> BaseException | None:
        named = slots[torch.isin(slots, bad)]
        return PagesBroken(named) if len(named) else None

    source.fault = fault
    job = make(DEMAND, source, list(range(10)), target)
    mover.submit(job)
    mover.wait([job])
    assert job.state is State.FAILED
    assert isinstance(job.error, PagesBroken)
    assert job.arrived.tolist() == [slot not in (1, 6) for slot in range(10)]
    assert copied(job, job.arrived.nonzero().flatten())
    assert job.bytes == 8 * FMT.page_bytes


def test_an_error_without_pages_ends_the_job(mover: Mover) -> None:
    source, target = Memory(64), Memory(64, fill=False)
    source.fault = lambda slots: OSError("gone") if 4 in slots.tolist() else None
    job = make(DEMAND, source, list(range(12)), target)
    mover.submit(job)
    mover.wait([job])
    assert job.state is State.FAILED
    assert job.arrived.tolist() == [True] * 4 + [False] * 8
    assert len(source.calls) == 2


@pytest.mark.parametrize("lane", list(LaneName))
def test_a_dead_worker_is_an_error_and_no_hang(lane: LaneName) -> None:
    mover = Mover()
    source, target = Memory(8), Memory(8, fill=False)
    source.fault = lambda slots: SystemExit("killed")
    job = make(DEMAND, source, [0], target, lane=lane)
    mover.submit(job)
    started = time.monotonic()
    with contextlib.suppress(MoverError):  # it may be dead by now
        mover.wait([job])
    assert job.state is State.FAILED
    assert isinstance(job.error, MoverError)
    for call in (mover.drain, lambda: mover.submit(make(DEMAND, source, [1], target)), lambda: mover.escalate(job)):
        with pytest.raises(MoverError, match="worker of the mover died: SystemExit: killed"):
            call()
    mover.close()
    assert time.monotonic() - started < 20


def test_what_is_no_job_is_refused(mover: Mover) -> None:
    source, target = Memory(8), Memory(8)
    two, three = torch.arange(2), torch.arange(3)
    for source_slots, target_slots in ((two, three), (two.int(), two), (two, two[:, None])):
        with pytest.raises(ValueError, match=r"job\..*must be int64"):
            Job(DEMAND, 0, source, source_slots, target, target_slots)
    with pytest.raises(ValueError, match="not a valid Priority"):
        Job(7, 0, source, two, target, two)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="chunk_bytes=0"):
        Mover(chunk_bytes=0)
    with pytest.raises(MoverError, match="never submitted"):
        mover.wait([make(DEMAND, source, [1], target)])
    job = make(DEMAND, source, [1], target)
    mover.submit(job)
    with pytest.raises(MoverError, match="submitted twice"):
        mover.submit(job)
    empty = make(DEMAND, source, [], target)
    mover.submit(empty)
    assert empty.state is State.DONE


# --- without overlap ---------------------------------------------------------------------------------------------


def test_without_overlap_a_job_is_done_at_once() -> None:
    before = threading.active_count()
    mover = Mover(overlap=False, chunk_bytes=3 * FMT.page_bytes)
    source, target = Memory(64), Memory(64, fill=False)
    source.delay_s = 0.01
    job = make(PREFETCH, source, list(range(10)), target)
    mover.submit(job)
    assert job.state is State.DONE
    assert copied(job)
    assert threading.active_count() == before
    assert mover.wait([job]) == 0.0
    assert 0.01 <= mover.traffic.stall_s["prefetch_late"] == pytest.approx(job.busy_s, abs=0.01)
    source.fault = lambda slots: KeyboardInterrupt()
    stopped = make(DEMAND, source, [11], target)
    with pytest.raises(KeyboardInterrupt):
        mover.submit(stopped)
    assert stopped.state is State.FAILED
    assert mover.drain() == 0.0
    mover.close()


# --- the end -----------------------------------------------------------------------------------------------------


def test_close_takes_back_what_was_not_begun() -> None:
    mover = Mover(chunk_bytes=2 * FMT.page_bytes)
    source, target = Memory(64), Memory(64, fill=False)
    source.gate.clear()
    half, queued = make(DEMAND, source, list(range(6)), target), make(DEMOTE, source, [20], target)
    mover.submit(half)
    assert source.reading.wait(30)
    mover.submit(queued)
    threading.Timer(0.05, source.gate.set).start()
    mover.close()
    mover.close()
    assert queued.state is State.CANCELLED
    assert half.state is State.FAILED
    assert "closed" in str(half.error)
    assert half.arrived.tolist() == [True, True, False, False, False, False]
    assert mover.wait([half, queued]) == 0.0
    with pytest.raises(MoverError, match="closed"):
        mover.submit(make(DEMAND, source, [1], target))
    Mover().close()


def test_a_forgotten_mover_ends_its_threads() -> None:
    mover = Mover()
    source, target = Memory(8), Memory(8, fill=False)
    for lane in LaneName:
        mover.submit(make(DEMAND, source, [1], target, lane=lane))
    mover.drain()
    threads = [thread for one in mover._lanes.values() for thread in one.threads]
    assert len(threads) == 3
    assert all(thread.is_alive() for thread in threads)
    del mover
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("begun", [False, True])
def test_a_forked_child_finishes_by_itself(begun: bool) -> None:
    """The child has no worker threads and what locks they held, yet all its jobs come to an end."""
    mover = Mover(chunk_bytes=2 * FMT.page_bytes)
    source, target = Memory(64), Memory(64, fill=False)
    source.gate.clear()
    job, other = make(DEMAND, source, list(range(9)), target), make(DEMOTE, source, [20], target)
    mover.submit(job)
    assert source.reading.wait(30)
    mover.submit(other)
    if begun:
        mover._shared.lock.acquire()  # as a worker might at that moment
    child = os.fork()
    if not child:
        signal.alarm(30)
        source.gate = threading.Event()
        source.gate.set()
        mover.drain()
        right = copied(job) and copied(other) and job.state is State.DONE and set(mover.finished()) == {job, other}
        mover.close()
        os._exit(0 if right else 1)
    if begun:
        mover._shared.lock.release()
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert not job.ended
    source.gate.set()
    mover.drain()
    assert copied(job)
    assert copied(other)
    mover.close()


AT_EXIT = """
import sys
sys.path.insert(0, "tests/testbed/cache")
from test_mover import DEMOTE, Memory, Mover, make
mover = Mover(chunk_bytes=1)
source, target = Memory(64), Memory(64, fill=False)
source.delay_s = 0.01
mover.submit(job := make(DEMOTE, source, list(range(64)), target))
{last}
print("end")
"""


@pytest.mark.parametrize(
    ("last", "code"), [("", 0), ("mover.wait([])", 0), ("raise SystemExit(3)", 3), ("raise KeyError('x')", 1)]
)
def test_the_interpreter_ends_with_work_left(last: str, code: int) -> None:
    started = time.monotonic()
    done = warm.run(["-c", AT_EXIT.format(last=last)], cwd=ROOT, timeout=60)
    assert done.returncode == code, done.stderr
    assert ("end" in done.stdout) == (code == 0)
    assert "Fatal" not in done.stderr
    assert time.monotonic() - started < 60


def test_nobody_elses_settings_change() -> None:
    """Workers compute with one OpenMP thread; the model's number stays, also for threads made later."""
    before, interval = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(2)
    try:
        mover = Mover()
        source, target = Memory(8), Memory(8, fill=False)
        seen: list[int] = []
        source.fault = lambda slots: seen.append(torch.get_num_threads())
        for lane in LaneName:
            mover.submit(make(DEMAND, source, [1], target, lane=lane))
            mover.drain()
        assert seen == [1, 1]
        assert torch.get_num_threads() == 2
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert seen == [1, 1, 2]
        assert sys.getswitchinterval() == interval
        mover.close()
    finally:
        torch.set_num_threads(before)
