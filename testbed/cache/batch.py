"""Several caches over shared pools that act as one for a step: one append and one attention call a layer.

Each sequence keeps its own page state, plan and length (ragged); what is joined are the rows of the kernel's tables,
padded to the widest. No row of attention depends on another (`kernels.api.attend`), so every sequence gets the bits
that it would get alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import api
from testbed.cache.flights import LostPages
from testbed.cache.pool import CacheError
from testbed.cache.table import Tables

if TYPE_CHECKING:
    from testbed.cache.paged import PagedCache


class CacheBatch:
    """B caches of one model over the same pools.

    Args:
        caches: no one twice; of one shape and configuration.

    Raises:
        CacheError: caches that share no pools, or one that is there twice.
    """

    def __init__(self, caches: Sequence[PagedCache]) -> None:
        self.caches = tuple(caches)
        first = self.caches[0]
        if len({id(cache) for cache in self.caches}) < len(self.caches):
            raise CacheError("a batch holds a cache twice: fork it first")
        if any(cache.pools is not first.pools for cache in self.caches):
            raise CacheError("the caches of a batch must share their pools: make them with the same `pools`")
        self.kv_heads = first.kv_heads
        self._tables: Tables | None = None
        self._parts: tuple[Tables, ...] = ()  # what `_tables` was joined from
        self._positions = torch.zeros(0, dtype=torch.int32)
        self._slots = self._offsets = self._positions
        self._loser = 0

    def begin(self, tokens: int) -> None:
        """Fixes where the next tokens of each sequence go; the plans for them must have been applied."""
        for cache in self.caches:
            cache.begin(tokens)
        if len(self.caches) == 1:
            return
        self._join()
        each = [cache.places() for cache in self.caches]
        layers = self.caches[0].layers
        # [L, B * Hk, T]: a layer's rows of all sequences lie together.
        self._slots = torch.cat([place.slots.view(layers, self.kv_heads, tokens) for place in each], 1)
        self._offsets = torch.cat([place.offsets.expand(self.kv_heads, tokens) for place in each])
        self._positions = torch.cat([place.first_position for place in each])

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes the new tokens of one layer: k, v [B, Hk, T, D]."""
        first = self.caches[0]
        # Key bounds are each sequence's own tensor, so that with them a call a sequence is due.
        if len(self.caches) == 1 or first.keeps_bounds:
            for index, cache in enumerate(self.caches):
                cache.append(layer, k[index], v[index])
            return
        assert self._tables is not None
        api.append(
            k.flatten(0, 1),
            v.flatten(0, 1),
            self._slots[layer],
            self._offsets,
            self._tables.pools[0],
            None,
            first.backend,
        )

    def attend(
        self,
        layer: int,
        q: Tensor,
        scale: float,
        window_tokens: int = 0,
        slopes: Tensor | None = None,
        mass: bool = False,
    ) -> api.Partial:
        """Attention of new queries q [B * Hk, G, T, D] over what each sequence's plan attends; slopes [Hk, G].

        Raises:
            LostPages: pages that a sequence reads can't be had; `all_lost` says which of all.
        """
        for index, cache in enumerate(self.caches):
            try:
                cache.arrive(layer)
            except LostPages:
                self._loser = index
                raise
        if len(self.caches) == 1:
            return self.caches[0].attend(layer, q, scale, window_tokens, slopes, mass)
        assert self._tables is not None
        first = self.caches[0]
        slopes = None if slopes is None else slopes.repeat(len(self.caches), 1)
        part, variant = self._tables.attend(
            layer, q, self._positions, first.backend, scale, window_tokens, slopes, mass
        )
        for cache in self.caches:
            cache.kernel_calls[variant] += 1
        return part

    def all_lost(self, first: LostPages) -> list[Tensor]:
        """After `attend` raised: lost pages [M, 2] of every sequence in all layers, so that one mending does."""
        out = [[torch.zeros(0, 2, dtype=torch.int64)] for _ in self.caches]
        out[self._loser].append(first.at)
        for cache, lost in zip(self.caches, out, strict=True):
            for layer in range(cache.layers):
                try:
                    cache.arrive(layer)
                except LostPages as more:
                    lost.append(more.at)
        return [torch.cat(lost) for lost in out]

    def end(self, tokens: int) -> None:
        """The tokens begun are written in all layers."""
        for cache in self.caches:
            cache.end(tokens)

    def masses(self, mass: Tensor) -> list[Tensor]:
        """Mass of table entries [L * B * Hk, W], layer by layer -> of each sequence's pages, [L, Hk, N] each."""
        layers, heads = self.caches[0].layers, self.kv_heads
        by_cache = mass.view(layers, len(self.caches), heads, -1)
        out = []
        for index, cache in enumerate(self.caches):
            assert cache.tables is not None
            width = cache.tables.column.shape[1]
            own = by_cache[:, index, :, :width].reshape(layers * heads, width)
            out.append(cache.tables.mass_by_page(own).view(layers, heads, -1))
        return out

    def _join(self) -> None:
        """Tables of all sequences, rows in the order layer, sequence, head; made anew where one has changed."""
        parts = tuple(cache.tables for cache in self.caches if cache.tables is not None)
        pools = self.caches[0].pools.kernel_pools()
        same = len(parts) == len(self._parts) and all(a is b for a, b in zip(parts, self._parts, strict=True))
        if same and self._tables is not None and all(a is b for a, b in zip(pools, self._tables.pools, strict=True)):
            return
        layers, heads, count = self.caches[0].layers, self.kv_heads, len(parts)
        width = max(part.column.shape[1] for part in parts)

        def joined(name: str) -> Tensor:
            like: Tensor = getattr(parts[0], name)
            out = like.new_zeros(layers, count, heads, width)
            for index, part in enumerate(parts):
                own: Tensor = getattr(part, name)
                out[:, index, :, : own.shape[1]] = own.view(layers, heads, -1)
            return out.view(layers * count * heads, width)

        counts = torch.stack([part.count.view(layers, heads) for part in parts], 1).flatten()
        self._parts = parts
        self._tables = Tables(
            joined("pool"),
            joined("slot"),
            joined("page"),
            counts,
            column=torch.empty(0, dtype=torch.int64),  # masses go back through each sequence's own
            pools=pools,
            kv_heads=count * heads,
        )
