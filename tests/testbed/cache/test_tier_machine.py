"""A model-checked machine of pages and tiers: plans, steps, forks and slow stores in any order.

The truth is a flat cache that keeps everything on the device in the same formats: whatever moves in the other one, both
must give the same bits. What is counted must be what is there: no page in two places, none lost, no byte unaccounted.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from policies.base import Format, Mode, Plan, PoolLayout, Tier
from testbed.cache.layout import CacheConfig
from testbed.cache.ledger import positions
from testbed.cache.paged import PagedCache
from testbed.cache.pool import PageStore

L, HK, G, D, P = 2, 2, 2, 16, 16
CONFIG = CacheConfig(dtype="float32", sink_tokens=16, hot_tokens=32, slab_pages=4)


class Slow:
    """A store whose copies take a random while, so that jobs finish in any order and steps catch them half-way."""

    def __init__(self, store: PageStore, seed: int) -> None:
        self.store, self.random = store, torch.Generator().manual_seed(seed)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def _dawdle(self) -> None:
        time.sleep(0.003 * float(torch.rand((), generator=self.random)))

    def read(self, slots: Tensor) -> Tensor:
        self._dawdle()
        return self.store.read(slots)

    def write(self, slots: Tensor, blobs: Tensor) -> None:
        self._dawdle()
        self.store.write(slots, blobs)


@dataclass
class World:
    """A cache under test and its flat twin."""

    tiered: PagedCache
    flat: PagedCache
    dropped: Tensor  # [L, Hk, N] bool, by our own book


def legal(cache: PagedCache, plan: Plan, length: int) -> Plan:
    """The plan with hot pages as the cache demands them."""
    hot = cache.hot.mask(length)
    tier, mode, fmt = plan.tier.clone(), plan.mode.clone(), plan.format.clone()
    tier[tier == Tier.L0] = int(Tier.L1)
    tier[..., hot], mode[..., hot], fmt[..., hot] = int(Tier.L0), int(Mode.EXACT), int(Format.COMPUTE)
    return replace(plan, mode=mode, format=fmt, tier=tier)


def flattened(plan: Plan) -> Plan:
    """The same with everything alive on the device."""
    away = (plan.tier == Tier.L2) | (plan.tier == Tier.L3)
    return replace(plan, tier=torch.where(away, int(Tier.L1), plan.tier).to(torch.int8))


def drawn_plan(held: Plan, seed: int) -> Plan:
    """Random tiers, formats that only get coarser, exact only on the device."""
    g = torch.Generator().manual_seed(seed)
    shape = held.mode.shape
    away = torch.multinomial(torch.tensor([5.0, 3.0, 3.0, 0.3]), held.mode.numel(), True, generator=g).view(shape) + 1
    still = torch.rand(shape, generator=g) < 0.4
    tier = torch.where(still & (held.tier > 0), held.tier, away.to(torch.int8)).to(torch.int8)
    tier = torch.where(held.tier == Tier.DROPPED, held.tier, tier)
    coarser = torch.rand(shape, generator=g) < 0.2
    fmt = torch.where(coarser, (held.format + 1).clamp(max=2), held.format).to(torch.int8)
    exact = (torch.rand(shape, generator=g) < 0.6) & (tier == Tier.L1)
    mode = torch.where(exact, int(Mode.EXACT), int(Mode.SKIP)).to(torch.int8)
    arena = torch.randint(0, 3, shape[:2], generator=g).to(torch.int8)
    return Plan(mode, fmt, tier, torch.rand(shape, generator=g), PoolLayout(arena, (4, 8, 12)))


class TierMachine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.worlds: list[World] = []

    @initialize(tokens=st.integers(1, 200), seed=st.integers(0, 2**20), overlap=st.booleans(), slow=st.booleans())
    def begin(self, tokens: int, seed: int, overlap: bool, slow: bool) -> None:
        g = torch.Generator().manual_seed(seed)
        k, v = ([torch.randn(HK, tokens, D, generator=g) for _ in range(L)] for _ in range(2))
        config = replace(CONFIG, overlap=overlap)
        caches = [PagedCache(L, HK, D, each, backend="torch") for each in (config, CONFIG)]
        if slow:
            stores = caches[0].pools.stores
            for index, key in enumerate(list(stores)):
                if key[0] in (Tier.L2, Tier.L3):
                    stores[key] = Slow(stores[key], seed + index)  # type: ignore[assignment]
        plan = legal(caches[0], drawn_plan(Plan.dense(L, HK, -(-tokens // P)), seed), tokens)
        caches[0].load(list(k), list(v), plan)
        caches[1].load(list(k), list(v), flattened(plan))
        self.worlds = [World(*caches, dropped=plan.tier == Tier.DROPPED)]

    @rule(which=st.integers(0, 9), seed=st.integers(0, 2**20), tokens=st.integers(1, 20), replan=st.booleans())
    def step(self, which: int, seed: int, tokens: int, replan: bool) -> None:
        """New tokens after a new plan or after the old one."""
        world = self.worlds[which % len(self.worlds)]
        a, b = world.tiered, world.flat
        held = a.held(tokens)
        plan = legal(a, drawn_plan(held, seed) if replan else held, a.length_tokens + tokens)
        new = plan.tier == Tier.DROPPED
        world.dropped = new
        a.apply(plan, tokens)
        b.apply(flattened(plan), tokens)
        g = torch.Generator().manual_seed(seed)
        a.begin(tokens)
        b.begin(tokens)
        for layer in range(L):
            k, v = (torch.randn(HK, tokens, D, generator=g) for _ in range(2))
            q = torch.randn(HK, G, tokens, D, generator=g)
            outs = []
            for cache in (a, b):
                cache.append(layer, k, v)
                outs.append(cache.attend(layer, q, D**-0.5).out)
            assert torch.equal(*outs), f"layer {layer}: {float((outs[0] - outs[1]).abs().max())}"
        a.end(tokens)
        b.end(tokens)

    @precondition(lambda self: len(self.worlds) < 4)
    @rule(which=st.integers(0, 9), own=st.booleans())
    def fork(self, which: int, own: bool) -> None:
        world = self.worlds[which % len(self.worlds)]
        self.worlds.append(World(world.tiered.fork(own), world.flat.fork(own), world.dropped.clone()))

    @precondition(lambda self: len(self.worlds) > 1)
    @rule(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        world = self.worlds.pop(which % len(self.worlds))
        world.tiered.close()
        world.flat.close()

    @rule(which=st.integers(0, 9))
    def settle(self, which: int) -> None:
        """All copies are done: nothing is in flight any more."""
        cache = self.worlds[which % len(self.worlds)].tiered
        cache.settle()
        assert not len(cache.flights)
        assert not cache.flights.pending.any()
        assert not any("in_flight" in name for name in cache.ledger().used_bytes)

    @invariant()
    def pages_are_in_one_place(self) -> None:
        """Every slot that is taken is held by as many pages and flights as it has references, and none besides."""
        for pools in {id(world.tiered.pools): world.tiered.pools for world in self.worlds}.values():
            holders: dict[tuple[Tier, Format], Counter[int]] = {key: Counter() for key in pools.stores}
            for cache in pools.users:
                state = cache.state
                alive = (state["tier"] != Tier.DROPPED) & (state["tier"] != Tier.L0)
                for tier, code, slot in zip(
                    *(state[name][alive].tolist() for name in ("tier", "format", "slot")), strict=True
                ):
                    holders[Tier(tier), Format(code)][slot] += 1
                for flight in cache.flights:
                    if not flight.staged:
                        holders[flight.source].update(flight.job.source_slots.tolist())
            for key, store in pools.stores.items():
                if key[0] in (Tier.L1, Tier.L2):
                    references = store.slots.references  # type: ignore[attr-defined]
                    there = {slot: int(references[slot]) for slot in references.nonzero().flatten().tolist()}
                    assert there == dict(holders[key]), key
                if key[0] != Tier.L0:
                    assert store.used_pages == len(holders[key]), key

    @invariant()
    def bytes_and_positions_are_kept(self) -> None:
        for world in self.worlds:
            cache = world.tiered
            ledger = cache.ledger()
            if len(cache.pools.users) == 1:
                for tier in (Tier.L1, Tier.L2, Tier.L3):
                    used = sum(size for name, size in ledger.used_bytes.items() if name.startswith(tier.name))
                    assert used <= ledger.held_bytes[tier.name]
                for (tier, code), store in cache.pools.stores.items():
                    if tier in (Tier.L1, Tier.L2, Tier.L3):
                        moving = sum(len(each.at) for each in cache.flights if each.source == (tier, code))
                        staged = sum(
                            len(each.at) for each in cache.flights if each.source == (tier, code) and each.staged
                        )
                        assert store.used_pages == ledger.pages.get((tier, code), 0) + moving - staged
            kept = positions(cache)
            gone = world.dropped.repeat_interleave(P, dim=2)[..., : cache.length_tokens]
            assert torch.equal(kept, ~gone)

    def teardown(self) -> None:
        for world in self.worlds:
            world.tiered.close()
            world.flat.close()
            if not world.tiered.pools.users:
                assert all(store.held_bytes == 0 for store in world.tiered.pools.stores.values())


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=30, stateful_step_count=20, deadline=None, phases=[Phase.generate])
