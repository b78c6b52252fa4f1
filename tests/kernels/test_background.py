"""Background states: closed forms, order of the methods on queries they have not seen, edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.background import METHODS, background_error, fit_background

SCALE = 0.125


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Out and base-2 lse in float64."""
    logit = q.double() @ k.double().transpose(1, 2) * SCALE
    return logit.softmax(2) @ v.double(), logit.logsumexp(2) / math.log(2)


def lifelike(seed: int) -> tuple[Tensor, ...]:
    """Queries (past, to come) around a direction of their stream; skipped keys of a few kinds; kept ones like them but
    nearer to the queries, so that about 30 % of the mass is skipped, as on a real model."""
    rng = torch.Generator().manual_seed(seed)
    streams, head_dim = 6, 64

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    mean_q, common = 1.5 * normal(streams, 1, head_dim), 2 * normal(streams, 1, head_dim)
    past, coming = (mean_q + 0.5 * normal(streams, 96, head_dim) for _ in range(2))
    kind = torch.randint(0, 12, (streams, 300), generator=rng)
    rows = torch.arange(streams)[:, None]
    k = common + normal(streams, 12, head_dim)[rows, kind] + 0.7 * normal(streams, 300, head_dim)
    v = normal(streams, 12, head_dim)[rows, kind] + 0.5 * normal(streams, 300, head_dim)
    k[:, :60] += 0.15 * mean_q
    return past, coming, k[:, :60], v[:, :60], k[:, 60:], v[:, 60:]


@pytest.mark.parametrize("seed", [0, 1])
def test_fits_beat_the_plain_mean_on_queries_to_come(seed: int) -> None:
    past, coming, kept_k, kept_v, k, v = lifelike(seed)
    errors = {}
    for method in METHODS:
        state = fit_background(past, k, v, scale=SCALE, method=method, kept=attention(past, kept_k, kept_v))
        wanted = attention(coming, k, v), SCALE, attention(coming, kept_k, kept_v)
        errors[method] = float(background_error(coming, state, *wanted).mean())
    assert errors["gradient"] < 0.9 * errors["closed"]
    assert errors["closed"] < 0.8 * errors["mean"]


def test_error_is_that_of_the_joint_softmax() -> None:
    """Against one softmax over the kept keys and one more with the state's logit."""
    _, coming, kept_k, kept_v, k, v = lifelike(2)
    state = fit_background(coming, k, v, scale=SCALE)
    got = background_error(coming, state, attention(coming, k, v), SCALE, attention(coming, kept_k, kept_v))
    truth = attention(coming, torch.cat((kept_k, k), 1), torch.cat((kept_v, v), 1))[0]
    logit = coming.double() @ torch.cat((kept_k, state[0]), 1).double().transpose(1, 2) * SCALE
    logit[..., -1] += state[2].double() * math.log(2)
    out = logit.softmax(2) @ torch.cat((kept_v, state[1]), 1).double()
    assert torch.allclose(got.double(), (out - truth).norm(dim=2) / truth.norm(dim=2), atol=1e-5)


def test_mean_is_the_mean() -> None:
    _, _, _, _, k, v = lifelike(3)
    valid = torch.rand(k.shape[:2], generator=torch.Generator().manual_seed(0)) < 0.5
    spoiled = [torch.where(valid[..., None], x, torch.nan) for x in (k, v)]
    got_k, got_v, log2_count = fit_background(k[:, :0], *spoiled, scale=SCALE, method="mean", valid=valid)
    for s in range(len(k)):
        assert torch.allclose(got_k[s, 0], k[s][valid[s]].mean(0), atol=1e-5)
        assert torch.allclose(got_v[s, 0], v[s][valid[s]].mean(0), atol=1e-5)
        assert torch.allclose(log2_count[s].exp2(), valid[s].sum().float())


@pytest.mark.parametrize("method", METHODS)
def test_keys_that_are_alike_are_stood_for_exactly(method: str) -> None:
    """Their log-sum-exp is affine in q: q . k + log n; so nothing is lost and nothing is left to gain."""
    past, coming, kept_k, kept_v, k, v = lifelike(4)
    k, v = k[:, :1].expand_as(k), v[:, :1].expand_as(v)
    kept = attention(past, kept_k, kept_v)
    state = fit_background(past, k, v, scale=SCALE, method=method, kept=kept)
    assert torch.allclose(state[0], k[:, :1], atol=1e-3)
    assert torch.allclose(state[1], v[:, :1], atol=1e-3)
    assert torch.allclose(state[2], torch.full_like(state[2], math.log2(240)), atol=1e-3)
    assert (
        background_error(coming, state, attention(coming, k, v), SCALE, attention(coming, kept_k, kept_v)).max() < 1e-3
    )


