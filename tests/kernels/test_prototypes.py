"""Prototypes: exact with as many groups as tokens, means and counts of their groups, better with more."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pages import keys
from torch import Tensor

from kernels.api import PageTable, Pool, attend
from kernels.pages import encode, page_format, views
from kernels.prototypes import GREEDY_SPREAD, KMEANS_ROUNDS, METHODS, encode_prototypes, join_pages, make_prototypes


def clustered(pages: int, tokens: int, head_dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys of a few kinds a page around a common mean, and values that go with the kind, as real ones do."""
    rng = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 5, (pages, tokens), generator=rng)
    rows = torch.arange(pages)[:, None]
    centre_k, centre_v = (torch.randn(pages, 5, head_dim, generator=rng) for _ in range(2))
    common = 3 * torch.randn(head_dim, generator=rng)
    k = common + 2 * centre_k[rows, kind] + 0.5 * torch.randn(pages, tokens, head_dim, generator=rng)
    return k, centre_v[rows, kind] + 0.3 * torch.randn(pages, tokens, head_dim, generator=rng)


def softmax_output(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Plain float64 attention of q [R, D] over all rows of k, v [M, n, D] with natural-log bias [M, n]."""
    logit = q.double() @ k.double().flatten(0, 1).T / q.shape[1] ** 0.5
    if bias is not None:
        logit = logit + bias.double().flatten()
    return logit.softmax(1) @ v.double().flatten(0, 1)


def error(q: Tensor, k: Tensor, v: Tensor, groups: int, method: str, valid: Tensor | None = None) -> float:
    """Relative error of attention over prototypes."""
    bias = None if valid is None else torch.where(valid, 0.0, -math.inf)
    want = softmax_output(q, k, v, bias)
    mean_k, mean_v, log2_count = make_prototypes(k, v, groups, valid, method)
    got = softmax_output(q, mean_k, mean_v, log2_count * math.log(2))
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 32])
def test_as_many_groups_as_tokens_lose_nothing(method: str, tokens: int) -> None:
    k, v = clustered(20, tokens, 64)
    k[3], k[4, tokens // 2] = k[3, :1], k[4, 0]  # tokens that are alike
    q = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)) * 3
    assert error(q, k, v, tokens, method) < 1e-4  # float32 means of keys with logits of up to 60
    _, _, log2_count = make_prototypes(k[5:], v[5:], tokens, method=method)
    assert not log2_count.any()
    valid = torch.arange(tokens) < torch.arange(20)[:, None] % (tokens + 1)
    assert error(q, k, v, tokens, method, valid) < 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_more_groups_attend_better(method: str) -> None:
    k, v = clustered(40, 16, 64, seed=2)
    q = torch.randn(60, 64, generator=torch.Generator().manual_seed(3)) * 0.7
    errors = [error(q, k, v, groups, method) for groups in (1, 2, 4, 8, 16)]
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < 0.35 * errors[0]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(1, 12),
    groups=st.integers(1, 12),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    keep=st.floats(0.2, 1.0),
)
def test_groups_are_those_of_plain_loops(seed: int, tokens: int, groups: int, spread: float, keep: float) -> None:
    """Greedy and k-means against the textbook, token by token on the keys themselves."""
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(3, tokens, 8, generator=rng) * spread + torch.randn(3, 1, 8, generator=rng)
    valid = torch.rand(3, tokens, generator=rng) < keep
    for method, plain in (("greedy", plain_greedy), ("kmeans", plain_kmeans)):
        mean_k, _, log2_count = make_prototypes(k, k, groups, valid, method)
        for m in range(3):
            # Of two tokens each is as far from their mean as the other, so groups may be numbered either way.
            want = sorted(
                (x for x in plain(k[m][valid[m]].double(), groups) if len(x)), key=lambda x: float(x.mean(0)[0])
            )
            held = log2_count[m] > -math.inf
            order = mean_k[m, held][:, 0].argsort()
            assert [round(float(n)) for n in log2_count[m, held][order].exp2()] == [len(x) for x in want]
            for got, members in zip(mean_k[m, held][order], want, strict=True):
                assert torch.allclose(got.double(), members.mean(0), atol=1e-4)


def plain_greedy(k: Tensor, groups: int) -> list[Tensor]:
    held: list[list[Tensor]] = []
    variance = float((k - k.mean(0)).square().sum(1).mean()) if len(k) else 0.0
    for j, key in enumerate(k):
        distance = [float((torch.stack(g).mean(0) - key).square().sum()) for g in held]
        near = min(range(len(held)), key=distance.__getitem__, default=-1)
        room = len(held) < groups
        if room and (near < 0 or distance[near] > GREEDY_SPREAD * variance or len(held) + len(k) - j <= groups):
            held.append([key])
        else:
            held[near].append(key)
    return [torch.stack(g) for g in held] + [k[:0]] * (groups - len(held))


def plain_kmeans(k: Tensor, groups: int) -> list[Tensor]:
    if not len(k) or groups == 1:
        return [k] + [k[:0]] * (groups - 1)
    leaders = [int((k - k.mean(0)).square().sum(1).argmax())]
    while len(leaders) < groups:
        leaders.append(int(torch.stack([(k - k[i]).square().sum(1) for i in leaders]).amin(0).argmax()))
    means = k[leaders].clone()
    nearest = torch.zeros(len(k), dtype=torch.long)
    for _ in range(KMEANS_ROUNDS):
        nearest = (k[:, None] - means).square().sum(2).argmin(1)
        for c in range(groups):
            if bool((nearest == c).any()):
                means[c] = k[nearest == c].mean(0)
    return [k[nearest == c] for c in range(groups)]


def test_spans_are_pages_joined() -> None:
    x = torch.arange(2 * 5 * 16 * 8, dtype=torch.float32).view(2, 5, 16, 8)
    valid = torch.rand(2, 5, 16, generator=torch.Generator().manual_seed(0)) < 0.8
    joined, counted = join_pages(x, 2, valid)
    assert joined.shape == (6, 32, 8)
    assert torch.equal(joined[1, 16:], x[0, 3])
    assert torch.equal(joined[5, :16], x[1, 4])
    assert torch.equal(counted[4], torch.cat((valid[1, 2], valid[1, 3])))
    assert not counted[[2, 5], 16:].any()
    whole, _ = join_pages(x, 5)
    mean_k, _, log2_count = make_prototypes(joined, joined, 1, counted)
    assert torch.allclose(log2_count.exp2().view(2, 3).sum(1), valid.sum((1, 2)).float())
    assert torch.allclose(mean_k[0, 0], whole[0, :32][valid[0, :2].flatten()].mean(0))


@pytest.mark.parametrize("method", METHODS)
def test_stored_prototypes_attend_as_computed(method: str) -> None:
    """The whole way: group, encode, attend by table, against plain attention over the rounded prototypes."""
    k, v = clustered(6, 16, 64, seed=4)
    fmt = page_format("proto", 16, 64, 4)
    blobs = encode_prototypes(fmt, *make_prototypes(k, v, 4, method=method))
    if method == "greedy":  # the default
        assert torch.equal(blobs, encode(fmt, k, v))
    stored = views(fmt, blobs)
    index = torch.arange(6, dtype=torch.int32)[None]
    table = PageTable(index.to(torch.int8) * 0, index, index, torch.tensor([6], dtype=torch.int32))
    q = torch.randn(1, 3, 1, 64, generator=torch.Generator().manual_seed(5))
    position = torch.tensor([96], dtype=torch.int32)
    got = attend(q, table, (Pool(fmt, (blobs,)),), position, scale=0.125).out[0, :, 0]
    want = softmax_output(q[0, :, 0], stored["k"], stored["v"], stored["log2_count"] * math.log(2))
    assert (got - want).norm() < 1e-5 * want.norm()


def test_bad_prototype_arguments_are_named() -> None:
    k = torch.zeros(2, 16, 8)
    with pytest.raises(ValueError, match="groups=0"):
        make_prototypes(k, k, 0)
    with pytest.raises(ValueError, match="method='median'.*bisect, kmeans, greedy"):
        make_prototypes(k, k, 2, method="median")
    with pytest.raises(ValueError, match=r"valid \(2, 8\)"):
        make_prototypes(k, k, 2, torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="join_pages"):
        join_pages(k, 2)
    fmt, three, two = page_format("proto", 16, 64, 2), torch.zeros(1, 3, 64), torch.zeros(1, 2, 64)
    with pytest.raises(ValueError, match=r"k \(1, 3, 64\)"):
        encode_prototypes(fmt, three, three, torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"log2_count \(1, 3\)"):
        encode_prototypes(fmt, two, two, torch.zeros(1, 3))


@pytest.mark.parametrize("method", METHODS)
def test_prototypes_are_the_means_of_their_groups(method: str) -> None:
    """Two far clusters must be found whatever the tokens' order, and their means and counts be exact."""
    rng = torch.Generator().manual_seed(0)
    centres = torch.randn(50, 2, 64, generator=rng) * 10
    first = torch.stack([torch.randperm(16, generator=rng) < 5 for _ in range(50)])
    k = torch.where(first[..., None], centres[:, :1], centres[:, 1:]) + 0.01 * torch.randn(50, 16, 64, generator=rng)
    v = torch.randn(50, 16, 64, generator=rng)
    mean_k, mean_v, log2_count = make_prototypes(k, v, 2, method=method)
    for m in range(50):
        sizes = log2_count[m].exp2()
        small = int(sizes.argmin())
        assert sizes[small].round() == 5
        assert torch.allclose(mean_k[m, small], k[m, first[m]].mean(0), atol=1e-4)
        assert torch.allclose(mean_v[m, small], v[m, first[m]].mean(0), atol=1e-5)
        assert torch.allclose(mean_v[m, 1 - small], v[m, ~first[m]].mean(0), atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7])
