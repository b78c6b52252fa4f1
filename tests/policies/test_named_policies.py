"""What holds for every named policy and some of their sums, on the fixed trace and on random signals."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_golden import GOLDEN, decisions
from policy_trace import (
    KV_HEADS,
    LAYERS,
    PAGE_BYTES,
    PAGE_TOKENS,
    POLICIES,
    device_bytes,
    full_bytes,
    is_about_heads,
    walk,
)

from policies.base import Format, Mode, Phase, Plan, Policy, PolicyError, Role, Signals, Tier, fixed_bytes
from testbed.compose import compose_policy

composed = cache(compose_policy)
every_policy = pytest.mark.parametrize("name", POLICIES)
every_budget = pytest.mark.parametrize("fraction", [None, 0.9, 0.45, 0.25])


def check(signals: Signals, plan: Plan) -> None:
    """The promises of a plan that hold for any policy."""
    hot = signals.hot.expand(signals.shape)
    assert (plan.mode[hot] == Mode.EXACT).all()
    assert (plan.tier[hot] == Tier.L0).all()
    assert (plan.format[hot] == Format.COMPUTE).all()
    gone = signals.held.tier == Tier.DROPPED
    assert (plan.tier[gone] == Tier.DROPPED).all()
    assert (plan.mode[plan.tier == Tier.DROPPED] == Mode.SKIP).all()
    assert (plan.tier[plan.mode == Mode.EXACT] <= Tier.L1).all()
    assert (plan.tier[~hot] != Tier.L0).all()
    assert (plan.format[~hot] >= signals.held.format[~hot]).all()
    for codes in (plan.mode, plan.format, plan.tier):
        assert codes.dtype == torch.int8
        assert tuple(codes.shape) == signals.shape
    if signals.device_budget_bytes is not None:
        assert device_bytes(signals, plan) <= signals.device_budget_bytes


@every_policy
@every_budget
def test_promises_hold_along_the_trace(name: str, fraction: float | None) -> None:
    budget = None if fraction is None else int(full_bytes() * fraction)
    for signals, plan in walk(composed(name), budget):
        check(signals, plan)


@every_policy
def test_the_same_trace_gives_the_same_plans(name: str) -> None:
    budget = full_bytes() // 2
    runs = [[p for _, p in walk(composed(name), budget)] for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert all(torch.equal(getattr(first, key), getattr(second, key)) for key in ("mode", "format", "tier"))


@every_policy
def test_decisions_are_the_golden_ones(name: str) -> None:
    assert decisions(name) == json.loads(GOLDEN.read_text())[name]


@every_policy
def test_a_budget_below_sinks_and_window_is_an_error(name: str) -> None:
    with pytest.raises(PolicyError, match="can't hold sinks, recent window and metadata"):
        list(walk(composed(name), 1000))


@every_policy
def test_a_budget_of_exactly_what_must_stay_keeps_only_that(name: str) -> None:
    signals, _ = next(walk(composed(name), None))
    least = int(fixed_bytes(signals).sum())
    signals, plan = next(walk(composed(name), least))
    assert device_bytes(signals, plan) == least


def test_every_policy_but_full_does_something() -> None:
    for name in POLICIES:
        plans = [plan for _, plan in walk(composed(name), int(full_bytes() * 0.45))]
        idle = all((p.tier <= Tier.L1).all() and (p.format == Format.COMPUTE).all() for p in plans)
        assert not idle, name
    for signals, plan in walk(composed("full"), None):
        assert (plan.mode == Mode.EXACT).all()
        assert torch.equal(plan.tier == Tier.L0, signals.hot.expand(signals.shape))


def test_cold_start_is_dense() -> None:
    policy = replace(composed("redknot+elastic"), cold_start_tokens=10_000)
    for _, plan in walk(policy, None):
        assert (plan.mode == Mode.EXACT).all()
        assert (plan.format == Format.COMPUTE).all()


def random_signals(policy: Policy, draw: st.DrawFn) -> Signals:
    """Any state that an executor may be in."""
    pages = draw(st.integers(1, 40))
    chance = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (LAYERS, KV_HEADS, pages)
    hot = torch.rand(pages, generator=chance) < draw(st.sampled_from([0.1, 0.5, 1.0]))
    tier = torch.randint(1, 5, shape, generator=chance).to(torch.int8)
    tier[hot.expand(shape)] = int(Tier.L0)
    held = Plan(torch.ones_like(tier), torch.randint(0, 3, shape, generator=chance).to(torch.int8), tier)
    scale = draw(st.sampled_from([0.0, 1.0, 1e-30, 1e30]))
    values = {
        name: torch.randn(shape[:2] if is_about_heads(name) else shape, generator=chance) * scale
        for name in sorted(policy.needs)
    }
    if "role" in values:
        values["role"] = torch.randint(-1, len(Role), (pages,), generator=chance).to(torch.int8)
    least = LAYERS * KV_HEADS * (int(hot.sum()) * PAGE_BYTES.compute + pages * PAGE_BYTES.metadata)
    spare = draw(st.none() | st.integers(0, LAYERS * KV_HEADS * pages * PAGE_BYTES.compute))
    return Signals(
        phase=draw(st.sampled_from(list(Phase))),
        step=draw(st.integers(0, 100)),
        length_tokens=(pages - 1) * PAGE_TOKENS + draw(st.integers(1, PAGE_TOKENS)),
        page_tokens=PAGE_TOKENS,
        hot=hot,
        held=held,
        page_bytes=PAGE_BYTES,
        device_budget_bytes=None if spare is None else least + spare,
        classes=torch.randint(0, 4, shape[:2], generator=chance).to(torch.int8),
        values=values,
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_promises_hold_on_random_signals(data: st.DataObject) -> None:
    policy = replace(composed(data.draw(st.sampled_from(POLICIES))), cold_start_tokens=0)
    signals = random_signals(policy, data.draw)
    check(signals, policy.plan(signals))
