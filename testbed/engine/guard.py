"""The quality guard: every so many tokens the policy's next-token distributions meet those of a better cache.

A reference session (the full cache, or the same policy with a larger budget) is kept beside the guarded one and lags
behind; at a probe it catches up on all tokens since the last one: a full cache in one run of the model, so that k
tokens cost little more than one; a larger budget step by step, at a step's price each. Where the policy's distributions
are worse than the threshold allows, its budget is raised, at most a few times, and then the session goes on with the
reference's cache. The price is stated with the outcome: the seconds of the probes and the bytes of the reference.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from policies.base import Tier
from testbed.engine.divergence import kl_nats
from testbed.engine.full import full_session
from testbed.engine.prefill import DenseKV
from testbed.engine.signals import SignalContext
from testbed.engine.trail import Trail

if TYPE_CHECKING:
    from testbed.engine.session import Session

MEASURES = ("likelihood", "overlap", "top1")
FULL = "full"


class GuardError(ValueError):
    """A guard that can't be built, or a reference that is none."""


@dataclass(frozen=True)
class GuardConfig:
    """When to look, what to compare with, and what to do; built by Hydra from conf/guard.

    Attributes:
        every_tokens: tokens between probes; None = no guard.
        threshold: least quality, in [0, 1].
        measure: of quality, 1 = the same distributions. likelihood: exp(-mean KL(reference || policy)); overlap: mean
            of sum_x min(p(x), q(x)), 1 less the total variation; top1: share of positions with the same likeliest one.
        reference: "full", or the larger budget's fraction of the full cache, for the same policy.
        most_raises: how often the budget is raised before the session goes on with the reference's cache; a policy
            that drops pages for good, which no budget brings back, is not given that chance.
        raise_factor: what a raise multiplies the budget by, above 1.
    """

    every_tokens: int | None = None
    threshold: float = 0.95
    measure: str = "likelihood"
    reference: str | float = FULL
    most_raises: int = 1
    raise_factor: float = 2.0

    def __post_init__(self) -> None:
        """Checks what Hydra's instantiate does not."""
        for key, least, optional in (("every_tokens", 1, True), ("most_raises", 0, False)):
            value = getattr(self, key)
            if not (optional and value is None) and (type(value) is not int or value < least):
                allowed = f"a whole number of at least {least}" + (", or null for no guard" if optional else "")
                raise GuardError(f"guard.{key}={value!r}: must be {allowed}")
        if not _number(self.threshold) or not 0.0 <= self.threshold <= 1.0:
            raise GuardError(f"guard.threshold={self.threshold!r}: must be a number from 0 to 1")
        if not _number(self.raise_factor) or self.raise_factor <= 1.0:
            raise GuardError(f"guard.raise_factor={self.raise_factor!r}: must be a number above 1")
        if self.measure not in MEASURES:
            raise GuardError(f"guard.measure={self.measure!r}: must be one of {', '.join(MEASURES)}")
        fraction = _number(self.reference) and 0.0 < float(self.reference) <= 1.0
        if self.reference != FULL and not fraction:
            raise GuardError(f"guard.reference={self.reference!r}: must be full, or a fraction above 0 and at most 1")

    @property
    def active(self) -> bool:
        """Whether there is a guard at all."""
        return self.every_tokens is not None


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Probe:
    """One look.

    Attributes:
        step: decode steps taken.
        length_tokens: of the text then.
        positions: distributions compared.
        quality: in [0, 1].
        action: "" (good enough), "raise" or "switch".
        budget_fraction: in force from then on; None = no limit.
        seconds: what the probe took.
    """

    step: int
    length_tokens: int
    positions: int
    quality: float
    action: str
    budget_fraction: float | None
    seconds: float

    def plain(self) -> dict[str, Any]:
        """For records."""
        return asdict(self)


@dataclass(frozen=True)
class _Run:
    """What the session ran and the reference has not seen.

    Attributes:
        ids: [T].
        role: of all of them.
        turn: whether they were a turn; else a decode step.
        logits: [T, V] of the policy after each of them; None if nobody wanted them.
    """

    ids: Tensor
    role: int
    turn: bool
    logits: Tensor | None


def quality(policy: Tensor, reference: Tensor, measure: str) -> float:
    """How near logits [M, V] of the policy are to the reference's, by one of `MEASURES`.

    Logits that make no distribution, as NaN or infinite ones, are worth 0; a single -inf rules its token out.

    Raises:
        GuardError: the reference's make none.
    """
    if not _distributions(reference):
        raise GuardError("the guard's reference gave logits that are NaN, infinite, or -inf for every token")
    if not _distributions(policy):
        return 0.0
    if measure == "top1":
        return float((policy.argmax(-1) == reference.argmax(-1)).float().mean())
    ours, right = policy.float().log_softmax(-1), reference.float().log_softmax(-1)
    if measure == "overlap":
        return float(torch.minimum(ours.exp(), right.exp()).sum(-1).mean())
    return math.exp(-max(0.0, float(kl_nats(right, ours).mean())))