def test_prototypes_count_valid_tokens_only(groups: int, method: str) -> None:
    k, v = keys(30, 16, 64), keys(30, 16, 64, 1)
    valid = torch.arange(16) < torch.arange(30)[:, None] % 17
    k[~valid], v[~valid] = float("nan"), float("nan")
    mean_k, mean_v, log2_count = make_prototypes(k, v, groups, valid, method)
    weight = log2_count.exp2()
    assert torch.allclose(weight.sum(1), valid.sum(1).float())
    assert torch.isfinite(mean_k).all()
    total = torch.where(valid[..., None], v, 0).sum(1)
    assert torch.allclose((mean_v * weight[..., None]).sum(1), total, atol=1e-3)
    again = make_prototypes(k, v, groups, valid, method)
    assert torch.equal(again[0], mean_k)


def test_more_groups_describe_the_keys_better() -> None:
    k, v = keys(100, 16, 64), keys(100, 16, 64, 1)
    spread = []
    for groups in (1, 2, 4, 8):
        mean_k, _, log2_count = make_prototypes(k, v, groups)
        distance = torch.cdist(k, mean_k) + torch.where(log2_count.isinf(), 1e9, 0.0)[:, None]
        spread.append(float(distance.amin(2).square().mean()))
    assert spread == sorted(spread, reverse=True)
    assert spread[2] < 0.8 * spread[0]


def test_alike_tokens_make_one_group() -> None:
    k = torch.ones(1, 16, 64)
    mean_k, _, log2_count = make_prototypes(k, k, 2)
    assert log2_count.exp2().sum() == 16
    assert torch.equal(mean_k[log2_count > -1], torch.ones(int((log2_count > -1).sum()), 64))
