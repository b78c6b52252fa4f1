"""Takes a real session through a document and shows every step of its windows, with the truth, to whoever looks.

The document is run as it stands (teacher-forced). Its context is prefilled; what lies between windows is run as turns
under the full cache; in a window every token is a decode step. Each window is run once under the full cache, which is
the truth of its steps, and again in a fork that attends to a small share of the pages, so that signals made from
attention look as they do in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from policies.base import Mode, Phase, Policy, Predictor, Signals
from policies.checks import require_number
from testbed.cache.layout import CacheConfig
from testbed.compose import full_policy
from testbed.engine.beside import NEWEST
from testbed.engine.prefill import prefill
from testbed.engine.session import Session, SessionConfig
from testbed.engine.signals import SignalContext
from testbed.models.base import Attend, Decoder, Logits
from testbed.predictor.corpus import Document
from testbed.workloads.base import WorkloadError, check_fraction, check_list


@dataclass(frozen=True)
class Moment:
    """Before one step: everything that a policy may know.

    Attributes:
        document: what is run.
        window: index of its window.
        at: position of the token about to be run.
        share: of the candidate pages that are attended; None = the full cache.
        session: of that step; its sources have seen all before, and the coming token.
        signals: as its policy sees them.
        memory: keys and values so far; only under the full cache.
    """

    document: Document
    window: int
    at: int
    share: float | None
    session: Session
    signals: Signals
    memory: Memory | None = None

    @property
    def phase(self) -> int:
        """Of the token that the step predicts, an index into `PHASES`."""
        return self.document.phases[self.at + 1]

    @property
    def candidates(self) -> Tensor:
        """[N] bool: pages that a policy chooses among."""
        return ~self.signals.hot


Learn = Callable[[Tensor], None]
Visit = Callable[[Moment], Learn]
"""Called before a step; what it returns is called with the truth, the mass [L, Hk, N] of that step under full."""


@dataclass(frozen=True)
class Course:
    """How sessions are driven.

    Attributes:
        cache: of the sessions.
        shares: of the candidate pages that forks attend to; each window takes the next one.
        chooser: says which pages those are.
        watch: signals that whoever looks wants in `Moment.signals`, beside the chooser's.
        beside: signals whose sources follow the session but are asked for no value.
        signals: name -> keys that replace those of the signal's YAML.
        head_measures: calibrated measures of heads, for policies and signals that read them.
        chunk_tokens: of the prefill.
    """

    chooser: Predictor
    watch: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()
    shares: tuple[float, ...] = (0.1, 0.25)
    cache: CacheConfig = field(default_factory=CacheConfig)
    signals: Mapping[str, dict[str, object]] = field(default_factory=dict)
    head_measures: Callable[[], Mapping[str, Tensor]] = dict[str, Tensor]
    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        """Refuses what are no shares, and a share of nothing."""
        object.__setattr__(self, "shares", check_list("shares", self.shares))
        for share in self.shares:
            check_fraction("shares", share)
            if share == 0:
                raise WorkloadError(f"shares={list(self.shares)}: must be above 0")


class Memory:
    """A decoder that remembers the keys and values it hands to attention.

    Args:
        decoder: does the work.
        length_tokens: most positions.
        dtype: that they are kept in.
    """

    def __init__(self, decoder: Decoder, length_tokens: int, dtype: torch.dtype) -> None:
        geometry = decoder.geometry
        shape = (geometry.layers, geometry.kv_heads, length_tokens, geometry.head_dim)
        self.decoder = decoder
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=decoder.device) for _ in range(2))

    def __getattr__(self, name: str) -> Any:
        """Everything but `forward` is the decoder's."""
        return getattr(self.decoder, name)

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, logits: Logits = "last", watch: Any = None
    ) -> Tensor | None:
        """See `Decoder.forward`."""
        span = slice(int(positions[0, 0]), int(positions[0, -1]) + 1)

        def remember(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer, :, span], self.values[layer, :, span] = k[0], v[0]
            return attend(layer, q, k, v)

        return self.decoder.forward(tokens, positions, remember, logits, watch)


@dataclass(frozen=True)
class Looking:
    """A predictor part that shows the signals of every decode step before it scores them."""

    inner: Predictor
    watch: frozenset[str]
    look: Callable[[Signals], None]

    @property
    def needs(self) -> frozenset[str]:
        """The inner part's, and those that are to be seen."""
        return self.inner.needs | self.watch

    def score(self, signals: Signals) -> Tensor:
        """[L, Hk, N], the inner part's."""
        if signals.phase == Phase.DECODE:
            self.look(signals)
        return self.inner.score(signals)


