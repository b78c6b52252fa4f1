"""The cascade device -> L2 -> L3 -> DROPPED against plain loops, alone and in whole plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_trace import KV_HEADS, LAYERS, PAGE_BYTES, device_bytes, first_signals, full_bytes, walk
from torch import Tensor

from policies.base import Format, Mode, Plan, Policy, Signals, Tier
from policies.filling import best, cascade, count, stream_bytes, whole_pages
from policies.formats.by_tier import ByTier
from testbed.compose import compose_policy

SIZES = (PAGE_BYTES.compute, PAGE_BYTES.int8, PAGE_BYTES.int4)
budgets = st.none() | st.just(0) | st.integers(0, full_bytes())


def tier_bytes(plan: Plan, tier: Tier) -> int:
    """Bytes in a tier, page by page."""
    pairs = zip(plan.tier.flatten().tolist(), plan.format.flatten().tolist(), strict=True)
    return sum(SIZES[fmt] for place, fmt in pairs if place == tier)


def by_loop(
    victims: Tensor, fmt: Tensor, rank: Tensor, order: tuple[Tier, ...], room: dict[Tier, int | None]
) -> list[int]:
    """Where each page of the flattened tensors goes; 0 for pages that are no victims."""
    where = [0] * victims.numel()
    ranks, formats = rank.flatten().tolist(), fmt.flatten().tolist()
    waiting = sorted(victims.flatten().nonzero().flatten().tolist(), key=lambda n: (-ranks[n], n))
    for tier in order:
        left = room[tier]
        while waiting and (left is None or SIZES[formats[waiting[0]]] <= left):
            page = waiting.pop(0)
            where[page] = int(tier)
            left = None if left is None else left - SIZES[formats[page]]
    for page in waiting:
        where[page] = int(Tier.DROPPED)
    return where


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    host=budgets,
    archive=budgets,
    first=st.sampled_from([Tier.L2, Tier.L3, Tier.DROPPED]),
    formats=st.sampled_from([(0,), (2,), (0, 1), (0, 1, 2)]),
    ranks=st.sampled_from([2, 7, 1000]),
)
def test_the_best_ranked_stay_in_the_higher_tier(
    seed: int, host: int | None, archive: int | None, first: Tier, formats: tuple[int, ...], ranks: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    signals = replace(first_signals(frozenset()), host_budget_bytes=host, archive_budget_bytes=archive)
    victims = torch.rand(signals.shape, generator=chance) < 0.6
    rank = torch.randint(-ranks, ranks, signals.shape, generator=chance).float()
    fmt = torch.tensor(formats, dtype=torch.int8)[torch.randint(0, len(formats), signals.shape, generator=chance)]
    found = cascade(signals, fmt, victims, first, lambda: rank)
    order = {Tier.L2: (Tier.L2, Tier.L3), Tier.L3: (Tier.L3, Tier.L2)}.get(first, ())
    assert found.dtype == torch.int8
    assert found.flatten().tolist() == by_loop(victims, fmt, rank, order, {Tier.L2: host, Tier.L3: archive})


def test_nothing_is_ranked_while_there_is_room() -> None:
    def refuse() -> Tensor:
        raise AssertionError("asked for ranks")

    signals = replace(first_signals(frozenset()), host_budget_bytes=full_bytes())
    victims = torch.ones(signals.shape, dtype=torch.bool)
    fmt = torch.zeros(signals.shape, dtype=torch.int8)
    assert (cascade(signals, fmt, victims, Tier.L2, refuse) == Tier.L2).all()


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["elastic", "quest", "redknot+elastic", "redknot+quest"]),
    victim=st.sampled_from(["l2", "l3", "dropped"]),
    device=st.sampled_from([0.25, 0.45, 0.9]),
    host=st.none() | st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    archive=st.none() | st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
def test_every_plan_of_the_trace_keeps_every_budget(
    name: str, victim: str, device: float, host: float | None, archive: float | None
) -> None:
    policy = _with_victim(compose_policy(name), victim)
    rooms = [None if share is None else int(share * full_bytes()) for share in (host, archive)]
    for signals, plan in _walk(policy, int(device * full_bytes()), *rooms):
        assert device_bytes(signals, plan) <= int(device * full_bytes())
        for tier, room in zip((Tier.L2, Tier.L3), rooms, strict=True):
            held = tier_bytes(plan, tier)
            assert room is None or held <= room
            assert victim != "dropped" or held == 0
        # Nothing is dropped while the last tier still has room for a page.
        lost = (plan.tier == Tier.DROPPED) & (signals.held.tier != Tier.DROPPED)
        if victim != "dropped" and "redknot" not in name and lost.any():
            for tier, room in zip((Tier.L2, Tier.L3), rooms, strict=True):
                assert room is not None
                assert room - tier_bytes(plan, tier) < max(SIZES[f] for f in plan.format[lost].tolist())


def test_no_host_and_no_archive_is_the_same_as_dropping() -> None:
    policy = compose_policy("quest")
    dropping = _with_victim(policy, "dropped")
    runs = [list(_walk(p, full_bytes() // 3, 0, 0)) for p in (policy, dropping)]
    for (_, one), (_, other) in zip(*runs, strict=True):
        assert torch.equal(one.tier, other.tier)
        assert torch.equal(one.mode, other.mode)


def test_unlimited_tiers_leave_decisions_alone() -> None:
    for name in ("elastic", "redknot+elastic"):
        plain = list(walk(compose_policy(name), full_bytes() // 3))
        wide = list(_walk(compose_policy(name), full_bytes() // 3, 10**12, None))
        assert all(torch.equal(a.tier, b.tier) for (_, a), (_, b) in zip(plain, wide, strict=True))
        assert any((plan.tier == Tier.L2).any() for _, plan in plain)


def test_a_plan_carries_its_scores_and_pools() -> None:
    policy = compose_policy("redknot+elastic")
    for signals, plan in walk(policy, full_bytes() // 2):
        assert plan.score is not None
        assert torch.equal(plan.score, policy.predictor.score(signals))
        assert plan.score.dtype == torch.float32
        assert plan.pools is not None
        assert torch.equal(plan.pools.arena, signals.classes if signals.classes is not None else plan.pools.arena)
    for _, plan in walk(compose_policy("elastic"), full_bytes() // 2):
        assert plan.pools is None
    cold = replace(policy, cold_start_tokens=10**6)
    for _, plan in walk(cold, None):
        assert plan.score is None  # nobody scored
        assert plan.pools is not None


@settings(max_examples=150, deadline=None)
@given(rows=st.integers(1, 5), pages=st.integers(1, 40), kinds=st.integers(1, 50), seed=st.integers(0, 2**31))
def test_best_takes_the_highest_and_of_equals_the_oldest(rows: int, pages: int, kinds: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    value = torch.randint(-kinds, kinds, (rows, pages), generator=chance).float() * 0.5
    value[torch.rand(value.shape, generator=chance) < 0.2] = -0.0  # the equal of 0.0
    candidate = torch.rand(rows, pages, generator=chance) < 0.7
    most = torch.randint(0, pages + 2, (rows,), generator=chance)
    most[:] = most[0] if seed % 2 else most  # all alike is selected, unlike is sorted
    before = value.clone()
    found = best(value, candidate, most)
    assert torch.equal(value, before)
    for row in range(rows):
        mine = candidate[row].nonzero().flatten().tolist()
        expected = sorted(mine, key=lambda n: (-float(value[row, n]), n))[: int(most[row])]  # noqa: B023
        assert found[row].nonzero().flatten().tolist() == sorted(expected)


@settings(max_examples=200, deadline=None)
@given(st.floats(-1e4, 1e9) | st.just(float("inf")), st.integers(1, 70_000))
def test_whole_pages_are_the_most_that_fit(room: float, each: int) -> None:
    pages = int(whole_pages(torch.tensor([room], dtype=torch.float64), each))
    if room == float("inf"):
        assert pages == torch.iinfo(torch.int32).max
    else:
        assert pages == max(0, int(room) // each if room >= 0 else 0)


def test_bytes_and_counts_of_streams() -> None:
    fmt = (torch.arange(LAYERS * KV_HEADS * 300) % 3).to(torch.int8).view(LAYERS, KV_HEADS, 300)
    mask = torch.rand(fmt.shape, generator=torch.Generator().manual_seed(3)) < 0.9
    found = stream_bytes(PAGE_BYTES, fmt, mask)
    assert torch.equal(found, (PAGE_BYTES.of(fmt).double() * mask).sum(-1))
    assert torch.equal(stream_bytes(PAGE_BYTES, fmt * 0 + Format.INT8, mask), mask.sum(-1).double() * PAGE_BYTES.int8)
    assert torch.equal(count(mask), mask.sum(-1))  # more than a byte holds
    assert stream_bytes(PAGE_BYTES, fmt[..., :0], mask[..., :0]).sum() == 0


def _with_victim(policy: Policy, victim: str) -> Policy:
    return replace(policy, eviction=replace(policy.eviction, victim=victim))  # type: ignore[type-var]


def _walk(policy: Policy, device: int, host: int | None, archive: int | None) -> list[tuple[Signals, Plan]]:
    """`walk` with budgets below the device."""

    class Bound:
        """The policy as its signals were with these budgets."""

        needs, classifier = policy.needs, policy.classifier

        @staticmethod
        def plan(signals: Signals) -> Plan:
            plan = policy.plan(replace(signals, host_budget_bytes=host, archive_budget_bytes=archive))
            assert (plan.tier[plan.mode == Mode.EXACT] <= Tier.L1).all()
            return plan

    return list(walk(Bound, device))  # type: ignore[arg-type]


@pytest.mark.parametrize("victim", ["l2", "l3"])
def test_a_full_first_tier_spills_into_the_second(victim: str) -> None:
    policy = _with_victim(compose_policy("quest"), victim)
    small = 6 * PAGE_BYTES.compute
    first, second = (Tier.L2, Tier.L3) if victim == "l2" else (Tier.L3, Tier.L2)
    rooms = (small, None) if victim == "l2" else (None, small)
    _, plan = _walk(policy, full_bytes() // 2, *rooms)[0]
    assert int((plan.tier == first).sum()) == 6
    assert int((plan.tier == second).sum()) > 6
    assert not (plan.tier == Tier.DROPPED).any()


def test_what_leaves_the_device_is_compressed_and_stays_so() -> None:
    """`by_tier`: INT8 in L2, INT4 in L3, what came back from there keeps what it has; budgets hold in those sizes."""
    policy = replace(compose_policy("elastic"), format=ByTier("compute", "int8", "int4"), cold_start_tokens=0)
    host = full_bytes() // 10
    signals = replace(first_signals(policy.needs), device_budget_bytes=int(0.4 * full_bytes()), host_budget_bytes=host)
    signals = replace(signals, classes=policy.classifier.classify(signals))
    plan = policy.plan(signals)
    for tier, code in ((Tier.L1, Format.COMPUTE), (Tier.L2, Format.INT8), (Tier.L3, Format.INT4)):
        here = plan.tier == tier
        assert here.any()
        assert (plan.format[here] == code).all()
    assert host - PAGE_BYTES.int8 < tier_bytes(plan, Tier.L2) <= host
    back = policy.plan(replace(signals, held=plan, device_budget_bytes=None))
    returned = (back.tier == Tier.L1) & (plan.tier > Tier.L1)
    assert returned.any()
    assert torch.equal(back.format[returned], plan.format[returned])
