"""The contract of a KV-cache policy: signals in, plans out.

A policy never sees K or V, a device, a file, a link or a clock. It reads named arrays about pages and
heads (`Signals`) and answers, for every page of every stream, how it is attended, how it is stored and
where (`Plan`). The same object therefore drives the real decode path and the SimPy twin.

Letters: L layers, Hk KV heads, N pages, P tokens a page; a page is P consecutive positions of one (layer, KV head).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


class Mode(IntEnum):
    """What a page contributes to attention."""

    SKIP = 0
    EXACT = 1
    CLUSTER = 2  # by its prototypes
    BACKGROUND = 3  # by the one state of its stream that stands for everything in this mode


class Format(IntEnum):
    """At which precision a page is kept."""

    COMPUTE = 0  # the cache's own dtype (bf16 or fp32)
    INT8 = 1
    INT4 = 2


class Tier(IntEnum):
    """Where a page is kept. A DROPPED page is gone for good and its bytes are free."""

    L0 = 0  # hot: sinks and recent window, compute dtype
    L1 = 1  # warm: paged pools on the device
    L2 = 2  # cold: host memory
    L3 = 3  # archive: a file
    DROPPED = 4


class Head(IntEnum):
    """What kind a head is."""

    LOCAL = 0
    GLOBAL = 1
    SPECIAL = 2
    DENSE = 3  # nothing is known about it, everything is kept


class Phase(IntEnum):
    """When a plan is asked for."""

    COMPRESS = 0  # the context is prefilled, no question is known
    TURN = 1  # the tokens of the next turn are known, none of them has been run
    DECODE = 2  # before a decode step


class PolicyError(ValueError):
    """A policy or one of its parts was given something it can't work with."""


class Role(IntEnum):
    """What the tokens of a page are in the conversation; a page of several roles has the lowest of them."""

    SYSTEM = 0
    TOOL = 1  # what tools are there and how they are called
    DOCUMENT = 2  # what is asked about
    USER = 3
    GENERATED = 4


@dataclass(frozen=True)
class PoolLayout:
    """How the streams share the device pools, so that pages that live and leave together lie together.

    Attributes:
        arena: [L, Hk] int8, the arena of each stream, 0 to len(block_pages) - 1.
        block_pages: pages that an arena grows by at a time, a multiple of the cache's slab.
    """

    arena: Tensor
    block_pages: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuses what no pool could be built from."""
        if not self.block_pages or any(pages < 1 for pages in self.block_pages):
            raise PolicyError(f"pools.block_pages={self.block_pages}: must be one whole number of at least 1 per arena")
        if self.arena.dim() != 2 or self.arena.dtype != torch.int8:
            raise PolicyError(f"pools.arena: must be [L, Hk] int8, got {list(self.arena.shape)} {self.arena.dtype}")
        if self.arena.numel() and not 0 <= int(self.arena.min()) <= int(self.arena.max()) < len(self.block_pages):
            raise PolicyError(f"pools.arena: must be 0 to {len(self.block_pages) - 1}, one of {self.block_pages}")


@dataclass(frozen=True)
class Plan:
    """What the pages are from now on.

    Attributes:
        mode, format, tier: [L, Hk, N] int8, values of `Mode`, `Format`, `Tier`.
        score: [L, Hk, N] float32, the predictor's, kept with the pages; decides who leaves a tier that overflows
            after all. None = nobody scored (a dense plan).
        pools: how the streams should share the device pools; None = as the cache likes.
    """

    mode: Tensor
    format: Tensor
    tier: Tensor
    score: Tensor | None = None
    pools: PoolLayout | None = None

    @staticmethod
    def dense(layers: int, kv_heads: int, pages: int, device: torch.device | str = "cpu") -> Plan:
        """Everything exact, in compute dtype, in L1."""
        ones = torch.ones(layers, kv_heads, pages, dtype=torch.int8, device=device)
        return Plan(ones * Mode.EXACT, ones * Format.COMPUTE, ones * Tier.L1)

    @property
    def alive(self) -> Tensor:
        """[L, Hk, N] bool: pages that still exist."""
        return self.tier != Tier.DROPPED


@dataclass(frozen=True)
class PageBytes:
    """Bytes of one page of one stream on its tier, scales and zero points included."""

    compute: int
    int8: int
    int4: int
    prototype: int  # one page's prototypes, kept in L1 while the page is attended by CLUSTER
    background: int  # one stream's background state
    metadata: int = 0  # per page on the device, whatever its tier (e.g. Quest's key bounds)

    def of(self, fmt: Tensor) -> Tensor:
        """Bytes by format code: fmt [...] int8 -> [...] int64."""
        table = torch.tensor([self.compute, self.int8, self.int4], dtype=torch.int64, device=fmt.device)
        return table[fmt.long()]


@dataclass(frozen=True)
class Signals:
    """Everything a policy may know at one moment.

    Attributes:
        phase: why a plan is asked for.
        step: decode steps since the context was compressed, 0 before the first.
        length_tokens: positions written so far; pages = ceil(length / P).
        page_tokens: P.
        hot: [N] bool, pages in L0 (sinks and the recent window): always exact, compute dtype, L0.
        held: the plan in force, with new pages as dense; a page DROPPED there stays dropped.
        page_bytes: what pages cost.
        device_budget_bytes: most bytes all streams together may hold in L0 and L1, or None.
        host_budget_bytes, archive_budget_bytes: the same of L2 and of L3; None = no limit, 0 = no such tier.
        classes: [L, Hk] int8 of `Head`, what the policy's classifier said for this sequence.
        values: the named signals that the parts declared in `needs`, each [L, Hk, N] unless its YAML says otherwise.
        seed: for parts that draw.
    """

    phase: Phase
    step: int
    length_tokens: int
    page_tokens: int
    hot: Tensor
    held: Plan
    page_bytes: PageBytes
    device_budget_bytes: int | None = None
    classes: Tensor | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict)
    seed: int = 0
    host_budget_bytes: int | None = None
    archive_budget_bytes: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L, Hk, N)."""
        layers, kv_heads, pages = self.held.mode.shape
        return layers, kv_heads, pages

    @property
    def device(self) -> torch.device:
        """Where the signals live."""
        return self.held.mode.device

    def __getitem__(self, name: str) -> Tensor:
        """The named signal.

        Raises:
            PolicyError: no executor computed it, because no part declared it.
        """
        if name not in self.values:
            raise PolicyError(f"signal {name!r} was not computed; declare it in `needs`. Here: {sorted(self.values)}")
        return self.values[name]

    def age_tokens(self) -> Tensor:
        """[N] int64: tokens between the end of each page and the newest position."""
        last = torch.arange(1, self.shape[2] + 1, device=self.device) * self.page_tokens
        return (self.length_tokens - last).clamp(min=0)


