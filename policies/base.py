"""The contract of a KV-cache policy: signals in, plans out.

A policy never sees K or V, a device, a file, a link or a clock. It reads named arrays about pages and
heads (`Signals`) and answers, for every page of every stream, how it is attended, how it is stored and
where (`Plan`). The same object therefore drives the real decode path and the SimPy twin.

The data are in `policies.plan`, the arithmetic of bytes in `policies.filling`; both are offered here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from policies.filling import Room, cascade, count, fill, fit, fixed_bytes, stream_bytes
from policies.plan import (
    Format,
    Head,
    Mode,
    PageBytes,
    Phase,
    Plan,
    PolicyError,
    PoolLayout,
    Role,
    Share,
    Signals,
    Tier,
)

__all__ = [
    "SLOTS",
    "Attention",
    "Budget",
    "Classifier",
    "Eviction",
    "Format",
    "Formatter",
    "Head",
    "Mode",
    "PageBytes",
    "Part",
    "Phase",
    "Plan",
    "Policy",
    "PolicyError",
    "PoolLayout",
    "Pooled",
    "Predictor",
    "Prefetch",
    "Reclassifying",
    "Role",
    "Share",
    "Signals",
    "Tier",
    "fit",
    "fixed_bytes",
]


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
class Reclassifying(Protocol):
    """What a classifier may offer besides: heads may change their class while the sequence is decoded."""

    def reclassify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8 of `Head`, from `signals.classes`, those in force. Asked with the first plan of each page."""
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
class Pooled(Protocol):
    """What a budget part may offer besides: streams that keep alike share pools."""

    def pools(self, signals: Signals) -> PoolLayout:
        """Which arena each stream's pages lie in, and by how much arenas grow."""
        ...


@runtime_checkable
class Formatter(Part, Protocol):
    """At which precision is each page kept?"""

    def choose(self, signals: Signals, score: Tensor) -> Tensor:
        """[L, Hk, N] int8 of `Format`. Precision never comes back: the policy takes max(held, chosen)."""
        ...


@runtime_checkable
class Compressing(Protocol):
    """What a format part may offer besides: pages lose precision when they leave the device."""

    def in_tier(self, tier: Tier) -> Format:
        """The finest format in L2 or L3; a page that is coarser already stays so."""
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

        What the device can't hold goes down the tiers, best eviction rank first; see `policies.filling.cascade`.

        Raises:
            PolicyError: the device budget can't hold what must stay (sinks, recent window, metadata).
        """
        pools = self.budget.pools(signals) if isinstance(self.budget, Pooled) else None
        if signals.length_tokens < self.cold_start_tokens:
            dense = Plan.dense(*signals.shape, device=signals.device)
            return _with_hot(signals, replace(dense, pools=pools))
        score = self.predictor.score(signals)
        rank = cache(lambda: self.eviction.rank(signals, score))  # asked for only where something has to leave
        fmt = torch.maximum(self.format.choose(signals, score), signals.held.format)
        share = self.budget.share(signals, fmt)
        alive = signals.held.alive
        candidate = alive & share.eligible & ~signals.hot
        wanted_bytes = stream_bytes(signals.page_bytes, fmt, candidate)
        lasting = 1.0 - self.attention.prototype_share
        # One byte more than the pages need, lest rounding the division leaves the last of them out.
        share = fit(signals, share, (wanted_bytes + 1.0) / lasting)
        room = Room(signals.page_bytes, fmt, share.quota_bytes * lasting)
        kept = fill(room, candidate, rank)
        spare = share.quota_bytes - stream_bytes(signals.page_bytes, fmt, kept)
        lost = ~alive | ~(share.eligible | signals.hot)

        tier = self._tiers(signals, fmt, kept, candidate, lost, rank)
        decided = replace(signals, held=replace(signals.held, format=fmt, tier=tier))
        mode = self.attention.modes(decided, score, kept | signals.hot, spare)
        wanted = self.prefetch.fetch(decided, score, kept) & candidate & ~kept
        if bool(wanted.any()):
            spare = spare - _prototype_bytes(signals, mode)
            fetched = fill(Room(signals.page_bytes, fmt, spare), wanted, lambda: score)
            tier = self._tiers(signals, fmt, kept | fetched, candidate, lost, rank)
        return _with_hot(signals, Plan(mode, self._stored(fmt, tier), tier, score, pools))

    def _stored(self, fmt: Tensor, tier: Tensor) -> Tensor:
        """[L, Hk, N] int8: the formats, coarser where the format part compresses what has left the device."""
        if not isinstance(self.format, Compressing):
            return fmt
        for place in (Tier.L2, Tier.L3):
            fmt = torch.where(tier == place, fmt.clamp(min=int(self.format.in_tier(place))), fmt)
        return fmt

    def _tiers(
        self,
        signals: Signals,
        fmt: Tensor,
        kept: Tensor,
        candidate: Tensor,
        lost: Tensor,
        rank: Callable[[], Tensor],
    ) -> Tensor:
        """[L, Hk, N] int8: L1 for what is kept, DROPPED for what is lost, the cascade for the other candidates."""
        first = self.eviction.victim_tier
        if isinstance(self.format, Compressing):  # what leaves costs L2 its compressed size; L3 never more than that
            fmt = fmt.clamp(min=int(self.format.in_tier(Tier.L2)))
        tier = cascade(signals, fmt, candidate & ~kept, first, rank)
        tier += kept.view(torch.int8) * int(Tier.L1)
        tier += lost.view(torch.int8) * int(Tier.DROPPED)
        # What is hot goes to L0 in the end; until then it lies where victims go.
        return tier + (~(candidate | lost)).view(torch.int8) * int(first)


def _prototype_bytes(signals: Signals, mode: Tensor) -> Tensor:
    """[L, Hk] bytes of the prototypes and background states that the modes ask for."""
    clusters = count(mode == Mode.CLUSTER).double() * signals.page_bytes.prototype
    return clusters + (count(mode == Mode.BACKGROUND) > 0) * signals.page_bytes.background


def _with_hot(signals: Signals, plan: Plan) -> Plan:
    """The plan with hot pages in L0 and dropped pages still dropped; pages that are gone are skipped."""
    hot = signals.hot.nonzero().squeeze(1)
    mode, fmt, tier = (x.to(torch.int8).clone() for x in (plan.mode, plan.format, plan.tier))
    tier[..., hot], mode[..., hot], fmt[..., hot] = int(Tier.L0), int(Mode.EXACT), int(Format.COMPUTE)
    gone = ~signals.held.alive
    if int(count(gone).sum()):
        tier = _put(tier, gone, Tier.DROPPED)
    # The product with a mask is a mask: a skipped page is 0.
    mode *= (tier != Tier.DROPPED).view(torch.int8)
    return replace(plan, mode=mode, format=fmt, tier=tier)


def _put(codes: Tensor, where: Tensor, code: int) -> Tensor:
    """The codes, int8, with `code` at some places: arithmetic, since masked_fill of bytes is many times slower."""
    return codes * (~where).view(torch.int8) + where.view(torch.int8) * int(code)
