"""Linear states against softmax over the features' own products in float64, and the maps against their definitions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.linear_attention import (
    FeatureMap,
    LinearState,
    add,
    anchor_map,
    attend,
    elu_map,
    empty_state,
    favor_map,
    fit_offset,
    merge_states,
    reference,
    remove,
)
from kernels.state import Partial, merge

SCALE = 0.25
NAMES = ("favor", "anchors", "elu")


def tokens_of(seed: int, streams: int, tokens: int, head_dim: int, loud: float = 1.0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(streams, tokens, head_dim, generator=rng) for _ in range(2))
    return loud * k, v


def queries(seed: int, streams: int, head_dim: int, group: int = 3, tokens: int = 2) -> Tensor:
    return torch.randn(streams, group, tokens, head_dim, generator=torch.Generator().manual_seed(1000 + seed))


def make_map(name: str, k: Tensor, features: int, centred: bool = False) -> FeatureMap:
    centre = k.mean(1) if centred else None
    if name == "favor":
        return favor_map(k.shape[2], features, SCALE, seed=7, centre=centre)
    if name == "anchors":
        return replace(anchor_map(k, features, SCALE), centre=centre)
    return replace(elu_map(SCALE, torch.linspace(-2, 3, len(k))), centre=centre)


def state_of(fmap: FeatureMap, k: Tensor, v: Tensor, valid: Tensor | None = None) -> LinearState:
    state = empty_state(len(k), fmap.features(k.shape[2]), v.shape[2])
    add(state, fmap, k, v, valid)
    return state


def assert_close(got: Partial, want: Partial, tolerance: float = 1e-5) -> None:
    assert got.out.dtype == got.lse.dtype == torch.float32
    assert torch.equal(got.lse.isinf(), want.lse.isinf())
    seen = ~want.lse.isinf()
    assert torch.isfinite(got.out).all()
    assert (got.out - want.out).abs().max() <= tolerance * want.out.abs().max().clamp(min=1e-3)
    assert ((got.lse - want.lse)[seen].abs() <= tolerance * (10 + want.lse[seen].abs())).all()


def log2_products(fmap: FeatureMap, q: Tensor, k: Tensor) -> Tensor:
    """Log2 of phi_q(q) . phi_k(k) in float64, straight from the papers' formulas; q [R, D], k [n, D] of stream 0."""
    q, k = q.double(), k.double()
    shift = torch.zeros(len(q), 1, dtype=torch.float64)
    if fmap.centre is not None:
        shift = fmap.scale * (q @ fmap.centre[0].double())[:, None]
        k = k - fmap.centre[0].double()
    if fmap.log2_offset is not None:
        shift = shift + float(fmap.log2_offset[0]) * math.log(2)
    root = math.sqrt(fmap.scale)
    if fmap.name == "elu":
        phi_q, phi_k = (torch.nn.functional.elu(root * x) + 1 for x in (q, k))
    elif fmap.name == "favor":
        assert fmap.projection is not None
        w = fmap.projection.double()
        phi_q, phi_k = (
            (root * x @ w.T - root**2 * x.square().sum(1, keepdim=True) / 2).exp() / math.sqrt(len(w)) for x in (q, k)
        )
    else:
        assert fmap.projection is not None
        anchors = fmap.projection[0].double()
        phi_q = (fmap.scale * q @ anchors.T).exp()
        phi_k = (-fmap.scale * (k[:, None] - anchors).square().sum(2)).softmax(1)
    return ((phi_q @ phi_k.T).log() + shift) / math.log(2)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_reference_is_softmax_over_the_maps_own_products(name: str, centred: bool) -> None:
    k, v = tokens_of(0, 1, 9, 16)
    q = queries(0, 1, 16)
    fmap = make_map(name, k, 5, centred)
    logit = log2_products(fmap, q[0].flatten(0, 1), k[0]) * math.log(2)
    got = reference(q, k, v, fmap)
    assert torch.allclose(got.out[0].flatten(0, 1), logit.softmax(1) @ v[0].double(), atol=1e-6)
    assert torch.allclose(got.lse.flatten(), logit.logsumexp(1) / math.log(2), atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from(NAMES),
    head_dim=st.sampled_from([8, 40, 64]),
    features=st.integers(1, 70),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    loud=st.sampled_from([0.1, 1.0, 6.0]),
    centred=st.booleans(),
)
def test_a_state_built_in_any_steps_matches_the_reference(
    seed: int, name: str, head_dim: int, features: int, cuts: list[int], loud: float, centred: bool
) -> None:
    k, v = tokens_of(seed, 3, 40, head_dim, loud)
    valid = torch.rand(3, 40, generator=torch.Generator().manual_seed(seed)) < 0.7
    valid[2] = seed % 2 == 0
    fmap = make_map(name, k, features, centred)
    q = queries(seed, 3, head_dim)
    want = reference(q, k, v, fmap, valid)
    bad_k, bad_v = (torch.where(valid[..., None], x, torch.nan) for x in (k, v))
    state = empty_state(3, fmap.features(head_dim), head_dim)
    edges = [0, *sorted(cuts), 40]
    for a, b in zip(edges, edges[1:], strict=False):
        add(state, fmap, bad_k[:, a:b], bad_v[:, a:b], valid[:, a:b])
    assert_close(attend(q, state, fmap), want, 3e-5)
    assert state.tokens.tolist() == valid.sum(1).tolist()
    halves = [state_of(fmap, bad_k[:, c], bad_v[:, c], valid[:, c]) for c in (slice(0, 13), slice(13, 40))]
    assert_close(attend(q, merge_states(*halves), fmap), want, 3e-5)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_eighty_neither_overflow_nor_vanish(name: str) -> None:
    """Keys and queries so large that |scale q . k| passes 80, and a first token 160 above the rest."""
    k, v = tokens_of(1, 4, 30, 16)
    q = queries(1, 4, 16)
    k, q = (x / x.norm(dim=-1, keepdim=True) for x in (k, q))
    k, q = k * 18, q * 18 * 80 / (SCALE * 18 * 18)
    k[0, 0], k[1, -1] = q[0, 0, 0] * 18 / q[0, 0, 0].norm(), -q[1, 0, 0] * 18 / q[1, 0, 0].norm()
    assert float((q[0, 0, 0] @ k[0, 0]) * SCALE) > 79
    fmap = make_map(name, k, 64)
    state = empty_state(4, fmap.features(16), 16)
    for t in range(30):
        add(state, fmap, k[:, t : t + 1], v[:, t : t + 1])
    got, want = attend(q, state, fmap), reference(q, k, v, fmap)
    assert torch.isfinite(got.lse).all()
    assert_close(got, want, 1e-4)
    assert (state.z.amax(1) >= 1).all()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from(NAMES),
    loud=st.sampled_from([0.3, 1.0, 3.0]),
    order=st.permutations(range(6)),
)
def test_removing_pages_leaves_the_rest(seed: int, name: str, loud: float, order: list[int]) -> None:
    k, v = tokens_of(seed, 2, 6 * 16, 24, loud)
    fmap = make_map(name, k, 20)
    q = queries(seed, 2, 24)
    state = state_of(fmap, k, v)
    pages = [slice(16 * n, 16 * n + 16) for n in range(6)]
    for gone in range(1, 7):
        page = pages[order[gone - 1]]
        remove(state, fmap, k[:, page], v[:, page])
        assert (state.z >= 0).all()
        left = [pages[n] for n in order[gone:]]
        if left:
            rest_k, rest_v = (torch.cat([x[:, p] for p in left], 1) for x in (k, v))
            got, want = attend(q, state, fmap), reference(q, rest_k, rest_v, fmap)
            assert not got.out.isnan().any()
            if loud < 3:  # so that no page holds nearly all the mass of a feature
                assert_close(got, want, 2e-3)
    assert not state.s.any()
    assert not state.z.any()
    assert (attend(q, state, fmap).lse == -math.inf).all()


