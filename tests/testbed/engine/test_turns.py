"""Conversations: roles of pages, parking between turns and waking, forks that share, a history before a question."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Run, decode, decoder, text

from policies.base import Mode, PageBytes, Phase, Plan, Role, Signals, Tier
from testbed.compose import compose_policy
from testbed.decisions import Step, diff
from testbed.engine.evaluate import answer, force
from testbed.engine.idle import parked
from testbed.engine.prefill import prefill
from testbed.engine.session import Session
from testbed.engine.signals import Observed, SignalContext, SignalError
from testbed.engine.signals.base import Source
from testbed.engine.signals.role import UNKNOWN, RoleSource, page_roles
from testbed.engine.trail import Trail
from testbed.models.base import Logits
from testbed.workloads.base import Turn

BF16 = {"dtype": "bfloat16"}
CONTEXT = 200


def begin(name: str = "full", fraction: float | None = None, **changes: object) -> Session:
    overrides = ["policy.eviction.victim=l2"] if name == "quest" else []
    return Run(fraction=fraction, cache=BF16 | changes).start(compose_policy(name, overrides), text(CONTEXT))


# --- roles ---------------------------------------------------------------------------------------------------------


def majority(roles: list[int]) -> int:
    """Plain Python: the most frequent, among equals the one that occurs last."""
    return max(set(roles), key=lambda role: (roles.count(role), len(roles) - roles[::-1].index(role)))


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.lists(st.sampled_from([UNKNOWN, *map(int, Role)]), max_size=50), max_size=6))
def test_role_of_a_page_is_its_majority_however_the_tokens_come(parts: list[list[int]]) -> None:
    source = RoleSource(SignalContext(16, dict))
    for part in parts:
        source.watch_roles(torch.tensor(part, dtype=torch.int8))
    every = [role for part in parts for role in part]
    expected = [majority(every[at : at + 16]) for at in range(0, len(every), 16)]
    got = source.value(Observed((1, 1, len(expected) + 2), 16, lambda: (torch.zeros(0), torch.zeros(0))))
    assert got.tolist() == [*expected, UNKNOWN, UNKNOWN]


def test_roles_of_a_short_last_page() -> None:
    assert page_roles(torch.tensor([3] * 16 + [4]), 16).tolist() == [3, 4]
    assert page_roles(torch.tensor([], dtype=torch.int8), 16).tolist() == []


def test_session_keeps_tokens_and_roles_of_everything() -> None:
    run, policy = Run(cache=BF16), compose_policy("full")
    given_roles = [int(Role.SYSTEM)] * 20 + [int(Role.DOCUMENT)] * 44
    session = run.start(policy, text(64))
    other = Session(decoder(), policy, session.config, SignalContext(16, dict))
    dense = prefill(decoder(), text(64), torch.bfloat16)
    with pytest.raises(ValueError, match="3 roles for 64 tokens"):
        other.start(dense, roles=[0, 1, 2])
    other.start(dense, roles=given_roles)
    other.extend(text(40, 1))
    other.extend(text(5, 2), role=Role.TOOL)
    other.step(7)
    other.step(8, Role.USER)
    assert other.tokens.tolist() == text(64) + text(40, 1) + text(5, 2) + [7, 8]
    said = [Role.USER] * 40 + [Role.TOOL] * 5 + [Role.GENERATED, Role.USER]
    assert other.roles.tolist() == given_roles + [int(role) for role in said]
    assert session.roles.tolist() == [UNKNOWN] * 64


# --- parking -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def settle(session: Session) -> None:
    """Until all moves are done."""
    session.cache.flights.drain()


def away(session: Session, tier: Tier) -> int:
    return int((session.cache.state["tier"] == tier).sum())


@pytest.mark.parametrize("tier", [Tier.L2, Tier.L3])
@pytest.mark.parametrize(("name", "fraction"), [("full", None), ("quest", 0.6), ("elastic", 0.6)])
def test_a_parked_session_goes_on_as_if_it_had_not_been(name: str, fraction: float | None, tier: Tier) -> None:
    session, straight = begin(name, fraction), begin(name, fraction)
    for at in range(3):
        turn = text(20, 10 + at)
        for each in (session, straight):
            each.extend(turn)
        ours, right = decode(session, text(4, at)), decode(straight, text(4, at))
        if name == "full":  # the others may choose other pages: what is away counts as not held
            assert torch.equal(ours, right)
        on_device = session.cache.ledger().used_device_bytes
        entry = session.park(tier)
        settle(session)
        assert away(session, Tier.L1) == 0
        assert away(session, tier) > 0
        assert entry.parked_pages[tier.name] == sum(entry.parked_pages.values()) > 0
        assert session.cache.ledger().used_device_bytes < on_device - 0.9 * sum(entry.parked_bytes.values())
        assert entry.idle_s is None
    session.extend(text(20, 30))
    straight.extend(text(20, 30))
    if name == "full":
        assert torch.equal(session.step(5), straight.step(5))
        assert session.cache.state["mode"].eq(int(Mode.EXACT)).all()
    assert len(session.idle) == 3
    for entry in session.idle:
        assert entry.idle_s is not None
        assert entry.idle_s >= 0.0
        assert entry.woken_pages > 0
        assert entry.freed_bytes >= 0.9 * sum(entry.parked_bytes.values())  # tables and prototypes stay


def test_waking_brings_back_what_the_budget_holds_and_no_more() -> None:
    session = begin("quest", 0.5)
    session.extend(text(20, 1))
    session.park()
    session.extend(text(20, 2))
    (entry,) = session.idle
    assert 0 < entry.woken_pages < sum(entry.parked_pages.values()) + away(session, Tier.L2)
    assert away(session, Tier.L2) > 0
    length = session.cache.length_tokens
    assert session.cache.ledger().used_device_bytes <= 0.5 * session.full_bytes(length)


def test_a_step_after_parking_plans_first_and_a_second_park_changes_nothing() -> None:
    session, straight = begin(), begin()
    decode(session, text(3, 1))
    decode(straight, text(3, 1))
    session.park()
    again = session.park()
    assert sum(again.parked_pages.values()) == 0
    assert torch.equal(session.step(9), straight.step(9))
    assert session.log().steps[-1].planned
    assert [step.phase for step in session.log().steps[-3:]] == ["turn", "turn", "decode"]
    assert [entry.woken_pages > 0 for entry in session.idle] == [False, True]


def test_parking_is_logged_alike_in_every_run() -> None:
    logs = []
    for _ in range(2):
        session = begin("elastic", 0.6)
        session.extend(text(20, 1))
        session.park()
        session.extend(text(20, 2))
        logs.append(session.log())
    assert diff(*logs) is None
    parks = [step for step in logs[0].steps if step.phase == "turn"]
    assert len(parks) == 1
    assert {move.target for move in parks[0].moves} == {"L2"}


def test_only_tiers_off_the_device_take_parked_pages() -> None:
    session = begin()
    for tier in (Tier.L0, Tier.L1, Tier.DROPPED):
        with pytest.raises(ValueError, match="must be L2 or L3"):
            session.park(tier)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    host=st.one_of(st.none(), st.integers(0, 4000)),
    archive=st.one_of(st.none(), st.integers(0, 4000)),
    tier=st.sampled_from([Tier.L2, Tier.L3]),
)
def test_parked_pages_fit_and_the_better_ones_are_nearer(
    seed: int, host: int | None, archive: int | None, tier: Tier
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 2, 9)

    def draw(below: int) -> torch.Tensor:
        return torch.randint(0, below, shape, generator=generator, dtype=torch.int8)

    hot = torch.arange(9) >= 7
    place = torch.tensor([1, 1, 1, 2, 3, 4], dtype=torch.int8)[draw(6).long()].masked_fill(hot, 0)
    mode = torch.where(place <= 1, draw(3), 0).masked_fill(hot, 1).to(torch.int8)
    held = Plan(mode, draw(3).masked_fill(hot, 0), place)
    cost = PageBytes(compute=100, int8=60, int4=30, prototype=9, background=9)
    signals = Signals(Phase.TURN, 0, 144, 16, hot, held, cost, host_budget_bytes=host, archive_budget_bytes=archive)
    score = torch.rand(shape, generator=generator)
    plan = parked(signals, tier, score)
    every, before, after = cost.of(held.format), held.tier, plan.tier
    assert torch.equal(plan.format, held.format)
    assert torch.equal(after[before != 1], before[before != 1])  # only the device's own pages move
    moved = before != after
    assert bool((after[moved] >= tier).all())
    for limit, where in ((host, Tier.L2), (archive, Tier.L3)):
        own = int(every[before == where].sum())
        if limit is not None:
            assert int(every[after == where].sum()) <= max(limit, own)
    stays = (after == 1) & (before == 1)
    for limit, where in ((host, Tier.L2), (archive, Tier.L3)):
        if where < tier or not bool(stays.any()):
            continue
        assert limit is not None
        assert limit - int(every[after == where].sum()) < 100  # a page stays only where no tier has room for one
    assert not bool(((plan.mode == Mode.EXACT) & (after > 1)).any())
    unmoved = ~moved
    assert torch.equal(plan.mode[unmoved], held.mode[unmoved])


# --- history before a question -------------------------------------------------------------------------------------


def test_history_is_taken_and_paused_before_the_question() -> None:
    history = (Turn(text(20, 1), Role.USER), Turn(text(6, 2), Role.GENERATED, pause=True), Turn(text(9, 3), Role.TOOL))
    question, rest = text(5, 4), text(6, 5)
    got = answer(begin(), question, rest, 6, wants_answer=False, history=history)
    straight = begin()
    for turn in history:
        straight.extend(turn.tokens)
    right = force(straight, question, rest).float().log_softmax(-1)
    assert torch.equal(got.logprobs, right)
    assert len(got.times) == 6  # of the question and what follows it only
    assert len(got.turn_times) == 1
    assert [step.phase for step in got.log.steps].count("turn") == 1


def test_an_answer_counts_moves_and_waits_of_its_question_only() -> None:
    """The turn before the question pauses: all that left the device did so then, and what wakes is the question's."""
    history, question, rest = (Turn(text(20, 1), Role.USER, pause=True),), text(5, 4), text(6, 5)
    got = answer(begin(), question, rest, 6, wants_answer=False, history=history)
    steps = got.log.steps

    def pages(of: Sequence[Step], source: str, target: str) -> int:
        return sum(m.pages for step in of for m in step.moves if (m.source, m.target) == (source, target))

    assert sum(step.tokens for step in steps[got.first_step :]) == len(question) + len(rest) - 1
    assert steps[got.first_step - 1].phase == "turn"  # the pause
    assert pages(steps[: got.first_step], "L1", "L2") == got.history_traffic.links["L1>L2"]["pages"] > 0
    assert pages(steps[got.first_step :], "L2", "L1") == got.traffic.links["L2>L1"]["pages"] > 0
    assert "L1>L2" not in got.traffic.links
    stalls = sum(step.stall_s for step in (*got.turn_times, *got.times))
    assert got.traffic.total_stall_s == pytest.approx(stalls, rel=1e-9, abs=1e-12)


