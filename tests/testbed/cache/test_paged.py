"""The cache against plain tensors: whatever is moved, converted or dropped, attention sees what it should."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.pages import decode, encode
from policies.base import Format, Mode, Plan, Tier
from testbed.cache.layout import CacheConfig
from testbed.cache.ledger import positions
from testbed.cache.paged import PagedCache
from testbed.cache.pool import CacheError

L, HK, G, D, P = 2, 3, 2, 16, 16
CONFIG = CacheConfig(dtype="float32", sink_tokens=16, hot_tokens=32, slab_pages=8, l3_path=None)


def dense_kv(tokens: int, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return tuple([torch.randn(HK, tokens, D, generator=g) for _ in range(L)] for _ in range(2))  # type: ignore


def make(tokens: int, plan: Plan | None = None, **kwargs: object) -> tuple[PagedCache, list[Tensor], list[Tensor]]:
    cache = PagedCache(L, HK, D, CONFIG, backend="torch", **kwargs)  # type: ignore[arg-type]
    k, v = dense_kv(tokens)
    cache.load(list(k), list(v), plan or hot_plan(cache, Plan.dense(L, HK, -(-tokens // P)), tokens))
    return cache, k, v


def hot_plan(cache: PagedCache, plan: Plan, length: int) -> Plan:
    """The plan with hot pages as the cache demands them."""
    hot = cache.hot.mask(length)
    tier, mode, fmt = plan.tier.clone(), plan.mode.clone(), plan.format.clone()
    tier[tier == Tier.L0] = int(Tier.L1)
    tier[..., hot], mode[..., hot], fmt[..., hot] = int(Tier.L0), int(Mode.EXACT), int(Format.COMPUTE)
    return Plan(mode, fmt, tier)


def expected(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, position: int) -> Tensor:
    """Plain float64 softmax over the kept positions up to `position`.

    q [..., G, D], k, v [..., T, D], keep [..., T] -> [..., G, D].
    """
    keep = keep & (torch.arange(k.shape[-2]) <= position)
    logits = (q.double() @ k.double().mT / math.sqrt(D)).masked_fill(~keep.unsqueeze(-2), -torch.inf)
    return (logits.softmax(-1) @ v.double()).float()


def run_step(cache: PagedCache, k: list[Tensor], v: list[Tensor], seed: int, plan: Plan | None = None) -> Tensor:
    """Appends one token to every layer and attends: [L, Hk, G, D]; k, v grow by the token."""
    g = torch.Generator().manual_seed(seed)
    if plan is None:
        plan = hot_plan(cache, cache.held(1), cache.length_tokens + 1)
    cache.apply(plan, 1)
    cache.begin(1)
    out = []
    for layer in range(L):
        new_k, new_v = (torch.randn(HK, 1, D, generator=g) for _ in range(2))
        k[layer], v[layer] = torch.cat((k[layer], new_k), 1), torch.cat((v[layer], new_v), 1)
        cache.append(layer, new_k, new_v)
        q = torch.randn(HK, G, 1, D, generator=torch.Generator().manual_seed(seed + layer))
        out.append(cache.attend(layer, q, D**-0.5).out[:, :, 0])
    cache.end(1)
    return torch.stack(out)


def queries(seed: int) -> Tensor:
    return torch.stack(
        [torch.randn(HK, G, 1, D, generator=torch.Generator().manual_seed(seed + i))[:, :, 0] for i in range(L)]
    )


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100, 333])
def test_dense_decode_equals_plain_attention(tokens: int) -> None:
    cache, k, v = make(tokens)
    for step in range(40):
        out = run_step(cache, k, v, 100 * step)
        keep = torch.ones(tokens + step + 1, dtype=torch.bool)
        want = expected(queries(100 * step), torch.stack(k), torch.stack(v), keep, tokens + step)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5, msg=lambda text: f"step {step}: {text}")  # noqa: B023


@st.composite
def journeys(draw: st.DrawFn) -> tuple[int, list[int]]:
    return draw(st.integers(40, 200)), draw(st.lists(st.integers(0, 2**20), min_size=1, max_size=6))


def random_plan(cache: PagedCache, seed: int) -> Plan:
    """A legal plan: precision never rises, the dead stay dead, exact only on the device."""
    g = torch.Generator().manual_seed(seed)
    held = cache.held(1)
    shape = held.mode.shape
    tier = torch.randint(int(Tier.L1), int(Tier.DROPPED) + 1, shape, generator=g).to(torch.int8)
    fmt = torch.maximum(held.format, torch.randint(0, 3, shape, generator=g).to(torch.int8))
    tier = torch.where(held.tier == Tier.DROPPED, held.tier, tier)
    exact = (torch.rand(shape, generator=g) < 0.7) & (tier == Tier.L1)
    mode = torch.where(exact, int(Mode.EXACT), int(Mode.SKIP)).to(torch.int8)
    return hot_plan(cache, Plan(mode, fmt, tier), cache.length_tokens + 1)


class Model:
    """What each page should hold by now, kept as plain decoded tensors."""

    def __init__(self, cache: PagedCache, k: list[Tensor], v: list[Tensor]) -> None:
        self.cache, self.k, self.v = cache, k, v
        self.stored: dict[tuple[int, int, int], tuple[int, Tensor, Tensor]] = {}

    def follow(self, plan: Plan) -> None:
        """Requantises pages whose format the plan lowers."""
        full = (self.cache.length_tokens) // P
        for code in (Format.INT8, Format.INT4):
            changed = []
            for layer, head, page in (plan.format == code).nonzero().tolist():
                before, rows = self.stored.get((layer, head, page)), slice(page * P, page * P + P)
                if page < full and (before is None or before[0] != code):
                    k, v = before[1:] if before else (self.k[layer][head, rows], self.v[layer][head, rows])
                    changed.append(((layer, head, page), k, v))
            if changed:
                places, k, v = zip(*changed, strict=True)
                fmt = self.cache.formats[code]
                new_k, new_v = decode(fmt, encode(fmt, torch.stack(k), torch.stack(v)))
                self.stored |= {place: (code, k, v) for place, k, v in zip(places, new_k, new_v, strict=True)}

    def kv(self) -> tuple[Tensor, Tensor]:
        """[L, Hk, T, D] each."""
        k, v = torch.stack(self.k), torch.stack(self.v)
        for (layer, head, page), (_, page_k, page_v) in self.stored.items():
            k[layer, head, page * P : page * P + P], v[layer, head, page * P : page * P + P] = page_k, page_v
        return k, v


def check_ledger(cache: PagedCache) -> None:
    """The page table's count and the pools' agree page by page, and bytes within a slab of slack a pool."""
    with torch.inference_mode():
        cache.flights.drain()
    ledger = cache.ledger()
    for (tier, code), pool in cache.pools.stores.items():
        assert pool.used_pages == ledger.pages.get((tier, code), 0), (tier, code)
    slack = sum(pool.held_bytes - pool.used_pages * pool.fmt.page_bytes for pool in every_pool(cache))
    assert ledger.total_bytes - sum(ledger.used_bytes.values()) == slack
    assert slack >= 0


def every_pool(cache: PagedCache) -> list:
    return [*cache.pools.stores.values(), cache.approximations.prototypes, cache.approximations.background]


@settings(max_examples=25, deadline=None)
@given(journeys())
def test_any_legal_journey_keeps_what_it_should(journey: tuple[int, list[int]]) -> None:
    tokens, seeds = journey
    cache, k, v = make(tokens)
    model = Model(cache, k, v)
    try:
        for seed in seeds:
            plan = random_plan(cache, seed)
            model.follow(plan)
            out = run_step(cache, k, v, seed, plan)
            attended = (plan.mode == Mode.EXACT).repeat_interleave(P, dim=-1)[..., : cache.length_tokens]
            want = expected(queries(seed), *model.kv(), attended, cache.length_tokens - 1)
            torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-5)
            alive = (plan.tier != Tier.DROPPED).repeat_interleave(P, dim=-1)[..., : cache.length_tokens]
            assert torch.equal(positions(cache), alive)
            check_ledger(cache)
    finally:
        cache.close()


def test_prototype_of_equal_tokens_is_exact() -> None:
    """A page whose tokens are all alike is stood for by its prototype without any error."""
    tokens = 160
    cache = PagedCache(L, HK, D, CONFIG, backend="torch")
    k, v = dense_kv(tokens)
    for side in (k, v):
        for layer in range(L):
            page = side[layer][:, 32:33].to(torch.bfloat16).float()
            side[layer][:, 32:48] = page
    plan = hot_plan(cache, Plan.dense(L, HK, tokens // P), tokens)
    plan.mode[..., 2] = int(Mode.CLUSTER)
    plan.tier[..., 2] = int(Tier.L2)
    cache.load(list(k), list(v), plan)
    out = run_step(cache, k, v, 5)
    q = queries(5)
    keep = torch.ones(tokens + 1, dtype=torch.bool)
    for layer in range(L):
        for head in range(HK):
            want = expected(q[layer, head], k[layer][head], v[layer][head], keep, tokens)
            assert torch.allclose(out[layer, head], want, atol=1e-4)
    assert cache.ledger().used_bytes["L1/prototype"] == L * HK * cache.approximations.prototypes.fmt.page_bytes
    check_ledger(cache)


def test_background_stands_for_its_pages_and_leaves_with_them() -> None:
    """The state is the mean of the pages in it; pages that leave take their share along."""
    tokens = 240
    cache, k, v = make(tokens)
    plan = hot_plan(cache, cache.held(1), tokens + 1)
    plan.mode[..., 2:8] = int(Mode.BACKGROUND)
    plan.tier[..., 2:8] = int(Tier.L2)
    out = run_step(cache, k, v, 5, plan)
    q = queries(5)
    for layer in range(L):
        for head in range(HK):
            keys, values = k[layer][head], v[layer][head]
            rest = torch.ones(tokens + 1, dtype=torch.bool)
            rest[32:128] = False
            mean_k, mean_v = (side[32:128].mean(0, keepdim=True).bfloat16().float() for side in (keys, values))
            logits = torch.cat((q[layer, head] @ keys[rest].T, q[layer, head] @ mean_k.T), 1) / math.sqrt(D)
            logits[:, -1] += math.log(96)
            want = logits.softmax(-1) @ torch.cat((values[rest], mean_v))
            assert torch.allclose(out[layer, head], want, atol=1e-4)
    back = hot_plan(cache, cache.held(1), cache.length_tokens + 1)
    back.mode[..., 2:8] = int(Mode.EXACT)
    back.tier[..., 2:8] = int(Tier.L1)
    out = run_step(cache, k, v, 6, back)
    q = queries(6)
    keep = torch.ones(tokens + 2, dtype=torch.bool)
    want = expected(q[1, 2], k[1][2], v[1][2], keep, tokens + 1)
    assert torch.allclose(out[1, 2], want, atol=1e-4)


def test_dropping_frees_bytes_on_every_tier() -> None:
    tokens = 800
    cache, k, v = make(tokens)
    for tier in (Tier.L1, Tier.L2, Tier.L3):
        plan = hot_plan(cache, cache.held(1), cache.length_tokens + 1)
        movable = plan.tier == Tier.L1
        plan.tier[movable] = int(tier)
        plan.mode[movable & (tier > Tier.L1)] = int(Mode.SKIP)
        run_step(cache, k, v, int(tier), plan)
        cache.apply(plan, 0)
        before = cache.ledger().held_bytes[tier.name]
        gone = hot_plan(cache, cache.held(1), cache.length_tokens + 1)
        last = gone.tier.shape[-1] if tier == Tier.L3 else 20  # the file gives back whole extents
        gone.tier[(gone.tier == tier) & (torch.arange(gone.tier.shape[-1]) < last)] = int(Tier.DROPPED)
        gone.mode[gone.tier == Tier.DROPPED] = int(Mode.SKIP)
        run_step(cache, k, v, 10 + int(tier), gone)
        assert cache.ledger().held_bytes[tier.name] < before
        cache.close()
        cache, k, v = make(tokens)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p.mode[0, 0, 3].fill_(int(Mode.EXACT)) and p.tier[0, 0, 3].fill_(int(Tier.L2)), "not on the device"),
        (lambda p: p.tier[0, 1, 3].fill_(int(Tier.DROPPED)), "not on the device"),
        (lambda p: p.format[1, 2, 0].fill_(int(Format.INT4)), "hot page"),
        (lambda p: p.tier[1, 2, 3].fill_(int(Tier.L0)), "L0 that is not hot"),
    ],
)
def test_impossible_plans_are_refused_untouched(change, says: str) -> None:  # noqa: ANN001
    cache, k, v = make(160)
    run_step(cache, k, v, 1)
    state = {name: value.clone() for name, value in cache.state.items()}
    plan = hot_plan(cache, cache.held(1), cache.length_tokens + 1)
    change(plan)
    with pytest.raises(CacheError, match=says):
        cache.apply(plan, 1)
    assert all(torch.equal(state[name], cache.state[name][:, : state[name].shape[1]]) for name in state)


def test_a_fork_goes_its_own_way() -> None:
    cache, k, v = make(100)
    other_k, other_v = [x.clone() for x in k], [x.clone() for x in v]
    other = cache.fork()
    first = run_step(cache, k, v, 1)
    for seed in range(2, 30):
        run_step(cache, k, v, seed)
    again = run_step(other, other_k, other_v, 1)
    assert torch.equal(first, again)
    assert other.length_tokens == 101


def test_key_bounds_are_those_of_the_pages() -> None:
    cache, k, v = make(90, with_bounds=True)
    for seed in range(20):
        run_step(cache, k, v, seed)
    low, high = cache.key_bounds()
    for layer in range(L):
        for page in range(cache.pages):
            rows = k[layer][:, page * P : page * P + P]
            assert torch.equal(low[layer * HK : (layer + 1) * HK, page], rows.amin(1))
            assert torch.equal(high[layer * HK : (layer + 1) * HK, page], rows.amax(1))


def test_holes_close_when_pages_come_and_go() -> None:
    """Every other page of every stream goes to the host: the device holds less than a slab more than it uses."""
    cache, k, v = make(800)
    plan = hot_plan(cache, cache.held(1), cache.length_tokens + 1)
    away = (plan.tier == Tier.L1) & (torch.arange(plan.tier.shape[-1]) % 2 == 0)
    plan.tier[away], plan.mode[away] = int(Tier.L2), int(Mode.SKIP)
    out = run_step(cache, k, v, 3, plan)
    pool = cache.pools.stores[Tier.L1, Format.COMPUTE]
    assert pool.held_bytes - pool.used_pages * pool.fmt.page_bytes < CONFIG.slab_pages * pool.fmt.page_bytes
    q = queries(3)
    keep = (plan.mode == Mode.EXACT).repeat_interleave(P, dim=-1)[..., : cache.length_tokens]
    for layer in range(L):
        for head in range(HK):
            want = expected(q[layer, head], k[layer][head], v[layer][head], keep[layer, head], 800)
            assert torch.allclose(out[layer, head], want, atol=1e-5)
    check_ledger(cache)
