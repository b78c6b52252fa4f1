"""From page state to what a kernel reads: which pages each stream attends and where they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.api import PageTable, Pool
from kernels.cost import CostModel, Load, Variant, safe_variants
from policies.base import Format, Mode, Tier

if TYPE_CHECKING:
    from testbed.cache.paged import PagedCache

# Kernel pools, in this order: L0, L1 by format, prototypes, background.
L0_POOL, L1_POOL, PROTOTYPE_POOL, BACKGROUND_POOL = 0, 1, 1 + len(Format), 2 + len(Format)


@dataclass(frozen=True)
class Tables:
    """The kernel's page tables of all layers.

    Attributes:
        pool, slot, page: [S, N + 1], rows compact from the left; see `kernels.api.PageTable`.
        count: [S] int32.
        column: [S, N + 1] int64, page each entry stands for; N for the background entry and unused ones.
        pools: what `pool` indexes.
    """

    pool: Tensor
    slot: Tensor
    page: Tensor
    count: Tensor
    column: Tensor
    pools: tuple[Pool, ...]
    kv_heads: int
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

    def mass_by_page(self, mass: Tensor) -> Tensor:
        """Mass of table entries [S, N + 1] -> mass of pages [S, N]; the background's share is left out."""
        out = torch.zeros_like(mass)
        return out.scatter_(1, self.column, mass)[:, :-1]


def build_tables(cache: PagedCache) -> Tables:
    """Tables of everything attended, by three prefix sums over [S, N]; no loop over streams or pages."""
    state = cache.state
    mode, streams = state["mode"], cache.streams
    pages = mode.shape[1]
    exact, cluster = mode == Mode.EXACT, mode == Mode.CLUSTER
    pool = torch.where(state["tier"] == Tier.L0, L0_POOL, L1_POOL + state["format"])
    pool = torch.where(cluster, PROTOTYPE_POOL, pool).to(torch.int8)
    slot = torch.where(cluster, cache.approximations.slot, state["slot"])
    page = torch.arange(pages, dtype=torch.int32).expand(streams, pages)
    background = (mode == Mode.BACKGROUND).any(1, keepdim=True)
    if bool(background.any()):
        own = cache.approximations.background_slot.unsqueeze(1)
        last = torch.full((streams, 1), BACKGROUND_POOL, dtype=torch.int8)
        columns = (torch.cat((pool, last), 1), torch.cat((slot, own), 1), torch.cat((page, 0 * own), 1))
    else:
        pad = (0, 1)
        columns = tuple(torch.nn.functional.pad(x, pad) for x in (pool, slot, page))
    wanted = torch.cat((exact | cluster, background), 1)
    # The place of each wanted entry in its row; the others go to a last column that is cut off.
    place = torch.where(wanted, wanted.cumsum(1) - 1, pages + 1)
    compact = [x.new_zeros(streams, pages + 2).scatter_(1, place, x)[:, :-1] for x in columns]
    index = torch.arange(pages + 1).expand(streams, -1)
    column = torch.full((streams, pages + 2), pages).scatter_(1, place, index)[:, :-1]
    device = cache.device
    return Tables(
        *(x.contiguous().to(device) for x in compact),
        count=wanted.sum(1, dtype=torch.int32).to(device),
        column=column.to(device),
        pools=cache.pools.kernel_pools(),
        kv_heads=cache.kv_heads,
    )
