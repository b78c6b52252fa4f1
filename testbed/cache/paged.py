"""The cache of one sequence: ragged per-head pages in four tiers, moved and converted as plans say.

A stream is one (layer, KV head) and has its own page table, so heads differ in length, format and tier. State is
tensors over [S, N] (S = L * Hk streams, N pages), and every operation works on all streams at once. The bytes are in
`Pools`, which sequences may share; moves from and to L2 and L3 go on while the model computes (`flights`).

Whatever changes a cache runs in inference mode, since a tensor that was made in it can't be changed outside of it.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kernels import api
from kernels.cost import local_model
from kernels.pages import decode, encode
from policies.base import Format, Mode, PageBytes, Plan, PoolLayout, Tier
from testbed.cache.approximate import Approximations
from testbed.cache.archive import ArchiveError, CorruptPages
from testbed.cache.flights import Flights, LostPages
from testbed.cache.layout import TABLE_BYTES_PER_PAGE, CacheConfig
from testbed.cache.ledger import Ledger, facts
from testbed.cache.limits import reserve
from testbed.cache.metadata import HOST_BYTES_PER_PAGE, Metadata
from testbed.cache.moves import count, groups
from testbed.cache.pool import CacheError, PoolFull
from testbed.cache.pools import Pools, Shape
from testbed.cache.relocate import READ_BLOCK_PAGES, compact, fill, place, relocate
from testbed.cache.shield import shielded
from testbed.cache.sizes import Capacities
from testbed.cache.table import Tables, build_tables
from testbed.cache.traffic import PrefetchBook, Traffic
from testbed.decisions import Move

NAMES = ("mode", "format", "tier")


@dataclass(frozen=True)
class Places:
    """Where new tokens are written: slots [S, T] int32 in L0, offsets [T] int32, first_position [Hk] int32."""

    slots: Tensor
    offsets: Tensor
    first_position: Tensor


class PagedCache:
    """K and V of one sequence, page by page.

    Args:
        layers, kv_heads, head_dim: L, Hk, D.
        config: page size, dtype, hot window, limits of the tiers.
        device: of L0 and L1; L2 is host memory (pinned beside a GPU), L3 a file.
        with_bounds: keep each page's key minimum and maximum (Quest).
        backend: kernel backend, None = the fastest here.
        pools: where the pages are kept, shared with other sequences; None = pools of its own.
        model: the model's name, for the page file.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        config: CacheConfig,
        device: torch.device | str = "cpu",
        with_bounds: bool = False,
        backend: str | None = None,
        pools: Pools | None = None,
        model: str = "",
    ) -> None:
        self.shape = Shape(layers, kv_heads, head_dim, model)
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.config, self.device, self.backend = config, torch.device(device), backend
        self.streams = layers * kv_heads
        self.page_bytes: PageBytes = config.page_bytes(head_dim, with_bounds)
        self.length_tokens = 0
        self.state = {name: torch.zeros(self.streams, 0, dtype=torch.int8) for name in NAMES}
        self.state["slot"] = torch.zeros(self.streams, 0, dtype=torch.int32)
        self._bounds = torch.zeros(2, self.streams, 0, head_dim, dtype=config.torch_dtype) if with_bounds else None
        self.metadata = Metadata(self.streams)
        self.traffic = Traffic()
        self.prefetches = PrefetchBook(self.streams, self.traffic)
        self.arena = torch.zeros(self.streams, dtype=torch.int64)
        self.tables: Tables | None = None
        self.tables_stale = False
        self.kernel_calls: Counter[str] = Counter()  # variant of the attention kernel -> calls
        self.write_slots: Tensor | None = None  # [S, T] int32, set by `begin`
        self.write_offsets: Tensor | None = None  # [T] int32
        self.write_pages: Tensor | None = None  # [T] int32
        self.first_position = torch.zeros(kv_heads, dtype=torch.int32, device=self.device)
        self._join(pools or Pools(self.shape, config, self.device))
        self.approximations = Approximations(self.streams, head_dim, self.pools.prototypes, self.pools.background)
        self.flights = Flights(self)

    def _join(self, pools: Pools) -> None:
        self.pools, self.hot, self.formats = pools, pools.hot, pools.formats
        self.hot_slots = pools.join(self)
        self._hot_base = int(self.hot_slots[0]) if len(self.hot_slots) else 0

    # --- what policies and executors see -----------------------------------------------------------------------

    @property
    def pages(self) -> int:
        """N, pages begun."""
        return self.hot.pages(self.length_tokens)

    @property
    def keeps_bounds(self) -> bool:
        """Whether key bounds are kept."""
        return self._bounds is not None

    @property
    def bounds_bytes(self) -> int:
        """Bytes of the key bounds."""
        return 0 if self._bounds is None else self._bounds.nbytes

    @property
    def device_table_bytes(self) -> int:
        """Bytes of page tables and key bounds, counted as the device's."""
        return self.state["mode"].numel() * TABLE_BYTES_PER_PAGE + self.bounds_bytes

    @property
    def host_table_bytes(self) -> int:
        """Bytes of metadata and of the sums behind background states, whether or not they are there yet."""
        pages = max(self.pages, self.metadata.score.shape[1])
        return self.streams * pages * HOST_BYTES_PER_PAGE + self.approximations.most_sums_bytes

    @property
    def device_slack_bytes(self) -> int:
        """Bytes of free slots in the blocks that the device's pages fill; what a budget must leave room for.

        From the page table alone, so that it does not depend on how far moves are.
        """
        slack = 0
        tier, fmt = self.state["tier"], self.state["format"]
        grid = (int(self.arena.max()) + 1, len(Format), len(Tier))
        key = self.arena.to(torch.int16).unsqueeze(1) * (grid[1] * grid[2]) + (fmt * grid[2] + tier)
        counts = torch.bincount(key.flatten(), minlength=math.prod(grid)).view(grid)
        for arena, code in torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).tolist():
            pool = self.pools.level_1(Format(code))
            pages = int(counts[arena, code, Tier.L1])
            slack += -pages % pool.slots.block_pages(arena) * pool.fmt.page_bytes
        for slots, pool in (
            (self.approximations.slot, self.pools.prototypes),
            (self.approximations.background_slot, self.pools.background),
        ):
            slack += -int((slots >= 0).sum()) % pool.slab_pages * pool.fmt.page_bytes
        return slack

    def slots_in(self, tier: Tier, code: Format) -> Tensor:
        """Slots [M] int64 of the pages of a tier and format."""
        here = (self.state["tier"] == tier) & (self.state["format"] == code)
        return self.state["slot"][here].long()

    @property
    def reserved_device_bytes(self) -> int:
        """Bytes on the device that are not for this sequence's pages: slack, and what the others sharing it hold."""
        return self.device_slack_bytes + self.pools.others_bytes(self, (Tier.L0, Tier.L1))

    @property
    def host_budget_bytes(self) -> int | None:
        """Most bytes that pages may take in L2; None = no limit."""
        limit = self.pools.limits.l2_bytes
        if limit is None:
            return None
        slack = sum(
            -len(self.slots_in(Tier.L2, code)) % self.config.slab_pages * fmt.page_bytes
            for code, fmt in self.formats.items()
        )
        return max(0, limit - self.host_table_bytes - slack - self.pools.others_bytes(self, (Tier.L2,)))

    @property
    def archive_budget_bytes(self) -> int | None:
        """Most bytes that pages may take in L3; None = no limit, 0 once it is switched off."""
        if self.pools.archive_off:
            return 0
        limit = self.pools.limits.l3_bytes
        return None if limit is None else max(0, limit - self.pools.others_bytes(self, (Tier.L3,)))

    def held(self, next_tokens: int = 0) -> Plan:
        """The plan in force, with pages for the next tokens as dense: [L, Hk, N]."""
        total = self.hot.pages(self.length_tokens + next_tokens)
        fresh = Plan.dense(self.layers, self.kv_heads, total)
        have = self.state["mode"].shape[1]

        def merged(name: str, new: Tensor) -> Tensor:
            old = self.state[name].view(self.layers, self.kv_heads, have)
            return torch.cat((old, new[..., have:]), dim=-1)

        return Plan(merged("mode", fresh.mode), merged("format", fresh.format), merged("tier", fresh.tier))

    def hot_mask(self, next_tokens: int = 0) -> Tensor:
        """[N] bool: pages that are hot once the next tokens are written."""
        return self.hot.mask(self.length_tokens + next_tokens)

    def key_bounds(self) -> tuple[Tensor, Tensor]:
        """Key minimum and maximum of each page, [S, N, D] each."""
        if self._bounds is None:
            raise CacheError("this cache keeps no key bounds; construct it with with_bounds=True")
        return self._bounds[0], self._bounds[1]

    def by_arena(self, at: Tensor, tier: Tier) -> Iterator[tuple[int, Tensor]]:
        """Splits pages at [M, 2] by the arena of their streams; only the device's pools have arenas."""
        arenas = self.arena[at[:, 0]]
        if tier != Tier.L1 or not len(at):
            yield 0, at
            return
        for arena in arenas.unique().tolist():
            yield arena, at[arenas == arena]

    # --- filling from prefill --------------------------------------------------------------------------------

    @torch.inference_mode()
    @shielded
    def load(self, keys: list[Tensor], values: list[Tensor], plan: Plan, free_source: bool = False) -> list[Move]:
        """Places a prefilled context as the plan says, layer by layer.

        keys, values: per layer [Hk, T, D] in cache dtype. With `free_source` each layer's entry is emptied once
        placed, so that memory peaks at the context plus one layer.
        """
        if self.length_tokens:
            raise CacheError("load fills an empty cache only")
        self.length_tokens = keys[0].shape[1]
        self._grow(self.pages)
        target = self._flat(plan)
        self._check(target, self.length_tokens)
        self._lay_out(plan.pools)
        self.metadata.note_scores(plan.score)
        slots = self.state["slot"].long()
        outside = (target["tier"] != Tier.L0) & (target["tier"] != Tier.DROPPED)
        reserve(self, outside.nonzero(), target, slots)
        refused = 0
        for layer in range(self.layers):
            k, v = (self._paged(side[layer]) for side in (keys, values))
            rows = slice(layer * self.kv_heads, (layer + 1) * self.kv_heads)
            if self._bounds is not None:
                self._set_bounds(rows, keys[layer])
            at = (target["tier"][rows] != Tier.DROPPED).nonzero()
            at[:, 0] += rows.start
            flat_k, flat_v = k[at[:, 0] - rows.start, at[:, 1]], v[at[:, 0] - rows.start, at[:, 1]]
            fill(self, at, flat_k, flat_v, target, slots)
            refused += self.approximations.update(at, flat_k, flat_v, target["mode"], torch.zeros_like(target["mode"]))
            if free_source:
                keys[layer] = values[layer] = torch.empty(0)
        for name in NAMES:
            self.state[name] = target[name]
        self._settle_approximations(target, refused)
        self.metadata.note_access(target["mode"])
        self.tables = build_tables(self)
        return self._moves_of_load(target)

    def _paged(self, x: Tensor) -> Tensor:
        """[Hk, T, D] -> [Hk, N, P, D], the last page padded with zeros."""
        pad = self.pages * self.config.page_tokens - x.shape[1]
        return torch.nn.functional.pad(x, (0, 0, 0, pad)).unflatten(1, (self.pages, self.config.page_tokens))

    def _set_bounds(self, rows: slice, k: Tensor) -> None:
        assert self._bounds is not None
        pad = self.pages * self.config.page_tokens - k.shape[1]
        shape = (self.pages, self.config.page_tokens)
        # The last page repeats its last key, so that padding moves no bound.
        padded = torch.cat((k, k[:, -1:].expand(-1, pad, -1)), dim=1).unflatten(1, shape)
        self._bounds[0, rows], self._bounds[1, rows] = padded.amin(2), padded.amax(2)

    def _moves_of_load(self, target: dict[str, Tensor]) -> list[Move]:
        zero = torch.zeros_like(target["tier"])
        source = {"tier": zero + int(Tier.L1), "format": zero + int(Format.COMPUTE)}
        return count(source, target, self.formats)

    # --- plans -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    @shielded
    def apply(self, plan: Plan, next_tokens: int = 0) -> list[Move]:
        """Makes the plan the state of the pages, starts the moves it asks for, rebuilds the kernel's tables.

        What a tier has no room for goes on to the next (`limits`); attention waits for what it reads (`arrive`).

        Raises:
            CacheError: the plan is impossible (revives a dropped page, raises precision, attends exactly what is
                not on the device, has another page in L0 than the hot ones); nothing is changed then.
        """
        first_new = self.state["mode"].shape[1]
        self._grow(self.hot.pages(self.length_tokens + next_tokens))
        target = self._flat(plan)
        self._check(target, self.length_tokens + next_tokens)
        self._land()
        self._lay_out(plan.pools)
        self.metadata.note_scores(plan.score)
        state = self.state
        self._keep_dropped(target)
        source = {name: state[name].clone() for name in NAMES}
        changed = self._changed(target)
        if not bool(changed.any()) and torch.equal(target["mode"], state["mode"]):
            self._in_force(source)
            if first_new != state["mode"].shape[1] or self.tables is None or self.tables_stale:
                self._rebuild()
            return []
        # A flight that is taken back here changes where its pages are, so all that must end do so first.
        touched = self.approximations.lacking(target["mode"], state["mode"])
        self.flights.resolve((changed | touched) & (self.flights.pending > 0))
        self._keep_dropped(target)
        changed = self._changed(target)
        touched = self.approximations.lacking(target["mode"], state["mode"])
        refused = 0
        for at, k, v in self._read(touched, target):
            refused += self.approximations.update(at, k, v, target["mode"], state["mode"])
        self._settle_approximations(target, refused)
        self._release(changed & (target["tier"] == Tier.DROPPED))
        moved = changed & (target["tier"] != Tier.DROPPED)
        leaves = target["tier"] > Tier.L1
        relocate(self, (moved & leaves).nonzero(), target)
        relocate(self, (moved & ~leaves).nonzero(), target)
        self._release(self._changed(target) & (target["tier"] == Tier.DROPPED))  # what found no room anywhere
        moves = count(source, target, self.formats)
        for name in NAMES:
            state[name] = target[name]
        compact(self)
        self._in_force(source)
        self._rebuild()
        return moves

    def _land(self) -> None:
        """Before a plan: settles what has arrived; under limits all, since what fits must not depend on timing."""
        limits = self.pools.limits
        if limits.l1_bytes is None and limits.l2_bytes is None and limits.l3_bytes is None:
            self.flights.reap()
        else:
            self.flights.drain()
            compact(self)

    def _keep_dropped(self, target: dict[str, Tensor]) -> None:
        """Pages dropped since the policy looked, as a move failed and had nowhere to go back to, stay so."""
        gone = self.state["tier"] == Tier.DROPPED
        target["tier"][gone], target["mode"][gone] = int(Tier.DROPPED), int(Mode.SKIP)
        target["format"][gone] = self.state["format"][gone]

    def _changed(self, target: dict[str, Tensor]) -> Tensor:
        """[S, N] bool: pages whose tier or format the target changes."""
        return (target["tier"] != self.state["tier"]) | (target["format"] != self.state["format"])

    def _in_force(self, source: dict[str, Tensor]) -> None:
        """Books what the plan reads: which pages were there, which are waited for."""
        state = self.state
        read = (state["mode"] == Mode.EXACT) & (state["tier"] == Tier.L1)
        self.prefetches.plan(source["tier"], state["tier"], state["mode"])
        self.prefetches.late(self.flights.demand(read & (source["tier"] <= Tier.L1)).nonzero())
        self.metadata.note_access(self.state["mode"])

    def _rebuild(self) -> None:
        self.tables, self.tables_stale = build_tables(self), False

    def _lay_out(self, layout: PoolLayout | None) -> None:
        if layout is not None:
            self.pools.lay_out(layout)
            self.arena = layout.arena.reshape(-1).to("cpu", torch.int64)

    def _settle_approximations(self, target: dict[str, Tensor], refused: int) -> None:
        streams = self.approximations.settle(target["mode"])
        if refused or streams:
            self.traffic.warn(
                f"L1 full: {refused} pages skipped that wanted prototypes, {streams} streams without background"
            )

    def _flat(self, plan: Plan) -> dict[str, Tensor]:
        """The plan as [S, N] tensors of our own.

        Raises:
            CacheError: another shape than the cache's, or codes that mean nothing.
        """
        shape, out = (self.layers, self.kv_heads, self.state["mode"].shape[1]), {}
        for name, codes in (("mode", Mode), ("format", Format), ("tier", Tier), ("score", None)):
            value = getattr(plan, name)
            if value is None:
                continue
            if tuple(value.shape) != shape:
                raise CacheError(
                    f"plan.{name} has shape {tuple(value.shape)}, the cache has {shape}: layers, heads, pages"
                )
            if codes is None:
                continue
            if value.numel() and not 0 <= value.min() <= value.max() < len(codes):
                known = ", ".join(f"{code.value} {code.name}" for code in codes)
                raise CacheError(f"plan.{name} has codes of {value.min()} to {value.max()}: must be of {known}")
            out[name] = value.reshape(self.streams, shape[2]).to("cpu", torch.int8).clone()
        if plan.pools is not None and tuple(plan.pools.arena.shape) != shape[:2]:
            raise CacheError(f"plan.pools.arena has shape {tuple(plan.pools.arena.shape)}, the cache has {shape[:2]}")
        gone = out["tier"] == Tier.DROPPED  # a dropped page keeps no format, so that nothing counts as a change
        out["format"][gone] = self.state["format"][gone]
        return out

    def _check(self, target: dict[str, Tensor], length_tokens: int) -> None:
        """Refuses impossible plans before anything is touched."""
        tier, state = target["tier"], self.state
        alive, hot = tier != Tier.DROPPED, self.hot.mask(length_tokens)
        faults = {
            "revives a dropped page": alive & (state["tier"] == Tier.DROPPED),
            "raises the precision of a page": alive & (target["format"] < state["format"]),
            "attends exactly a page that is not on the device": (target["mode"] == Mode.EXACT) & (tier > Tier.L1),
            "attends a dropped page": ~alive & (target["mode"] != Mode.SKIP),
            "stores a hot page in another format than compute": (tier == Tier.L0) & (target["format"] != 0),
            "has a page in L0 that is not hot": (tier == Tier.L0) & ~hot,
            "has a hot page outside L0": (tier != Tier.L0) & hot & (state["tier"] != Tier.DROPPED),
        }
        for what, where in faults.items():
            if bool(where.any()):
                stream, page = where.nonzero()[0].tolist()
                layer, head = divmod(stream, self.kv_heads)
                raise CacheError(f"the plan {what}: layer {layer}, head {head}, page {page}")

    def _grow(self, pages: int) -> None:
        """Adds rows for new pages: exact, compute dtype, in L0 (new tokens are always hot)."""
        missing = pages - self.state["mode"].shape[1]
        if missing <= 0:
            return
        first = self.state["mode"].shape[1]
        fill_ = {
            "mode": torch.full((self.streams, missing), int(Mode.EXACT), dtype=torch.int8),
            "format": torch.zeros(self.streams, missing, dtype=torch.int8),
            "tier": torch.full((self.streams, missing), int(Tier.L0), dtype=torch.int8),
            "slot": self._hot_slot(torch.arange(first, pages)).int(),
        }
        for name, value in fill_.items():
            self.state[name] = torch.cat((self.state[name], value), dim=1)
        self.approximations.grow(missing)
        self.metadata.grow(missing)
        self.flights.grow(missing)
        if self._bounds is not None:
            empty = torch.empty(1, self.streams, missing, self.head_dim, dtype=self._bounds.dtype)
            fresh = torch.cat((empty.fill_(torch.inf), torch.full_like(empty, -torch.inf)))
            self._bounds = torch.cat((self._bounds, fresh), dim=2)

    def _hot_slot(self, page: Tensor) -> Tensor:
        """Slots [S, M] in L0 of hot pages [M]."""
        region = self._hot_base + torch.arange(self.streams).unsqueeze(1) * self.hot.stream_pages
        return region + self.hot.slot(page)

    # --- moving pages ----------------------------------------------------------------------------------------

    def _read(self, touched: Tensor, target: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Decoded K and V of pages [S, N] bool, in bounded blocks: (at [m, 2], k [m, P, D], v [m, P, D]) float32.

        What the archive can't give back is not approximated but skipped, in the target too.
        """
        state = self.state
        for tier, code, group in groups(touched.nonzero(), state["tier"], state["format"]):
            for block in group.split(READ_BLOCK_PAGES):
                try:
                    blobs = self.pools.stores[tier, code].read(state["slot"][block[:, 0], block[:, 1]].long())
                except (ArchiveError, CorruptPages) as error:
                    self.flights.note_failure("read", error)
                    target["mode"][block[:, 0], block[:, 1]] = int(Mode.SKIP)
                    continue
                yield block, *decode(self.formats[code], blobs)

    def _release(self, gone: Tensor) -> None:
        """Frees the slots of pages [S, N] bool that are dropped; L0 slots are a ring and are simply written over."""
        state = self.state
        for tier, code, group in groups(gone.nonzero(), state["tier"], state["format"]):
            if tier not in (Tier.L0, Tier.DROPPED):
                self.pools.stores[tier, code].free(state["slot"][group[:, 0], group[:, 1]].long())
            state["tier"][group[:, 0], group[:, 1]] = int(Tier.DROPPED)

    def place_staged(self, at: Tensor, code: Format, blobs: Tensor) -> None:
        """Pages at [M, 2] that left L0 for a tier that did not take them: on the device, in L2, or dropped."""
        place(self, at, code, blobs, (Tier.L1, Tier.L2), self.state)
        self.tables_stale = True

    @torch.inference_mode()
    @shielded
    def restore_pages(self, at: Tensor, k: Tensor, v: Tensor) -> None:
        """Gives pages at [M, 2] that L3 lost their content anew, on the device: k, v [M, P, D]."""
        rows = torch.full(self.state["slot"].shape, -1)
        rows[at[:, 0], at[:, 1]] = torch.arange(len(at))
        for tier, code, group in groups(at, self.state["tier"], self.state["format"]):
            old = self.state["slot"][group[:, 0], group[:, 1]].long()
            index = rows[group[:, 0], group[:, 1]]
            place(self, group, code, encode(self.formats[code], k[index], v[index]), (Tier.L1,), self.state)
            self.pools.stores[tier, code].free(old)
        self.traffic.warn(f"{len(at)} pages that the archive lost were computed again")
        self._rebuild()

    @torch.inference_mode()
    @shielded
    def drop_pages(self, at: Tensor) -> None:
        """Gives up pages at [M, 2]."""
        gone = torch.zeros(self.state["mode"].shape, dtype=torch.bool)
        gone[at[:, 0], at[:, 1]] = True
        self._release(gone)
        self.state["mode"][gone] = int(Mode.SKIP)
        self.traffic.warn(f"{len(at)} pages that the archive lost were dropped")
        self._rebuild()

    # --- a step ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, tokens: int) -> None:
        """Fixes where the next tokens go; the plan for them must have been applied."""
        if tokens > self.config.hot_tokens:
            raise CacheError(f"{tokens} tokens at once, the hot window takes {self.config.hot_tokens}")
        if self.state["mode"].shape[1] < self.hot.pages(self.length_tokens + tokens):
            raise CacheError("apply a plan that covers the next tokens before they are written")
        position = self.length_tokens + torch.arange(tokens)
        page = position // self.config.page_tokens
        self.write_slots = self._hot_slot(page).int().to(self.device)
        self.write_offsets = (position % self.config.page_tokens).int().to(self.device)
        self.write_pages = page.int().to(self.device)
        self.first_position.fill_(self.length_tokens)

    def places(self) -> Places:
        """Where `begin` said that the tokens go."""
        assert self.write_slots is not None
        assert self.write_offsets is not None
        return Places(self.write_slots, self.write_offsets, self.first_position)

    @torch.inference_mode()
    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes the new tokens of one layer: k, v [Hk, T, D]."""
        assert self.write_slots is not None
        assert self.write_offsets is not None
        assert self.tables is not None
        rows = slice(layer * self.kv_heads, (layer + 1) * self.kv_heads)
        upkeep = None
        if self._bounds is not None:
            assert self.write_pages is not None
            upkeep = api.Upkeep(self.write_pages, self._bounds[0, rows], self._bounds[1, rows])
        api.append(k, v, self.write_slots[rows], self.write_offsets, self.tables.pools[0], upkeep, self.backend)

    @torch.inference_mode()
    def arrive(self, layer: int) -> None:
        """Until all pages that a layer reads are there; what is waited is exposed stall.

        Raises:
            LostPages: some can't be had.
        """
        self.flights.arrive(layer)

    @torch.inference_mode()
    def attend(
        self,
        layer: int,
        q: Tensor,
        scale: float,
        window_tokens: int = 0,
        slopes: Tensor | None = None,
        mass: bool = False,
    ) -> api.Partial:
        """Attention of new queries q [Hk, G, T, D] over everything the plan attends, by the variant that suits it.

        Raises:
            LostPages: pages it reads can't be had from the archive.
        """
        assert self.tables is not None
        self.arrive(layer)
        backend = api.choose_backend(self.backend, q.device.type)
        variant = self.tables.variant(layer, q, backend, local_model())
        self.kernel_calls[variant.describe()] += 1
        return api.attend(
            q,
            self.tables.layers[layer],
            self.tables.pools,
            self.first_position,
            scale=scale,
            window_tokens=window_tokens,
            slopes=slopes,
            want_mass=mass,
            schedule=variant.schedule,
            backend=backend,
        )

    def end(self, tokens: int) -> None:
        """The tokens begun are written in all layers."""
        self.length_tokens += tokens
        self.write_slots = self.write_offsets = self.write_pages = None

    @torch.inference_mode()
    @shielded
    def settle(self) -> None:
        """Ends all moves and closes the holes they left, so that what is held is what the plan needs."""
        self.flights.drain()
        compact(self)
        self._rebuild()

    # --- whole cache -----------------------------------------------------------------------------------------

    def ledger(self) -> Ledger:
        """Bytes by tier and format, from the page table."""
        return Ledger.of(self)

    def facts(self) -> dict[str, dict[str, int]]:
        """What a decision log says of this moment; see `ledger.facts`."""
        return facts(self)

    @torch.inference_mode()
    @shielded
    def fork(self, own_pools: bool = False) -> PagedCache:
        """An independent sequence that goes on from here.

        Args:
            own_pools: a whole copy with memory, limits and page file of its own; else pages are shared until one of
                the two lets go of them, and the limits bind both together.

        Raises:
            LostPages: pages to be copied can't be had from the archive; nothing has changed.
            PoolFull: cache.l1_bytes has no room for the recent window of one more; nothing has changed.
        """
        self.flights.drain()
        other = copy.copy(self)
        if own_pools:
            folder = Path(self.config.l3_path).parent if self.config.l3_path else None
            spot = self.config.l3_path if folder is None or Path(self.config.l3_path or "").is_dir() else str(folder)
            other.config = replace(self.config, l3_path=spot)
        other.state = {name: value.clone() for name, value in self.state.items()}
        pools = Pools(self.shape, other.config, self.device) if own_pools else self.pools
        limits = pools.limits
        if own_pools:  # what was held within the limits is taken over as it is, though tables have grown since
            pools.limits = Capacities()
        other.metadata, other.flights, other.traffic = self.metadata.clone(), Flights(other), Traffic()
        other._join(pools)
        try:
            other.approximations = self.approximations.fork(other.pools.prototypes, other.pools.background)
            other._take_pages(self, limits)
        except BaseException:
            other.pools.stores[Tier.L0, Format.COMPUTE].free(other.hot_slots)
            other.pools.leave(other)
            raise
        other.prefetches = self.prefetches.clone(other.traffic)
        other.flights.grow(self.state["mode"].shape[1])
        other.kernel_calls = Counter()
        other._bounds = None if self._bounds is None else self._bounds.clone()
        other.first_position = self.first_position.clone()
        other._rebuild()
        pools.limits = limits
        return other

    def _take_pages(self, parent: PagedCache, limits: Capacities) -> None:
        """The parent's pages as our own: the ring as a copy, what can't change by reference or as a copy."""
        state = self.state
        ring = (Tier.L0, Format.COMPUTE)
        self.pools.stores[ring].write(self.hot_slots, parent.pools.stores[ring].read(parent.hot_slots))
        for tier, code, group in groups((state["tier"] != Tier.DROPPED).nonzero(), state["tier"], state["format"]):
            slots = state["slot"][group[:, 0], group[:, 1]].long()
            mine, theirs = self.pools.stores[tier, code], parent.pools.stores[tier, code]
            if tier == Tier.L0:
                state["slot"][group[:, 0], group[:, 1]] += self._hot_base - parent._hot_base
            elif mine is theirs:
                mine.share(slots)
            else:
                for arena, part in self.by_arena(group, tier):
                    for block in part.split(READ_BLOCK_PAGES):
                        self._copy_pages(parent, (tier, code), arena, block, limits)

    def _copy_pages(
        self, parent: PagedCache, where: tuple[Tier, Format], arena: int, at: Tensor, limits: Capacities
    ) -> None:
        """Pages at [M, 2] of the parent into pools of our own; a disk without room costs them their place there."""
        store, slots = self.pools.stores[where], self.state["slot"][at[:, 0], at[:, 1]].long()
        try:
            blobs = parent.pools.stores[where].read(slots)
        except CorruptPages as error:
            raise LostPages(at[torch.isin(slots, error.slots)], str(error)) from error
        except ArchiveError as error:
            raise LostPages(at, str(error)) from error
        try:
            fresh = store.allocate(len(at), arena)
        except PoolFull as full:
            if where[0] != Tier.L3:
                raise
            self.traffic.warn(f"L3 full: {len(at)} pages of a fork find no room there ({full})")
            self._place_within(limits, at, where[1], blobs)
            return
        self.state["slot"][at[:, 0], at[:, 1]] = fresh.int()
        try:
            store.write(fresh, blobs)
        except ArchiveError as error:
            store.free(fresh)
            self.flights.note_failure("write", error)
            self._place_within(limits, at, where[1], blobs)

    def _place_within(self, limits: Capacities, at: Tensor, code: Format, blobs: Tensor) -> None:
        """Pages at [M, 2] into L2 or nowhere, by the limits that hold when nothing is taken over."""
        lifted, self.pools.limits = self.pools.limits, limits
        place(self, at, code, blobs, (Tier.L2,), self.state)
        self.pools.limits = lifted

    @torch.inference_mode()
    @shielded
    def close(self) -> None:
        """Gives all pages back; the last sequence of its pools closes them, the page file too."""
        if self not in self.pools.users:
            return
        self.flights.drain()
        self.prefetches.finish()
        self._release(self.state["tier"] != Tier.DROPPED)
        self.approximations.close()
        self.pools.stores[Tier.L0, Format.COMPUTE].free(self.hot_slots)
        self.pools.leave(self)