@dataclass(frozen=True)
class Share:
    """What the budget part grants.

    Attributes:
        quota_bytes: [L, Hk] float64, bytes a stream's L1 pages may take; inf = no limit.
        eligible: [L, Hk, N] bool; a page that is not leaves whatever its score (outside a local head's window).
    """

    quota_bytes: Tensor
    eligible: Tensor


class Part(Protocol):
    """What every part has: the names of the signals it reads."""

    @property
    def needs(self) -> frozenset[str]:
        """Names of the signals it reads."""
        ...


@runtime_checkable
class Classifier(Part, Protocol):
    """What kind is each head?"""

    def classify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8 of `Head`. Asked once per sequence, at COMPRESS."""
        ...


@runtime_checkable
class Predictor(Part, Protocol):
    """How much will each page matter at the next step?"""

    def score(self, signals: Signals) -> Tensor:
        """[L, Hk, N] float32, finite, higher matters more."""
        ...


@runtime_checkable
class Budget(Part, Protocol):
    """How are the bytes shared between layers and heads?"""

    def share(self, signals: Signals, fmt: Tensor) -> Share:
        """Share of each stream; fmt [L, Hk, N] is the format each page would get."""
        ...


@runtime_checkable
class Formatter(Part, Protocol):
    """At which precision is each page kept?"""

    def choose(self, signals: Signals, score: Tensor) -> Tensor:
        """[L, Hk, N] int8 of `Format`. Precision never comes back: the policy takes max(held, chosen)."""
        ...


@runtime_checkable
class Eviction(Part, Protocol):
    """Which page leaves a full tier first, and where does it go?"""

    @property
    def victim_tier(self) -> Tier:
        """Where a page that no longer fits goes: L2, L3 or DROPPED."""
        ...

    def rank(self, signals: Signals, score: Tensor) -> Tensor:
        """[L, Hk, N] float32, the lowest leaves first."""
        ...


@runtime_checkable
class Attention(Part, Protocol):
    """How is each page attended?"""

    @property
    def prototype_share(self) -> float:
        """Part of each stream's quota kept free for prototypes, 0 to < 1."""
        ...

    def modes(self, signals: Signals, score: Tensor, resident: Tensor, spare_bytes: Tensor) -> Tensor:
        """[L, Hk, N] int8 of `Mode`.

        resident [L, Hk, N] bool: pages on the device; only these may be EXACT. spare_bytes [L, Hk] float64: what the
        prototypes and the background state of a stream may take together. `signals.held` has the formats and tiers of
        the plan in the making, so that pages about to be dropped are not alive any more.
        """
        ...


