"""Pages in flight, caught half-way: copies wait at a gate while plans, forks and drops go on around them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tier_case import STREAMS, D, P, Pair, check_books, cold, sent
from torch import Tensor

from kernels.pages import page_format
from policies.base import Format, Mode, Plan, Tier
from testbed.cache.paged import PagedCache
from testbed.cache.pool import PageStore

PAGE = page_format("fp32", P, D).page_bytes


class Gated:
    """A store of which nothing is read and into which nothing is written while its gate is shut."""

    def __init__(self, store: PageStore) -> None:
        self.store, self.gate = store, threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def read(self, slots: Tensor) -> Tensor:
        self.gate.wait(60)
        return self.store.read(slots)

    def write(self, slots: Tensor, blobs: Tensor) -> None:
        self.gate.wait(60)
        self.store.write(slots, blobs)


@contextmanager
def shut(cache: PagedCache, tier: Tier) -> Iterator[threading.Event]:
    """What goes to or comes from a tier in compute format waits until the block ends or the gate it gives is set."""
    stores, key = cache.pools.stores, (tier, Format.COMPUTE)
    gated = Gated(stores[key])
    stores[key] = gated  # type: ignore[assignment]
    try:
        yield gated.gate
    finally:
        gated.gate.set()
        stores[key] = gated.store


def slots_of(cache: PagedCache, pages: Tensor) -> Tensor:
    """[S, n] int64, of pages [N] bool of all streams."""
    return cache.state["slot"][:, : len(pages)][:, pages].long()


def between(pages: int, first: int, end: int) -> Tensor:
    index = torch.arange(pages)
    return (index >= first) & (index < end)


def test_a_source_is_kept_until_its_copy_is_done() -> None:
    """New pages don't get its slots, and the ledger says what they take."""
    pair = Pair(300)
    cache = pair.tiered
    pages = cold(cache.pages)
    count = int(pages.sum()) * STREAMS
    before, pool = slots_of(cache, pages).flatten(), cache.pools.level_1(Format.COMPUTE)
    with shut(cache, Tier.L2):
        ours, theirs = pair.step(sent(cache, Tier.L2, pages))
        assert torch.equal(ours, theirs)
        assert (pool.slots.references[before] == 1).all()
        assert cache.ledger().used_bytes.get("L1/in_flight") == count * PAGE
        assert pool.used_pages == int((cache.state["tier"] == Tier.L1).sum()) + count
        check_books(cache)
    cache.settle()
    assert "L1/in_flight" not in cache.ledger().used_bytes
    assert pool.used_pages == int((cache.state["tier"] == Tier.L1).sum())
    ours, theirs = pair.step(sent(cache, Tier.L1, pages))
    assert torch.equal(ours, theirs)
    pair.close()


def fetched_early(cache: PagedCache, pages: Tensor) -> Plan:
    """Pages [N] bool on the device, but not attended."""
    plan = sent(cache, Tier.L1, pages)
    plan.mode[..., : len(pages)][..., pages] = int(Mode.SKIP)
    return plan


def test_attention_waits_for_pages_on_their_way() -> None:
    """Fetched early, wanted before they are there: what is attended is the pages, and the wait is counted."""
    pair = Pair(300)
    cache = pair.tiered
    pages = cold(cache.pages)
    pair.step(sent(cache, Tier.L2, pages))
    cache.settle()
    with shut(cache, Tier.L2) as gate:
        pair.step(fetched_early(cache, pages))
        opener = threading.Timer(0.2, gate.set)
        opener.start()
        ours, theirs = pair.step(sent(cache, Tier.L1, pages))
        opener.join()
    assert torch.equal(ours, theirs)
    assert cache.traffic.prefetch["late"] == int(pages.sum()) * STREAMS
    assert cache.traffic.stall_s["prefetch_late"] > 0
    pair.close()


def test_holes_close_around_pages_that_arrive() -> None:
    """A copy under way writes into the slot it was given, so compaction leaves that page alone."""
    pair = Pair(800)
    cache = pair.tiered
    late, gone = between(cache.pages, 22, 44), between(cache.pages, 1, 16)
    pair.step(sent(cache, Tier.L2, late))
    cache.settle()
    with shut(cache, Tier.L2):
        pair.step(fetched_early(cache, late))
        before = slots_of(cache, late)
        pair.step(sent(cache, Tier.DROPPED, gone))
        assert torch.equal(slots_of(cache, late), before)
        check_books(cache)
    ours, theirs = pair.step(sent(cache, Tier.L1, late))
    assert torch.equal(ours, theirs)
    cache.settle()
    pool = cache.pools.level_1(Format.COMPUTE)
    assert pool.held_bytes - pool.used_pages * PAGE < cache.config.slab_pages * PAGE
    pair.close()


def test_holes_close_around_pages_that_a_fork_shares() -> None:
    """To move one of them would leave a copy behind."""
    pair = Pair(790)  # the next token begins no page
    cache = pair.tiered
    fork = cache.fork()
    shared, gone = between(cache.pages, 22, 44), between(cache.pages, 1, 16)
    pool, before = cache.pools.level_1(Format.COMPUTE), slots_of(cache, shared)
    used = pool.used_pages
    for each in (cache, fork):
        each.apply(sent(each, Tier.DROPPED, gone), 1)
    assert torch.equal(slots_of(cache, shared), before)
    assert torch.equal(slots_of(fork, shared), before)
    assert pool.used_pages == used - int(gone.sum()) * STREAMS
    ours, theirs = pair.step()
    assert torch.equal(ours, theirs)
    fork.close()
    pair.close()


@pytest.mark.parametrize("tier", [Tier.L2, Tier.L3])
def test_what_leaves_the_ring_comes_back_as_it_was(tier: Tier) -> None:
    """Pages of all streams leave L0 together, straight to a tier beyond the device."""
    pair = Pair(100)
    cache = pair.tiered
    for _ in range(2 * P):
        ours, theirs = pair.step(sent(cache, tier, ~cache.hot_mask(1)))
        assert torch.equal(ours, theirs)
        assert not (cache.state["tier"] == Tier.L1).any()
    ours, theirs = pair.step(sent(cache, Tier.L1, ~cache.hot_mask(1)))
    assert torch.equal(ours, theirs)
    pair.close()
