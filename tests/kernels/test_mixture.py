"""Mixtures: one softmax over pages, prototypes, background and linear states, against that softmax in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import Case, make_case
from torch import Tensor

import kernels.api
from kernels import linear_attention
from kernels.api import PageTable, Pool
from kernels.linear_attention import FeatureMap, add, anchor_map, elu_map, empty_state, favor_map
from kernels.mixture import attend_mixture, check_once
from kernels.pages import decode, page_format, views
from kernels.prototypes import encode_prototypes
from kernels.state import Partial

SCALE = 0.125
LN2 = math.log(2)


def with_background(case: Case, seed: int) -> Case:
    """The case with a background entry at the end of each stream's table, at page 0 like the cache's own."""
    streams, head_dim = len(case.lengths), case.q.shape[3]
    rng = torch.Generator().manual_seed(seed)
    fmt = page_format("proto", case.pools[0].fmt.page_tokens, head_dim, 1)
    k, v = (torch.randn(streams, 1, head_dim, generator=rng) for _ in range(2))
    blobs = encode_prototypes(fmt, k, v, torch.full((streams, 1), 7.5))
    t = case.table
    pool, slot, page = (torch.nn.functional.pad(x, (0, 1)) for x in (t.pool, t.slot, t.page))
    rows, at = torch.arange(streams), t.count.long()
    pool[rows, at], slot[rows, at], page[rows, at] = len(case.pools), rows.int(), 0
    return replace(case, table=PageTable(pool, slot, page, t.count + 1), pools=(*case.pools, Pool(fmt, (blobs,))))


def plain(case: Case, tokens: list[tuple[FeatureMap, Tensor, Tensor]], s: int, row: tuple[int, int]) -> tuple:
    """Output, lse and mass (by entry, then by linear part) of one row by one float64 softmax over all there is."""
    g, t = row
    q, own = case.q[s, g, t].double(), int(case.first_position[s]) + t
    logits, values, owner = [], [], []
    width = case.table.pool.shape[1]
    for n in range(int(case.table.count[s])):
        pool = case.pools[int(case.table.pool[s, n])]
        slot, page = int(case.table.slot[s, n]), int(case.table.page[s, n])
        blob = pool.slabs[slot // pool.slab_pages][slot % pool.slab_pages][None]
        k, v = (x[0] for x in decode(pool.fmt, blob, torch.float64))
        bias = torch.zeros(len(k), dtype=torch.float64)
        if pool.fmt.name == "proto":
            bias = views(pool.fmt, blob)["log2_count"][0].double() * LN2
        else:
            seen = page * pool.fmt.page_tokens + torch.arange(len(k)) <= own
            k, v, bias = k[seen], v[seen], bias[seen]
        logits.append(k @ q * SCALE + bias)
        values.append(v)
        owner += [n] * len(k)
    for i, (fmap, k, v) in enumerate(tokens):
        exponent, offset = linear_attention.query_exponents(fmap, case.q[:, g, t, None].double())
        keys = linear_attention.key_exponents(fmap, k.double())
        logits.append((((exponent + keys)[s] * LN2).logsumexp(1)) + offset[s, 0] * LN2)
        values.append(v[s].double())
        owner += [width + i] * k.shape[1]
    logit = torch.cat(logits)
    weight = logit.softmax(0)
    mass = torch.zeros(width + len(tokens), dtype=torch.float64).index_add_(0, torch.tensor(owner), weight)
    return weight @ torch.cat(values), logit.logsumexp(0) / LN2, mass


def linear_parts(case: Case, seed: int, names: list[str]) -> list[tuple[FeatureMap, Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    streams, head_dim = len(case.lengths), case.q.shape[3]
    parts = []
    for name in names:
        k, v = (torch.randn(streams, 30, head_dim, generator=rng) for _ in range(2))
        if name == "favor":
            fmap = favor_map(head_dim, 24, SCALE, seed=seed, centre=k.mean(1))
        else:
            fmap = elu_map(SCALE) if name == "elu" else anchor_map(k, 10, SCALE)
        parts.append((fmap, k, v))
    return parts


def extras(case: Case, tokens: list[tuple[FeatureMap, Tensor, Tensor]]) -> list[Partial]:
    parts = []
    for fmap, k, v in tokens:
        state = empty_state(len(k), fmap.features(k.shape[2]), v.shape[2])
        add(state, fmap, k, v)
        parts.append(linear_attention.attend(case.q, state, fmap))
    return parts


def mixture(case: Case, extra: list[Partial], backend: str, **options: object) -> Partial:
    """`attend_mixture` of a case."""
    arguments = {"scale": SCALE, "backend": backend, "want_mass": True, **options}
    return attend_mixture(case.q, case.table, case.pools, case.first_position, extra, **arguments)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    formats=st.lists(st.sampled_from(["int8", "int4", "proto", "bf16"]), max_size=3, unique=True),
    names=st.lists(st.sampled_from(["favor", "elu", "anchors"]), max_size=2),
    lengths=st.lists(st.integers(2, 120), min_size=1, max_size=3),
    tokens=st.sampled_from([1, 2]),
    background=st.booleans(),
)
def test_a_mixture_is_one_softmax_over_everything(
    seed: int, formats: list[str], names: list[str], lengths: list[int], tokens: int, background: bool
) -> None:
    case = make_case(seed, ("fp32", *formats), tuple(lengths), tokens=tokens, group=2)
    case = with_background(case, seed) if background else case
    linear = linear_parts(case, seed, names)
    for backend in ("cpu", "torch"):
        got = mixture(case, extras(case, linear), backend)
        assert got.mass is not None
        assert got.mass.shape == (len(lengths), case.table.pool.shape[1] + len(names))
        for s in range(len(lengths)):
            rows = [(g, t) for g in range(2) for t in range(tokens)]
            masses = []
            for g, t in rows:
                out, lse, mass = plain(case, linear, s, (g, t))
                assert (got.out[s, g, t] - out).abs().max() <= 2e-5 * out.abs().max()
                assert (got.lse[s, g, t] - lse).abs() <= 1e-5 * (1 + lse.abs())
                masses.append(mass)
            assert (got.mass[s] - torch.stack(masses).mean(0)).abs().max() < 1e-5
        assert torch.allclose(got.mass.sum(1), torch.ones(len(lengths)), atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_mass_is_not_asked_for_at_a_price(backend: str) -> None:
    """The result is the same with and without mass, and without extra parts it is attend's own."""
    case = make_case(3, ("fp32", "int4"), (0, 40, 200), tokens=2, group=2)
    extra = extras(case, linear_parts(case, 3, ["favor"]))
    window = torch.tensor([0, 17, 60], dtype=torch.int32)
    slopes = torch.linspace(0.01, 0.1, 6).view(3, 2)
    options = {"window_tokens": window, "slopes": slopes, "sink_tokens": 3}
    one, other = (mixture(case, extra, backend, want_mass=w, **options) for w in (True, False))
    assert other.mass is None
    assert torch.allclose(one.out, other.out, atol=1e-5)
    assert torch.allclose(one.lse, other.lse, atol=1e-5)
    alone, want = mixture(case, [], backend, **options), case.run(backend, want_mass=True, **options)
    assert torch.equal(alone.out, want.out)
    assert torch.equal(alone.lse, want.lse)
    assert alone.mass is not None
    assert want.mass is not None
    assert torch.allclose(alone.mass, want.mass)
    assert not alone.mass[0].any()