@runtime_checkable
class Prefetch(Part, Protocol):
    """What is fetched before it is asked for?"""

    def fetch(self, signals: Signals, score: Tensor, resident: Tensor) -> Tensor:
        """[L, Hk, N] bool: pages to bring to L1 though they are not attended exactly; signals as for `Attention`."""
        ...


SLOTS = ("classifier", "predictor", "budget", "format", "eviction", "attention", "prefetch")


@dataclass(frozen=True)
class Policy:
    """Seven parts that together answer signals with a plan. Built by Hydra from conf/policy/<name>.yaml.

    Attributes:
        every_steps: decode steps between plans (1 = before each token); a plan is also made where a page begins.
        cold_start_tokens: while the sequence is shorter than this, the plan is dense.
        budget_fraction: device bytes as a fraction of the full cache, for runs that name none; None = no limit.
    """

    name: str
    classifier: Classifier
    predictor: Predictor
    budget: Budget
    format: Formatter
    eviction: Eviction
    attention: Attention
    prefetch: Prefetch
    every_steps: int = 16
    cold_start_tokens: int = 0
    budget_fraction: float | None = None

    def __post_init__(self) -> None:
        """Checks what Hydra's instantiate does not."""
        for slot, contract in zip(
            SLOTS, (Classifier, Predictor, Budget, Formatter, Eviction, Attention, Prefetch), strict=True
        ):
            if not isinstance(getattr(self, slot), contract):
                raise PolicyError(f"policy.{slot}: {getattr(self, slot)!r} is no {contract.__name__}")
        for key in ("every_steps", "cold_start_tokens"):
            value = getattr(self, key)
            least = 1 if key == "every_steps" else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise PolicyError(f"policy.{key}={value!r}: must be a whole number of at least {least}")
        fraction = self.budget_fraction
        if fraction is not None and not (isinstance(fraction, int | float) and 0.0 < fraction <= 1.0):
            raise PolicyError(f"policy.budget_fraction={fraction!r}: must be above 0 and at most 1, or null")

    @property
    def parts(self) -> dict[str, Part]:
        """Slot name -> part."""
        return {slot: getattr(self, slot) for slot in SLOTS}

    @property
    def needs(self) -> frozenset[str]:
        """Names of all signals the executor must compute."""
        return frozenset().union(*(part.needs for part in self.parts.values()))

    def plan(self, signals: Signals) -> Plan:
        """The plan for this moment; vectorised over all streams, no state kept.

        Raises:
            PolicyError: the device budget can't hold what must stay (sinks, recent window, metadata).
        """
        if signals.length_tokens < self.cold_start_tokens:
            return _with_hot(signals, Plan.dense(*signals.shape, device=signals.device))
        score = self.predictor.score(signals)
        fmt = torch.maximum(self.format.choose(signals, score), signals.held.format)
        share = self.budget.share(signals, fmt)
        cost = signals.page_bytes.of(fmt).double()
        candidate = signals.held.alive & share.eligible & ~signals.hot
        lasting = 1.0 - self.attention.prototype_share
        # One byte more than the pages need, lest rounding the division leaves the last of them out.
        share = fit(signals, share, ((cost * candidate).sum(-1) + 1.0) / lasting)
        kept = _fill(self.eviction.rank(signals, score), cost, candidate, share.quota_bytes * lasting)
        spare = share.quota_bytes - (cost * kept).sum(-1)
        tier = torch.where(kept, int(Tier.L1), int(self.eviction.victim_tier))
        lost = ~signals.held.alive | ~(share.eligible | signals.hot)
        tier = tier.masked_fill(lost, int(Tier.DROPPED)).to(torch.int8)
        decided = replace(signals, held=replace(signals.held, format=fmt, tier=tier))
        mode = self.attention.modes(decided, score, kept | signals.hot, spare)
        wanted = self.prefetch.fetch(decided, score, kept) & candidate & ~kept
        if bool(wanted.any()):
            fetched = _fill(score, cost, wanted, spare - _prototype_bytes(signals, mode))
            tier = tier.masked_fill(fetched, int(Tier.L1))
        return _with_hot(signals, Plan(mode, fmt, tier))


