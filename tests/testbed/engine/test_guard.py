"""The quality guard: what it measures, when it acts, and that a session goes on with the better cache."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny import CACHE, Run, decode, decoder, measures, text, truth

from policies.base import Policy
from testbed.cache.layout import CacheConfig
from testbed.cache.pool import CacheError
from testbed.cache.saved import SavedError
from testbed.compose import compose_policy
from testbed.engine.batch import Batch, shared_pools
from testbed.engine.evaluate import answer
from testbed.engine.guard import GuardConfig, GuardError, quality
from testbed.engine.prefill import prefill
from testbed.engine.session import Session, SessionConfig
from testbed.engine.signals import SignalContext
from testbed.engine.signals.locked import Locked

CONTEXT, TURN, SAID = text(300, 1), text(7, 2), text(20, 3)


def guarded(guard: GuardConfig, policy: Policy | None = None, fraction: float | None = 0.6) -> Session:
    config = CacheConfig(**CACHE)
    context = SignalContext(config.page_tokens, measures)
    session = Session(
        decoder(), policy or compose_policy("streaming"), SessionConfig(config, fraction, guard=guard), context
    )
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


@pytest.mark.parametrize("measure", ["likelihood", "overlap", "top1"])
def test_logits_that_are_no_numbers_are_worth_nothing(measure: str) -> None:
    assert quality(torch.full((2, 4), math.nan), torch.zeros(2, 4), measure) == 0.0
    assert quality(torch.full((2, 4), -math.inf), torch.zeros(2, 4), measure) == 0.0


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


def test_what_a_guard_refuses(tmp_path: object) -> None:
    session = guarded(GuardConfig(every_tokens=4))
    with pytest.raises(SavedError, match="guarded"):
        session.save(f"{tmp_path}/x.session")
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