def test_what_rounding_leaves_is_emptied_not_answered() -> None:
    """A token 2^30 times heavier than the other hides it; once it leaves, nothing may be made up in its place."""
    fmap = FeatureMap("favor", 1.0, torch.tensor([[1.0]]))
    k = torch.tensor([[[-20.0], [1.0]]])
    v = torch.tensor([[[5.0], [1.0]]])
    state = state_of(fmap, k, v)
    remove(state, fmap, k[:, 1:], v[:, 1:])
    got = attend(torch.ones(1, 1, 1, 1), state, fmap)
    assert state.tokens.tolist() == [1]
    assert got.lse == -math.inf
    assert got.out == 0
    add(state, fmap, k[:, :1], v[:, :1])
    assert_close(
        attend(torch.ones(1, 1, 1, 1), state, fmap), reference(torch.ones(1, 1, 1, 1), k[:, :1], v[:, :1], fmap)
    )


def test_favor_is_unbiased_and_nears_softmax_with_more_features() -> None:
    k, v = tokens_of(3, 1, 50, 16, loud=0.7)
    q = queries(3, 1, 16) * 0.7
    logit = q.double() @ k.double().transpose(1, 2) * SCALE
    want = logit.softmax(-1) @ v.double()
    errors = []
    for features in (16, 256, 16384):
        got = reference(q, k, v, favor_map(16, features, SCALE, seed=1))
        errors.append(float((got.out - want).norm() / want.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1
    assert (got.lse - logit.logsumexp(-1) / math.log(2)).abs().max() < 0.2
    directions = favor_map(16, 16, SCALE, seed=1).projection
    assert directions is not None
    gram = torch.nn.functional.normalize(directions, dim=1) @ torch.nn.functional.normalize(directions, dim=1).T
    assert torch.allclose(gram, torch.eye(16), atol=1e-5)
    again, other = favor_map(16, 16, SCALE, seed=1).projection, favor_map(16, 16, SCALE, seed=2).projection
    assert again is not None
    assert other is not None
    assert torch.equal(again, directions)
    assert not torch.equal(other, directions)


def test_taking_the_mean_key_off_helps_favor() -> None:
    k, v = tokens_of(4, 2, 80, 16, loud=0.7)
    k = k + 4 * torch.randn(16, generator=torch.Generator().manual_seed(0))
    q = queries(4, 2, 16)
    want = (q @ k[:, None].transpose(2, 3) * SCALE).softmax(-1) @ v[:, None]
    errors = [
        (reference(q, k, v, favor_map(16, 256, SCALE, seed=1, centre=centre)).out - want).norm()
        for centre in (None, k.mean(1))
    ]
    assert errors[1] < 0.5 * errors[0]


def test_an_anchor_on_every_kind_of_key_is_exact() -> None:
    rng = torch.Generator().manual_seed(5)
    kinds = torch.randn(2, 6, 16, generator=rng) * 6
    k = kinds[:, torch.arange(60) % 6]
    v = torch.randn(2, 60, 16, generator=rng)
    q = queries(5, 2, 16)
    logit = q.double() @ k.double()[:, None].transpose(2, 3) * SCALE
    want = Partial(logit.softmax(-1) @ v.double()[:, None], logit.logsumexp(-1) / math.log(2))
    fmap = anchor_map(k, 6, SCALE)
    assert_close(attend(q, state_of(fmap, k, v), fmap), want, 1e-4)


def test_more_anchors_attend_better() -> None:
    k, v = tokens_of(6, 4, 200, 16)
    q = queries(6, 4, 16)
    want = (q @ k[:, None].transpose(2, 3) * SCALE).softmax(-1) @ v[:, None]
    errors = [(reference(q, k, v, anchor_map(k, f, SCALE)).out - want).norm() for f in (1, 20, 200)]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.5 * errors[0]


def test_an_offset_makes_elu_merge_at_the_right_weight() -> None:
    k, v = tokens_of(7, 3, 64, 16)
    q = queries(7, 3, 16, group=4, tokens=8)
    exact = (q.double() @ k.double()[:, None].transpose(2, 3) * SCALE).logsumexp(-1) / math.log(2)
    fmap = elu_map(SCALE)
    state = state_of(fmap, k, v)
    fitted = fit_offset(fmap, state, q, exact)
    assert (attend(q, state, fitted).lse - exact).mean((1, 2)).abs().max() < 1e-5
    assert (attend(q, state, fmap).lse - exact).mean((1, 2)).abs().max() > 1
    weight = torch.zeros(3, 4, 8)
    weight[:, 2, 5] = 1
    one = fit_offset(fitted, state, q, exact, weight)
    assert (attend(q, state, one).lse - exact)[:, 2, 5].abs().max() < 1e-5
    hollow = fit_offset(fmap, empty_state(3, 16, 16), q, exact)
    assert hollow.log2_offset is not None
    assert not hollow.log2_offset.any()


def test_a_state_merges_with_softmax_over_other_keys() -> None:
    k, v = tokens_of(8, 2, 40, 16)
    q = queries(8, 2, 16)
    fmap = make_map("favor", k, 32)
    logit = q.double() @ k.double()[:, None, :20].transpose(2, 3) * SCALE
    softmax = Partial(logit.softmax(-1) @ v.double()[:, None, :20], logit.logsumexp(-1) / math.log(2))
    for s in range(2):
        products = log2_products(fmap, q[s].flatten(0, 1), k[s, 20:]) * math.log(2)
        joint = torch.cat((logit[s].flatten(0, 1), products), 1)
        got = merge([softmax, attend(q, state_of(fmap, k[:, 20:], v[:, 20:]), fmap)])
        assert torch.allclose(got.out[s].flatten(0, 1).double(), joint.softmax(1) @ v[s].double(), atol=1e-5)
        assert torch.allclose(got.lse[s].flatten().double(), joint.logsumexp(1) / math.log(2), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_query_spoils_its_own_row_only(name: str) -> None:
    k, v = tokens_of(9, 2, 20, 16)
    q = queries(9, 2, 16)
    fmap = make_map(name, k, 8)
    state = state_of(fmap, k, v)
    clean = attend(q, state, fmap)
    q[1, 2, 0, 3] = torch.nan
    got = attend(q, state, fmap)
    assert got.out[1, 2, 0].isnan().all()
    assert got.lse[1, 2, 0].isnan()
    got.out[1, 2, 0], got.lse[1, 2, 0] = clean.out[1, 2, 0], clean.lse[1, 2, 0]
    assert torch.equal(got.out, clean.out)
    assert torch.equal(got.lse, clean.lse)


def test_an_empty_state_gives_nothing_and_half_queries_are_taken() -> None:
    fmap = favor_map(16, 8, SCALE, seed=0)
    state = empty_state(2, 8, 16)
    k, v = tokens_of(10, 2, 0, 16)
    add(state, fmap, k, v)
    got = attend(queries(10, 2, 16), state, fmap)
    assert not got.out.any()
    assert (got.lse == -math.inf).all()
    k, v = tokens_of(10, 2, 5, 16)
    add(state, fmap, k, v)
    half = queries(10, 2, 16).bfloat16()
    assert torch.equal(attend(half, state, fmap).out, attend(half.float(), state, fmap).out)
    assert state.bytes == 2 * (8 * 16 + 3 * 8 + 1) * 4


def test_bad_linear_arguments_are_named() -> None:
    k, v = tokens_of(11, 2, 5, 16)
    fmap = favor_map(16, 8, SCALE, seed=0)
    state = empty_state(2, 8, 16)
    with pytest.raises(ValueError, match="name='exp'.*favor, anchors, elu"):
        FeatureMap("exp", 1.0)
    with pytest.raises(ValueError, match="projection"):
        FeatureMap("favor", 1.0)
    with pytest.raises(ValueError, match="scale=0"):
        elu_map(0)
    with pytest.raises(ValueError, match="linear state z"):
        replace(state, z=state.z[:, :3])
    with pytest.raises(ValueError, match="linear state tokens"):
        replace(state, tokens=state.tokens.long())
    with pytest.raises(ValueError, match=r"k \(1, 5, 16\)"):
        add(state, fmap, k[:1], v[:1])
    with pytest.raises(ValueError, match="valid"):
        remove(state, fmap, k, v, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="F=8"):
        add(state, elu_map(SCALE), k, v)
    with pytest.raises(ValueError, match="linear attention"):
        attend(torch.zeros(2, 1, 1, 24), state, elu_map(SCALE))
    with pytest.raises(ValueError, match="one shape"):
        merge_states(state, empty_state(3, 8, 16))


def test_removing_more_than_is_held_changes_nothing_and_no_graph_is_kept() -> None:
    k, v = tokens_of(12, 2, 5, 16)
    fmap, state = elu_map(SCALE), empty_state(2, 16, 16)
    add(state, fmap, k.requires_grad_(), v)
    assert not state.s.requires_grad
    assert not merge_states(state, state).s.requires_grad
    before = [x.clone() for x in (state.s, state.z, state.log2_scale, state.peak, state.tokens)]
    more = torch.zeros(2, 6, 16)
    with pytest.raises(ValueError, match="remove of 6 tokens from stream 1: must be at most the 5 it holds"):
        remove(state, fmap, more, more, torch.tensor([[True] * 5 + [False], [True] * 6]))
    for old, new in zip(before, (state.s, state.z, state.log2_scale, state.peak, state.tokens), strict=True):
        assert torch.equal(old, new)
    remove(state, fmap, k, v)
    assert not state.tokens.any()
    assert not state.s.any()