def _fill(rank: Tensor, cost: Tensor, candidate: Tensor, room: Tensor) -> Tensor:
    """The highest-ranked candidates of each stream whose summed cost fits its room: [L, Hk, N] bool."""
    full = ((cost * candidate).sum(-1) > room).nonzero(as_tuple=True)  # most streams keep all they have
    if len(full[0]) < room.numel():
        kept = candidate.clone()
        if len(full[0]):
            kept[full] = _fill_full(rank[full], cost[full], candidate[full], room[full])
        return kept
    return _fill_full(rank, cost, candidate, room)


def _fill_full(rank: Tensor, cost: Tensor, candidate: Tensor, room: Tensor) -> Tensor:
    """`_fill` for streams [..., N] that can't keep all candidates: one sort."""
    order = rank.masked_fill(~candidate, -math.inf).argsort(dim=-1, descending=True, stable=True)
    spent = torch.where(candidate, cost, 0.0).gather(-1, order).cumsum(-1)
    fits = (spent <= room.unsqueeze(-1)) & candidate.gather(-1, order)
    return torch.zeros_like(candidate).scatter_(-1, order, fits)


def _prototype_bytes(signals: Signals, mode: Tensor) -> Tensor:
    """[L, Hk] bytes of the prototypes and background states that the modes ask for."""
    clusters = (mode == Mode.CLUSTER).sum(-1).double() * signals.page_bytes.prototype
    return clusters + (mode == Mode.BACKGROUND).any(-1) * signals.page_bytes.background


def _with_hot(signals: Signals, plan: Plan) -> Plan:
    """The plan with hot pages in L0 and dropped pages still dropped; pages that are gone are skipped."""
    hot = signals.hot.expand(signals.shape)
    gone = ~signals.held.alive
    tier = torch.where(hot, int(Tier.L0), plan.tier).masked_fill(gone, int(Tier.DROPPED)).to(torch.int8)
    mode = torch.where(hot, int(Mode.EXACT), plan.mode)
    mode = mode.masked_fill(tier == Tier.DROPPED, int(Mode.SKIP)).to(torch.int8)
    fmt = torch.where(hot, int(Format.COMPUTE), plan.format).to(torch.int8)
    return replace(plan, mode=mode, format=fmt, tier=tier)


def fixed_bytes(signals: Signals) -> Tensor:
    """[L, Hk] float64: device bytes of a stream that no policy can change (hot pages, metadata)."""
    layers, kv_heads, pages = signals.shape
    hot = int(signals.hot.sum()) * signals.page_bytes.compute + pages * signals.page_bytes.metadata
    return torch.full((layers, kv_heads), float(hot), dtype=torch.float64, device=signals.device)


def fit(signals: Signals, share: Share, useful_bytes: Tensor) -> Share:
    """Caps the quotas so that all streams together stay inside the device budget.

    useful_bytes [L, Hk] float64: what a stream could spend at most; without it a stream that may take everything but
    has little to keep would claim as much as one that has a lot.

    One cap for all streams (water-filling): small streams keep what they asked for, large ones are cut to the same
    level, so a per-class split keeps its shape as long as the bytes allow.
    """
    if signals.device_budget_bytes is None:
        return share
    fixed = fixed_bytes(signals)
    free = signals.device_budget_bytes - float(fixed.sum())
    if free < 0:
        raise PolicyError(
            f"the device budget of {signals.device_budget_bytes} bytes can't hold sinks, recent window and metadata: "
            f"they take {int(fixed.sum())} bytes; raise budget.fraction or lower cache.sink_tokens, cache.hot_tokens"
        )
    quota = torch.minimum(share.quota_bytes, useful_bytes)
    want = quota.flatten()
    ordered = want.clamp(max=free).sort().values
    count = torch.arange(len(ordered), 0, -1, device=want.device)
    before = ordered.cumsum(0) - ordered
    level = ((free - before) / count).clamp(min=0)
    # The cap is the level at the first stream whose wish exceeds it; if none does, all wishes fit, an infinite one as
    # all that is free.
    over = ordered > level
    cap = level[int(over.int().argmax())] if bool(over.any()) else free
    return replace(share, quota_bytes=quota.clamp(max=float(cap)))
