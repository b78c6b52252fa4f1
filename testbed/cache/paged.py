"""The cache of one sequence: ragged per-head pages in four tiers, moved and converted as plans say.

A stream is one (layer, KV head) and has its own page table, so heads differ in length, format and tier. State is
tensors over [S, N] (S = L * Hk streams, N pages), and every operation works on all streams at once. The bytes are in
`Pools`, which sequences may share; moves from and to L2 and L3 go on while the model computes (`flights`).

Whatever changes a cache runs in inference mode, since a tensor that was made in it can't be changed outside of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import api
from kernels.pages import decode, encode
from policies.base import Format, Mode, PageBytes, Plan, PoolLayout, Tier
from testbed.cache.approximate import Approximations
from testbed.cache.archive import ArchiveError, CorruptPages
from testbed.cache.flights import Flights
from testbed.cache.forking import fork
from testbed.cache.layout import TABLE_BYTES_PER_PAGE, CacheConfig
from testbed.cache.ledger import Ledger, facts
from testbed.cache.loading import load
from testbed.cache.metadata import HOST_BYTES_PER_PAGE, Metadata
from testbed.cache.moves import count, groups
from testbed.cache.offsets import packaged
from testbed.cache.plans import NAMES, check, flatten, keep_dropped
from testbed.cache.pool import CacheError
from testbed.cache.pools import Pools, Shape
from testbed.cache.relocate import READ_BLOCK_PAGES, compact, place, relocate
from testbed.cache.shield import shielded
from testbed.cache.table import Tables, build_tables
from testbed.cache.traffic import PrefetchBook, Traffic
from testbed.decisions import Move


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
        offsets = packaged(model, self.streams, head_dim) if config.background == "learned" else None
        self.approximations = Approximations(
            self.streams, head_dim, self.pools.prototypes, self.pools.background, offsets
        )
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

    def slots_in(self, tier: Tier, code: Format) -> Tensor:
        """Slots [M] int64 of the pages of a tier and format."""
        here = (self.state["tier"] == tier) & (self.state["format"] == code)
        return self.state["slot"][here].long()

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
        """Places a prefilled context as the plan says; see `loading.load`."""
        return load(self, keys, values, plan, free_source)

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
        target = flatten(self, plan)
        check(self, target, self.length_tokens + next_tokens)
        self._land()
        self._lay_out(plan.pools)
        self.metadata.note_scores(plan.score)
        state = self.state
        keep_dropped(self, target)
        source = {name: state[name].clone() for name in NAMES}
        changed = self.changed(target)
        if not bool(changed.any()) and torch.equal(target["mode"], state["mode"]):
            self._in_force(source)
            if first_new != state["mode"].shape[1] or self.tables is None or self.tables_stale:
                self._rebuild()
            return []
        # A flight that is taken back here changes where its pages are, so all that must end do so first.
        touched = self.approximations.lacking(target["mode"], state["mode"])
        self.flights.resolve((changed | touched) & (self.flights.pending > 0))
        keep_dropped(self, target)
        changed = self.changed(target)
        touched = self.approximations.lacking(target["mode"], state["mode"])
        refused = 0
        for at, k, v in self._read(touched, target):
            refused += self.approximations.update(at, k, v, target["mode"], state["mode"])
        self._settle_approximations(target, refused)
        self._release(changed & (target["tier"] == Tier.DROPPED))
        moved = changed & (target["tier"] != Tier.DROPPED)
        # The furthest first: what leaves a tier makes room in it for what comes.
        for where in [moved & (target["tier"] == tier) for tier in (Tier.L3, Tier.L2, Tier.L1)]:
            relocate(self, where.nonzero(), target)
        self._release(self.changed(target) & (target["tier"] == Tier.DROPPED))  # what found no room anywhere
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

    def changed(self, target: dict[str, Tensor]) -> Tensor:
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
                there, blobs = self._readable(tier, code, block)
                lost = block[~there]
                target["mode"][lost[:, 0], lost[:, 1]] = int(Mode.SKIP)
                if bool(there.any()):
                    yield block[there], *decode(self.formats[code], blobs)

    def _readable(self, tier: Tier, code: Format, at: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the pages at [M, 2] can be read, [M] bool, and their blobs; a corrupt page costs no other."""
        slots = self.state["slot"][at[:, 0], at[:, 1]].long()
        there = torch.ones(len(at), dtype=torch.bool)
        while bool(there.any()):
            try:
                return there, self.pools.stores[tier, code].read(slots[there])
            except CorruptPages as error:
                self.flights.note_failure("read", error)
                there &= ~torch.isin(slots, error.slots)
            except ArchiveError as error:
                self.flights.note_failure("read", error)
                there[:] = False
        return there, torch.zeros(0, dtype=torch.uint8)

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
        part, variant = self.tables.attend(
            layer, q, self.first_position, self.backend, scale, window_tokens, slopes, mass
        )
        self.kernel_calls[variant] += 1
        return part

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
        """An independent sequence that goes on from here; see `forking.fork`."""
        return fork(self, own_pools)

    def go_on_counting(self, before: PagedCache) -> None:
        """Takes over the counters of another cache, which this one replaces: what moved, what was waited for."""
        self.traffic = Traffic.merge([before.traffic, self.traffic])
        self.prefetches = PrefetchBook(self.streams, self.traffic)
        self.kernel_calls = before.kernel_calls + self.kernel_calls

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
