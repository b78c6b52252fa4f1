"""The cache of one sequence: ragged per-head pages in four tiers, moved and converted as plans say.

A stream is one (layer, KV head) and has its own page table, so heads differ in length, format and tier. State is
tensors over [S, N] (S = L * Hk streams, N pages), and every operation works on all streams at once.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels import api
from kernels.cost import local_model
from kernels.pages import PageFormat, decode, encode
from policies.base import Format, Mode, PageBytes, Plan, Tier
from testbed.cache.approximate import Approximations
from testbed.cache.archive import FilePool
from testbed.cache.layout import CacheConfig, Hot
from testbed.cache.ledger import Ledger, facts
from testbed.cache.moves import count, groups
from testbed.cache.pool import CacheError, PageStore, SlabPool
from testbed.cache.table import Tables, build_tables
from testbed.decisions import Move

READ_BLOCK_PAGES = 8192  # bounds what a conversion holds beside the pools


class PagedCache:
    """K and V of one sequence, page by page.

    Args:
        layers, kv_heads, head_dim: L, Hk, D.
        config: page size, dtype, hot window.
        device: of L0 and L1; L2 is host memory (pinned beside a GPU), L3 a file.
        with_bounds: keep each page's key minimum and maximum (Quest).
        backend: kernel backend, None = the fastest here.
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
    ) -> None:
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.config, self.device, self.backend = config, torch.device(device), backend
        self.streams = layers * kv_heads
        self.hot = Hot(config.page_tokens, config.sink_tokens, config.hot_tokens)
        self.formats = config.formats(head_dim)
        self.page_bytes: PageBytes = config.page_bytes(head_dim, with_bounds)
        self.length_tokens = 0
        self.pools = self._make_pools()
        self.approximations = Approximations(
            self.streams,
            head_dim,
            self._slab_pool(config.prototype_format(head_dim)),
            self._slab_pool(config.background_format(head_dim)),
        )
        self.state = {
            "mode": torch.zeros(self.streams, 0, dtype=torch.int8),
            "format": torch.zeros(self.streams, 0, dtype=torch.int8),
            "tier": torch.zeros(self.streams, 0, dtype=torch.int8),
            "slot": torch.zeros(self.streams, 0, dtype=torch.int32),
        }
        self._bounds = torch.zeros(2, self.streams, 0, head_dim, dtype=config.torch_dtype) if with_bounds else None
        self.tables: Tables | None = None
        self.kernel_calls: Counter[str] = Counter()  # variant of the attention kernel -> calls
        self._write_slots: Tensor | None = None
        self._write_offsets: Tensor | None = None
        self._write_pages: Tensor | None = None
        self._first_position = torch.zeros(kv_heads, dtype=torch.int32, device=self.device)

    # --- pools -----------------------------------------------------------------------------------------------

    def _slab_pool(self, fmt: PageFormat, tier: Tier = Tier.L1) -> SlabPool:
        place = self.device if tier <= Tier.L1 else torch.device("cpu")
        return SlabPool(fmt, self.config.slab_pages, place, self.device)

    def _make_pools(self) -> dict[tuple[Tier, Format], PageStore]:
        pools: dict[tuple[Tier, Format], PageStore] = {}
        hot = SlabPool(self.formats[Format.COMPUTE], self.streams * self.hot.stream_pages, self.device)
        hot.allocate(self.streams * self.hot.stream_pages)
        pools[Tier.L0, Format.COMPUTE] = hot
        for code, fmt in self.formats.items():
            pools[Tier.L1, code] = self._slab_pool(fmt)
            pools[Tier.L2, code] = self._slab_pool(fmt, Tier.L2)
            pools[Tier.L3, code] = FilePool(fmt, self.config.archive_folder(), self.device)
        return pools

    def kernel_pools(self) -> tuple[api.Pool, ...]:
        """Pools on the device in the order `table` numbers them."""
        level_1 = [self.pools[Tier.L1, code] for code in Format]
        every = (
            self.pools[Tier.L0, Format.COMPUTE],
            *level_1,
            self.approximations.prototypes,
            self.approximations.background,
        )
        return tuple(pool.kernel_view() for pool in every if isinstance(pool, SlabPool))

    @property
    def device_slack_bytes(self) -> int:
        """Bytes of free page slots that the device's pools hold; what a budget must leave room for."""
        level_1 = [self.pools[Tier.L1, code] for code in Format]
        every = (*level_1, self.approximations.prototypes, self.approximations.background)
        return sum(pool.slack_bytes for pool in every if isinstance(pool, SlabPool))

    @property
    def bounds_bytes(self) -> int:
        """Bytes of the key bounds."""
        return 0 if self._bounds is None else self._bounds.nbytes

    # --- what policies see -----------------------------------------------------------------------------------

    @property
    def pages(self) -> int:
        """N, pages begun."""
        return self.hot.pages(self.length_tokens)

    def held(self, next_tokens: int = 0) -> Plan:
        """The plan in force, with pages for the next tokens as dense: [L, Hk, N]."""
        total = self.hot.pages(self.length_tokens + next_tokens)
        fresh = Plan.dense(self.layers, self.kv_heads, total)
        have = self.state["mode"].shape[1]

        def merged(name: str, new: Tensor) -> Tensor:
            old = self.state[name].view(self.layers, self.kv_heads, have)
            return torch.cat((old, new[..., have:]), dim=-1)

        return Plan(*(merged(name, getattr(fresh, name)) for name in ("mode", "format", "tier")))

    def hot_mask(self, next_tokens: int = 0) -> Tensor:
        """[N] bool: pages that are hot once the next tokens are written."""
        return self.hot.mask(self.length_tokens + next_tokens)

    def key_bounds(self) -> tuple[Tensor, Tensor]:
        """Key minimum and maximum of each page, [S, N, D] each."""
        if self._bounds is None:
            raise CacheError("this cache keeps no key bounds; construct it with with_bounds=True")
        return self._bounds[0], self._bounds[1]

    # --- filling from prefill --------------------------------------------------------------------------------

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
        written = target["tier"] != Tier.DROPPED
        for layer in range(self.layers):
            k, v = (self._paged(side[layer]) for side in (keys, values))
            rows = slice(layer * self.kv_heads, (layer + 1) * self.kv_heads)
            if self._bounds is not None:
                self._set_bounds(rows, keys[layer])
            at = written[rows].nonzero()
            at[:, 0] += rows.start
            flat_k, flat_v = k[at[:, 0] - rows.start, at[:, 1]], v[at[:, 0] - rows.start, at[:, 1]]
            self._store(at, flat_k, flat_v, target)
            self.approximations.update(at, flat_k, flat_v, target["mode"], torch.zeros_like(target["mode"]))
            if free_source:
                keys[layer] = values[layer] = torch.empty(0)
        for name in ("mode", "format", "tier"):
            self.state[name] = target[name]
        self.approximations.settle(target["mode"])
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

    def apply(self, plan: Plan, next_tokens: int = 0) -> list[Move]:
        """Moves, converts and drops pages so that the plan holds, then rebuilds the kernel's tables.

        Raises:
            CacheError: the plan is impossible (revives a dropped page, raises precision, attends exactly what is
                not on the device, has another page in L0 than the hot ones).
        """
        first_new = self.state["mode"].shape[1]
        self._grow(self.hot.pages(self.length_tokens + next_tokens))
        target = self._flat(plan)
        self._check(target, self.length_tokens + next_tokens)
        state = self.state
        source = {name: state[name] for name in ("mode", "format", "tier")}
        changed = (target["tier"] != state["tier"]) | (target["format"] != state["format"])
        if not bool(changed.any()) and torch.equal(target["mode"], state["mode"]):
            if first_new != state["mode"].shape[1] or self.tables is None:
                self.tables = build_tables(self)
            return []
        gone = changed & (target["tier"] == Tier.DROPPED)
        moved = changed & ~gone
        touched = self.approximations.lacking(target["mode"], state["mode"])
        moves = count(source, target, self.formats)
        for at, k, v in self._read(touched.nonzero()):
            self.approximations.update(at, k, v, target["mode"], state["mode"])
        self.approximations.settle(target["mode"])
        # What leaves makes room first, so that pools do not grow for a moment and stay half empty.
        self._release(gone.nonzero(), state["tier"], state["format"], state["slot"])
        leaves = target["tier"] > Tier.L1
        self._relocate((moved & leaves).nonzero(), target)
        self._relocate((moved & ~leaves).nonzero(), target)
        for name in ("mode", "format", "tier"):
            state[name] = target[name]
        self._compact()
        self.tables = build_tables(self)
        return moves

    def _flat(self, plan: Plan) -> dict[str, Tensor]:
        """The plan as [S, N] tensors of our own."""
        shape = (self.streams, self.state["mode"].shape[1])
        out = {}
        for name in ("mode", "format", "tier"):
            value = getattr(plan, name)
            if value.numel() != shape[0] * shape[1]:
                raise CacheError(f"plan.{name} has shape {tuple(value.shape)}, the cache has {shape} streams x pages")
            out[name] = value.reshape(shape).to("cpu", torch.int8).clone()
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
        new_pages = torch.arange(first, pages)
        region = torch.arange(self.streams).unsqueeze(1) * self.hot.stream_pages
        fill = {
            "mode": torch.full((self.streams, missing), int(Mode.EXACT), dtype=torch.int8),
            "format": torch.zeros(self.streams, missing, dtype=torch.int8),
            "tier": torch.full((self.streams, missing), int(Tier.L0), dtype=torch.int8),
            "slot": (region + self.hot.slot(new_pages)).int(),
        }
        for name, value in fill.items():
            self.state[name] = torch.cat((self.state[name], value), dim=1)
        self.approximations.grow(missing)
        if self._bounds is not None:
            empty = torch.empty(1, self.streams, missing, self.head_dim, dtype=self._bounds.dtype)
            fresh = torch.cat((empty.fill_(torch.inf), torch.full_like(empty, -torch.inf)))
            self._bounds = torch.cat((self._bounds, fresh), dim=2)

    # --- moving pages ----------------------------------------------------------------------------------------

    def _read(self, at: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Decoded K and V of pages at [M, 2], in bounded blocks: (at, k [m, P, D], v [m, P, D]) float32."""
        state = self.state
        for tier, code, group in groups(at, state["tier"], state["format"]):
            for block in group.split(READ_BLOCK_PAGES):
                blobs = self.pools[tier, code].read(state["slot"][block[:, 0], block[:, 1]].long())
                yield block, *decode(self.formats[code], blobs)

    def _store(self, at: Tensor, k: Tensor, v: Tensor, target: dict[str, Tensor]) -> None:
        """Encodes pages into the pools the target names and notes their slots."""
        index = torch.full((self.streams, self.state["slot"].shape[1]), -1)
        index[at[:, 0], at[:, 1]] = torch.arange(len(at))
        for tier, code, group in groups(at, target["tier"], target["format"]):
            rows = index[group[:, 0], group[:, 1]]
            self._put(tier, code, group, encode(self.formats[code], k[rows], v[rows]))

    def _put(self, tier: Tier, code: Format, at: Tensor, blobs: Tensor) -> None:
        pool = self.pools[tier, code]
        if tier == Tier.L0:
            slots = at[:, 0] * self.hot.stream_pages + self.hot.slot(at[:, 1])
        else:
            slots = pool.allocate(len(at))
        pool.write(slots, blobs)
        self.state["slot"][at[:, 0], at[:, 1]] = slots.int()

    def _relocate(self, at: Tensor, target: dict[str, Tensor]) -> None:
        """Moves live pages; a page whose format stays is copied byte by byte."""
        state = self.state
        if not len(at):
            return
        old_slot = state["slot"].clone()
        for tier, code, group in groups(at, state["tier"], state["format"]):
            for new_tier, new_code, part in groups(group, target["tier"], target["format"]):
                for block in part.split(READ_BLOCK_PAGES):
                    blobs = self.pools[tier, code].read(old_slot[block[:, 0], block[:, 1]].long())
                    if new_code != code:
                        blobs = encode(self.formats[new_code], *decode(self.formats[code], blobs))
                    self._put(new_tier, new_code, block, blobs)
        self._release(at, state["tier"], state["format"], old_slot)

    def _compact(self) -> None:
        """Closes holes: in a pool with more than a slab of free slots the last pages move into the first holes.

        Pages that come and go leave slabs half empty, and a budget binds what is held.
        """
        state = self.state
        for (tier, code), pool in self.pools.items():
            slab_bytes = self.config.slab_pages * pool.fmt.page_bytes
            if tier == Tier.L0 or not isinstance(pool, SlabPool) or pool.slack_bytes <= slab_bytes:
                continue
            needed = -(-pool.used_pages // self.config.slab_pages) * self.config.slab_pages
            beyond = (state["tier"] == tier) & (state["format"] == code) & (state["slot"] >= needed)
            at = beyond.nonzero()
            if len(at):
                slots = state["slot"][at[:, 0], at[:, 1]].long()
                blobs = pool.read(slots)
                pool.free(slots)
                self._put(tier, code, at, blobs)

    def _release(self, at: Tensor, tier: Tensor, fmt: Tensor, slot: Tensor) -> None:
        """Frees the slots that pages were in; L0 slots are a ring and are simply written over."""
        for old_tier, code, group in groups(at, tier, fmt):
            if old_tier not in (Tier.L0, Tier.DROPPED):
                self.pools[old_tier, code].free(slot[group[:, 0], group[:, 1]].long())

    # --- a step ----------------------------------------------------------------------------------------------

    def begin(self, tokens: int) -> None:
        """Fixes where the next tokens go; the plan for them must have been applied."""
        if tokens > self.config.hot_tokens:
            raise CacheError(f"{tokens} tokens at once, the hot window takes {self.config.hot_tokens}")
        if self.state["mode"].shape[1] < self.hot.pages(self.length_tokens + tokens):
            raise CacheError("apply a plan that covers the next tokens before they are written")
        position = self.length_tokens + torch.arange(tokens)
        page = position // self.config.page_tokens
        region = torch.arange(self.streams).unsqueeze(1) * self.hot.stream_pages
        self._write_slots = (region + self.hot.slot(page)).int().to(self.device)
        self._write_offsets = (position % self.config.page_tokens).int().to(self.device)
        self._write_pages = page.int().to(self.device)
        self._first_position.fill_(self.length_tokens)

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes the new tokens of one layer: k, v [Hk, T, D]."""
        assert self._write_slots is not None
        assert self._write_offsets is not None
        assert self.tables is not None
        rows = slice(layer * self.kv_heads, (layer + 1) * self.kv_heads)
        upkeep = None
        if self._bounds is not None:
            assert self._write_pages is not None
            upkeep = api.Upkeep(self._write_pages, self._bounds[0, rows], self._bounds[1, rows])
        slots = self._write_slots[rows]
        api.append(k, v, slots, self._write_offsets, self.tables.pools[0], upkeep, self.backend)

    def attend(
        self,
        layer: int,
        q: Tensor,
        scale: float,
        window_tokens: int = 0,
        slopes: Tensor | None = None,
        mass: bool = False,
    ) -> api.Partial:
        """Attention of new queries q [Hk, G, T, D] over everything the plan attends, by the variant that suits it."""
        assert self.tables is not None
        backend = api.choose_backend(self.backend, q.device.type)
        variant = self.tables.variant(layer, q, backend, local_model())
        self.kernel_calls[variant.describe()] += 1
        return api.attend(
            q,
            self.tables.layers[layer],
            self.tables.pools,
            self._first_position,
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
        self._write_slots = self._write_offsets = self._write_pages = None

    # --- whole cache -----------------------------------------------------------------------------------------

    def ledger(self) -> Ledger:
        """Bytes by tier and format, from the page table."""
        return Ledger.of(self)

    def facts(self) -> dict[str, dict[str, int]]:
        """What a decision log says of this moment; see `ledger.facts`."""
        return facts(self)

    def fork(self) -> PagedCache:
        """An independent copy that goes on from here."""
        other = copy.copy(self)
        other.pools = {key: pool.clone() for key, pool in self.pools.items()}
        other.approximations = self.approximations.clone()
        other.kernel_calls = Counter()
        other.state = {name: value.clone() for name, value in self.state.items()}
        other._bounds = None if self._bounds is None else self._bounds.clone()
        other._first_position = self._first_position.clone()
        other.tables = build_tables(other)
        return other

    def close(self) -> None:
        """Frees everything, the L3 files too."""
        for pool in self.pools.values():
            pool.close()
        self.approximations.close()
