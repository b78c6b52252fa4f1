"""A small tiered cache beside a flat one that keeps everything on the device: both must attend the same bits."""

from __future__ import annotations

from dataclasses import replace

import torch
from archive_case import Faults
from torch import Tensor

from policies.base import Format, Mode, Plan, Tier
from testbed.cache.layout import CacheConfig
from testbed.cache.paged import PagedCache
from testbed.cache.pools import Pools, Shape

L, HK, G, D, P = 2, 3, 2, 32, 16
STREAMS = L * HK
CONFIG = CacheConfig(dtype="float32", sink_tokens=16, hot_tokens=32, slab_pages=4)


def legal(cache: PagedCache, plan: Plan, length: int) -> Plan:
    """The plan with hot pages as the cache demands them."""
    hot = cache.hot.mask(length)
    tier, mode, fmt = plan.tier.clone(), plan.mode.clone(), plan.format.clone()
    tier[tier == Tier.L0] = int(Tier.L1)
    tier[..., hot], mode[..., hot], fmt[..., hot] = int(Tier.L0), int(Mode.EXACT), int(Format.COMPUTE)
    return replace(plan, mode=mode, format=fmt, tier=tier)


def sent(cache: PagedCache, tier: Tier, pages: Tensor, more_tokens: int = 1, score: Tensor | None = None) -> Plan:
    """The plan in force with `pages` [N] bool of all streams in a tier: exact on the device, skipped elsewhere."""
    plan = cache.held(more_tokens)
    pages = torch.nn.functional.pad(pages, (0, plan.tier.shape[-1] - len(pages)))
    new = plan.tier.clone(), plan.mode.clone()
    new[0][..., pages] = int(tier)
    new[1][..., pages] = int(Mode.EXACT if tier <= Tier.L1 else Mode.SKIP)
    return legal(cache, replace(plan, tier=new[0], mode=new[1], score=score), cache.length_tokens + more_tokens)


def cold(pages: int) -> Tensor:
    """[N] bool: pages that are neither sinks nor near the end."""
    index = torch.arange(pages)
    return (index > 0) & (index < pages - 4)


class Pair:
    """A tiered cache and its flat twin, run side by side.

    Args:
        tokens: of the context, all on the device at first.
        faults: what the page file's system calls do.
        keys: configuration of the tiered one.
    """

    def __init__(self, tokens: int, faults: Faults | None = None, **keys: object) -> None:
        config = replace(CONFIG, **keys)  # type: ignore[arg-type]
        shape = Shape(L, HK, D)
        pools = Pools(shape, config) if faults is None else Pools(shape, config, make=faults.make("python"))
        self.tiered = PagedCache(L, HK, D, config, backend="torch", pools=pools)
        self.flat = PagedCache(L, HK, D, CONFIG, backend="torch")
        g = torch.Generator().manual_seed(tokens)
        k, v = ([torch.randn(HK, tokens, D, generator=g) for _ in range(L)] for _ in range(2))
        self.k, self.v = [x.clone() for x in k], [x.clone() for x in v]
        plan = legal(self.tiered, Plan.dense(L, HK, -(-tokens // P)), tokens)
        for cache in (self.tiered, self.flat):
            cache.load(list(k), list(v), plan)
        self.seed = 0

    def step(self, plan: Plan | None = None) -> tuple[Tensor, Tensor]:
        """One token under a plan (the one in force if none): attention of both, [L, Hk, G, D] each.

        The flat cache attends what the tiered one does in the end, all of it on the device.
        """
        self.seed += 1
        a, b = self.tiered, self.flat
        a.apply(plan or legal(a, a.held(1), a.length_tokens + 1), 1)
        done = a.held(1)
        away = (done.tier == Tier.L2) | (done.tier == Tier.L3)
        gone = b.held(1).tier == Tier.DROPPED
        tier = torch.where(away, int(Tier.L1), done.tier).masked_fill(gone, int(Tier.DROPPED)).to(torch.int8)
        b.apply(replace(done, tier=tier), 1)
        outs: tuple[list[Tensor], list[Tensor]] = ([], [])
        g = torch.Generator().manual_seed(self.seed)
        a.begin(1)
        b.begin(1)
        for layer in range(L):
            k, v = (torch.randn(HK, 1, D, generator=g) for _ in range(2))
            q = torch.randn(HK, G, 1, D, generator=g)
            for cache, out in zip((a, b), outs, strict=True):
                cache.append(layer, k, v)
                out.append(cache.attend(layer, q, D**-0.5).out[:, :, 0])
        a.end(1)
        b.end(1)
        return torch.stack(outs[0]), torch.stack(outs[1])

    def close(self) -> None:
        """Both."""
        self.tiered.close()
        self.flat.close()


def check_books(cache: PagedCache) -> None:
    """Pools, page table and ledger say the same of a cache that has its pools to itself."""
    ledger = cache.ledger()
    for (tier, code), store in cache.pools.stores.items():
        kept = sum(len(each.at) for each in cache.flights if each.source == (tier, code) and not each.staged)
        assert store.used_pages == ledger.pages.get((tier, code), 0) + kept, (tier, code)
    for tier in ("L0", "L1", "L2", "L3"):
        used = sum(size for name, size in ledger.used_bytes.items() if name.startswith(tier))
        assert used <= ledger.held_bytes[tier], tier
