"""An archive that misbehaves: what comes out is right, or a page is known to be lost; never anything else."""

from __future__ import annotations

import errno
import os
import resource
import time
from pathlib import Path

import pytest
import torch
from archive_case import Faults
from tier_case import STREAMS, P, Pair, check_books, cold, sent

from policies.base import Format, Mode, Tier
from testbed.cache.budgets import archive_budget_bytes, device_slack_bytes
from testbed.cache.flights import LostPages
from testbed.cache.paged import PagedCache


def archived(pair: Pair) -> torch.Tensor:
    """All cold pages are in the archive, and the copies are done: pages [N] bool."""
    pages = cold(pair.tiered.pages)
    ours, theirs = pair.step(sent(pair.tiered, Tier.L3, pages))
    assert torch.equal(ours, theirs)
    pair.tiered.settle()
    return pages


def count(cache: PagedCache, tier: Tier) -> int:
    return int((cache.state["tier"] == tier).sum())


@pytest.mark.parametrize("overlap", [True, False])
def test_slow_and_short_io_changes_nothing(overlap: bool, tmp_path: Path) -> None:
    """Random delays, short reads and writes: the bits are those of the flat cache, the wait is counted."""
    draw = torch.Generator().manual_seed(0)

    def answer(write: bool, offset: int, size: int) -> int:
        time.sleep(0.002 * float(torch.rand((), generator=draw)))
        return max(1, int(size * float(torch.rand((), generator=draw))))

    pair = Pair(300, Faults(answer), l3_path=str(tmp_path), l3_direct=False, overlap=overlap)
    for _ in range(3):
        pages = archived(pair)
        ours, theirs = pair.step(sent(pair.tiered, Tier.L1, pages))
        assert torch.equal(ours, theirs)
        check_books(pair.tiered)
    pair.tiered.settle()
    assert pair.tiered.traffic.stall_s["demand"] > 0
    assert pair.tiered.traffic.links["L3>L1"]["pages"] == 3 * int(pages.sum()) * STREAMS
    pair.close()


def test_failing_writes_leave_pages_where_they_were(tmp_path: Path) -> None:
    """No page is lost when the disk refuses, and after three failures in a row L3 is off and the run goes on."""
    pair = Pair(300, Faults(lambda write, offset, size: -errno.EIO if write else size), l3_path=str(tmp_path))
    cache = pair.tiered
    pages = cold(cache.pages)
    for _ in range(4):
        ours, theirs = pair.step(sent(cache, Tier.L3, pages))
        assert torch.equal(ours, theirs)
        cache.settle()
        check_books(cache)
    assert cache.traffic.failures["write"] >= 3
    assert any("L3 switched off" in event for event in cache.traffic.events)
    assert archive_budget_bytes(cache) == 0
    assert count(cache, Tier.L3) == 0
    ours, theirs = pair.step(sent(cache, Tier.L3, pages))
    assert torch.equal(ours, theirs)
    check_books(cache)
    pair.close()


def test_what_left_the_ring_is_not_lost_with_the_disk(tmp_path: Path) -> None:
    """A page that goes from L0 to a disk that refuses it has no slot to go back to: it finds another place."""
    pair = Pair(100, Faults(lambda write, offset, size: -errno.EIO if write else size), l3_path=str(tmp_path))
    cache, away = pair.tiered, 0
    for _ in range(40):
        plan = sent(cache, Tier.L3, ~cache.hot_mask(1))
        dead = cache.held(1).tier == Tier.DROPPED
        plan.tier[dead], plan.mode[dead] = int(Tier.DROPPED), int(Mode.SKIP)
        ours, theirs = pair.step(plan)
        assert torch.equal(ours, theirs)
        away += int((cache.state["tier"] == Tier.L3).sum())
    assert away > 0
    cache.settle()
    assert count(cache, Tier.DROPPED) == 0
    check_books(cache)
    ours, theirs = pair.step(sent(cache, Tier.L1, ~cache.hot_mask(1)))
    assert torch.equal(ours, theirs)
    pair.close()


@pytest.mark.parametrize("l2_bytes", [None, 0])
def test_a_full_disk_is_a_full_tier(l2_bytes: int | None, tmp_path: Path) -> None:
    """The system lets no file grow: pages stay in memory, or are dropped where that is not allowed either."""
    pair = Pair(300, l3_path=str(tmp_path), l2_bytes=l2_bytes)
    cache = pair.tiered
    pages = cold(cache.pages)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    try:
        ours, theirs = pair.step(sent(cache, Tier.L3, pages))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.equal(ours, theirs)
    assert count(cache, Tier.L3) == 0
    assert count(cache, Tier.DROPPED if l2_bytes == 0 else Tier.L2) == int(pages.sum()) * STREAMS
    assert any("L3 full" in event for event in cache.traffic.events)
    check_books(cache)
    pair.close()