# --- trails, sources -----------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["append", "fork"])), max_size=40))
def test_trails_are_lists_that_fork(steps: list[tuple[int, str]]) -> None:
    trails, lists = [Trail[int]()], [[]]
    for number, (which, what) in enumerate(steps):
        at = which % len(trails)
        if what == "append":
            trails[at].append(number)
            lists[at].append(number)
        else:
            trails.append(trails[at].fork())
            lists.append(list(lists[at]))
    assert [list(trail) for trail in trails] == lists
    assert [len(trail) for trail in trails] == [len(each) for each in lists]


def test_a_fork_of_a_trail_copies_nothing() -> None:
    trail = Trail(range(1000))
    forks = [trail.fork() for _ in range(3)]
    assert all(fork._past is trail._past for fork in forks)


class _Odd(Source):
    def __init__(self) -> None:
        self.table = {"a": 1}


def test_a_source_that_holds_something_odd_says_so_when_saved() -> None:
    with pytest.raises(SignalError, match="_Odd.table is a dict: override"):
        _Odd().state()


class _Nested(Source):
    def __init__(self) -> None:
        self.inner = RoleSource(SignalContext(16, dict))
        self.step, self.mass, self.queries, self.label = 0, None, [], "x"
        self.step: int
        self.mass: torch.Tensor | None
        self.queries: list[torch.Tensor]


