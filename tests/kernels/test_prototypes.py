"""Prototypes: exact with as many groups as tokens, means and counts of their groups, better with more."""

from __future__ import annotations

import pytest
import torch
from test_pages import keys

from kernels.prototypes import make_prototypes


def test_prototypes_are_the_means_of_their_groups() -> None:
    """Two far clusters must be found whatever the tokens' order, and their means and counts be exact."""
    rng = torch.Generator().manual_seed(0)
    centres = torch.randn(50, 2, 64, generator=rng) * 10
    first = torch.stack([torch.randperm(16, generator=rng) < 5 for _ in range(50)])
    k = torch.where(first[..., None], centres[:, :1], centres[:, 1:]) + 0.01 * torch.randn(50, 16, 64, generator=rng)
    v = torch.randn(50, 16, 64, generator=rng)
    mean_k, mean_v, log2_count = make_prototypes(k, v, 2)
    for m in range(50):
        sizes = log2_count[m].exp2()
        small = int(sizes.argmin())
        assert sizes[small].round() == 5
        assert torch.allclose(mean_k[m, small], k[m, first[m]].mean(0), atol=1e-4)
        assert torch.allclose(mean_v[m, small], v[m, first[m]].mean(0), atol=1e-5)
        assert torch.allclose(mean_v[m, 1 - small], v[m, ~first[m]].mean(0), atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7])
def test_prototypes_count_valid_tokens_only(groups: int) -> None:
    k, v = keys(30, 16, 64), keys(30, 16, 64, 1)
    valid = torch.arange(16) < torch.arange(30)[:, None] % 17
    k[~valid], v[~valid] = float("nan"), float("nan")
    mean_k, mean_v, log2_count = make_prototypes(k, v, groups, valid)
    weight = log2_count.exp2()
    assert torch.allclose(weight.sum(1), valid.sum(1).float())
    assert torch.isfinite(mean_k).all()
    total = torch.where(valid[..., None], v, 0).sum(1)
    assert torch.allclose((mean_v * weight[..., None]).sum(1), total, atol=1e-3)
    again = make_prototypes(k, v, groups, valid)
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
