"""Caches in a batch and in a file, without a model: attention is bit for bit what each gives alone and before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tier_case import CONFIG, HK, D, G, L, P, legal, sent
from torch import Tensor

from policies.base import Format, Mode, Plan, Tier
from testbed.cache.batch import CacheBatch
from testbed.cache.paged import PagedCache
from testbed.cache.pools import Pools, Shape
from testbed.cache.saved import Reader, writing
from testbed.cache.snapshot import load_cache, save_cache

LENGTHS = (100, 243, 17)


def filled(tokens: int, pools: Pools | None = None) -> PagedCache:
    """Pages of every format, some in L2 and L3."""
    cache = PagedCache(L, HK, D, CONFIG, backend="torch", pools=pools)
    g = torch.Generator().manual_seed(tokens)
    k, v = ([torch.randn(HK, tokens, D, generator=g) for _ in range(L)] for _ in range(2))
    plan = Plan.dense(L, HK, -(-tokens // P))
    place = torch.randint(int(Tier.L1), int(Tier.L3) + 1, plan.tier.shape, generator=g).to(torch.int8)
    fmt = torch.randint(0, len(Format), plan.tier.shape, generator=g).to(torch.int8)
    mode = torch.where(place == Tier.L1, int(Mode.EXACT), int(Mode.SKIP)).to(torch.int8)
    cache.load(k, v, legal(cache, Plan(mode, fmt, place), tokens))
    return cache


def everything(cache: PagedCache) -> Plan:
    """The next step's plan: all pages on the device."""
    return sent(cache, Tier.L1, torch.ones(cache.pages, dtype=torch.bool))


def new_tokens(seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """K, V [Hk, 1, D] and q [Hk, G, 1, D] of each layer."""
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(HK, 1, D, generator=g), torch.randn(HK, 1, D, generator=g), torch.randn(HK, G, 1, D, generator=g))
        for _ in range(L)
    ]


def step(caches: list[PagedCache], seeds: list[int]) -> list[Tensor]:
    """One token for each cache, in a batch: attention of all layers [L, Hk, G, D] each."""
    batch = CacheBatch(caches)
    tokens = [new_tokens(seed) for seed in seeds]
    batch.begin(1)
    rows = []
    for layer in range(L):
        k, v, q = (torch.stack(part) for part in zip(*(each[layer] for each in tokens), strict=True))
        batch.append(layer, k, v)
        rows.append(batch.attend(layer, q.flatten(0, 1), D**-0.5).out.view(len(caches), HK, G, D))
    batch.end(1)
    return list(torch.stack(rows, 1))


def test_rows_of_different_lengths_are_what_they_are_alone() -> None:
    pools = Pools(Shape(L, HK, D), CONFIG)
    together, alone = [filled(tokens, pools) for tokens in LENGTHS], [filled(tokens) for tokens in LENGTHS]
    for at in range(3):
        for cache in (*together, *alone):
            cache.apply(everything(cache) if at == 1 else legal(cache, cache.held(1), cache.length_tokens + 1), 1)
        seeds = [10 * at + row for row in range(len(LENGTHS))]
        for row, out in enumerate(step(together, seeds)):
            assert torch.equal(out, step([alone[row]], [seeds[row]])[0]), f"step {at}, row {row}"
    for cache in (*together, *alone):
        cache.close()


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_saved_cache_has_every_page_where_it_was(tokens: int, tmp_path: Path) -> None:
    cache, copy = filled(tokens), PagedCache(L, HK, D, CONFIG, backend="torch")
    with writing(tmp_path / "saved") as writer:
        about, _ = save_cache(cache, writer, in_place=False)
        writer.finish(about)
    with Reader(tmp_path / "saved") as reader, torch.inference_mode():
        load_cache(copy, reader, about)
    assert copy.length_tokens == tokens
    for name in ("mode", "format", "tier"):
        assert torch.equal(copy.state[name], cache.state[name]), name
    for seed in range(2):
        for each in (cache, copy):
            each.apply(everything(each), 1)
        assert torch.equal(step([copy], [seed])[0], step([cache], [seed])[0])
    cache.close()
    copy.close()
