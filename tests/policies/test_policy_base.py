"""The arithmetic of policies/base.py against brute force."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_trace import KV_HEADS, LAYERS, PAGE_BYTES, device_bytes, first_signals, full_bytes

from policies.base import Head, Mode, PageBytes, Plan, PolicyError, Share, Tier, fit, fixed_bytes
from policies.filling import Room, fill
from policies.predictors.age import Age
from testbed.compose import compose_policy

composed = cache(compose_policy)


def water_level(wishes: list[float], free: int) -> Fraction | None:
    """The highest cap c with sum(min(wish, c)) <= free, by trying each number of capped streams; None = no cap."""
    if sum(wishes) <= free:
        return None
    best = Fraction(0)
    exact = sorted(Fraction(w) if math.isfinite(w) else None for w in wishes if math.isfinite(w))
    infinite = sum(math.isinf(w) for w in wishes)
    for uncapped in range(len(exact) + 1):
        capped = len(exact) - uncapped + infinite
        if capped == 0:
            continue
        cap = (free - sum(exact[:uncapped])) / Fraction(capped)
        if cap >= 0 and sum(min(w, cap) for w in exact) + cap * infinite <= free:
            best = max(best, cap)
    return best


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.integers(0, 10_000).map(float) | st.just(math.inf), min_size=LAYERS * KV_HEADS, max_size=LAYERS * KV_HEADS
    ),
    st.integers(0, 60_000),
    st.integers(0, 10_000).map(float) | st.just(math.inf),
)
def test_fit_is_the_optimal_common_cap(wishes: list[float], free: int, useful: float) -> None:
    signals = first_signals(frozenset())
    signals = replace(signals, device_budget_bytes=int(fixed_bytes(signals).sum()) + free)
    asked = torch.tensor(wishes, dtype=torch.float64).reshape(LAYERS, KV_HEADS)
    most = torch.full_like(asked, math.inf)
    most[0] = useful
    granted = fit(signals, Share(asked, torch.ones(signals.shape, dtype=torch.bool)), most).quota_bytes
    wish = torch.minimum(asked, most)
    wishes = wish.flatten().tolist()
    level = water_level(wishes, free)
    expected = wish if level is None else wish.clamp(max=float(level))
    torch.testing.assert_close(granted, expected, rtol=1e-12, atol=1e-9)
    assert granted.sum() <= free + 1e-6


def test_a_lone_unlimited_stream_gets_what_is_free_and_no_more() -> None:
    signals = first_signals(frozenset())
    free = 5000
    signals = replace(signals, device_budget_bytes=int(fixed_bytes(signals).sum()) + free)
    wish = torch.zeros(LAYERS, KV_HEADS, dtype=torch.float64)
    wish[1, 1] = math.inf
    granted = fit(signals, Share(wish, torch.ones(signals.shape, dtype=torch.bool)), wish + 1).quota_bytes
    assert granted[1, 1] == free
    assert granted.sum() == free


def test_without_a_budget_nothing_is_cut() -> None:
    wish = torch.full((LAYERS, KV_HEADS), 1e12, dtype=torch.float64)
    share = Share(wish, torch.ones(1, dtype=torch.bool))
    assert fit(first_signals(frozenset()), share, wish) is share


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.integers(0, 2**31))
def test_fill_takes_the_best_that_fit(pages: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    rank = torch.randint(0, 6, (2, 2, pages), generator=chance).float()
    sizes = PageBytes(*torch.randint(1, 50, (3,), generator=chance).tolist(), prototype=1, background=1)
    fmt = torch.randint(0, 3, (2, 2, pages), generator=chance).to(torch.int8)
    fmt[0] = fmt[0, :, :1] if seed % 2 else fmt[0]  # streams of one format take another way
    cost = sizes.of(fmt).double()
    candidate = torch.rand(2, 2, pages, generator=chance) < 0.7
    room = torch.randint(0, 400, (2, 2), generator=chance).double()
    room[0, 0] = math.inf
    kept = fill(Room(sizes, fmt, room), candidate, lambda: rank)
    for layer in range(2):
        for head in range(2):
            left, expected = float(room[layer, head]), set()
            order = sorted(range(pages), key=lambda n: (-float(rank[layer, head, n]), n))  # noqa: B023
            for page in (n for n in order if candidate[layer, head, n]):
                left -= float(cost[layer, head, page])
                if left < 0:
                    break
                expected.add(page)
            assert set(kept[layer, head].nonzero().flatten().tolist()) == expected


def test_fields_of_a_policy_are_checked() -> None:
    full = compose_policy("full")
    with pytest.raises(PolicyError, match=r"policy\.every_steps=0"):
        replace(full, every_steps=0)
    with pytest.raises(PolicyError, match=r"policy\.cold_start_tokens=True"):
        replace(full, cold_start_tokens=True)
    for fraction in (0.0, -0.1, 1.5, math.nan, "much"):
        with pytest.raises(PolicyError, match=r"policy\.budget_fraction"):
            replace(full, budget_fraction=fraction)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match=r"policy\.budget: Age\(\) is no Budget"):
        replace(full, budget=Age())  # type: ignore[arg-type]


def test_a_signal_nobody_declared_is_an_error() -> None:
    with pytest.raises(PolicyError, match="declare it in `needs`"):
        first_signals(frozenset())["window_mass"]


def test_age_counts_from_the_newest_token() -> None:
    signals = replace(first_signals(frozenset()), length_tokens=24 * 16 - 5)
    assert signals.age_tokens().tolist() == [max(0, 24 * 16 - 5 - 16 * (n + 1)) for n in range(24)]


def test_bytes_that_small_streams_can_not_use_go_to_the_large_ones() -> None:
    """Three streams may keep a window only, three everything: a budget for exactly that is enough."""
    classes = torch.tensor([[Head.LOCAL, Head.GLOBAL]] * LAYERS, dtype=torch.int8)
    policy = compose_policy("redknot+elastic", ["policy.format.global_format=int4", "policy.budget.local_tokens=80"])
    signals = replace(first_signals(policy.needs), classes=classes, length_tokens=24 * 16)
    pages = LAYERS * (21 + 3)  # 24 less 3 hot; of the 5 in the window 2 are hot
    exact_bytes = int(fixed_bytes(signals).sum()) + pages * PAGE_BYTES.int4
    plan = policy.plan(replace(signals, device_budget_bytes=int(exact_bytes / 0.9) + 10))
    assert (plan.tier[:, 1] <= Tier.L1).all()
    assert ((plan.tier[:, 0] <= Tier.L1).sum(-1) == 6).all()
    assert int((plan.mode == Mode.EXACT).sum()) == LAYERS * (24 + 6)


def test_a_fetched_page_leaves_room_for_prototypes_and_background() -> None:
    """Prefetch gets what is left, and not the bytes of the states that the plan's modes need."""
    policy = compose_policy("elastic", ["policy.prefetch.pages=24", "policy.attention.prototype_share=0.3"])
    dear = replace(PAGE_BYTES, background=5000)  # more than a page, so that forgetting it fetches one
    seen = False
    for percent in range(35, 70):
        signals = replace(first_signals(policy.needs), length_tokens=24 * 16, page_bytes=dear)
        signals = replace(signals, device_budget_bytes=full_bytes() * percent // 100)
        plan = policy.plan(signals)
        assert device_bytes(signals, plan) <= full_bytes() * percent // 100
        seen |= bool((plan.mode == Mode.BACKGROUND).any())
    assert seen


@pytest.mark.parametrize("prototype_percent", range(0, 100, 3))
def test_a_budget_for_everything_keeps_everything(prototype_percent: int) -> None:
    """The share kept for prototypes never costs a page its place through rounding."""
    policy = composed("elastic")
    policy = replace(policy, attention=replace(policy.attention, prototype_share=prototype_percent / 100))  # type: ignore[type-var]
    for pages in (3, 7, 24):
        signals = first_signals(policy.needs)
        held = Plan.dense(LAYERS, KV_HEADS, pages)
        values = {name: value[..., :pages] for name, value in signals.values.items()}
        signals = replace(signals, held=held, hot=signals.hot[:pages], values=values, length_tokens=pages * 16)
        plan = policy.plan(replace(signals, device_budget_bytes=100 * full_bytes()))
        assert (plan.mode == Mode.EXACT).all()


def test_what_leaves_for_good_is_no_longer_alive_for_attention_and_prefetch() -> None:
    """A page that this plan drops gets no prototype and is not fetched."""
    overrides = ["policy/eviction=score", "policy.attention.prototype_share=0.4"]
    policy = compose_policy("elastic", overrides)
    signals = replace(first_signals(policy.needs), length_tokens=24 * 16, device_budget_bytes=full_bytes() // 2)
    plan = policy.plan(signals)
    assert (plan.mode[plan.tier == Tier.DROPPED] == Mode.SKIP).all()
    assert (plan.tier == Tier.DROPPED).any()
    assert not (plan.tier == Tier.L2).any()
    calm = compose_policy("elastic", [*overrides, "policy/prefetch=none"]).plan(signals)
    assert torch.equal(plan.tier, calm.tier)