def test_least_squares_solves_its_normal_equations() -> None:
    """With more queries than unknowns and the ridge counted in, a small change must not fit better."""
    past, _, _, _, k, v = lifelike(5)
    state = fit_background(past, k, v, scale=SCALE)
    lse = attention(past, k, v)[1]
    x = torch.cat((past * SCALE / math.log(2), torch.ones(6, 96, 1)), 2).double()
    ridge = 0.1 * x.square().sum(1)[:, :-1].mean(1)

    def loss(key: Tensor, offset: Tensor) -> Tensor:
        residual = (x @ torch.cat((key, offset[:, None]), 2).double().transpose(1, 2))[..., 0] - lse
        away = (key[:, 0].double() - k.double().mean(1)).square().sum(1)
        return residual.square().sum(1) + ridge * away

    least = loss(state[0], state[2])
    rng = torch.Generator().manual_seed(0)
    for _ in range(5):
        step = 0.05 * torch.randn(6, 1, 64, generator=rng)
        assert (loss(state[0] + step, state[2]) > least).all()
        assert (loss(state[0], state[2] + step[..., 0]) > least).all()


def test_closed_value_is_weighed_by_the_skipped_mass() -> None:
    past, _, kept_k, kept_v, k, v = lifelike(8)
    out, lse = attention(past, k, v)
    kept = attention(past, kept_k, kept_v)
    share = (torch.exp2(lse) / (torch.exp2(lse) + torch.exp2(kept[1])))[..., None]
    want = (share * out).sum(1) / share.sum(1)
    weighed, even = (fit_background(past, k, v, scale=SCALE, kept=given)[1][:, 0].double() for given in (kept, None))
    assert torch.allclose(weighed, want, atol=1e-5)
    assert torch.allclose(even, out.mean(1), atol=1e-5)
    assert (want - out.mean(1)).abs().max() > 1e-3


def test_gradient_is_never_worse_than_its_start_on_the_queries_it_checks() -> None:
    past, _, kept_k, kept_v, k, v = lifelike(6)
    kept, skipped = attention(past, kept_k, kept_v), attention(past, k, v)
    one, other = (
        background_error(
            past, fit_background(past, k, v, scale=SCALE, method=m, kept=kept, steps=60), skipped, SCALE, kept
        )
        for m in ("closed", "gradient")
    )
    checked = torch.arange(96) % 4 == 3
    assert (other[:, checked].square().mean(1) <= one[:, checked].square().mean(1) * (1 + 1e-5)).all()
    assert other[:, ~checked].mean() < one[:, ~checked].mean()
    still = fit_background(past, k, v, scale=SCALE, method="gradient", kept=kept, steps=0)
    closed = fit_background(past, k, v, scale=SCALE, kept=kept)
    assert all(torch.equal(a, b) for a, b in zip(still, closed, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_streams_do_not_depend_on_each_other_and_may_be_empty(method: str) -> None:
    past, _, kept_k, kept_v, k, v = lifelike(7)
    kept = attention(past, kept_k, kept_v)
    valid = torch.ones(k.shape[:2], dtype=torch.bool)
    valid[2] = False
    with torch.inference_mode():  # as within a decode step
        state = fit_background(past, k, v, scale=SCALE, method=method, valid=valid, kept=kept, steps=20)
    assert (state[2][2] == -math.inf).all()
    assert not state[0][2].any()
    assert not state[1][2].any()
    own = slice(4, 5)
    alone = fit_background(
        past[own], k[own], v[own], scale=SCALE, method=method, kept=(kept[0][own], kept[1][own]), steps=20
    )
    for whole, single in zip(state, alone, strict=True):
        assert torch.allclose(whole[own], single, atol=1e-4)
    assert all(torch.isfinite(x[[0, 1, 3, 4, 5]]).all() for x in state)


def test_bad_background_arguments_are_named() -> None:
    q, k = torch.zeros(2, 9, 16), torch.zeros(2, 30, 16)
    with pytest.raises(ValueError, match="method='adam'.*mean, closed, gradient"):
        fit_background(q, k, k, scale=1.0, method="adam")
    with pytest.raises(ValueError, match="kept=None"):
        fit_background(q, k, k, scale=1.0, method="gradient")
    with pytest.raises(ValueError, match="at least 8"):
        fit_background(q[:, :7], k, k, scale=1.0, method="gradient", kept=(q[:, :7], q[:, :7, 0]))
    with pytest.raises(ValueError, match="background q"):
        fit_background(q[:1], k, k, scale=1.0)
    with pytest.raises(ValueError, match="background kept"):
        fit_background(q, k, k, scale=1.0, kept=(q, q))
    with pytest.raises(ValueError, match="valid"):
        fit_background(q, k, k, scale=1.0, valid=torch.ones(2, 3, dtype=torch.bool))