def test_state_of_a_source_comes_back_whole() -> None:
    one, other = _Nested(), _Nested()
    one.step, one.mass, one.queries = 3, torch.ones(2), [torch.zeros(1), torch.ones(1)]
    one.inner.watch_roles(torch.ones(20, dtype=torch.int8))
    other.restore(one.state())
    assert (other.step, other.label) == (3, "x")
    assert other.mass is not None
    assert torch.equal(other.mass, torch.ones(2))
    assert [x.tolist() for x in other.queries] == [[0.0], [1.0]]
    assert other.inner._pages.tolist() == [1]
    other.restore(_Nested().state())
    assert other.mass is None
    assert other.queries == []


@pytest.mark.parametrize("logits", ["none", "last", "all"])
@pytest.mark.parametrize(
    "policy",
    ["full", "streaming", "snapkv", "quest", "elastic policy/predictor=bm25", "elastic policy/predictor=embedding"],
)
def test_a_turn_of_no_tokens_is_none(policy: str, logits: Logits) -> None:
    name, *overrides = policy.split()
    one, other = (Run().start(compose_policy(name, overrides), text(CONTEXT)) for _ in range(2))
    for session in (one, other):
        session.extend(text(9, 1))
        decode(session, text(3, 2))
    got = one.extend([], logits)
    assert got is None if logits == "none" else got is not None and got.shape == (0, decoder().geometry.vocab)
    assert diff(one.log(), other.log()) is None
    assert torch.equal(decode(one, text(5, 3)), decode(other, text(5, 3)))
    assert diff(one.log(), other.log()) is None
    assert len(one.turn_times) == len(other.turn_times)
