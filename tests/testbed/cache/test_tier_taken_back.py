"""Flights that end while a plan is made true: taken back, failed, waited for; never a page in the wrong place."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from archive_case import Faults
from tier_case import Pair, check_books, cold, sent
from torch import Tensor

from policies.base import Format, Mode, Tier
from testbed.cache.mover import State
from testbed.cache.pool import PageStore, SlabPool
from testbed.cache.shield import shielded


class Gated:
    """A store whose writes wait until the gate is open."""

    def __init__(self, store: PageStore) -> None:
        self.store, self.gate = store, threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def read(self, slots: Tensor) -> Tensor:
        return self.store.read(slots)

    def write(self, slots: Tensor, blobs: Tensor) -> None:
        assert self.gate.wait(30)
        self.store.write(slots, blobs)


def gated(pair: Pair, tier: Tier) -> Gated:
    stores = pair.tiered.pools.stores
    store = Gated(stores[tier, Format.COMPUTE])
    stores[tier, Format.COMPUTE] = store  # type: ignore[assignment]
    return store


def test_a_page_that_is_approximated_while_it_waits_to_leave() -> None:
    """It is read where it is, and goes where the plan in force says; nothing else takes its slot."""
    pair = Pair(400)
    cache, store = pair.tiered, gated(pair, Tier.L2)
    first, second = cold(cache.pages), cold(cache.pages)
    first[12:], second[:12] = False, False
    pair.step(sent(cache, Tier.L2, first))  # the worker is held up at these
    pair.step(sent(cache, Tier.L2, second))
    plan = sent(cache, Tier.L2, second)
    plan.mode[..., torch.nn.functional.pad(second, (0, plan.mode.shape[-1] - len(second)))] = int(Mode.CLUSTER)
    cache.apply(plan, 1)
    store.gate.set()
    cache.settle()
    check_books(cache)
    ours, theirs = pair.step(sent(cache, Tier.L1, first | second))
    assert torch.equal(ours, theirs)
    check_books(cache)
    pair.close()


@pytest.mark.parametrize("tier", [Tier.L1, Tier.L2])
def test_a_page_is_not_spared_a_conversion_that_has_not_begun(tier: Tier) -> None:
    """Compute to INT8 to INT4 gives other bits than compute to INT4, so what a slow disk left undone is still done."""
    pair = Pair(400)
    cache, store = pair.tiered, gated(pair, Tier.L2)
    first, second = cold(cache.pages), cold(cache.pages)
    first[12:], second[:12] = False, False
    pair.step(sent(cache, Tier.L2, first))  # the worker is held up at these
    away = sent(cache, Tier.L2, second)
    away.format[..., : len(second)][..., second] = int(Format.INT8)
    pair.step(away)
    assert [flight.job.state for flight in cache.flights if flight.target[1] == Format.INT8] == [State.QUEUED]
    opener = threading.Timer(0.2, store.gate.set)
    opener.start()
    coarser = sent(cache, tier, second)
    coarser.format[..., : len(second)][..., second] = int(Format.INT4)
    pair.step(coarser)
    cache.settle()
    check_books(cache)
    ours, theirs = pair.step(sent(cache, Tier.L1, first | second))
    assert torch.equal(ours, theirs)
    opener.join()
    pair.close()


def refuse(write: bool, offset: int, size: int) -> int:
    return -errno.EIO if write else size


def full_device(pair: Pair) -> None:
    """L1 may not grow from here on."""
    pools = pair.tiered.pools
    pools.limits = replace(pools.limits, l1_bytes=pools.device_bytes)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_failed_move_is_not_taken_back_in_the_midst_of_a_plan(overlap: bool, tmp_path: Path) -> None:
    """Pages that wait for room on the device wait for those that leave it, which the disk refuses."""
    pair = Pair(400, Faults(refuse), l3_path=str(tmp_path), overlap=overlap)
    cache = pair.tiered
    near, far = cold(cache.pages), cold(cache.pages)
    near[12:], far[:12] = False, False
    pair.step(sent(cache, Tier.L2, far))
    cache.settle()
    full_device(pair)
    plan, here = sent(cache, Tier.L3, near), sent(cache, Tier.L1, far)
    swapped = torch.nn.functional.pad(far, (0, plan.mode.shape[-1] - len(far)))
    plan.tier[..., swapped], plan.mode[..., swapped] = here.tier[..., swapped], here.mode[..., swapped]
    ours, theirs = pair.step(plan)
    assert torch.equal(ours, theirs)
    check_books(cache)
    cache.settle()
    assert not (cache.state["tier"] == Tier.L3).any()
    assert not (cache.state["tier"] == Tier.DROPPED).any()
    check_books(cache)
    ours, theirs = pair.step(sent(cache, Tier.L1, near))
    assert torch.equal(ours, theirs)
    pair.close()


def test_a_page_that_finds_no_place_when_it_is_called_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It left the ring and waits for the disk, and no memory is left for it: dropped, with a warning."""

    def fail(pool: SlabPool) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    pair = Pair(100, l3_path=str(tmp_path))
    cache, store = pair.tiered, gated(pair, Tier.L3)
    for _ in range(80):  # the workers are held up at the first pages, the last ones wait
        everything = torch.ones(cache.pages, dtype=torch.bool)  # that is not hot, so pages go there from the ring
        ours, theirs = pair.step(sent(cache, Tier.L3, everything))
        assert torch.equal(ours, theirs)
    waiting = [flight for flight in cache.flights if flight.job.state == State.QUEUED]
    assert waiting
    assert all(flight.staged for flight in waiting)
    monkeypatch.setattr(SlabPool, "_slab", fail)
    page = torch.zeros(cache.pages, dtype=torch.bool)
    page[waiting[-1].at[0, 1]] = True
    opener = threading.Timer(0.3, store.gate.set)
    opener.start()
    ours, theirs = pair.step(sent(cache, Tier.L1, page))
    assert torch.equal(ours, theirs)
    cache.settle()
    assert (cache.state["tier"][:, page.nonzero()[0, 0]] == Tier.DROPPED).all()
    assert any("dropped" in event for event in cache.traffic.events)
    check_books(cache)
    opener.join()
    pair.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_ctrl_c_leaves_no_page_half_moved(overlap: bool, tmp_path: Path) -> None:
    """Whatever line it comes at, the plan is in force as a whole, the step can be run, and the cache closed."""
    draw = random.Random(7)
    for turn in range(24):
        pair = Pair(100, l3_path=str(tmp_path), overlap=overlap)
        cache, stores = pair.tiered, pair.tiered.pools.stores
        tier, other = draw.sample((Tier.L1, Tier.L2, Tier.L3), 2)
        pair.step(sent(cache, tier, cold(cache.pages)))
        plan, left = sent(cache, other, cold(cache.pages)), draw.randrange(400)

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            if f"testbed{os.sep}cache" not in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
                return None
            left -= event == "line"
            if left == 0 and event == "line":
                signal.raise_signal(signal.SIGINT)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            cache.apply(plan, 1)
        except KeyboardInterrupt:
            assert torch.equal(cache.held(1).tier, plan.tier)
        finally:
            sys.settrace(before)
        check_books(cache)
        if turn % 2:
            ours, theirs = pair.step(plan)
            assert torch.equal(ours, theirs)
        pair.close()
        assert all(store.held_bytes == 0 for store in stores.values())


def test_a_second_ctrl_c_is_not_put_off() -> None:
    """Should a disk hang, there is a way out."""
    done = []

    @shielded
    def change() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append(1)
        signal.raise_signal(signal.SIGINT)
        done.append(2)

    with pytest.raises(KeyboardInterrupt):
        change()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
