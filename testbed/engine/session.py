"""One sequence under one policy: compress a prefilled context, take turns, decode; every step is logged.

    prefill -> COMPRESS plan -> [TURN plan -> extend -> (DECODE plan -> step) ...] ...

A plan precedes the step it is for and has seen every step before it, never the step itself.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policies.base import Phase, Plan, Policy, Signals
from testbed.cache.layout import CacheConfig
from testbed.cache.paged import PagedCache
from testbed.decisions import DecisionLog, Header, ModelShape, Move, Step
from testbed.engine.prefill import DenseKV, check_length
from testbed.engine.signals import Observed, SignalContext, SignalSource, StepView, build_sources
from testbed.models.base import Decoder, Logits


@dataclass(frozen=True)
class SessionConfig:
    """What a session is run with.

    Attributes:
        cache: page size, dtype, hot window.
        budget_fraction: device bytes as a fraction of the full cache in bf16 at the current length; None = no limit.
        kernel: attention backend, None = the fastest here.
        seed: for policies that draw.
        signals: name -> keys that replace those of the signal's YAML.
    """

    cache: CacheConfig
    budget_fraction: float | None = None
    kernel: str | None = None
    seed: int = 0
    signals: dict[str, dict[str, object]] | None = None


@dataclass(frozen=True)
class StepTime:
    """Seconds of one run of the model, of the planning in it (signals, policy, moves, tables), of waiting for pages."""

    total_s: float
    plan_s: float
    stall_s: float = 0.0


class Session:
    """A sequence with its cache, its policy and its signals.

    Args:
        decoder: the model.
        policy: decides.
        config: how.
        context: what signal sources are built with.
    """

    def __init__(self, decoder: Decoder, policy: Policy, config: SessionConfig, context: SignalContext) -> None:
        self.decoder, self.policy, self.config = decoder, policy, config
        self.sources: dict[str, SignalSource] = build_sources(policy.needs, context, config.signals)
        self._wants_mass = any(source.wants_mass for source in self.sources.values())
        self._wants_queries = any(source.wants_queries for source in self.sources.values())
        geometry = decoder.geometry
        self.cache = PagedCache(
            geometry.layers,
            geometry.kv_heads,
            geometry.head_dim,
            config.cache,
            decoder.device,
            with_bounds=any(source.wants_bounds for source in self.sources.values()),
            backend=config.kernel,
        )
        self._slopes = None if geometry.slopes is None else geometry.slopes.view(geometry.kv_heads, -1)
        self._classes: Tensor | None = None
        self._facts: dict[str, dict[str, int]] = {}
        self._digest = ""
        self._step = 0
        self._steps: list[Step] = []
        self._plan_s = 0.0
        self._since_plan = 0
        self.times: list[StepTime] = []
        self.turn_times: list[StepTime] = []

    # --- life --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def start(self, dense: DenseKV, free_source: bool = False) -> None:
        """Compresses a prefilled context; no question is known. The sources have watched the prefill."""
        for source in self.sources.values():
            source.watch_tokens(dense.tokens)
        self.cache.length_tokens = dense.length_tokens  # pages exist for planning, though none is placed yet
        signals = self._signals(Phase.COMPRESS, 0)
        self._classes = self.policy.classifier.classify(signals)
        plan = self.policy.plan(replace(signals, classes=self._classes))
        self.cache.length_tokens = 0
        moves = self.cache.load(dense.keys, dense.values, plan, free_source)
        self._note_plan(plan)
        self._log("compress", 0, True, moves)

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int], logits: Logits = "none") -> Tensor | None:
        """A turn: its tokens are known to the policy first, then run. Logits [T, V] of all of them, or of the last."""
        ids = torch.tensor(list(tokens), dtype=torch.long, device=self.decoder.device)
        check_length(self.decoder, self.cache.length_tokens + len(ids))
        for source in self.sources.values():
            source.watch_turn(ids)
        out = []
        for part in ids.split(self.config.cache.hot_tokens):
            started = time.perf_counter()
            moves = self._plan(Phase.TURN, len(part))
            out.append(self._run(part, logits, "extend"))
            self.turn_times.append(StepTime(time.perf_counter() - started, self._plan_s))
            self._log("extend", len(part), True, moves)
        kept = [x for x in out if x is not None]
        return (torch.cat(kept) if logits == "all" else kept[-1]) if kept else None

    @torch.inference_mode()
    def step(self, token: int | Tensor) -> Tensor:
        """One decode step: plans if one is due, runs the token, returns its logits [V]."""
        started = time.perf_counter()
        self._since_plan += 1
        due = self._since_plan >= self.policy.every_steps
        moves: list[Move] = []
        self._plan_s = 0.0
        if due or self.cache.length_tokens % self.config.cache.page_tokens == 0:
            moves = self._plan(Phase.DECODE, 1)
            due = True
        ids = torch.as_tensor(token, dtype=torch.long, device=self.decoder.device).view(1)
        logits = self._run(ids, "last", "decode")
        assert logits is not None
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(StepTime(time.perf_counter() - started, self._plan_s))
        self._step += 1
        self._log("decode", 1, due, moves)
        return logits[-1]

    def fork(self) -> Session:
        """An independent session that goes on from here, its log begun with this one's steps."""
        import copy

        other = copy.copy(self)
        other.cache = self.cache.fork()
        other.sources = {name: source.fork() for name, source in self.sources.items()}
        other._steps, other.times = list(self._steps), list(self.times)
        other.turn_times = list(self.turn_times)
        return other

    @property
    def classes(self) -> Tensor | None:
        """[L, Hk] int8 of `Head`, once started."""
        return self._classes

    def close(self) -> None:
        """Frees the cache."""
        self.cache.close()

    def log(self) -> DecisionLog:
        """All decisions so far."""
        geometry, decoder = self.decoder.geometry, self.decoder
        value_bytes = self.config.cache.torch_dtype.itemsize
        shape = ModelShape(
            decoder.name,
            geometry.layers,
            geometry.query_heads,
            geometry.kv_heads,
            geometry.head_dim,
            weights_bytes=decoder.weights_bytes,
            flops_per_token=2 * decoder.weights,
        )
        full = geometry.token_bytes(self.config.cache.torch_dtype)
        header = Header(shape, self.config.cache.page_tokens, self.policy.name, full, value_bytes)
        return DecisionLog(header, tuple(self._steps))

    # --- planning ----------------------------------------------------------------------------------------------

    def _signals(self, phase: Phase, next_tokens: int) -> Signals:
        cache = self.cache
        held = cache.held(next_tokens)
        length = cache.length_tokens + next_tokens
        layers, kv_heads, pages = held.mode.shape
        budget = self.device_budget_bytes(length)
        observed = Observed((layers, kv_heads, pages), self.config.cache.page_tokens, cache.key_bounds)
        return Signals(
            phase=phase,
            step=self._step,
            length_tokens=length,
            page_tokens=self.config.cache.page_tokens,
            hot=cache.hot_mask(next_tokens),
            held=held,
            page_bytes=cache.page_bytes,
            device_budget_bytes=None if budget is None else budget - cache.device_slack_bytes,
            classes=self._classes,
            values={name: source.value(observed).cpu() for name, source in self.sources.items()},
            seed=self.config.seed,
        )

    def full_bytes(self, length_tokens: int) -> int:
        """Everything in bf16: what budgets are fractions of."""
        return length_tokens * self.decoder.geometry.token_bytes(torch.bfloat16)

    def device_budget_bytes(self, length_tokens: int) -> int | None:
        """Most bytes on the device at that length."""
        fraction = self.config.budget_fraction
        return None if fraction is None else int(fraction * self.full_bytes(length_tokens))

    def _plan(self, phase: Phase, next_tokens: int) -> list[Move]:
        started = time.perf_counter()
        signals = self._signals(phase, next_tokens)
        plan = self.policy.plan(signals)
        moves = self.cache.apply(plan, next_tokens)
        self._plan_s, self._since_plan = time.perf_counter() - started, 0
        self._note_plan(plan)
        return moves

    def _note_plan(self, plan: Plan) -> None:
        parts = (x.contiguous().numpy().tobytes() for x in (plan.mode, plan.format, plan.tier))
        self._digest = hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()
        self._facts = {}

    # --- running -----------------------------------------------------------------------------------------------

    def _run(self, ids: Tensor, logits: Logits, phase: str) -> Tensor | None:
        """Runs tokens whose plan is applied; logits [T or 1, V]."""
        cache, geometry, count = self.cache, self.decoder.geometry, len(ids)
        cache.begin(count)
        queries: list[Tensor] = []
        masses: list[Tensor] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.append(layer, k[0], v[0])
            grouped = q[0].unflatten(0, (geometry.kv_heads, geometry.group))
            part = cache.attend(
                layer,
                grouped,
                geometry.scale[layer],
                geometry.window_tokens[layer],
                self._slopes,
                self._wants_mass,
            )
            if self._wants_queries:
                queries.append(grouped)
            if part.mass is not None:
                masses.append(part.mass)
            return part.out.flatten(0, 1).unsqueeze(0).to(q.dtype)

        start = cache.length_tokens
        positions = torch.arange(start, start + count, device=ids.device).unsqueeze(0)
        out = self.decoder.forward(ids.unsqueeze(0), positions, attend, logits)
        cache.end(count)
        mass = None
        if masses:
            assert cache.tables is not None
            flat = cache.tables.mass_by_page(torch.cat(masses))
            mass = flat.view(geometry.layers, geometry.kv_heads, -1)
        view = StepView(queries or None, mass, count, self._step)
        for source in self.sources.values():
            source.watch_tokens(ids)
            source.watch_step(view)
        return None if out is None else out[0]

    def _log(self, phase: str, tokens: int, planned: bool, moves: list[Move]) -> None:
        if not self._facts:
            self._facts = self.cache.facts()
        self._steps.append(
            Step(
                step=self._step,
                phase=phase,
                tokens=tokens,
                length_tokens=self.cache.length_tokens,
                planned=planned,
                moves=tuple(moves),
                digest=self._digest,
                **self._facts,
            )
        )
