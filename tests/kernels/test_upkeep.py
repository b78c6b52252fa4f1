"""An append that keeps bounds, quantised copies and prototypes current equals doing these one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import linear_attention
from kernels.api import Pool, append
from kernels.pages import FLOAT_DTYPES, decode, encode, page_format, views
from kernels.prototypes import make_prototypes
from kernels.scoring import page_bounds
from kernels.upkeep import Upkeep

BACKENDS = ("cpu", "torch")
P = 16


def pool_of(name: str, pages: int, head_dim: int, page_tokens: int = P, groups: int = 1) -> Pool:
    """A pool in two slabs, full of bytes that are NaN in every float format."""
    fmt = page_format(name, page_tokens, head_dim, groups)
    half = -(-pages // 2)
    return Pool(fmt, tuple(torch.full((half, fmt.page_bytes), 0xFF, dtype=torch.uint8) for _ in range(2)))


def whole(pool: Pool) -> Tensor:
    return torch.cat(pool.slabs)


@dataclass
class Store:
    """Pages of S streams, in slots by chance, and everything an append can keep beside."""

    streams: int
    pages: int
    head_dim: int
    pool: Pool
    bounds: Tensor
    sealed: Pool | None
    prototypes: Pool | None
    slots: Tensor
    page_tokens: int

    def write(self, k: Tensor, v: Tensor, start: int, backend: str) -> None:
        """Appends tokens at positions start onwards."""
        position = start + torch.arange(k.shape[1])
        page = (position // self.page_tokens).int()
        offset = (position % self.page_tokens).int()
        slot = self.slots[:, page.long()]
        fills = torch.where(offset == self.page_tokens - 1, slot, -1)
        upkeep = Upkeep(
            page,
            self.bounds[0],
            self.bounds[1],
            self.sealed,
            None if self.sealed is None else fills,
            self.prototypes,
            None if self.prototypes is None else fills,
        )
        append(k, v, slot, offset, self.pool, upkeep, backend)


def make(
    seed: int,
    name: str,
    streams: int = 3,
    pages: int = 4,
    head_dim: int = 40,
    bounds: torch.dtype = torch.bfloat16,
    sealed: str | None = "int4",
    groups: int = 1,
    page_tokens: int = P,
) -> Store:
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(streams * pages + 1, generator=rng)[: streams * pages].view(streams, pages).int()
    total = streams * pages + 1
    # Bounds lie as they do in a cache of several layers: a part of a larger tensor.
    layers = torch.full((2, 2 * streams, pages, head_dim), math.nan, dtype=bounds)
    layers[0], layers[1] = math.inf, -math.inf
    return Store(
        streams,
        pages,
        head_dim,
        pool_of(name, total, head_dim, page_tokens),
        layers[:, streams:],
        None if sealed is None else pool_of(sealed, total, head_dim, page_tokens),
        pool_of("proto", total, head_dim, page_tokens, groups),
        order,
        page_tokens,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    name=st.sampled_from(["fp32", "bf16", "fp16"]),
    source=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    bounds=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    sealed=st.sampled_from(["int8", "int4", "bf16", "fp32"]),
    page_tokens=st.sampled_from([16, 32]),
    head_dim=st.sampled_from([8, 40, 64, 128]),
    groups=st.sampled_from([1, 1, 2, 5, 16]),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
)
def test_equal_to_doing_it_one_by_one(
    backend: str,
    seed: int,
    name: str,
    source: torch.dtype,
    bounds: torch.dtype,
    sealed: str,
    page_tokens: int,
    head_dim: int,
    groups: int,
    cuts: list[int],
) -> None:
    store = make(seed, name, 3, 4, head_dim, bounds, sealed, groups, page_tokens)
    total = min(sum(cuts), store.pages * page_tokens)
    rng = torch.Generator().manual_seed(seed)
    # As a model's heads lie: [T, S, D] turned over.
    k, v = (torch.randn(total, 3, head_dim, generator=rng).to(source).transpose(0, 1) for _ in range(2))
    start = 0
    for cut in cuts:
        end = min(start + cut, total)
        store.write(k[:, start:end], v[:, start:end], start, backend)
        start = end
    stored = FLOAT_DTYPES[name]
    keys, values = k.to(stored), v.to(stored)
    touched = torch.zeros(store.pool.pages, dtype=torch.bool)
    for s in range(3):
        for n in range(store.pages):
            slot = int(store.slots[s, n])
            part = slice(n * page_tokens, min((n + 1) * page_tokens, total))
            own_k, own_v = keys[s, part], values[s, part]
            low, high = store.bounds[0, s, n], store.bounds[1, s, n]
            if not len(own_k):
                assert (low == math.inf).all()
                assert (high == -math.inf).all()
                continue
            want_low, want_high = page_bounds(own_k.to(bounds)[None])
            assert torch.equal(low, want_low[0])
            assert torch.equal(high, want_high[0])
            got = decode(store.pool.fmt, whole(store.pool)[slot : slot + 1])
            assert torch.equal(got[0][0, : len(own_k)], own_k.float())
            assert torch.equal(got[1][0, : len(own_v)], own_v.float())
            if len(own_k) < page_tokens:
                continue
            touched[slot] = True
            assert store.sealed is not None
            assert store.prototypes is not None
            want = encode(store.sealed.fmt, own_k[None], own_v[None], backend)[0]
            assert torch.equal(whole(store.sealed)[slot], want)
            proto = views(store.prototypes.fmt, whole(store.prototypes)[slot : slot + 1])
            for key, exact in zip(
                ("k", "v", "log2_count"), make_prototypes(own_k[None], own_v[None], groups), strict=True
            ):
                torch.testing.assert_close(proto[key].float(), exact.float(), rtol=2**-8, atol=1e-6)
    for pool in (store.sealed, store.prototypes):
        assert pool is not None
        assert (whole(pool)[~touched] == 0xFF).all()
    # Nothing of the other layer's bounds has moved.
    base = store.bounds._base
    assert base is not None
    assert (base[0, :3] == math.inf).all()
    assert (base[1, :3] == -math.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_keys_are_stored_and_move_no_bound(backend: str) -> None:
    store = make(0, "bf16", streams=1, pages=1, head_dim=8, sealed=None)
    store.prototypes = None
    k = torch.tensor([1.0, math.nan, -3.0])[None, :, None].repeat(1, 1, 8)
    k[0, :, 5] = math.nan
    store.write(k, torch.zeros_like(k), 0, backend)
    assert store.bounds[0, 0, 0].tolist() == [-3.0] * 5 + [math.inf] + [-3.0] * 2
    assert store.bounds[1, 0, 0].tolist() == [1.0] * 5 + [-math.inf] + [1.0] * 2
    kept, _ = decode(store.pool.fmt, whole(store.pool)[store.slots[0].long()])
    torch.testing.assert_close(kept[0, :3], k[0], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_filled_page_is_copied_only_where_asked(backend: str) -> None:
    store = make(1, "fp16", streams=2, pages=1, head_dim=64, sealed="int8")
    k = torch.randn(2, P, 64, generator=torch.Generator().manual_seed(0))
    page, offset = torch.zeros(P, dtype=torch.int32), torch.arange(P, dtype=torch.int32)
    fills = torch.full((2, P), -1, dtype=torch.int32)
    fills[1, -1] = 2
    slots = store.slots.expand(2, P)
    assert store.sealed is not None
    append(k, k, slots, offset, store.pool, Upkeep(page, sealed=store.sealed, sealed_slot=fills), backend)
    assert (whole(store.sealed)[[0, 1, 3]] == 0xFF).all()
    want = encode(store.sealed.fmt, k[1:].half(), k[1:].half(), backend)
    assert torch.equal(whole(store.sealed)[2], want[0])
    assert (store.bounds[0] == math.inf).all()


def test_one_prototype_is_the_mean_and_stands_for_the_page() -> None:
    for backend in BACKENDS:
        store = make(2, "fp32", streams=1, pages=1, head_dim=64, sealed=None)
        k, v = torch.randn(2, 1, P, 64, generator=torch.Generator().manual_seed(1)).unbind(0)
        store.write(k, v, 0, backend)
        assert store.prototypes is not None
        got = views(store.prototypes.fmt, whole(store.prototypes)[store.slots[0].long()])
        assert got["log2_count"].tolist() == [[4.0]]
        torch.testing.assert_close(got["k"][0, 0].double(), k[0].double().mean(0), rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(got["v"][0, 0].double(), v[0].double().mean(0), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prototypes_of_a_page_of_equal_keys_stand_for_all_of_it(backend: str) -> None:
    store = make(3, "fp16", streams=2, pages=1, head_dim=64, sealed=None, groups=4)
    k = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(1)).expand(2, P, 64)
    store.write(k, k, 0, backend)
    assert store.prototypes is not None
    got = views(store.prototypes.fmt, whole(store.prototypes)[store.slots[:, 0].long()])
    assert got["log2_count"].exp2().sum(1).tolist() == [P, P]
    held = got["log2_count"] > -math.inf
    want = k[:, :1].half().float().expand(2, 4, 64)[held]
    torch.testing.assert_close(got["k"].float()[held], want, rtol=2**-7, atol=0)
    assert (got["v"][~held] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_tokens_go_into_the_linear_state(backend: str) -> None:
    rng = torch.Generator().manual_seed(4)
    pool = pool_of("bf16", 4, 16)
    slot, offset = torch.tensor([[0] * 3, [1] * 3], dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    chosen = torch.tensor([[True, False, True], [False, False, True]])
    fmap = linear_attention.favor_map(16, 24, 0.25, seed=0)
    state, want = (linear_attention.empty_state(2, 24, 16) for _ in range(2))
    for tokens in (None, chosen):
        k, v = torch.randn(2, 2, 3, 16, generator=rng).unbind(0)
        upkeep = Upkeep(torch.zeros(3, dtype=torch.int32), linear=state, feature_map=fmap, linear_tokens=tokens)
        append(k, v, slot, offset, pool, upkeep, backend)
        linear_attention.add(want, fmap, k, v, tokens)
    assert state.tokens.tolist() == [5, 4]
    for name in ("s", "z", "log2_scale", "peak", "tokens"):
        assert torch.equal(getattr(state, name), getattr(want, name))


def arguments(head_dim: int = 16) -> dict[str, Tensor | Pool]:
    fills = torch.full((2, 3), -1, dtype=torch.int32)
    return {
        "page": torch.zeros(3, dtype=torch.int32),
        "lowest": torch.zeros(2, 4, head_dim),
        "highest": torch.zeros(2, 4, head_dim),
        "sealed": pool_of("int8", 4, head_dim),
        "sealed_slot": fills,
        "prototypes": pool_of("proto", 4, head_dim),
        "prototype_slot": fills,
    }


def at(fills: Tensor, place: tuple[int, int], slot: int) -> Tensor:
    changed = fills.clone()
    changed[place] = slot
    return changed


FILLS = torch.full((2, 3), -1, dtype=torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("page", torch.zeros(3), "page"),
        ("page", torch.zeros(2, dtype=torch.int32), "page"),
        ("page", torch.tensor([0, 4, 0], dtype=torch.int32), "page 0 to 4"),
        ("page", torch.tensor([0, -1, 0], dtype=torch.int32), "page -1 to 0"),
        ("lowest", None, "lowest"),
        ("lowest", torch.zeros(2, 4, 16, dtype=torch.float64), "lowest"),
        ("lowest", torch.zeros(2, 16, 4).transpose(1, 2), "lowest"),
        ("highest", torch.zeros(2, 4, 16).half(), "highest"),
        ("highest", torch.zeros(2, 3, 16), "highest"),
        ("highest", torch.zeros(2, 4, 16, device="meta"), "highest on meta"),
        ("sealed", pool_of("proto", 4, 16), "sealed"),
        ("sealed", pool_of("int8", 4, 16, 32), "sealed"),
        ("sealed", pool_of("int8", 4, 24), "sealed"),
        ("sealed_slot", None, "sealed_slot"),
        ("sealed_slot", FILLS.long(), "sealed_slot"),
        ("sealed_slot", FILLS[:, :2], "sealed_slot"),
        ("sealed_slot", at(FILLS, (0, 2), 4), "sealed_slot -1 to 4"),
        ("sealed_slot", at(FILLS, (0, 2), -2), "sealed_slot -2 to -1"),
        ("sealed_slot", at(FILLS, (0, 1), 3), "sealed_slot 3 of a token that does not fill"),
        ("prototypes", pool_of("int8", 4, 16), "prototypes"),
        ("linear", linear_attention.empty_state(2, 8, 16), "linear and upkeep.feature_map"),
        ("linear_tokens", FILLS, "linear_tokens"),
        ("prototype_slot", at(FILLS, (1, 2), 4), "prototype_slot -1 to 4"),
        ("prototype_slot", at(FILLS, (1, 0), 0), "prototype_slot 0 of a token that does not fill"),
    ],
)
def test_upkeep_that_does_not_fit_is_refused_before_anything_is_written(
    key: str, value: Tensor | Pool | None, named: str, backend: str
) -> None:
    pool = pool_of("bf16", 2, 16)
    k = torch.zeros(2, 3, 16)
    slot, offset = torch.tensor([[0] * 3, [1] * 3], dtype=torch.int32), torch.tensor([13, 14, 15], dtype=torch.int32)
    with pytest.raises(ValueError, match=named):
        append(k, k, slot, offset, pool, Upkeep(**{**arguments(), key: value}), backend)
    assert (whole(pool) == 0xFF).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("state", "tokens", "named"),
    [
        (linear_attention.empty_state(2, 7, 16), None, "linear.s"),
        (linear_attention.empty_state(3, 8, 16), None, "linear.s"),
        (linear_attention.empty_state(2, 8, 16), torch.ones(2, 2, dtype=torch.bool), "linear_tokens"),
    ],
)
def test_a_linear_state_that_does_not_fit_is_refused_before_anything_is_written(
    state: linear_attention.LinearState, tokens: Tensor | None, named: str, backend: str
) -> None:
    pool, k = pool_of("bf16", 2, 16), torch.zeros(2, 3, 16)
    slot, offset = torch.tensor([[0] * 3, [1] * 3], dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    fmap = linear_attention.favor_map(16, 8, 0.25, seed=0)
    upkeep = Upkeep(torch.zeros(3, dtype=torch.int32), linear=state, feature_map=fmap, linear_tokens=tokens)
    with pytest.raises(ValueError, match=named):
        append(k, k, slot, offset, pool, upkeep, backend)
    assert (whole(pool) == 0xFF).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"projection": torch.zeros(3, 8, 16)}, r"projection \(3, 8, 16\): must be \(2, 8, 16\)"),
        ({"projection": torch.zeros(8, 24)}, r"projection \(8, 24\)"),
        ({"centre": torch.zeros(3, 16)}, r"centre \(3, 16\): must be \(2, 16\)"),
        ({"centre": torch.zeros(2, 16, device="meta")}, r"centre on meta"),
        ({"log2_offset": torch.zeros(3)}, r"log2_offset \(3,\): must be \(2,\)"),
    ],
)
def test_a_feature_map_of_other_streams_is_refused_before_anything_is_written(
    change: dict[str, Tensor], named: str, backend: str
) -> None:
    pool, k = pool_of("bf16", 2, 16), torch.zeros(2, 3, 16)
    slot, offset = torch.tensor([[0] * 3, [1] * 3], dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    fmap = replace(linear_attention.favor_map(16, 8, 0.25, seed=0), **change)
    state = linear_attention.empty_state(2, 8, 16)
    upkeep = Upkeep(torch.zeros(3, dtype=torch.int32), linear=state, feature_map=fmap)
    with pytest.raises(ValueError, match=named):
        append(k, k, slot, offset, pool, upkeep, backend)
    assert (whole(pool) == 0xFF).all()
    assert not state.tokens.any()
