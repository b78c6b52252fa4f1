"""Writing tokens one by one gives the page that encoding it whole gives."""

from __future__ import annotations

import pytest
import torch

from kernels.api import Pool, append
from kernels.pages import encode, page_format


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("page_tokens", [16, 32])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_appended_tokens_make_the_encoded_page(name: str, page_tokens: int, backend: str) -> None:
    rng = torch.Generator().manual_seed(0)
    fmt = page_format(name, page_tokens, 80)
    k, v = (torch.randn(3, 2 * page_tokens, 80, generator=rng) for _ in range(2))
    pool = Pool(fmt, tuple(torch.full((4, fmt.page_bytes), 7, dtype=torch.uint8) for _ in range(2)))
    pages = torch.tensor([[0, 5], [7, 2], [3, 4]], dtype=torch.int32)
    for start, end in ((0, 1), (1, 5), (5, page_tokens + 3), (page_tokens + 3, 2 * page_tokens)):
        at = torch.arange(start, end)
        slot, offset = pages[:, at // page_tokens], (at % page_tokens).int()
        append(k[:, start:end], v[:, start:end], slot, offset, pool, backend=backend)
    whole = torch.cat(pool.slabs)
    want = encode(fmt, k.view(6, page_tokens, 80), v.view(6, page_tokens, 80), "torch")
    assert torch.equal(whole[pages.flatten().long()], want)
    assert (whole[[1, 6]] == 7).all()


def test_only_float_pages_can_be_appended_to() -> None:
    fmt = page_format("int4", 16, 64)
    pool = Pool(fmt, (torch.zeros(1, fmt.page_bytes, dtype=torch.uint8),))
    new, slot, offset = torch.zeros(1, 1, 64), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="int4"):
        append(new, new, slot, offset, pool)
    fmt = page_format("bf16", 16, 64)
    pool = Pool(fmt, (torch.zeros(1, fmt.page_bytes, dtype=torch.uint8),))
    with pytest.raises(ValueError, match=r"\[S, T\]"):
        append(new, new, slot[:, :0], offset, pool)


K = torch.zeros(2, 2, 64)
SLOT = torch.zeros(2, 2, dtype=torch.int32)
OFFSET = torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(
    ("k", "v", "slot", "offset", "named"),
    [
        (K.int(), K, SLOT, OFFSET, "k torch.int32"),
        (K, K.long(), SLOT, OFFSET, "v torch.int64"),
        (K, K[:1], SLOT, OFFSET, r"v \(1, 2, 64\)"),
        (K[..., :32], K[..., :32], SLOT, OFFSET, "D=64 like pool"),
        (K, K, SLOT.long(), OFFSET, "table_slot torch.int64"),
        (K, K, SLOT + 6, OFFSET, "table_slot 6 to 6: must be 0 to 5"),
        (K, K, SLOT - 1, OFFSET, "table_slot -1 to -1: must be 0 to 5"),
        (K, K, SLOT, OFFSET.long(), "offset torch.int64"),
        (K, K, SLOT, OFFSET + 16, "offset 16 to 16: must be 0 to 15"),
        (K, K, SLOT, OFFSET - 1, "offset -1 to -1: must be 0 to 15"),
        (K, K.to("meta"), SLOT, OFFSET, "v on meta"),
        (K, K, SLOT.to("meta"), OFFSET, "table_slot on meta"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(
    k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor, offset: torch.Tensor, named: str, backend: str
) -> None:
    fmt = page_format("bf16", 16, 64)
    pool = Pool(fmt, tuple(torch.full((3, fmt.page_bytes), 7, dtype=torch.uint8) for _ in range(2)))
    with pytest.raises(ValueError, match=named):
        append(k, v, slot, offset, pool, backend=backend)
    assert (torch.cat(pool.slabs) == 7).all()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_no_tokens_are_no_trouble(backend: str) -> None:
    fmt = page_format("bf16", 16, 64)
    pool = Pool(fmt, (torch.full((3, fmt.page_bytes), 7, dtype=torch.uint8),))
    append(K[:, :0], K[:, :0], SLOT[:, :0], OFFSET[:0], pool, backend=backend)
    append(K[:0], K[:0], SLOT[:0], OFFSET, pool, backend=backend)
    assert (pool.slabs[0] == 7).all()