@dataclass(frozen=True)
class TopShare:
    """An attention part: of the pages that are not hot, the share with the highest scores EXACT.

    Attributes:
        share: in [0, 1].
        prototypes: whether the others are attended by their prototypes; else they are skipped.
    """

    share: float
    prototypes: bool = False

    def __post_init__(self) -> None:
        """Refuses what is no share."""
        require_number(self, "share", 0, 1)

    @property
    def needs(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    @property
    def prototype_share(self) -> float:
        """No bytes are limited, so none are kept free."""
        return 0.0

    def modes(self, signals: Signals, score: Tensor, resident: Tensor, spare_bytes: Tensor) -> Tensor:
        """[L, Hk, N] int8 of `Mode`."""
        candidates = int((~signals.hot).sum())
        best = score.masked_fill(signals.hot, -torch.inf).topk(kept_pages(self.share, candidates), -1).indices
        chosen = signals.hot.expand(signals.shape).scatter(-1, best, torch.ones_like(best, dtype=torch.bool))
        other = int(Mode.CLUSTER if self.prototypes else Mode.SKIP)
        return torch.where(chosen & resident, int(Mode.EXACT), other).to(torch.int8)


def kept_pages(share: float, candidates: int) -> int:
    """How many pages a share is: at least one where there are any."""
    return min(candidates, max(1, math.ceil(share * candidates - 1e-9)))


@torch.inference_mode()
def drive(document: Document, decoder: Decoder, course: Course, visit: Visit, remember: bool = False) -> None:
    """Runs one document.

    Args:
        document: with its windows.
        decoder: the model.
        course: how.
        visit: called before every step of every window, under the full cache and in the window's fork.
        remember: offer keys and values at the steps of the full cache.
    """
    run = _Run(document, decoder, course, visit, remember)
    try:
        for index, (begin, end) in enumerate(document.windows):
            run.to(begin)
            run.window(index, range(begin, end))
    finally:
        run.session.close()


class _Run:
    """One document on its way."""

    def __init__(self, document: Document, decoder: Decoder, course: Course, visit: Visit, remember: bool) -> None:
        self.document, self.decoder, self.course, self.visit = document, decoder, course, visit
        self.memory = Memory(decoder, len(document.tokens), course.cache.torch_dtype) if remember else None
        self.look: Callable[[Signals], None] | None = None  # at the step that runs; None between windows
        full = full_policy()
        looking = Looking(full.predictor, course.watch | course.chooser.needs, self._looked)
        self.session = self._started(replace(full, every_steps=1, predictor=looking))

    def _looked(self, signals: Signals) -> None:
        if self.look is not None:
            self.look(signals)

    def _started(self, policy: Policy) -> Session:
        """The session, its context prefilled."""
        document, course = self.document, self.course
        decoder = cast(Decoder, self.memory or self.decoder)
        context = SignalContext(course.cache.page_tokens, course.head_measures, self.decoder)
        config = SessionConfig(course.cache, signals=dict(course.signals))
        session = Session(decoder, policy, config, context, watch=course.beside | {NEWEST})
        given = document.context_tokens
        dense = prefill(
            decoder,
            document.tokens[:given],
            course.cache.torch_dtype,
            list(session.sources.values()),
            course.chunk_tokens,
        )
        session.start(dense, free_source=True, roles=document.roles[:given])
        return session

    def to(self, begin: int) -> None:
        """Runs what lies before a window, one turn for each role in turn."""
        document, done = self.document, self.session.cache.length_tokens
        for role, run in groupby(range(done, begin), lambda at: document.roles[at]):
            span = list(run)
            self.session.extend(document.tokens[span[0] : span[-1] + 1], role=role)

    def window(self, index: int, steps: range) -> None:
        """Runs a window under the full cache, then in a fork that attends to less."""
        shares = self.course.shares
        share = shares[index % len(shares)] if shares else None
        fork = None if share is None else self.session.fork()
        truths = [self._step(self.session, index, at, None, None) for at in steps]
        if fork is None or share is None:
            return
        looking = Looking(self.course.chooser, self.course.watch, self._looked)
        fork.policy = replace(fork.policy, predictor=looking, attention=TopShare(share))
        fork.decoder = self.decoder  # what the fork attends to is not the full cache's and is not remembered
        try:
            for at, truth in zip(steps, truths, strict=True):
                self._step(fork, index, at, share, truth)
        finally:
            fork.close()

    def _step(self, session: Session, window: int, at: int, share: float | None, truth: Tensor | None) -> Tensor:
        """One step: shown before, told the truth after; under the full cache its own mass is the truth."""
        document, seen = self.document, []
        memory = self.memory if share is None else None

        def look(signals: Signals) -> None:
            seen.append(self.visit(Moment(document, window, at, share, session, signals, memory)))

        self.look = look
        try:
            session.step(document.tokens[at], role=document.roles[at])
        finally:
            self.look = None
        if truth is None:
            truth = session.signal(NEWEST).clone()
        for learn in seen:
            learn(truth)
        return truth
