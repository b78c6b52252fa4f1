"""From page state to what a kernel reads: which pages each stream attends and where they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kernels import api
from kernels.api import PageTable, Pool
from kernels.cost import CostModel, Load, Variant, local_model, safe_variants
from policies.base import Format, Mode, Tier

if TYPE_CHECKING:
    from testbed.cache.paged import PagedCache

# Kernel pools, in this order: L0, L1 by format, prototypes, background.
L0_POOL, L1_POOL, PROTOTYPE_POOL, BACKGROUND_POOL = 0, 1, 1 + len(Format), 2 + len(Format)


@dataclass(frozen=True)
class Tables:
    """The kernel's page tables of all layers.

    Attributes:
        pool, slot, page: [S, W], rows compact from the left, W the longest; see `kernels.api.PageTable`.
        count: [S] int32.
        column: [S, W] int64, page each entry stands for; N for the background entry and unused ones.
        pools: what `pool` indexes.
        pages: N.
    """

    pool: Tensor
    slot: Tensor
    page: Tensor
    count: Tensor
    column: Tensor
    pools: tuple[Pool, ...]
    kv_heads: int
    pages: int = 0
    _chosen: dict[tuple[int, int, torch.dtype], Variant] = field(default_factory=dict)

    @cached_property
    def layers(self) -> tuple[PageTable, ...]:
        """One kernel table a layer, made once so that a step only looks them up."""
        return tuple(
            PageTable(self.pool[rows], self.slot[rows], self.page[rows], self.count[rows])
            for start in range(0, len(self.count), self.kv_heads)
            for rows in [slice(start, start + self.kv_heads)]
        )

    def variant(self, layer: int, q: Tensor, backend: str, costs: CostModel) -> Variant:
        """How to attend a layer for queries like q; chosen once a plan and kept, since it counts the layer's pages."""
        key = (layer, q.shape[2], q.dtype)
        if key not in self._chosen:
            offered = safe_variants(backend, torch.get_num_threads(), q.dtype != torch.float32)
            one = len(offered) == 1
            self._chosen[key] = offered[0] if one else costs.choose(Load.of(q, self.layers[layer], self.pools), offered)
        return self._chosen[key]

    def attend(
        self,
        layer: int,
        q: Tensor,
        first_position: Tensor,
        backend: str | None,
        scale: float,
        window_tokens: int,
        slopes: Tensor | None,
        mass: bool,
    ) -> tuple[api.Partial, str]:
        """Attention of queries q [rows, G, T, D] over a layer's entries, by the variant that suits it, and its name."""
        backend = api.choose_backend(backend, q.device.type)
        variant = self.variant(layer, q, backend, local_model())
        part = api.attend(
            q,
            self.layers[layer],
            self.pools,
            first_position,
            scale=scale,
            window_tokens=window_tokens,
            slopes=slopes,
            want_mass=mass,
            schedule=variant.schedule,
            backend=backend,
        )
        return part, variant.describe()

    def mass_by_page(self, mass: Tensor) -> Tensor:
        """Mass of table entries [S, W] -> mass of pages [S, N]; the background's share is left out."""
        out = mass.new_zeros(len(mass), self.pages + 1)
        return out.scatter_(1, self.column, mass)[:, :-1]


def build_tables(cache: PagedCache) -> Tables:
    """Tables of everything attended, in a few passes over [S, N]; no loop over streams or pages.

    The page state is in host memory; numpy selects by a mask several times faster than torch does there.
    """
    mode, tier, fmt, slot = (cache.state[name].numpy() for name in ("mode", "tier", "format", "slot"))
    streams, pages = mode.shape
    cluster = mode == Mode.CLUSTER
    wanted = (mode == Mode.EXACT) | cluster
    pool = (tier != Tier.L0) * (L1_POOL + fmt)
    if cluster.any():
        pool[cluster] = PROTOTYPE_POOL
        slot = np.where(cluster, cache.approximations.slot.numpy(), slot)
    background = (mode == Mode.BACKGROUND).any(1)
    count = wanted.sum(1)
    width = int((count + background).max()) if streams else 0
    entries = np.arange(width) < count[:, None]  # in the order of `wanted`, row by row

    def table(values: np.ndarray, dtype: type, of_background: np.ndarray | int, unused: int = 0) -> Tensor:
        """[S, W]: values of the entries, then that of the stream's background, if it has one."""
        out = np.full((streams, width), unused, dtype)
        out[entries] = values
        out[background, count[background]] = of_background
        return torch.from_numpy(out).to(cache.device)

    page = np.broadcast_to(np.arange(pages, dtype=np.int32), mode.shape)[wanted]
    return Tables(
        pool=table(pool[wanted], np.int8, BACKGROUND_POOL),
        slot=table(slot[wanted], np.int32, cache.approximations.background_slot.numpy()[background]),
        page=table(page, np.int32, 0),
        count=torch.from_numpy((count + background).astype(np.int32)).to(cache.device),
        column=table(page, np.int64, pages, unused=pages),
        pools=cache.pools.kernel_pools(),
        kv_heads=cache.kv_heads,
        pages=pages,
    )
