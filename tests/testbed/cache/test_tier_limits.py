"""Tiers that are full: pages go on to the next, the last are dropped with a warning, and nothing is half moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tier_case import CONFIG, HK, STREAMS, D, L, P, Pair, check_books, cold, legal, sent
from torch import Tensor

from kernels.pages import page_format
from policies.base import Format, Mode, Plan, PoolLayout, Tier
from testbed.cache.budgets import host_budget_bytes
from testbed.cache.layout import CacheConfig
from testbed.cache.metadata import page_table
from testbed.cache.paged import PagedCache
from testbed.cache.pool import CacheError, PoolFull, SlabPool
from testbed.cache.pools import Pools, Shape

PAGE = page_format("fp32", P, D).page_bytes


def count(cache: PagedCache, tier: Tier) -> int:
    return int((cache.state["tier"] == tier).sum())


@pytest.mark.parametrize("room_pages", [0, 3, 8, 40])
def test_l2_full_goes_on_to_l3(room_pages: int, tmp_path: Path) -> None:
    """The best pages stay in L2, as many as fit; the others are in the archive, and all come back as they were."""
    pair = Pair(400, l2_bytes=room_pages * PAGE + 20_000, l3_path=str(tmp_path))
    cache = pair.tiered
    pages = cold(cache.pages)
    score = torch.rand(L, HK, cache.held(1).tier.shape[-1], generator=torch.Generator().manual_seed(1))
    pair.step(sent(cache, Tier.L2, pages, score=score))
    there = count(cache, Tier.L2)
    wanted = int(pages.sum()) * STREAMS
    assert there + count(cache, Tier.L3) == wanted
    assert cache.pools.held_bytes(Tier.L2) + cache.host_table_bytes <= room_pages * PAGE + 20_000
    in_l2 = cache.state["tier"] == Tier.L2
    flat = score.view(STREAMS, -1)
    if there and count(cache, Tier.L3):
        assert flat[in_l2].min() >= flat[cache.state["tier"] == Tier.L3].max()
    if there < wanted:
        assert any("L2 full" in event for event in cache.traffic.events)
    check_books(cache)
    ours, theirs = pair.step(sent(cache, Tier.L1, pages))
    assert torch.equal(ours, theirs)
    check_books(cache)
    pair.close()


def test_all_tiers_full_drops_the_least_and_says_so(tmp_path: Path) -> None:
    pair = Pair(400, l2_bytes=8 * PAGE + 20_000, l3_bytes=1, l3_path=str(tmp_path))
    cache = pair.tiered
    pages = cold(cache.pages)
    score = torch.rand(L, HK, cache.held(1).tier.shape[-1], generator=torch.Generator().manual_seed(2))
    ours, theirs = pair.step(sent(cache, Tier.L2, pages, score=score))
    assert torch.equal(ours, theirs)
    dropped, kept = cache.state["tier"] == Tier.DROPPED, cache.state["tier"] == Tier.L2
    assert dropped.any()
    assert kept.any()
    flat = score.view(STREAMS, -1)
    assert flat[dropped].max() <= flat[kept].min()
    assert any("dropped" in event for event in cache.traffic.events)
    assert not (cache.state["mode"][dropped] != Mode.SKIP).any()
    check_books(cache)
    pair.close()


def test_l1_full_leaves_pages_where_they_are() -> None:
    """A promotion without room is not made: the page is not attended, and comes once there is room."""
    pair = Pair(400)
    cache = pair.tiered
    pages = cold(cache.pages)
    pair.step(sent(cache, Tier.L2, pages))
    cache.settle()
    pools = cache.pools
    pools.limits = type(pools.limits)(l1_bytes=pools.device_bytes + 8 * PAGE)
    ours, theirs = pair.step(sent(cache, Tier.L1, pages))
    assert torch.equal(ours, theirs)
    back = (cache.state["tier"] == Tier.L1)[:, : len(pages)] & pages
    assert back.sum() == 8
    assert count(cache, Tier.L2) == int(pages.sum()) * STREAMS - 8
    assert pools.device_bytes <= (pools.limits.l1_bytes or 0)
    check_books(cache)
    pools.limits = type(pools.limits)()
    ours, theirs = pair.step(sent(cache, Tier.L1, pages))
    assert torch.equal(ours, theirs)
    assert count(cache, Tier.L2) == 0
    pair.close()


def test_pages_that_leave_the_ring_find_room_further_out() -> None:
    """With a full device what leaves L0 goes to L2; decoding goes on and no page is lost."""
    pair = Pair(200)
    cache = pair.tiered
    pools = cache.pools
    for _ in range(60):
        pools.limits = type(pools.limits)(l1_bytes=pools.device_bytes + 2_000)  # room for tables, none for pages
        ours, theirs = pair.step()
        assert torch.equal(ours, theirs)
    assert count(cache, Tier.L2) > 0
    assert count(cache, Tier.DROPPED) == 0
    check_books(cache)
    pair.close()


def test_an_allocator_that_fails_is_a_full_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(400)
    cache = pair.tiered
    pages = cold(cache.pages)
    pair.step(sent(cache, Tier.L2, pages))
    cache.settle()

    def fail(pool: SlabPool) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    with monkeypatch.context() as patched:
        patched.setattr(SlabPool, "_slab", fail)
        ours, theirs = pair.step(sent(cache, Tier.L1, pages))
    assert torch.equal(ours, theirs)
    check_books(cache)
    ours, theirs = pair.step(sent(cache, Tier.L1, pages))
    assert torch.equal(ours, theirs)
    assert count(cache, Tier.L2) == 0
    pair.close()


def test_a_device_without_room_for_the_ring_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    config = CacheConfig(dtype="float32", sink_tokens=16, hot_tokens=32, l1_bytes=10 * PAGE, l3_path=str(tmp_path))
    with pytest.raises(PoolFull):
        PagedCache(L, HK, D, config)
    assert not list(tmp_path.iterdir())


def test_an_impossible_plan_changes_nothing() -> None:
    pair = Pair(300)
    cache = pair.tiered
    pair.step(sent(cache, Tier.L2, cold(cache.pages)))
    before = {name: value.clone() for name, value in cache.state.items()}
    plan = legal(cache, cache.held(1), cache.length_tokens + 1)
    plan.mode[plan.tier == Tier.L2] = int(Mode.EXACT)
    with pytest.raises(CacheError, match="attends exactly a page that is not on the device"):
        cache.apply(plan, 1)
    assert all(torch.equal(value[:, : before[name].shape[1]], before[name]) for name, value in cache.state.items())
    check_books(cache)
    pair.close()


# --- arenas --------------------------------------------------------------------------------------------------


def test_arenas_keep_their_pages_together_and_give_blocks_back() -> None:
    """Slots of an arena's pages are in blocks of its own, even if another has room; dropped classes return memory."""
    cache = PagedCache(L, HK, D, CONFIG, backend="torch")
    g = torch.Generator().manual_seed(0)
    k, v = ([torch.randn(HK, 520, D, generator=g) for _ in range(L)] for _ in range(2))
    arena = torch.tensor([[0, 1, 2], [2, 1, 0]], dtype=torch.int8)
    layout = PoolLayout(arena, (4, 8, 16))
    plan = Plan.dense(L, HK, 33)
    plan = legal(cache, Plan(plan.mode, plan.format, plan.tier, None, layout), 520)
    cache.load(k, v, plan)
    pool = cache.pools.level_1(Format.COMPUTE)
    for number, block in enumerate(layout.block_pages):
        streams = (arena.flatten() == number).nonzero().flatten()
        here = cache.state["tier"][streams] == Tier.L1
        slots = cache.state["slot"][streams][here].long()
        assert (pool.slots.owner[slots // pool.slab_pages] == number).all()
        held, used = pool.slots.held_by(number), len(slots)
        assert held == -(-used // block) * block
    rows = cache.pools.arenas()
    special = rows["compute/special"]
    assert special["block_pages"] == 16
    assert special["slack_bytes"] == (special["held_pages"] - special["used_pages"]) * PAGE
    assert sum(row["held_pages"] for row in rows.values()) * PAGE == pool.held_bytes
    before = pool.held_bytes
    gone = cache.held(1)
    drop = (arena == 2).unsqueeze(-1) & (gone.tier == Tier.L1)
    gone.tier[drop], gone.mode[drop] = int(Tier.DROPPED), int(Mode.SKIP)
    cache.apply(legal(cache, gone, 521), 1)
    assert pool.held_bytes == before - special["held_pages"] * PAGE
    assert pool.slots.held_by(2) == 0
    cache.close()
    assert pool.held_bytes == 0


def test_growth_copies_nothing() -> None:
    """Slabs that are there stay at their address when the pool grows."""
    pool = SlabPool(page_format("fp32", P, D), 4, torch.device("cpu"))
    pool.allocate(8)
    before = [slab.data_ptr() for slab in pool.slabs]
    pool.allocate(100)
    assert [slab.data_ptr() for slab in pool.slabs][:2] == before


# --- forks -----------------------------------------------------------------------------------------------------


def test_forks_share_pages_until_one_lets_go() -> None:
    """A fork costs its ring; what one converts or drops the other still has, bit for bit."""
    pair = Pair(600)
    cache = pair.tiered
    pools = cache.pools
    ring = STREAMS * cache.hot.stream_pages
    used = pools.level_1(Format.COMPUTE).used_pages
    fork = cache.fork()
    assert pools.level_1(Format.COMPUTE).used_pages == used
    assert pools.stores[Tier.L0, Format.COMPUTE].used_pages == 2 * ring
    away = sent(fork, Tier.DROPPED, cold(fork.pages))
    fork.apply(away, 1)
    assert pools.level_1(Format.COMPUTE).used_pages == used
    ours, theirs = pair.step()
    assert torch.equal(ours, theirs)
    pages = int(cold(cache.pages).sum()) * STREAMS
    cache.close()
    assert pools.level_1(Format.COMPUTE).used_pages == used - pages + STREAMS * 0
    fork.close()
    assert pools.level_1(Format.COMPUTE).used_pages == 0
    assert not pools.users


def test_limits_bind_sequences_together() -> None:
    """Two sequences over the same pools: the second is told what the first left."""
    config = CacheConfig(dtype="float32", sink_tokens=16, hot_tokens=32, l2_bytes=100 * PAGE)
    pools = Pools(Shape(L, HK, D), config)
    first, second = (PagedCache(L, HK, D, config, backend="torch", pools=pools) for _ in range(2))
    alone, empty = host_budget_bytes(second), first.host_table_bytes
    g = torch.Generator().manual_seed(0)
    k, v = ([torch.randn(HK, 200, D, generator=g) for _ in range(L)] for _ in range(2))
    plan = legal(first, Plan.dense(L, HK, 13), 200)
    first.load(k, v, plan)
    first.apply(sent(first, Tier.L2, cold(13)), 1)
    assert alone is not None
    grown = first.host_table_bytes - empty
    assert host_budget_bytes(second) == alone - first.ledger().used_bytes["L2/compute"] - grown
    first.close()
    assert host_budget_bytes(second) == alone + empty
    second.close()


def test_page_table_says_what_is_known_of_a_page(tmp_path: Path) -> None:
    pair = Pair(300, l3_path=str(tmp_path))
    cache = pair.tiered
    pages = cold(cache.pages)
    score = torch.rand(L, HK, cache.held(1).tier.shape[-1], generator=torch.Generator().manual_seed(3))
    pair.step(sent(cache, Tier.L3, pages, score=score))
    cache.settle()
    rows = page_table(cache, 1, 2)
    assert [row["first_position"] for row in rows] == [P * page for page in range(cache.pages)]
    assert [row["tier"] for row in rows].count("L3") == int(pages.sum())
    assert all((row["checksum"] is not None) == (row["tier"] == "L3") for row in rows)
    assert [row["core_score"] for row in rows] == pytest.approx(score[1, 2].tolist())
    pair.close()


def test_a_fork_of_a_full_cache_is_as_full(tmp_path: Path) -> None:
    """Pools of its own take over what was held, though tables have grown since it was placed."""
    pair = Pair(400, l1_bytes=2_000_000, l2_bytes=40 * PAGE + 20_000, l3_path=str(tmp_path))
    cache = pair.tiered
    pair.step(sent(cache, Tier.L2, cold(cache.pages)))
    cache.pools.limits = type(cache.pools.limits)(cache.pools.device_bytes, cache.pools.host_bytes - 100)
    fork = cache.fork(own_pools=True)
    assert fork.ledger().pages == cache.ledger().pages
    assert fork.pools.limits == fork.config.capacities("cpu")
    fork.close()
    pair.close()


def test_what_fits_does_not_depend_on_timing(tmp_path: Path) -> None:
    """Under tight limits the same pages end in the same tiers, with copies in the background and without."""
    seen = []
    for overlap in (True, False):
        pair = Pair(400, l2_bytes=60 * PAGE, l3_bytes=2 << 20, l3_path=str(tmp_path), overlap=overlap)
        g = torch.Generator().manual_seed(5)
        tiers = []
        for turn in range(12):
            width = pair.tiered.held(1).tier.shape[-1]
            pages = cold(width) & (torch.rand(width, generator=g) < 0.6)
            score = torch.rand(L, HK, width, generator=g)
            plan = sent(pair.tiered, (Tier.L2, Tier.L1, Tier.L3)[turn % 3], pages, score=score)
            dead = pair.tiered.held(1).tier == Tier.DROPPED
            plan.tier[dead], plan.mode[dead] = int(Tier.DROPPED), int(Mode.SKIP)
            ours, theirs = pair.step(plan)
            assert torch.equal(ours, theirs)
            tiers.append(pair.tiered.state["tier"].clone())
        seen.append(tiers)
        check_books(pair.tiered)
        pair.close()
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("mode", lambda x: x.index_fill(2, torch.tensor([5]), 4), r"plan.mode has codes of 1 to 4: must be of 0 SKIP"),
        (
            "format",
            lambda x: x.index_fill(2, torch.tensor([5]), 3),
            r"plan.format has codes of 0 to 3: must be of 0 COMPUTE",
        ),
        ("tier", lambda x: x.index_fill(2, torch.tensor([5]), -1), r"plan.tier has codes of -1 to 1: must be of 0 L0"),
        ("tier", lambda x: x.transpose(0, 1), r"plan.tier has shape \(3, 2, \d+\), the cache has \(2, 3, \d+\)"),
        ("score", lambda x: x.float().flatten(), r"plan.score has shape \(\d+,\), the cache has \(2, 3, \d+\)"),
        ("pools", lambda x: PoolLayout(x[..., 0].T, (4, 4)), r"plan.pools.arena has shape \(3, 2\), .* \(2, 3\)"),
    ],
)
def test_plans_that_mean_nothing_change_nothing(name: str, harm: Callable[[Tensor], object], said: str) -> None:
    pair = Pair(300)
    cache = pair.tiered
    plan = sent(cache, Tier.L1, cold(cache.pages))
    harmed = replace(plan, **{name: harm(plan.tier if name in ("score", "pools") else getattr(plan, name))})
    with pytest.raises(CacheError, match=said):
        cache.apply(harmed, 1)
    check_books(cache)
    ours, theirs = pair.step(plan)
    assert torch.equal(ours, theirs)
    pair.close()


def test_a_score_that_is_no_number_is_the_least(tmp_path: Path) -> None:
    """Where L2 has room for some only, the pages that a policy could not score go on to L3."""
    pair = Pair(400, l3_path=str(tmp_path), l2_bytes=100_000)
    cache = pair.tiered
    pages = cold(cache.pages)
    score = torch.ones(cache.held(1).tier.shape)
    score[..., ::2] = torch.nan
    ours, theirs = pair.step(sent(cache, Tier.L2, pages, score=score))
    assert torch.equal(ours, theirs)
    tier, known = cache.state["tier"][:, : len(pages)][:, pages], score.flatten(0, 1)[:, : len(pages)][:, pages] == 1
    assert 0 < int((tier == Tier.L2).sum()) <= int(known.sum())
    assert (tier[~known] == Tier.L3).all()
    pair.close()


def test_a_page_that_is_refused_stays_and_is_not_copied(tmp_path: Path) -> None:
    """Pages in the archive that L2 has no room for stay in their slots."""
    pair = Pair(400, l3_path=str(tmp_path))
    cache = pair.tiered
    pages = cold(cache.pages)
    pair.step(sent(cache, Tier.L3, pages))
    cache.settle()
    before = cache.state["slot"].clone()
    cache.pools.limits = type(cache.pools.limits)(l2_bytes=cache.pools.host_bytes)
    ours, theirs = pair.step(sent(cache, Tier.L2, pages))
    assert torch.equal(ours, theirs)
    cache.settle()
    stayed = (cache.state["tier"] == Tier.L3)[:, : len(pages)]
    assert int(stayed.sum()) == int(pages.sum()) * STREAMS
    assert torch.equal(cache.state["slot"][:, : len(pages)][stayed], before[:, : len(pages)][stayed])
    assert "L3>L3" not in cache.traffic.links
    pair.close()


def test_what_leaves_a_tier_makes_room_for_what_comes(tmp_path: Path) -> None:
    """L2 is full; half of it goes on to the archive and as many pages come from the device: all find their place."""
    pair = Pair(600, l3_path=str(tmp_path))
    cache = pair.tiered
    early, late = cold(cache.pages), cold(cache.pages)
    early[17:], late[:17], late[33:] = False, False, False
    pair.step(sent(cache, Tier.L2, early))
    cache.settle()
    cache.pools.limits = type(cache.pools.limits)(l2_bytes=cache.pools.host_bytes + 20_000)
    plan, other = sent(cache, Tier.L3, early), sent(cache, Tier.L2, late)
    where = torch.nn.functional.pad(late, (0, plan.tier.shape[-1] - len(late)))
    plan.tier[..., where], plan.mode[..., where] = other.tier[..., where], other.mode[..., where]
    ours, theirs = pair.step(plan)
    assert torch.equal(ours, theirs)
    assert count(cache, Tier.L2) == int(late.sum()) * STREAMS
    assert count(cache, Tier.L3) == int(early.sum()) * STREAMS
    assert not cache.traffic.events
    pair.close()
