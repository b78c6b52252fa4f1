"""The quality guard: what it measures, when it acts, and that a session goes on with the better cache."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tiny import CACHE, Run, decode, decoder, measures, text, truth

from policies.base import Policy, Role
from testbed.cache.flights import LostPages
from testbed.cache.layout import CacheConfig
from testbed.cache.pool import CacheError
from testbed.cache.saved import SavedError
from testbed.compose import compose_policy
from testbed.decisions import diff
from testbed.engine.batch import Batch, run_together, shared_pools
from testbed.engine.evaluate import answer
from testbed.engine.full import full_session
from testbed.engine.guard import MEASURES, GuardConfig, GuardError, quality
from testbed.engine.prefill import prefill
from testbed.engine.session import Session, SessionConfig
from testbed.engine.signals import SignalContext
from testbed.engine.signals.locked import Locked

BROKEN = (
    [math.nan] * 4,
    [-math.inf] * 4,
    [0.0, math.nan, 1.0, 2.0],
    [0.0, math.inf, 1.0, 2.0],
    [math.inf] * 4,
    [-math.inf, math.nan, 1.0, 2.0],
)
CONTEXT, TURN, SAID = text(300, 1), text(7, 2), text(20, 3)


def guarded(
    guard: GuardConfig,
    policy: Policy | None = None,
    fraction: float | None = 0.6,
    watch: frozenset[str] = frozenset(),
) -> Session:
    config = CacheConfig(**CACHE)
    context = SignalContext(config.page_tokens, measures, decoder())
    settings = SessionConfig(config, fraction, guard=guard)
    session = Session(decoder(), policy or compose_policy("streaming"), settings, context, watch=watch)
    session.start(prefill(decoder(), CONTEXT, config.torch_dtype, list(session.sources.values()), 37))
    return session


def right(tokens: int) -> torch.Tensor:
    """Logits of the first tokens after the context, by transformers."""
    return truth("llama", [*CONTEXT, *TURN, *SAID])[len(CONTEXT) : len(CONTEXT) + tokens]


def test_quality_is_that_of_transformers_own_distributions() -> None:
    session = guarded(GuardConfig(every_tokens=len(TURN) + 8, threshold=0.0))
    turn = session.extend(TURN, "all")
    assert turn is not None
    logits = torch.cat((turn, decode(session, SAID[:8])))
    (probe,) = session.story.probes
    p, q = right(len(logits)).double().log_softmax(-1), logits.double().log_softmax(-1)
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    assert kl > 0.01
    assert probe.quality == pytest.approx(math.exp(-kl), rel=1e-3)
    assert (probe.positions, probe.step, probe.action) == (len(TURN) + 8, 8, "")
    assert session.story.guard_bytes > session.cache.ledger().total_bytes


@pytest.mark.parametrize("measure", ["overlap", "top1"])
def test_other_measures_by_hand(measure: str) -> None:
    ours, theirs = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    low = 1 / (1 + math.e)
    assert quality(ours, theirs, measure) == pytest.approx({"overlap": (2 * low + 1) / 2, "top1": 0.5}[measure])


@pytest.mark.parametrize("measure", MEASURES)
def test_logits_that_are_no_numbers_are_worth_nothing(measure: str) -> None:
    fine = torch.zeros(2, 4)
    for row in BROKEN:
        for broken in (torch.tensor([[0.0, 1.0, 2.0, 3.0], row]), torch.tensor([row, row])):
            assert quality(broken, fine, measure) == 0.0
            with pytest.raises(GuardError, match="reference"):
                quality(fine, broken, measure)


def test_a_token_that_is_ruled_out_is_no_broken_logit() -> None:
    rules_out, fine = torch.tensor([[0.0, 1.0, -math.inf]]), torch.tensor([[0.0, 1.0, 0.0]])
    for measure in MEASURES:
        assert quality(rules_out, rules_out, measure) == 1.0
    assert quality(rules_out, fine, "likelihood") == 0.0
    assert 0.0 < quality(fine, rules_out, "likelihood") < 1.0
    assert 0.0 < quality(rules_out, fine, "overlap") == pytest.approx(quality(fine, rules_out, "overlap"))
    hopeless = torch.tensor([[0.0, 1.0, -300.0]])  # its share is 0 in float32, and still more than none
    assert quality(rules_out, hopeless, "likelihood") == 0.0


def test_a_guard_that_is_content_changes_nothing() -> None:
    plain = Run(fraction=0.6).start(compose_policy("streaming"), CONTEXT)
    session = guarded(GuardConfig(every_tokens=4, threshold=0.0))
    for each in (plain, session):
        each.extend(TURN)
    assert torch.equal(decode(plain, SAID), decode(session, SAID))
    assert plain.log().steps == session.log().steps
    assert len(session.story.probes) == 5  # turn and one token, then every four


def test_too_bad_first_raises_the_budget_then_goes_on_with_the_full_cache() -> None:
    demoting = compose_policy("streaming", ["policy/eviction=demote"])
    session = guarded(GuardConfig(every_tokens=6, threshold=1.0, most_raises=1, raise_factor=1.5), demoting)
    session.extend(TURN)
    logits = decode(session, SAID)
    probes = list(session.story.probes)
    assert [probe.action for probe in probes] == ["raise", "switch"]
    assert probes[0].budget_fraction == pytest.approx(0.6 * 1.5)
    # Everything was in the reference, also what the policy had dropped: the rest is the full cache's.
    done = probes[1].step - 1
    torch.testing.assert_close(logits[done:], right(len(TURN) + len(SAID))[len(TURN) + done :], atol=2e-3, rtol=2e-3)
    assert not bool((session.cache.state["tier"] == 4).any())
    assert session.cache.length_tokens == len(CONTEXT) + len(TURN) + len(SAID)


def test_what_is_dropped_for_good_no_budget_brings_back() -> None:
    session = guarded(GuardConfig(every_tokens=6, threshold=1.0, most_raises=1))
    logits = decode(session, SAID[:9])
    assert [probe.action for probe in session.story.probes] == ["switch"]
    expected = truth("llama", [*CONTEXT, *SAID[:9]])[len(CONTEXT) :]
    torch.testing.assert_close(logits[5:], expected[5:], atol=2e-3, rtol=2e-3)
    assert not torch.allclose(logits[4], expected[4], atol=0.05)


def test_a_policy_without_a_budget_has_nothing_to_raise() -> None:
    redknot = compose_policy("redknot", ["policy.budget.local_tokens=32", "policy.budget.special_tokens=32"])
    session = guarded(GuardConfig(every_tokens=4, threshold=1.0), redknot, None)
    decode(session, SAID[:4])
    assert [probe.action for probe in session.story.probes] == ["switch"]


def test_the_reference_may_be_a_larger_budget() -> None:
    session = guarded(GuardConfig(every_tokens=5, threshold=1.0, reference=0.9, most_raises=0))
    plain = Run(fraction=0.9).start(compose_policy("streaming"), CONTEXT)
    torch.testing.assert_close(decode(session, SAID)[6:], decode(plain, SAID)[6:], atol=2e-3, rtol=2e-3)


def test_a_fork_is_guarded_for_itself() -> None:
    session = guarded(GuardConfig(every_tokens=6, threshold=1.0, most_raises=0))
    decode(session, SAID[:3])
    other = session.fork(own_pools=True)
    decode(other, SAID[3:6])
    assert [probe.action for probe in other.story.probes] == ["switch"]
    assert not list(session.story.probes)
    decode(session, SAID[3:5])
    assert session.policy.name == "streaming"
    for each in (session, other):
        each.close()


def test_an_answer_counts_on_across_the_switch() -> None:
    session = guarded(GuardConfig(every_tokens=4, threshold=1.0, most_raises=0))
    said = answer(session, TURN, SAID[:6], 6)
    assert said.traffic.lookups["hit"] >= 0
    assert [probe.action for probe in said.probes] == ["switch"]
    assert len(said.log.steps) > said.first_step


@pytest.mark.parametrize("switched", [False, True])
def test_a_guarded_session_is_never_saved(switched: bool, tmp_path: Path) -> None:
    session = guarded(GuardConfig(every_tokens=4, threshold=float(switched)))
    decode(session, SAID[:4])
    assert [probe.action for probe in session.story.probes] == (["switch"] if switched else [""])
    for each in (session, session.fork(own_pools=True)):
        with pytest.raises(SavedError, match="guarded"):
            each.save(tmp_path / "talk")
    assert not list(tmp_path.iterdir())


def test_nothing_is_resumed_under_a_guard_whose_reference_has_seen_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Run(fraction=0.6).start(compose_policy("streaming"), CONTEXT)
    session.save(tmp_path / "talk")
    monkeypatch.setattr("testbed.engine.guard.full_session", lambda *_: pytest.fail("built in vain"))
    config = replace(session.config, guard=GuardConfig(every_tokens=4))
    with pytest.raises(SavedError, match="talk: a guarded session"):
        Session.resume(tmp_path / "talk", decoder(), session.policy, config, SignalContext(16, measures))


def test_what_a_guard_refuses() -> None:
    session = guarded(GuardConfig(every_tokens=4))
    config = CacheConfig(**CACHE)
    settings = SessionConfig(config, 0.5, guard=GuardConfig(every_tokens=4))
    with pytest.raises(CacheError, match="guard"):
        Session(decoder(), session.policy, settings, SignalContext(16, measures), shared_pools(decoder(), config))
    with pytest.raises(GuardError, match=r"guard\.reference=0\.3"):
        guarded(GuardConfig(every_tokens=4, reference=0.3))
    assert Batch([session]).step([1]).shape == (1, decoder().geometry.vocab)


@pytest.mark.parametrize(
    "bad",
    [
        {"every_tokens": 0},
        {"every_tokens": True},
        {"threshold": math.nan},
        {"threshold": 1.5},
        {"measure": "cosine"},
        {"reference": "half"},
        {"reference": 0.0},
        {"most_raises": -1},
        {"raise_factor": 1.0},
    ],
    ids=str,
)
def test_bad_settings_are_named(bad: dict[str, object]) -> None:
    (key,) = bad
    with pytest.raises(GuardError, match=f"guard.{key}"):
        replace(GuardConfig(), **bad)  # type: ignore[arg-type]


def test_a_larger_budget_keeps_what_it_would_keep_alone_and_is_told_of_locks() -> None:
    policy = compose_policy("snapkv", ["policy/eviction=demote"])
    session = guarded(GuardConfig(every_tokens=5, threshold=1.0, reference=0.9, most_raises=0), policy)
    session._beside._guard.reference.sources["locked"] = locked = Locked(SignalContext(16, measures))  # type: ignore[union-attr]
    session.lock(32, 40)
    assert locked.value(session.observed()).nonzero().flatten().tolist() == [2]
    alone = Run(fraction=0.9).start(policy, CONTEXT)
    decode(session, SAID[:5])
    assert [probe.action for probe in session.story.probes] == ["switch"]
    decode(alone, SAID[:5])
    assert torch.equal(session.cache.state["tier"], alone.cache.state["tier"])


# --- a reference under the same policy -------------------------------------------------------------------------------

LONG = text(100, 4)  # more than the hot window: the model runs it in parts
PREDICTORS = {
    "streaming": compose_policy("streaming"),
    "snapkv": compose_policy("snapkv", ["policy/eviction=demote"]),
    "quest": compose_policy("quest"),
    "bm25": compose_policy("elastic", ["policy/predictor=bm25"]),
    "embedding": compose_policy("elastic", ["policy/predictor=embedding", "policy.every_steps=3"]),
}


def converse(session: Session, logits: Literal["none", "all"] = "none") -> None:
    session.extend(LONG, logits)
    decode(session, SAID[:9])
    session.extend(TURN, logits)
    session.extend(TURN[:3], logits, Role.TOOL)
    session.step(5, Role.USER)  # asked word by word
    decode(session, SAID[9:17])


@pytest.mark.parametrize("name", PREDICTORS)
@pytest.mark.parametrize("every_tokens", [1, 8])
def test_a_larger_budget_decides_as_it_would_alone(name: str, every_tokens: int) -> None:
    policy = PREDICTORS[name]
    session = guarded(GuardConfig(every_tokens=every_tokens, threshold=0.0, reference=1.0), policy, 0.6)
    alone = guarded(GuardConfig(), policy, 1.0)
    converse(session)
    converse(alone)
    reference = session._beside._guard.reference  # type: ignore[union-attr]
    assert torch.equal(reference.tokens, alone.tokens)
    assert diff(reference.log(), alone.log()) is None
    assert torch.equal(reference.roles, alone.roles)


def test_what_a_session_generates_is_no_turn_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    session = guarded(GuardConfig(every_tokens=8, threshold=0.0, reference=0.9), PREDICTORS["bm25"])
    turns: list[list[int]] = []
    source = session._beside._guard.reference.sources["retrieval"]  # type: ignore[union-attr]
    monkeypatch.setattr(source, "watch_turn", lambda tokens: turns.append(tokens.tolist()))
    converse(session)
    assert turns == [LONG, TURN, TURN[:3]]
    assert len(session.story.probes) == 4


@pytest.mark.parametrize("logits", ["none", "all"])
def test_a_full_cache_catches_up_in_one_run_on_all_tokens(
    logits: Literal["none", "all"], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = guarded(GuardConfig(every_tokens=len(LONG) + 20, threshold=0.0))
    reference, runs = session._beside._guard.reference, []  # type: ignore[union-attr]
    extend = reference.extend

    def watched(tokens: list[int], logits: Literal["none", "all"], role: int) -> torch.Tensor | None:
        runs.append((len(tokens), logits))
        return extend(tokens, logits, role)

    monkeypatch.setattr(reference, "extend", watched)
    session.extend(LONG, logits)
    decode(session, SAID)
    assert runs == ([(len(LONG), "none"), (20, "all")] if logits == "none" else [(len(LONG) + 20, "all")])
    (probe,) = session.story.probes
    assert probe.positions == 20 + (len(LONG) if logits == "all" else 0)
    assert reference.tokens.tolist() == [*CONTEXT, *LONG, *SAID]


@pytest.mark.parametrize("reference", ["full", 0.9])
def test_a_failed_probe_runs_nothing_twice(reference: str | float, monkeypatch: pytest.MonkeyPatch) -> None:
    session = guarded(GuardConfig(every_tokens=4, threshold=0.0, reference=reference))

    def broken(*_: object) -> float:
        raise GuardError("reference")

    with monkeypatch.context() as patch:
        patch.setattr("testbed.engine.guard.quality", broken)
        with pytest.raises(GuardError):
            decode(session, SAID[:4])
    decode(session, SAID[4:8])
    (probe,) = session.story.probes
    assert probe.positions == 4
    assert session._beside._guard.reference.tokens.tolist() == [*CONTEXT, *SAID[:8]]  # type: ignore[union-attr]


@pytest.mark.parametrize("logits", ["none", "last", "all"])
@pytest.mark.parametrize("parts", [0, 1])
def test_what_was_run_of_a_turn_that_failed_is_run_by_the_reference(
    parts: int, logits: Literal["none", "last", "all"], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, runs = LONG[: parts * CACHE["hot_tokens"]], 0
    session = guarded(GuardConfig(every_tokens=len(ran) + 4, threshold=0.0))

    def lost(*args: Any) -> torch.Tensor | None:
        nonlocal runs
        runs += 1
        if runs > parts:
            raise LostPages(torch.zeros(0, 2, dtype=torch.long), "gone")
        return run_together(*args)

    with monkeypatch.context() as patch:
        patch.setattr("testbed.engine.session.run_together", lost)
        with pytest.raises(LostPages):
            session.extend(LONG, logits)
    decode(session, SAID[:4])
    assert session.tokens.tolist() == [*CONTEXT, *ran, *SAID[:4]]
    assert session._beside._guard.reference.tokens.tolist() == session.tokens.tolist()  # type: ignore[union-attr]
    assert [probe.positions for probe in session.story.probes] == [4 + (len(ran) if logits == "all" else 0)]


def test_watched_signals_stay_watched_after_the_switch() -> None:
    watch = frozenset({"last_mass", "role"})
    session = guarded(GuardConfig(every_tokens=4, threshold=1.0), watch=watch)
    decode(session, SAID[:4])
    assert [probe.action for probe in session.story.probes] == ["switch"]
    full = full_session(session, SignalContext(16, measures), watch)
    full.start(prefill(decoder(), [*CONTEXT, *SAID[:4]], torch.float32, (), 37))
    for each in (session, full):
        decode(each, SAID[4:6])
    torch.testing.assert_close(session.signal("last_mass"), full.signal("last_mass"), atol=2e-3, rtol=2e-3)
    assert session.signal("role").shape == full.signal("role").shape
