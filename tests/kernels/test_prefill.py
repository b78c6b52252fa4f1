"""Chunked attention and page mass against plain float64 softmax."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.prefill import chunk_attention, page_mass
from kernels.scoring import page_bounds, query_bound


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, slopes: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse base 2, softmax [Hq, T, Tk], all float64."""
    group, length, tokens = q.shape[0] // k.shape[0], k.shape[1], q.shape[1]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    logit = q.double() @ k.transpose(1, 2) * scale
    position, own = torch.arange(length), torch.arange(length - tokens, length)[:, None]
    if slopes is not None:
        logit = logit + slopes.double()[:, None, None] * position
    hidden = (position > own) | (position <= own - window if window else torch.tensor(False))
    logit = logit.masked_fill(hidden, -math.inf)
    return logit.softmax(2) @ v, logit.logsumexp(2) / math.log(2), logit.softmax(2)


def inputs(heads: int, kv_heads: int, tokens: int, length: int, head_dim: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(tokens + length)
    shapes = [(heads, tokens, head_dim), (kv_heads, length, head_dim), (kv_heads, length, head_dim)]
    return [torch.randn(shape, generator=rng) * 1.5 for shape in shapes]


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("window", [0, 1, 40, 1000])
@pytest.mark.parametrize(("tokens", "length"), [(1, 1), (1, 300), (64, 64), (70, 301)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (8, 1, 256)])
def test_chunk_matches_plain_softmax(
    heads: int, kv_heads: int, head_dim: int, tokens: int, length: int, window: int, alibi: bool
) -> None:
    q, k, v = inputs(heads, kv_heads, tokens, length, head_dim)
    slopes = torch.linspace(0.01, 1, heads) if alibi else None
    scale = head_dim**-0.5
    want_out, want_lse, weight = plain(q, k, v, scale, window, slopes)
    out, lse = chunk_attention(q, k, v, scale, window, slopes)
    assert (out - want_out).abs().max() < 1e-5
    assert ((lse - want_lse).abs() < 1e-5 * (1 + want_lse.abs())).all()
    padded = torch.nn.functional.pad(weight, (0, -length % 16)).view(kv_heads, heads // kv_heads, tokens, -1, 16)
    by_page = padded.sum((2, 4))
    mean, most = page_mass(q, lse, k, 16, scale, window, slopes)
    tolerance = 1e-4 if alibi else 1e-5
    assert (mean - by_page.mean(1)).abs().max() < tolerance * tokens
    assert (most - by_page.amax(1)).abs().max() < tolerance * tokens
    assert torch.allclose(mean.sum(1), torch.full((kv_heads,), float(tokens)), rtol=1e-3)


def test_chunks_of_a_sequence_equal_the_whole() -> None:
    q, k, v = inputs(6, 2, 200, 200, 64)
    whole = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
    parts = [chunk_attention(q[:, i : i + 64], k[:, : i + 64], v[:, : i + 64], 0.125)[0] for i in range(0, 200, 64)]
    assert torch.allclose(torch.cat(parts, 1), whole[0], atol=1e-5)


def test_strided_inputs_and_half_precision() -> None:
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs(6, 2, 30, 90, 64))
    want = plain(q, k, v, 0.125, 0, None)[0]
    assert (chunk_attention(q, k, v, 0.125)[0] - want).abs().max() < 1e-5
    half = chunk_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), 0.125)[0]
    assert half.dtype == torch.bfloat16
    assert (half - want).norm() < 2e-2 * want.norm()


def test_bad_shapes_are_named() -> None:
    q, k, v = inputs(4, 3, 5, 9, 64)
    with pytest.raises(ValueError, match="multiple of Hk"):
        chunk_attention(q, k, v, 1.0)
    with pytest.raises(ValueError, match="T <= Tk"):
        chunk_attention(q[:3], k[:, :4], v[:, :4], 1.0)


def test_query_bound_is_the_channelwise_maximum_and_never_too_low() -> None:
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(3, 2, 4, 64, generator=rng), torch.randn(3, 7, 16, 64, generator=rng)
    bounds = [page_bounds(x) for x in k]
    lowest, highest = torch.stack([b[0] for b in bounds]), torch.stack([b[1] for b in bounds])
    got = query_bound(q, lowest, highest)
    for s in range(3):
        for n in range(7):
            rows = q[s].flatten(0, 1)
            by_channel = torch.maximum(rows * lowest[s, n], rows * highest[s, n]).sum(1)
            assert torch.allclose(got[s, n], by_channel.max(), atol=1e-4)
            assert got[s, n] >= (rows @ k[s, n].T).max() - 1e-4
    with pytest.raises(ValueError, match="query_bound"):
        query_bound(q, lowest[:2], highest[:2])


def test_page_bounds_leave_out_what_is_not_valid() -> None:
    k = torch.arange(32.0).view(2, 16, 1).expand(-1, -1, 8).clone()
    valid = torch.arange(16) < torch.tensor([[5], [0]])
    k[~valid] = float("nan")
    lowest, highest = page_bounds(k, valid)
    assert (lowest[0] == 0).all()
    assert (highest[0] == 4).all()
    assert not lowest[1].any()
    assert not highest[1].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunk_on_a_gpu(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in inputs(8, 2, 70, 500, 128))
    want_out, want_lse, _ = plain(q, k, v, 0.1, 0, None)
    out, lse = chunk_attention(q.cuda(), k.cuda(), v.cuda(), 0.1)
    assert (out.cpu() - want_out).norm() < (1e-3 if dtype == torch.float32 else 2e-2) * want_out.norm()
    assert (lse.cpu() - want_lse).abs().max() < 2e-2
