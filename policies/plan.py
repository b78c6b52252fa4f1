"""What policies and executors exchange: signals in, plans out. Data only; `policies.base` has the contracts.

Letters: L layers, Hk KV heads, N pages, P tokens a page; a page is P consecutive positions of one (layer, KV head).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

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
    """What the tokens of a page are in the conversation; the signal `role` has -1 where nobody said."""

    SYSTEM = 0
    TOOL = 1  # what tools are there and how they are called
    DOCUMENT = 2  # what is asked about
    USER = 3
    GENERATED = 4
    RESULT = 5  # what a tool answered


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

    @cached_property
    def alive(self) -> Tensor:
        """[L, Hk, N] bool: pages that still exist; the plan's tensors are not to change any more."""
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

    def by_code(self, fmt: Format) -> int:
        """Bytes of a page in that format."""
        return (self.compute, self.int8, self.int4)[fmt]

    def of(self, fmt: Tensor) -> Tensor:
        """Bytes by format code: fmt [...] int8 -> [...] int64. Slow for whole caches: see `policies.filling`."""
        table = torch.tensor([self.by_code(code) for code in Format], dtype=torch.int64, device=fmt.device)
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