def _distributions(logits: Tensor) -> bool:
    """Whether every row of [M, V] makes one: its largest entry is a number, and then none of it is NaN or +inf."""
    return bool(torch.isfinite(logits.amax(-1)).all())


class Guard:
    """Watches one session.

    Args:
        session: the guarded one.
        config: see there; active.
        context: what signal sources are built with.

    Raises:
        GuardError: the reference's budget is no larger than the policy's.
    """

    def __init__(self, session: Session, config: GuardConfig, context: SignalContext) -> None:
        self.config = config
        self.reference = _reference(session, config, context)
        self.probes: Trail[Probe] = Trail()
        self.raises = 0
        self._runs: list[_Run] = []

    def start(self, session: Session, dense: DenseKV, roles: Sequence[int] | None) -> None:
        """The reference takes the same context; the session's signals, which have seen its prefill, tell its own."""
        self.reference.sources = {name: session.sources[name].fork() for name in self.reference.sources}
        self.reference.start(dense, roles=roles)

    def note(self, ids: Tensor, role: int, logits: Tensor | None, turn: bool) -> None:
        """What was run of a turn, or a decode step, tokens [T]; the session's logits [T, V] if all were wanted."""
        if logits is not None and len(logits) != len(ids):
            logits = None
        self._runs.append(_Run(ids, role, turn, None if logits is None else logits.clone()))

    @property
    def due(self) -> bool:
        """Whether enough tokens have been run since the last probe."""
        assert self.config.every_tokens is not None
        return sum(len(run.ids) for run in self._runs) >= self.config.every_tokens

    def probe(self, session: Session) -> Tensor | None:
        """Compares, and acts where the quality is too low: then the reference's logits [V] for the next token.

        The session's cache and policy are the reference's afterwards if there was nothing left to raise.
        """
        started = time.perf_counter()
        noted, self._runs = self._runs, []  # whatever fails below, nothing is run twice
        # A full cache decides nothing, so that all may be one run; a policy must meet turns and steps as they were.
        runs = _joined(noted) if self.config.reference == FULL else noted
        both = [(run.logits, self._follow(run)) for run in runs]
        ours, theirs = (torch.cat([x for x in side if x is not None]) for side in zip(*both, strict=True))
        worth = quality(ours, theirs, self.config.measure)
        action = "" if worth >= self.config.threshold else self._act(session)
        self.probes.append(
            Probe(
                session.steps,
                session.cache.length_tokens,
                len(ours),
                worth,
                action,
                session.config.budget_fraction,
                time.perf_counter() - started,
            )
        )
        return theirs[-1] if action else None

    def _follow(self, run: _Run) -> Tensor | None:
        """The reference runs it too: its logits [T, V], if the session's are there to compare with."""
        if run.turn:
            return self.reference.extend(run.ids.tolist(), "none" if run.logits is None else "all", run.role)
        return self.reference.step(run.ids, run.role).unsqueeze(0)

    def _act(self, session: Session) -> str:
        fraction = session.config.budget_fraction
        returns = session.policy.eviction.victim_tier != Tier.DROPPED  # else no budget brings back what is missing
        if returns and fraction is not None and fraction < 1.0 and self.raises < self.config.most_raises:
            self.raises += 1
            session.raise_budget(min(1.0, fraction * self.config.raise_factor))
            return "raise"
        session.take_cache_of(self.reference)
        return "switch"

    def fork(self) -> Guard:
        """An independent copy."""
        other = copy.copy(self)
        other.reference, other.probes = self.reference.fork(own_pools=True), self.probes.fork()
        other._runs = list(self._runs)
        return other

    @property
    def bytes(self) -> int:
        """What the reference's cache holds, in all tiers."""
        return self.reference.cache.ledger().total_bytes


def _joined(runs: Iterable[_Run]) -> Iterator[_Run]:
    """The same tokens in as few runs as logits allow: those that nobody has any of, and those that have all."""
    for known, group in groupby(runs, lambda run: run.logits is not None):
        parts = list(group)
        logits = torch.cat([run.logits for run in parts if run.logits is not None]) if known else None
        yield _Run(torch.cat([run.ids for run in parts]), parts[0].role, True, logits)


def check_reference(config: GuardConfig, budget_fraction: float | None) -> None:
    """Refuses a reference that is no better than the policy.

    Raises:
        GuardError: its budget is no larger.
    """
    if not config.active or config.reference == FULL:
        return
    if budget_fraction is None or float(config.reference) <= budget_fraction:
        own = f"budget.fraction={budget_fraction!r}"
        raise GuardError(f"guard.reference={config.reference!r}: must be above the policy's own {own}, or full")


def _reference(session: Session, config: GuardConfig, context: SignalContext) -> Session:
    from testbed.engine.session import Session

    check_reference(config, session.config.budget_fraction)
    if config.reference == FULL:
        return full_session(session, context)
    cache = session.config.cache.unlimited()
    larger = replace(session.config, cache=cache, budget_fraction=float(config.reference), guard=None)
    return Session(session.decoder, session.policy, larger, context)
