"""Heads that change their class while decoding: running estimates, when it happens, and what is lost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from tiny import Run, decode, decoder, measures, text
from torch import Tensor

from policies.base import Head, Plan, Policy, PolicyError, Reclassifying, Signals, Tier
from policies.classifiers.monitored import Monitored
from testbed.cache.layout import CacheConfig
from testbed.compose import compose_policy
from testbed.engine.session import Session, SessionConfig
from testbed.engine.signals import SignalContext, StepView
from testbed.engine.signals.base import Observed
from testbed.engine.signals.monitor import HeadMonitor

P = 16


def shown(source: HeadMonitor, mass: Tensor) -> None:
    source.watch_tokens(torch.zeros(1, dtype=torch.long))
    source.watch_step(StepView(None, mass, 1, 0))


def value(source: HeadMonitor, pages: int) -> Tensor:
    return source.value(Observed((1, 1, pages), P, lambda: (torch.zeros(0), torch.zeros(0))))


def test_far_and_edge_shares_by_hand() -> None:
    # 128 tokens: pages 0 to 7; a window of 64 tokens and its oldest quarter begin at ages of 64 and 48.
    mass = torch.tensor([[[0.3, 0.05, 0.1, 0.2, 0.15, 0.1, 0.06, 0.04]]])
    for watch, expected in (("far", 0.05 + 0.1 + 0.2), ("edge", 0.15)):
        source = HeadMonitor(SignalContext(P, dict), watch, window_tokens=64, decay=0.5)
        source.watch_tokens(torch.zeros(127, dtype=torch.long))
        shown(source, mass)
        assert float(value(source, 8)) == pytest.approx(expected)
        source.length_tokens -= 1
        shown(source, torch.zeros_like(mass))
        assert float(value(source, 8)) == pytest.approx(expected / 2)


def test_drift_is_what_the_slow_mean_has_not_seen_yet() -> None:
    source = HeadMonitor(SignalContext(P, dict), "drift", window_tokens=16, decay=0.5)
    source.watch_tokens(torch.zeros(64, dtype=torch.long))
    shown(source, torch.tensor([[[0.0, 0.0, 0.0, 0.0, 1.0]]]))
    shown(source, torch.tensor([[[0.0, 1.0, 0.0, 0.0, 0.0]]]))
    assert float(value(source, 5)) == pytest.approx(0.5 - 0.05)


def signals(classes: Tensor, **values: float) -> Signals:
    shape = (*classes.shape, 4)
    held = Plan.dense(*shape)
    told = {f"head_{name}": torch.full(classes.shape, each) for name, each in values.items()}
    hot = torch.zeros(4, dtype=torch.bool)
    return replace(
        Run(fraction=None).start(compose_policy("full"), text(64))._signals(0, 0),  # type: ignore[arg-type]
        held=held,
        classes=classes,
        values=told,
        hot=hot,
    )


def test_two_thresholds_keep_a_head_from_changing_to_and_fro() -> None:
    part = Monitored(compose_policy("redknot").classifier, enter=0.2, leave=0.05, settled=0.01)
    assert isinstance(part, Reclassifying)
    local, global_ = torch.tensor([[Head.LOCAL]]), torch.tensor([[Head.GLOBAL]])
    calm = {"far_now": 0.1, "drift": 0.0}
    assert part.reclassify(signals(local, edge_now=0.19, **calm)).item() == Head.LOCAL
    assert part.reclassify(signals(local, edge_now=0.2, **calm)).item() == Head.GLOBAL
    for far, drift, expected in ((0.1, 0.0, Head.GLOBAL), (0.05, 0.0, Head.LOCAL), (0.05, -0.02, Head.GLOBAL)):
        assert part.reclassify(signals(global_, edge_now=0.1, far_now=far, drift=drift)).item() == expected
    special, dense = torch.tensor([[Head.SPECIAL]]), torch.tensor([[Head.DENSE]])
    assert part.reclassify(signals(special, edge_now=0.9, **calm)).item() == Head.GLOBAL
    assert part.reclassify(signals(dense, edge_now=0.9, far_now=0.0, drift=0.0)).item() == Head.DENSE


@dataclass(frozen=True)
class Scripted:
    """All heads local; from `at` decode steps on head (0, 0) is global."""

    at: int
    codes: int = Head.GLOBAL
    needs: frozenset[str] = frozenset()

    def classify(self, signals: Signals) -> Tensor:
        return torch.full(signals.shape[:2], int(Head.LOCAL), dtype=torch.int8)

    def reclassify(self, signals: Signals) -> Tensor:
        assert signals.classes is not None
        out = signals.classes.clone()
        if signals.step >= self.at:
            out[0, 0] = self.codes
        return out


def session(classifier: object, context_tokens: int = 200) -> Session:
    redknot = compose_policy("redknot", ["policy.budget.local_tokens=64"])
    policy = replace(redknot, classifier=classifier, every_steps=1)  # type: ignore[arg-type]
    return Run().start(policy, text(context_tokens))


def test_a_head_that_turns_global_keeps_what_it_has_and_the_loss_is_told() -> None:
    run = session(Scripted(at=3))
    decode(run, text(30, 4))
    # Asked in the first plan of a page: 200 tokens are 12.5 pages, so page 13 begins with the ninth step.
    (change,) = run.story.changes
    assert (change.step, change.layer, change.head) == (8, 0, 0)
    assert (change.before, change.after) == (Head.LOCAL, Head.GLOBAL)
    tier = run.cache.state["tier"].view(3, 2, -1)
    # Sinks are page 0; the window of 64 tokens before token 208 begins with page 9; the eight between are gone.
    assert change.missed_pages == 8
    assert (tier[0, 0] == Tier.DROPPED).nonzero().flatten().tolist() == list(range(1, 9))
    assert int((tier[0, 1] == Tier.DROPPED).sum()) > 8
    assert run.classes is not None
    assert run.classes.tolist() == [[Head.GLOBAL, Head.LOCAL], [Head.LOCAL] * 2, [Head.LOCAL] * 2]


def test_changes_are_forked_and_saved(tmp_path: object) -> None:
    run = session(Scripted(at=3))
    decode(run, text(20, 4))
    fork = run.fork()
    path = f"{tmp_path}/talk.session"
    run.save(path)
    again = Session.resume(path, decoder(), run.policy, run.config, SignalContext(P, measures))
    for each in (fork, again):
        assert list(each.story.changes) == list(run.story.changes)
        assert each.story.classed_page == run.story.classed_page
        assert torch.equal(decode(each, text(20, 5)), decode(run.fork(), text(20, 5)))


def test_unknown_classes_are_refused() -> None:
    run = session(Scripted(at=0, codes=9))
    with pytest.raises(PolicyError, match="reclassify"):
        decode(run, text(20, 4))


def test_the_shipped_part_runs_and_its_decisions_repeat() -> None:
    def once() -> list[object]:
        policy = compose_policy("redknot", ["policy.budget.local_tokens=64", "policy/classifier=monitored"])
        config = SessionConfig(
            CacheConfig(dtype="float32", sink_tokens=16, hot_tokens=32, slab_pages=4),
            signals={f"head_{name}": {"window_tokens": 64} for name in ("far_now", "edge_now", "drift")},
        )
        assert isinstance(policy, Policy)
        run = Run().start(policy, text(300))
        assert run.config.signals is None
        other = Session(decoder(), policy, config, SignalContext(P, measures))
        dense = run.prefill_again(300)
        other.start(dense)
        decode(other, text(40, 6))
        return [other.log().steps, list(other.story.changes)]

    assert once() == once()
