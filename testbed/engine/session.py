"""One sequence under one policy: compress a prefilled context, take turns, decode; every step is logged.

    prefill -> COMPRESS plan -> [TURN plan -> extend -> (DECODE plan -> step) ... -> park] ...

A plan precedes the step it is for and has seen every step before it, never the step itself.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from policies.base import Phase, Plan, Policy, Role, Signals, Tier
from testbed.cache.budgets import archive_budget_bytes, host_budget_bytes
from testbed.cache.layout import CacheConfig
from testbed.cache.paged import PagedCache
from testbed.cache.pools import Pools
from testbed.cache.saved import Reader
from testbed.cache.snapshot import Pins, unpin
from testbed.decisions import DecisionLog, Move, Step
from testbed.engine import saved
from testbed.engine.accounts import device_budget_bytes, free_device_bytes, full_bytes, log_header, planned_device_bytes
from testbed.engine.batch import Batch, model_id, run_together
from testbed.engine.beside import Beside, check_unguarded
from testbed.engine.guard import GuardConfig
from testbed.engine.idle import Idle, parked
from testbed.engine.lost import mended
from testbed.engine.prefill import DenseKV, check_length, prefill
from testbed.engine.reclassify import reclassified
from testbed.engine.signals import Observed, SignalContext, SignalSource, StepView, build_sources
from testbed.engine.signals.role import UNKNOWN
from testbed.engine.story import StepTime, Story
from testbed.models.base import Decoder, Logits


@dataclass(frozen=True)
class SessionConfig:
    """What a session is run with.

    Attributes:
        cache: page size, dtype, hot window, sizes of the tiers.
        budget_fraction: device bytes as a fraction of the full cache in bf16 at the current length; None = no limit.
        kernel: attention backend, None = the fastest here.
        seed: for policies that draw.
        signals: name -> keys that replace those of the signal's YAML.
        guard: of the quality, None = none.
    """

    cache: CacheConfig
    budget_fraction: float | None = None
    kernel: str | None = None
    seed: int = 0
    signals: dict[str, dict[str, object]] | None = None
    guard: GuardConfig | None = None


class Session:
    """A sequence with its cache, its policy and its signals.

    Args:
        decoder: the model.
        policy: decides.
        config: how.
        context: what signal sources are built with.
        pools: of sessions that are to run in one batch; None = pools of its own.
        watch: signals to follow beside those that the policy needs; see `signal`.
    """

    def __init__(
        self,
        decoder: Decoder,
        policy: Policy,
        config: SessionConfig,
        context: SignalContext,
        pools: Pools | None = None,
        watch: frozenset[str] = frozenset(),
    ) -> None:
        self.decoder, self.policy, self.config = decoder, policy, config
        self.sources: dict[str, SignalSource] = build_sources(policy.needs | watch, context, config.signals)
        self._wants()
        self._beside = Beside.of(self, context, shares_pools=pools is not None)
        geometry = decoder.geometry
        self.cache = PagedCache(
            geometry.layers,
            geometry.kv_heads,
            geometry.head_dim,
            config.cache,
            decoder.device,
            with_bounds=any(source.wants_bounds for source in self.sources.values()),
            backend=config.kernel,
            pools=pools,
            model=model_id(decoder),
        )
        self._classes: Tensor | None = None
        self._plan_s = 0.0
        self._story = Story()
        self._pause: Idle | None = None
        self._paused_at = 0.0
        self._pins: Pins = []

    def _wants(self) -> None:
        """What the model's runs must show, for the signals."""
        self.wants_mass = any(source.wants_mass for source in self.sources.values())
        self.wants_queries = any(source.wants_queries for source in self.sources.values())
        self.wants_hidden = any(source.wants_hidden for source in self.sources.values())

    # --- life --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def start(self, dense: DenseKV, free_source: bool = False, roles: Sequence[int] | None = None) -> None:
        """Compresses a prefilled context; no question is known. The sources have watched the prefill.

        Args:
            dense: the context.
            free_source: let go of each layer of it once it is placed.
            roles: `Role` of every token; None = unknown, and then the policy sees no roles later either.

        Raises:
            ValueError: roles of another length.
        """
        if roles is not None and len(roles) != dense.length_tokens:
            raise ValueError(f"{len(roles)} roles for {dense.length_tokens} tokens of context")
        self._story.has_roles = roles is not None
        said_by = torch.full((dense.length_tokens,), UNKNOWN) if roles is None else torch.tensor(list(roles))
        self._story.chunk_tokens, self._story.context_tokens = dense.chunk_tokens, dense.length_tokens
        self._beside.start(self, dense, roles)
        self._watch(dense.tokens, said_by.to(torch.int8))
        self.cache.length_tokens = dense.length_tokens  # pages exist for planning, though none is placed yet
        signals = self._signals(Phase.COMPRESS, 0)
        self._classes = self.policy.classifier.classify(signals)
        self._story.classed_page = dense.length_tokens // self.config.cache.page_tokens
        plan = self.policy.plan(replace(signals, classes=self._classes))
        self.cache.length_tokens = 0
        moves = self.cache.load(dense.keys, dense.values, plan, free_source)
        self._note_plan(plan)
        self._log("compress", 0, True, moves)

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int], logits: Logits = "none", role: int = Role.USER) -> Tensor | None:
        """A turn: its tokens are known to the policy first, then run. Logits [T, V] of all of them, or of the last.

        A turn of no tokens is none: nothing is planned, and there are no logits, [0, V].
        """
        ids = torch.tensor(list(tokens), dtype=torch.long, device=self.decoder.device)
        check_length(self.decoder, self.cache.length_tokens + len(ids))
        if not len(ids):
            return None if logits == "none" else torch.zeros(0, self.decoder.geometry.vocab, device=ids.device)
        for source in self.sources.values():
            source.watch_turn(ids)
        out: list[Tensor] = []
        ran = 0
        try:
            for part in ids.split(self.config.cache.hot_tokens):
                started, stalled = time.perf_counter(), self.stall_s
                started += self.look_ahead(part)
                moves = self._plan(Phase.TURN, len(part))
                got = run_together([self], part.unsqueeze(0), logits, [role])
                ran += len(part)
                out += [] if got is None else [got[0]]
                total = time.perf_counter() - started
                self._story.turn_times.append(StepTime(total, self._plan_s, self.stall_s - stalled))
                self._log("extend", len(part), True, moves)
            self._plan_next()  # the turn's queries are known now
        finally:  # a later part may have failed: what came before it is in the text
            said = (torch.cat(out) if logits == "all" else out[-1]) if out else None
            self._beside.note(ids[:ran], role, said)
        return said

    def step(self, token: int | Tensor, role: int = Role.GENERATED) -> Tensor:
        """One decode step: plans if one is due, runs the token, returns its logits [V]."""
        return Batch([self]).step(torch.as_tensor(token).view(1), [role])[0]

    def guarded(self, ids: Tensor, role: int, logits: Tensor) -> Tensor:
        """After a decode step: its logits [V], or better ones where a probe found them too bad. For `Batch`."""
        return self._beside.guarded(self, ids, role, logits)

    def raise_budget(self, fraction: float) -> None:
        """Another budget from the next plan on, which comes with the next step. For the guard."""
        self.config = replace(self.config, budget_fraction=fraction)
        self._plan_next()

    def take_cache_of(self, other: Session) -> None:
        """Goes on with the cache, the policy and the budget of another session of the same text. For the guard."""
        self.cache.settle()
        other.cache.go_on_counting(self.cache)
        self.cache.close()
        self.cache, self.policy = other.cache, replace(other.policy, name=self.policy.name)
        self.config, self.sources = replace(other.config, guard=self.config.guard), {**self.sources, **other.sources}
        self._wants()
        self._classes, self._story.facts = other.classes, {}
        self._plan_next()

    def look_ahead(self, ids: Tensor) -> float:
        """Before the plan for tokens [T]: shows them to the signals, and the truth to those that want it. For `Batch`.

        Returns:
            Seconds that the truth took, which are no part of the session's own time.
        """
        for source in self.sources.values():
            source.watch_next(ids)
        return self._beside.foresee(self, ids)

    def plan_step(self) -> tuple[bool, list[Move]]:
        """Before a decode step: plans if one is due. Whether it was, and what moved. For `Batch`."""
        self._story.since_plan += 1
        self._plan_s = 0.0
        due = self._story.since_plan >= self.policy.every_steps
        if due or self.cache.length_tokens % self.config.cache.page_tokens == 0:
            return True, self._plan(Phase.DECODE, 1)
        return False, []

    def end_step(self, total_s: float, stall_s: float, due: bool, moves: list[Move]) -> None:
        """After a decode step: notes and logs it. For `Batch`."""
        self._story.times.append(StepTime(total_s, self._plan_s, stall_s))
        self._story.step += 1
        self._log("decode", 1, due, moves)

    def lock(self, begin: int, end: int) -> None:
        """Asks the policy to keep tokens [begin, end) whatever else matters; one without such a rule is not moved.

        Raises:
            ValueError: no span of the text so far.
        """
        if not 0 <= begin < end <= self.cache.length_tokens:
            raise ValueError(f"lock [{begin}, {end}): must lie in the text so far, 0 to {self.cache.length_tokens}")
        for source in self.sources.values():
            source.watch_lock(begin, end)
        self._beside.lock(begin, end)

    @torch.inference_mode()
    def park(self, tier: Tier = Tier.L2) -> Idle:
        """Between turns: pages leave the device, to `tier` as far as they fit, else to the next; the ring stays.

        The next turn or step plans anew and wakes what matters then.

        Raises:
            ValueError: a tier that is on the device, or none.
        """
        if tier not in (Tier.L2, Tier.L3):
            raise ValueError(f"park tier={tier!r}: must be L2 or L3")
        started, before = time.perf_counter(), planned_device_bytes(self)
        signals = self._signals(Phase.TURN, 0)
        plan = parked(signals, tier, self.cache.metadata.score.view(signals.shape))
        moves = self.cache.apply(plan)
        self._note_plan(plan)
        self._plan_next()
        self._log("turn", 0, True, moves)
        if self._pause is not None:  # parked twice, to another tier
            self._story.idle.append(self._pause.over([], started - self._paused_at, 0.0))
        self._paused_at = time.perf_counter()
        self._pause = Idle.begun(
            self._story.step, moves, before - planned_device_bytes(self), self._paused_at - started
        )
        return self._pause

    @torch.inference_mode()
    def fork(self, own_pools: bool = False) -> Session:
        """An independent session that goes on from here, its log begun with this one's steps.

        Args:
            own_pools: copy every page into memory with limits of its own, so that neither binds the other; else
                pages are shared until one of the two lets go of them.
        """
        cache = mended(self, lambda: self.cache.fork(own_pools))
        other = copy.copy(self)
        other._beside = self._beside.fork()
        other.cache = cache
        other.sources = {name: source.fork() for name, source in self.sources.items()}
        other._story = self._story.fork()
        other._pins = []  # a saved file is the affair of whoever saved it
        return other

    @torch.inference_mode()
    def save(self, path: str | Path, in_place: bool = False) -> None:
        """Writes the session to a file, whole or not at all; it goes on as before.

        Args:
            path: of the file; one that is there is replaced.
            in_place: leave pages of L3 in the page file (cache.l3_path, a file that is kept) and refer to them. They
                stay there, whatever the session does, until its next save.

        Raises:
            SavedError: the file can't be written, or pages can't stay in place.
            CacheError: pages of L3 are lost, with cache.on_lost=error.
        """
        self._beside.check_saved(path, self.config.guard)
        pins = saved.save(self, Path(path), in_place)
        unpin(self._pins)
        self._pins = pins

    @staticmethod
    @torch.inference_mode()
    def resume(
        path: str | Path,
        decoder: Decoder,
        policy: Policy,
        config: SessionConfig,
        context: SignalContext,
        pools: Pools | None = None,
    ) -> Session:
        """A session that goes on where the saved one was, bit for bit; arguments as of `Session`.

        Raises:
            SavedError: not a saved session, of another version, model, shape or configuration, cut short, damaged.
        """
        with Reader(Path(path)) as reader:
            saved.check(reader, decoder, policy, config)
            check_unguarded(path, config.guard)
            session = Session(decoder, policy, config, context, pools)
            try:
                session._beside.check_saved(path, config.guard)
                session._pins = saved.load(session, reader)
            except BaseException:
                session.close()
                raise
        return session

    def take_over(self, story: Story, classes: Tensor | None, pause: Idle | None) -> None:
        """Becomes the session that was saved; its cache and signals are in place. For `saved`."""
        self._story, self._classes = story, classes
        self._pause, self._paused_at = pause, time.perf_counter()

    @property
    def story(self) -> Story:
        """All that was run and done so far."""
        return self._story

    @property
    def pause(self) -> Idle | None:
        """The pause that lasts, if one does."""
        return self._pause

    @property
    def classes(self) -> Tensor | None:
        """[L, Hk] int8 of `Head`, once started."""
        return self._classes

    @property
    def steps(self) -> int:
        """Decode steps since the context was compressed."""
        return self._story.step

    def prefill_again(self, length_tokens: int) -> DenseKV:
        """K and V of at least so many of the tokens so far; those of the context in the chunks they were made in."""
        chunk = self._story.chunk_tokens
        least = self._story.context_tokens if length_tokens <= self._story.context_tokens else self.cache.length_tokens
        tokens = self.tokens[: min(least, -(-length_tokens // chunk) * chunk)]
        return prefill(self.decoder, tokens.tolist(), self.config.cache.torch_dtype, (), chunk)

    @property
    def tokens(self) -> Tensor:
        """[T] int64, everything run so far."""
        return self._story.tokens

    @property
    def roles(self) -> Tensor:
        """[T] int8 of `Role` of every token, -1 = unknown."""
        return self._story.roles

    @property
    def times(self) -> list[StepTime]:
        """Of every decode step."""
        return list(self._story.times)

    @property
    def turn_times(self) -> list[StepTime]:
        """Of every run of a turn's tokens."""
        return list(self._story.turn_times)

    @property
    def idle(self) -> list[Idle]:
        """Every pause so far, one that lasts included."""
        return [*self._story.idle, *([] if self.pause is None else [self.pause])]

    @property
    def stall_s(self) -> float:
        """Seconds so far in which a step waited for pages."""
        return self.cache.traffic.total_stall_s

    @torch.inference_mode()
    def close(self) -> None:
        """Frees the cache."""
        self._beside.close()
        self.cache.close()

    def log(self) -> DecisionLog:
        """All decisions so far."""
        return DecisionLog(log_header(self), tuple(self._story.steps))

    # --- planning ----------------------------------------------------------------------------------------------

    def _signals(self, phase: Phase, next_tokens: int) -> Signals:
        cache = self.cache
        held = cache.held(next_tokens)
        length = cache.length_tokens + next_tokens
        observed = self.observed(held.mode.shape[2])
        return Signals(
            phase=phase,
            step=self._story.step,
            length_tokens=length,
            page_tokens=self.config.cache.page_tokens,
            hot=cache.hot_mask(next_tokens),
            held=held,
            page_bytes=cache.page_bytes,
            device_budget_bytes=free_device_bytes(self, length),
            host_budget_bytes=host_budget_bytes(cache),
            archive_budget_bytes=archive_budget_bytes(cache),
            classes=self._classes,
            values={name: self.sources[name].value(observed).cpu() for name in sorted(self.policy.needs)},
            seed=self.config.seed,
        )

    def observed(self, pages: int | None = None) -> Observed:
        """Where signals are asked for: N pages, those of the text so far if not said."""
        page_tokens = self.config.cache.page_tokens
        pages = -(-self.cache.length_tokens // page_tokens) if pages is None else pages
        geometry = self.decoder.geometry
        return Observed((geometry.layers, geometry.kv_heads, pages), page_tokens, self.cache.key_bounds)

    def signal(self, name: str) -> Tensor:
        """What a signal that the policy needs, or that was asked for by `watch`, says now; shapes as in its YAML."""
        return self.sources[name].value(self.observed())

    def full_bytes(self, length_tokens: int) -> int:
        """Everything in bf16: what budgets are fractions of."""
        return full_bytes(self, length_tokens)

    def device_budget_bytes(self, length_tokens: int) -> int | None:
        """Most bytes on the device at that length."""
        return device_budget_bytes(self, length_tokens)

    def _plan_next(self) -> None:
        """Whatever comes next begins with a plan."""
        self._story.since_plan = self.policy.every_steps

    def _plan(self, phase: Phase, next_tokens: int) -> list[Move]:
        started = time.perf_counter()
        signals = self._signals(phase, next_tokens)
        page = self.cache.length_tokens // self.config.cache.page_tokens
        if page > self._story.classed_page:
            signals = reclassified(self.policy.classifier, signals, self._story.changes)
            self._classes, self._story.classed_page = signals.classes, page
        plan = self.policy.plan(signals)
        moves = self.cache.apply(plan, next_tokens)
        self._plan_s, self._story.since_plan = time.perf_counter() - started, 0
        self._note_plan(plan)
        if self._pause is not None:
            self._story.idle.append(self._pause.over(moves, started - self._paused_at, self._plan_s))
            self._pause = None
        return moves

    def _note_plan(self, plan: Plan) -> None:
        parts = (x.contiguous().numpy().tobytes() for x in (plan.mode, plan.format, plan.tier))
        self._story.digest = hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()
        self._story.facts = {}

    # --- running -----------------------------------------------------------------------------------------------

    def watch_run(self, ids: Tensor, role: int, view: StepView) -> None:
        """After a run: the text grows, the signals see what there was to see. For `Batch`."""
        self._watch(ids, torch.full((len(ids),), int(role), dtype=torch.int8))
        for source in self.sources.values():
            source.watch_step(view)

    def _watch(self, ids: Tensor, said_by: Tensor) -> None:
        self._story.text.append(ids)
        self._story.said_by.append(said_by)
        shown = said_by if self._story.has_roles else torch.full_like(said_by, UNKNOWN)
        for source in self.sources.values():
            source.watch_roles(shown)
            source.watch_tokens(ids)

    def forget_facts(self) -> None:
        """The pages are no longer those of the last plan (some were lost): the log counts them anew."""
        self._story.facts = {}

    def _log(self, phase: str, tokens: int, planned: bool, moves: list[Move]) -> None:
        if not self._story.facts:
            self._story.facts = self.cache.facts()
        self._story.steps.append(
            Step(
                step=self._story.step,
                phase=phase,
                tokens=tokens,
                length_tokens=self.cache.length_tokens,
                planned=planned,
                moves=tuple(moves),
                digest=self._story.digest,
                **self._story.facts,
            )
        )