def flip(cache: PagedCache, at: tuple[int, int]) -> None:
    """Changes one byte of a page in the file."""
    slot = cache.state["slot"][at[0], at[1]].view(1).long()
    pool = cache.pools.archive(Format(int(cache.state["format"][at[0], at[1]])))
    where = 4096 + int(pool.offsets(slot)[0]) + 77
    byte = os.pread(cache.pools.file.file, 1, where)
    os.pwrite(cache.pools.file.file, bytes([byte[0] ^ 0x10]), where)


def test_a_flipped_byte_is_one_lost_page(tmp_path: Path) -> None:
    """Attention never sees it; its neighbours in the batch arrive; given back or given up, the step goes on."""
    for give_back in (True, False):
        pair = Pair(300, l3_path=str(tmp_path), l3_direct=False)
        cache = pair.tiered
        pages = archived(pair)
        flip(cache, (1, 5))
        cache.apply(sent(cache, Tier.L1, pages), 1)
        with pytest.raises(LostPages) as lost:
            cache.arrive(0)
        assert lost.value.at.tolist() == [[1, 5]]
        assert cache.traffic.failures["corrupt"] >= 1
        check_books(cache)
        if give_back:
            cache.restore_pages(lost.value.at, pair.k[0][1, 5 * P : 6 * P][None], pair.v[0][1, 5 * P : 6 * P][None])
        else:
            cache.drop_pages(lost.value.at)
        ours, theirs = pair.step()
        assert torch.equal(ours, theirs)
        assert count(cache, Tier.L3) == 0
        assert count(cache, Tier.DROPPED) == (0 if give_back else 1)
        cache.settle()
        check_books(cache)
        pair.close()


def test_a_lost_page_that_is_only_approximated_is_skipped(tmp_path: Path) -> None:
    """Prototypes are not made of what can't be read; those of its neighbours are."""
    pair = Pair(300, l3_path=str(tmp_path), l3_direct=False)
    cache = pair.tiered
    archived(pair)
    flip(cache, (0, 4))
    plan = cache.held(1)
    plan.mode[0, 0, 3:6] = int(Mode.CLUSTER)
    cache.apply(plan, 1)
    assert cache.state["mode"][0, 3:6].tolist() == [Mode.CLUSTER, Mode.SKIP, Mode.CLUSTER]
    assert cache.traffic.failures["corrupt"] == 1
    check_books(cache)
    pair.close()


def test_reads_that_fail_for_ever_are_lost_pages_and_switch_the_archive_off(tmp_path: Path) -> None:
    broken = False
    pair = Pair(300, Faults(lambda write, offset, size: -errno.EIO if broken else size), l3_path=str(tmp_path))
    cache = pair.tiered
    pages = archived(pair)
    broken = True
    cache.apply(sent(cache, Tier.L1, pages), 1)
    lost = []
    for layer in range(cache.layers):
        with pytest.raises(LostPages) as error:
            cache.arrive(layer)
        lost.append(error.value.at)
    at = torch.cat(lost)
    assert len(at) == int(pages.sum()) * STREAMS
    assert archive_budget_bytes(cache) == 0
    check_books(cache)
    cache.drop_pages(at)
    ours, theirs = pair.step()
    assert torch.equal(ours, theirs)
    check_books(cache)
    pair.close()


def test_closing_with_moves_in_flight_leaves_nothing(tmp_path: Path) -> None:
    def slow(write: bool, offset: int, size: int) -> int:
        time.sleep(0.01)
        return size

    pair = Pair(400, Faults(slow), l3_path=str(tmp_path))
    pair.tiered.apply(sent(pair.tiered, Tier.L3, cold(pair.tiered.pages)), 1)
    assert len(pair.tiered.flights)
    stores = pair.tiered.pools.stores
    pair.close()
    assert all(store.held_bytes == 0 for store in stores.values())
    assert not list(tmp_path.iterdir())


def test_overlap_changes_no_decision_and_no_bit(tmp_path: Path) -> None:
    """Moves, facts and outputs are the same with copies in the background and without."""
    seen = []
    for overlap in (True, False):
        pair = Pair(300, l3_path=str(tmp_path), overlap=overlap)
        rows = []
        for turn in range(6):
            tier = (Tier.L3, Tier.L1, Tier.L2)[turn % 3]
            plan = sent(pair.tiered, tier, cold(pair.tiered.pages))
            out, _ = pair.step(plan)
            rows.append((out, pair.tiered.facts(), device_slack_bytes(pair.tiered)))
        seen.append(rows)
        pair.close()
    for (a, facts_a, slack_a), (b, facts_b, slack_b) in zip(*seen, strict=True):
        assert torch.equal(a, b)
        assert facts_a == facts_b
        assert slack_a == slack_b
