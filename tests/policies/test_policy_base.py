"""The arithmetic of policies/base.py against brute force."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_trace import KV_HEADS, LAYERS, first_signals

from policies.base import PolicyError, Share, _fill, fit, fixed_bytes
from policies.predictors.age import Age
from testbed.compose import compose_policy


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


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.integers(0, 10_000).map(float) | st.just(math.inf), min_size=LAYERS * KV_HEADS, max_size=LAYERS * KV_HEADS
    ),
    st.integers(0, 60_000),
)
def test_fit_is_the_optimal_common_cap(wishes: list[float], free: int) -> None:
    signals = first_signals(frozenset())
    signals = replace(signals, device_budget_bytes=int(fixed_bytes(signals).sum()) + free)
    wish = torch.tensor(wishes, dtype=torch.float64).reshape(LAYERS, KV_HEADS)
    granted = fit(signals, Share(wish, torch.ones(signals.shape, dtype=torch.bool))).quota_bytes
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
    granted = fit(signals, Share(wish, torch.ones(signals.shape, dtype=torch.bool))).quota_bytes
    assert granted[1, 1] == free
    assert granted.sum() == free


def test_without_a_budget_nothing_is_cut() -> None:
    wish = torch.full((LAYERS, KV_HEADS), 1e12, dtype=torch.float64)
    share = Share(wish, torch.ones(1, dtype=torch.bool))
    assert fit(first_signals(frozenset()), share) is share


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 30), st.integers(0, 2**31))
def test_fill_takes_the_best_that_fit(pages: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    rank = torch.randint(0, 6, (2, 2, pages), generator=chance).float()
    cost = torch.randint(1, 50, (2, 2, pages), generator=chance).double()
    candidate = torch.rand(2, 2, pages, generator=chance) < 0.7
    room = torch.rand(2, 2, generator=chance).double() * 400
    room[0, 0] = math.inf
    kept = _fill(rank, cost, candidate, room)
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
    with pytest.raises(PolicyError, match=r"policy\.budget: Age\(\) is no Budget"):
        replace(full, budget=Age())  # type: ignore[arg-type]


def test_a_signal_nobody_declared_is_an_error() -> None:
    with pytest.raises(PolicyError, match="declare it in `needs`"):
        first_signals(frozenset())["window_mass"]


def test_age_counts_from_the_newest_token() -> None:
    signals = replace(first_signals(frozenset()), length_tokens=24 * 16 - 5)
    assert signals.age_tokens().tolist() == [max(0, 24 * 16 - 5 - 16 * (n + 1)) for n in range(24)]
