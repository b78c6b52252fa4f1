"""Learned offsets of the background state: what attention sees, what a file keeps, what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from policies.base import Mode, Plan, Tier
from testbed.cache.layout import CacheConfig
from testbed.cache.offsets import BackgroundOffsets, OffsetsError, packaged
from testbed.cache.paged import PagedCache

L, HK, G, D, P = 2, 2, 2, 16, 16
TOKENS = 160
CONFIG = CacheConfig(dtype="float32", sink_tokens=16, hot_tokens=32, slab_pages=8)


def offsets(seed: int = 1) -> BackgroundOffsets:
    g = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(L * HK, *shape, generator=g) for shape in ((), (), (D,)))
    log2, scale, value = drawn
    return BackgroundOffsets(log2, 1 + 0.3 * scale, value)


def attended(cache: PagedCache, q: torch.Tensor) -> torch.Tensor:
    """Appends a token of zeros and attends: [L, Hk, G, D]."""
    plan = Plan.dense(L, HK, cache.hot.pages(TOKENS + 1))
    hot = cache.hot.mask(TOKENS + 1)
    plan.tier[..., hot] = int(Tier.L0)
    plan.mode[..., 2:7], plan.tier[..., 2:7] = int(Mode.BACKGROUND), int(Tier.L2)
    cache.apply(plan, 1)
    cache.begin(1)
    zeros = torch.zeros(HK, 1, D)
    for layer in range(L):
        cache.append(layer, zeros, zeros)
    return torch.stack(
        [cache.attend(layer, q[layer].unsqueeze(2), 1 / math.sqrt(D)).out[:, :, 0] for layer in range(L)]
    )


def loaded(given: BackgroundOffsets | None, k: torch.Tensor, v: torch.Tensor) -> PagedCache:
    cache = PagedCache(L, HK, D, CONFIG, backend="torch")
    cache.approximations.offsets = given
    plan = Plan.dense(L, HK, TOKENS // P)
    plan.tier[..., cache.hot.mask(TOKENS)] = int(Tier.L0)
    cache.load(list(k), list(v), plan)
    return cache


@pytest.mark.parametrize("given", [None, offsets()])
@pytest.mark.parametrize("forked", [False, True])
def test_attention_with_the_state_is_the_closed_form(given: BackgroundOffsets | None, forked: bool) -> None:
    """Mean key, moved mean value and moved log of the count, as one more key; the bytes are those of no offsets."""
    g = torch.Generator().manual_seed(0)
    k, v = torch.randn(L, HK, TOKENS, D, generator=g), torch.randn(L, HK, TOKENS, D, generator=g)
    q = torch.randn(L, HK, G, D, generator=g)
    cache = loaded(given, k, v)
    if forked:
        cache = cache.fork()
    out = attended(cache, q)
    zero = torch.zeros(1, D, dtype=torch.float64)
    for layer in range(L):
        for head in range(HK):
            keys, values = k[layer, head].double(), v[layer, head].double()
            mean_k, mean_v = (x[2 * P : 7 * P].mean(0, keepdim=True) for x in (keys, values))
            stream, addend = layer * HK + head, math.log(5 * P)
            if given is not None:
                mean_v = mean_v * given.scale[stream].double() + given.value[stream].double()
                addend += float(given.log2[stream]) * math.log(2)
            read = torch.cat((torch.arange(2 * P), torch.arange(7 * P, TOKENS)))
            logits = q[layer, head].double() @ torch.cat((keys[read], zero, mean_k)).T / math.sqrt(D)
            logits[:, -1] += addend
            want = logits.softmax(-1) @ torch.cat((values[read], zero, mean_v))
            assert torch.allclose(out[layer, head].double(), want, atol=2e-2)  # states are kept in bfloat16
            assert (out[layer, head].double() - want).norm() < 0.01 * want.norm()
    assert cache.approximations.held_bytes == L * HK * cache.approximations.background.fmt.page_bytes
    cache.close()


def test_files_keep_offsets_and_refuse_other_models(tmp_path: Path) -> None:
    given = offsets()
    path = tmp_path / "background-abc.safetensors"
    given.write(path, "abc", {"corpus": "x"})
    found = packaged("a name abc", L * HK, D, tmp_path)
    assert found is not None
    assert all(torch.equal(getattr(found, key), getattr(given, key)) for key in ("log2", "scale", "value"))
    assert packaged("a name xyz", L * HK, D, tmp_path) is None
    with pytest.raises(OffsetsError, match="model abc, this is model xyz"):
        BackgroundOffsets.read(path, "xyz", L * HK, D)
    with pytest.raises(OffsetsError, match=r"must be \(5, 16\)"):
        BackgroundOffsets.read(path, "abc", 5, D)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(OffsetsError, match="can't be read"):
        BackgroundOffsets.read(path, "abc", L * HK, D)


def test_what_is_no_offsets_is_refused() -> None:
    with pytest.raises(OffsetsError, match=r"must be \[S\], \[S\], \[S, D\]"):
        BackgroundOffsets(torch.zeros(3), torch.zeros(2), torch.zeros(2, 4))
    with pytest.raises(OffsetsError, match="NaN"):
        BackgroundOffsets(torch.full((2,), torch.nan), torch.ones(2), torch.zeros(2, 4))


def test_moved_broadcasts_over_rows() -> None:
    """Rows in between get what each would get alone."""
    given, g = offsets(), torch.Generator().manual_seed(3)
    value, count = torch.randn(L * HK, 5, D, generator=g), torch.randn(L * HK, 5, generator=g)
    moved, log2 = given.moved(value, count)
    for row in range(5):
        alone = given.moved(value[:, row], count[:, row])
        assert torch.equal(moved[:, row], alone[0])
        assert torch.equal(log2[:, row], alone[1])