def test_what_is_empty_has_no_mass() -> None:
    case = make_case(4, ("fp32",), (0, 30))
    state = empty_state(2, 8, 64)
    fmap = favor_map(64, 8, SCALE, seed=0)
    k = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0)).expand(2, 5, 64)
    nothing = mixture(case, [linear_attention.attend(case.q, state, fmap)], "cpu")
    assert nothing.mass is not None
    assert not nothing.mass[0].any()
    assert (nothing.lse[0] == -math.inf).all()
    assert torch.equal(nothing.out, case.run("cpu").out)
    add(state, fmap, k, k)
    got = mixture(case, [linear_attention.attend(case.q, state, fmap)], "cpu")
    assert got.mass is not None
    assert torch.allclose(got.mass.sum(1), torch.ones(2), atol=1e-6)
    assert got.mass[0, -1] == 1
    case.q[1, 0, 0, 0] = torch.nan
    spoiled = mixture(case, [linear_attention.attend(case.q, state, fmap)], "cpu")
    assert spoiled.out[1, 0].isnan().all()
    assert torch.equal(spoiled.out[1, 1:], got.out[1, 1:])


def test_a_page_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = with_background(make_case(5, ("fp32", "int8"), (64, 90)), 5)
    background = len(case.pools) - 1
    check_once(case.table, [background])
    with pytest.raises(ValueError, match="page=0 of stream 0 is listed twice"):
        check_once(case.table)
    twice = case.table.page.clone()
    twice[1, 0] = twice[1, 2]
    table = replace(case.table, page=twice)
    monkeypatch.setattr(kernels.api, "DEBUG", True)
    with pytest.raises(ValueError, match=f"page={int(twice[1, 2])} of stream 1 is listed twice"):
        mixture(replace(case, table=table), [], "torch", background_pools=[background])
    mixture(case, [], "torch", background_pools=[background])
    check_once(replace(table, count=torch.zeros_like(table.count)))


def test_bad_extra_parts_are_named() -> None:
    case = make_case(6, ("fp32",), (30, 40))
    short = Partial(case.q[:, :1], case.q[:, :1, :, 0])
    with pytest.raises(ValueError, match=r"extra\[1\]"):
        mixture(case, [Partial(case.q, case.q[..., 0]), short], "cpu")
