"""Fair-share links against closed forms: equal starts, messages, M/G/1 processor sharing, conservation."""

from __future__ import annotations

import math
from statistics import mean, stdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy import Environment

from testbed.sim.links import DuplexLink, FairLink


def ends(link: FairLink, env: Environment, jobs: list[tuple[float, int]]) -> list[float]:
    """Arrival times of jobs (start_us, bytes)."""
    done = [math.nan] * len(jobs)

    def job(index: int, start: float, size: int):
        yield env.timeout(start)
        yield link.transfer(size)
        done[index] = env.now

    for index, (start, size) in enumerate(jobs):
        env.process(job(index, start, size))
    env.run()
    return done


def test_equal_starts_share_fairly() -> None:
    env = Environment()
    assert ends(FairLink(env, 1.0), env, [(0, 1), (0, 2), (0, 4)]) == pytest.approx([3, 5, 7], rel=1e-12)


def test_late_flow_slows_the_first() -> None:
    env = Environment()
    # 10 bytes at rate 1: alone until 4, then half each; the 3-byte flow ends at 10, the rest alone until 13.
    assert ends(FairLink(env, 1.0), env, [(0, 10), (4, 3)]) == pytest.approx([13, 10], rel=1e-12)


def test_message_is_setup_plus_bytes_over_rate() -> None:
    env = Environment()
    assert ends(FairLink(env, 25e3, 10.0), env, [(0, 0), (100, 1_000_000)]) == pytest.approx([10, 150])


def test_rate_change_applies_from_now_on() -> None:
    env = Environment()
    link = FairLink(env, 1.0)

    def change():
        yield env.timeout(4)
        link.set_rate(2.0)

    env.process(change())
    assert ends(link, env, [(0, 10)]) == pytest.approx([7])


def test_duplex_directions_slow_each_other_only_when_coupled() -> None:
    for both, expected in ((2.0, 10.0), (1.5, 10 / 0.75), (9.0, 10.0)):
        env = Environment()
        link = DuplexLink(env, 1.0, 1.0, both)
        done = [link.down.transfer(10), link.up.transfer(10)]
        env.run(env.all_of(done))
        assert env.now == pytest.approx(expected), both


def test_duplex_speeds_up_again_when_one_direction_is_done() -> None:
    env = Environment()
    link = DuplexLink(env, 1.0, 1.0, 1.0)
    link.up.transfer(2)
    # Half rate until up's 2 bytes are over at 4, by then 2 of 10 are down; the other 8 at full rate.
    env.run(link.down.transfer(10))
    assert env.now == pytest.approx(12)


@pytest.mark.parametrize(("rate", "setup"), [(0.0, 0.0), (-1.0, 0.0), (math.nan, 0.0), (1.0, -1.0)])
def test_bad_link(rate: float, setup: float) -> None:
    with pytest.raises(ValueError, match="must"):
        FairLink(Environment(), rate, setup)


def test_negative_size() -> None:
    with pytest.raises(ValueError, match="size_bytes"):
        FairLink(Environment(), 1.0).transfer(-1)


JOBS = st.lists(st.tuples(st.floats(0, 1e4), st.integers(0, 10**7)), min_size=1, max_size=12)


def reference_ends(jobs: list[tuple[float, int]], rate: float) -> list[float]:
    """Processor sharing by brute force: advance from event to event, rate / n for each of n."""
    left = {i: float(size) for i, (_, size) in enumerate(jobs)}
    done = [math.nan] * len(jobs)
    now = 0.0
    while left:
        active = [i for i in left if jobs[i][0] <= now]
        arrivals = [jobs[i][0] for i in left if jobs[i][0] > now]
        until_arrival = min(arrivals, default=math.inf) - now
        if not active:
            now = min(arrivals)
            continue
        first = min(left[i] for i in active)
        step = min(until_arrival, first * len(active) / rate)
        for i in active:
            left[i] -= step * rate / len(active)
        now = min(arrivals) if step == until_arrival else now + step
        for i in [i for i in active if left[i] <= 1e-9 * max(1.0, jobs[i][1])]:
            done[i] = now
            del left[i]
    return done


@settings(deadline=None, max_examples=150)
@given(jobs=JOBS, rate=st.floats(1.0, 1e5))
def test_matches_brute_force_and_conserves(jobs: list[tuple[float, int]], rate: float) -> None:
    env = Environment()
    link = FairLink(env, rate)
    found = ends(link, env, jobs)
    assert found == pytest.approx(reference_ends(jobs, rate), rel=1e-6, abs=1e-3)
    assert link.moved_bytes == sum(size for _, size in jobs)
    assert link.active == 0
    # Work conservation: busy exactly as long as the bytes need.
    assert link.busy_us == pytest.approx(link.moved_bytes / rate, rel=1e-6, abs=1e-3)


@settings(deadline=None, max_examples=50)
@given(jobs=JOBS, extra=st.tuples(st.floats(0, 1e4), st.integers(0, 10**7)))
def test_another_flow_never_helps(jobs: list[tuple[float, int]], extra: tuple[float, int]) -> None:
    alone_env, shared_env = Environment(), Environment()
    alone = ends(FairLink(alone_env, 100.0), alone_env, jobs)
    shared = ends(FairLink(shared_env, 100.0), shared_env, [*jobs, extra])
    assert all(b >= a * (1 - 1e-9) - 1e-6 for a, b in zip(alone, shared, strict=False))


def mean_sojourn(seed: int, load: float, draw: str, customers: int) -> float:
    rng = np.random.default_rng(seed)
    size = {
        "exponential": lambda: rng.exponential(1e6, customers),
        "constant": lambda: np.full(customers, 1e6),
        "hyper": lambda: np.where(rng.random(customers) < 0.9, 0.5, 5.5) * rng.exponential(1e6, customers),
    }[draw]()
    start = np.cumsum(rng.exponential(1 / load, customers))
    env = Environment()
    link = FairLink(env, 1e6)
    done = ends(link, env, [(float(t), round(s)) for t, s in zip(start, size, strict=True)])
    return float(np.mean(np.array(done) - start))


@pytest.mark.parametrize("draw", ["exponential", "constant", "hyper"])
def test_processor_sharing_queue(draw: str) -> None:
    """M/G/1-PS: E[T] = E[S] / (1 - load) whatever the distribution; gate at 4 standard errors."""
    runs = [mean_sojourn(seed, 0.5, draw, 4_000) for seed in range(10)]
    error = stdev(runs) / math.sqrt(len(runs))
    assert abs(mean(runs) - 2.0) < 4 * error
    assert error < 0.1  # or the gate above would pass anything
