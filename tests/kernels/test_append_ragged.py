"""Streams at different offsets in one append: the same as appending to each stream alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.api import Pool, append
from kernels.pages import page_format
from kernels.upkeep import Upkeep

BACKENDS = ("cpu", "torch")
P, D, COLUMNS = 16, 40, 5


def pools(streams: int) -> tuple[Pool, Pool, Pool]:
    """Float pages, quantised copies and prototypes in two slabs each, full of bytes that are NaN in a float format."""
    half = -(-streams * COLUMNS // 2)
    formats = (page_format("bf16", P, D), page_format("int4", P, D), page_format("proto", P, D, 3))
    float_pages, sealed, proto = (
        Pool(fmt, tuple(torch.full((half, fmt.page_bytes), 0xFF, dtype=torch.uint8) for _ in range(2)))
        for fmt in formats
    )
    return float_pages, sealed, proto


def bounds(streams: int) -> tuple[Tensor, Tensor]:
    shape = (streams, COLUMNS, D)
    return torch.full(shape, math.inf), torch.full(shape, -math.inf)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30, deadline=None)
@given(
    starts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    steps=st.lists(st.sampled_from([1, 1, 1, 3, 20]), min_size=1, max_size=5),
    apart=st.booleans(),
    seed=st.integers(0, 99),
)
def test_as_each_stream_alone(backend: str, starts: list[int], steps: list[int], apart: bool, seed: int) -> None:
    """With bounds, copies and prototypes; `apart`: offset and page lie [T, S] in memory."""
    streams, rng = len(starts), torch.Generator().manual_seed(seed)
    total = min(sum(steps), COLUMNS * P - 40)
    k, v = (torch.randn(streams, total, D, generator=rng) for _ in range(2))
    places = torch.randperm(streams * COLUMNS, generator=rng).view(streams, COLUMNS).int()
    together, alone = pools(streams), pools(streams)
    (low, high), (own_low, own_high) = bounds(streams), bounds(streams)
    done = 0
    for step in steps:
        part = slice(done, min(done + step, total))
        position = torch.tensor(starts)[:, None] + torch.arange(total)[part]
        page, offset = (position // P).int(), (position % P).int()
        slot = places.gather(1, page.long())
        fills = torch.where(offset == P - 1, slot, -1)
        if apart:
            page, offset, slot, fills = (x.T.contiguous().T for x in (page, offset, slot, fills))
        upkeep = Upkeep(page, low, high, together[1], fills, together[2], fills)
        append(k[:, part], v[:, part], slot, offset, together[0], upkeep, backend)
        for s in range(streams):
            one = slice(s, s + 1)
            kept = Upkeep(page[s], own_low[one], own_high[one], alone[1], fills[one], alone[2], fills[one])
            append(k[one, part], v[one, part], slot[one], offset[s], alone[0], kept, backend)
        done = part.stop
    assert torch.equal(low, own_low)
    assert torch.equal(high, own_high)
    assert not torch.equal(low, bounds(streams)[0])
    for mine, theirs in zip(together, alone, strict=True):
        assert torch.equal(torch.cat(mine.slabs), torch.cat(theirs.slabs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_offset_of_each_kind(backend: str) -> None:
    """`offset` of all streams and `page` of each, and the other way round."""
    k = torch.randn(2, 1, D, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    slot = torch.tensor([[1], [7]], dtype=torch.int32)
    pool, _, _ = pools(2)
    low, high = bounds(2)
    append(k, -k, slot, torch.tensor([3]).int(), pool, Upkeep(torch.tensor([[2], [0]]).int(), low, high), backend)
    assert torch.equal(low[torch.tensor([0, 1]), torch.tensor([2, 0])], k[:, 0])
    assert low.isinf().sum() == (2 * COLUMNS - 2) * D
    append(k, -k, slot, torch.tensor([[9], [4]]).int(), pool, Upkeep(torch.tensor([1]).int(), low, high), backend)
    assert torch.equal(high[:, 1], k[:, 0])
    keys = torch.cat(pool.slabs)[[1, 7], : 2 * P * D].view(torch.bfloat16).view(2, D, P)
    written = ~keys.isnan()
    assert written[:, 0].nonzero().tolist() == [[0, 3], [0, 9], [1, 3], [1, 4]]


STREAMS, TOKENS = 3, 2
SLOT = torch.arange(STREAMS, dtype=torch.int32)[:, None].expand(-1, TOKENS)
FULL = torch.tensor([[13, 14], [14, 15], [0, 1]], dtype=torch.int32)
FILLS = torch.where(FULL == P - 1, 1, -1).int()


def with_one(x: Tensor, s: int, t: int, value: int) -> Tensor:
    changed = x.clone()
    changed[s, t] = value
    return changed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"offset": with_one(FULL, 2, 1, 16)}, "offset 0 to 16: must be 0 to 15"),
        ({"offset": with_one(FULL, 1, 0, -1)}, "offset -1 to 15: must be 0 to 15"),
        ({"offset": FULL.T.contiguous()}, r"offset \(2, 3\): must be .*\[T\] or \[S, T\]"),
        ({"offset": FULL[:1]}, r"offset \(1, 2\)"),
        ({"offset": FULL[:, :1]}, r"offset \(3, 1\)"),
        ({"page": with_one(FULL * 0, 2, 0, COLUMNS)}, f"page 0 to {COLUMNS}: must be 0 to {COLUMNS - 1}"),
        ({"page": FULL[:1]}, r"upkeep.page \(1, 2\): must be \(3, 2\)"),
        ({"page": FULL[None]}, r"upkeep.page .*must be torch.int32 \[T\] or \[S, T\]"),
        ({"fills": with_one(FILLS, 0, 1, 1)}, "sealed_slot 1 of a token that does not fill its page"),
        ({"fills": with_one(FILLS, 1, 0, 1)}, "sealed_slot 1 of a token that does not fill its page"),
    ],
)
def test_what_one_stream_gets_wrong_is_refused_and_nothing_written(
    change: dict[str, Tensor], named: str, backend: str
) -> None:
    given = {"offset": FULL, "page": FULL * 0, "fills": FILLS} | change
    pool, sealed, _ = pools(STREAMS)
    low, high = bounds(STREAMS)
    k = torch.zeros(STREAMS, TOKENS, D)
    with pytest.raises(ValueError, match=named):
        append(k, k, SLOT, given["offset"], pool, Upkeep(given["page"], low, high, sealed, given["fills"]), backend)
    assert (torch.cat(pool.slabs) == 0xFF).all()
    assert low.isinf().all()
    append(k, k, SLOT, FULL, pool, Upkeep(FULL * 0, low, high, sealed, FILLS), backend)
    assert not (torch.cat(pool.slabs) == 0xFF).all()
