"""What decoding several sequences at once rests on: a row's numbers are bitwise its own in any batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.api import PageTable, Pool, append, attend, choose_backend
from kernels.gemv import NATIVE_ROWS, gemv_bf16
from kernels.pages import encode, page_format
from kernels.schedule import Schedule

P, D, G = 16, 64, 3
FORMATS = ("fp32", "bf16", "int8", "int4")


def needs_native() -> None:
    if choose_backend() != "cpu":
        pytest.skip("no C++ compiler")


@pytest.mark.parametrize("inputs", [37, 576, 1536])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16, 17, 33, 64])
def test_a_linear_gives_each_row_its_own(rows: int, inputs: int) -> None:
    """Beyond `NATIVE_ROWS` only where it is asked for."""
    needs_native()
    rng = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(130, inputs, generator=rng).bfloat16(), torch.randn(rows, inputs, generator=rng)
    together = gemv_bf16(x, weight, native_rows=64)
    alone = torch.stack([gemv_bf16(row, weight) for row in x])
    assert torch.equal(together, alone)
    order = torch.randperm(rows, generator=rng)
    assert torch.equal(gemv_bf16(x[order], weight, native_rows=64), alone[order])
    if rows <= NATIVE_ROWS:
        assert torch.equal(gemv_bf16(x, weight), alone)
    assert torch.allclose(gemv_bf16(x, weight, backend="torch"), alone, rtol=1e-4, atol=1e-3)


def test_a_number_of_native_rows_that_is_none_is_refused() -> None:
    x, weight = torch.zeros(1, 4), torch.zeros(3, 4).bfloat16()
    for rows in (-1, 2.0, True):
        with pytest.raises(ValueError, match="native_rows="):
            gemv_bf16(x, weight, native_rows=rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [2, 7, 64])
@pytest.mark.parametrize("hidden", [48, 576, 1000, 1536])
def test_norms_and_rotations_give_each_row_its_own(rows: int, hidden: int) -> None:
    rng = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, hidden, generator=rng), torch.randn(hidden, generator=rng)

    def norm(x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (hidden,), weight, 1e-5)

    assert torch.equal(norm(x), torch.cat([norm(row[None]) for row in x]))
    # As testbed/models/lean.py turns heads by their positions, and gates its inner layer.
    heads, angle = torch.randn(rows, 4, D, generator=rng), torch.randn(rows, 1, D, generator=rng)

    def turned(x: Tensor, angle: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * angle.cos() + torch.cat((-high, low), -1) * angle.sin()

    alone = [turned(heads[i : i + 1], angle[i : i + 1]) for i in range(rows)]
    assert torch.equal(turned(heads, angle), torch.cat(alone))
    # torch's silu (and whatever else has an exp in it) rounds otherwise behind the last whole pair of vectors of all
    # rows together, so it does so only where rows are whole pairs of vectors: of 16 floats, 32 with AVX-512.
    silu = torch.nn.functional.silu
    assert hidden % 32 or torch.equal(silu(x), torch.cat([silu(row[None]) for row in x]))


def pools_for(pages: int, seed: int) -> list[Pool]:
    """One pool a format and one more of each, as head classes have them."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for name in (*FORMATS, *FORMATS):
        k, v = (torch.randn(pages, P, D, generator=rng) for _ in range(2))
        made.append(Pool(page_format(name, P, D), (encode(page_format(name, P, D), k, v),)))
    return made


def sequence(streams: int, tokens: int, pools: int, pages: int, seed: int) -> PageTable:
    """A table of a sequence with pages anywhere; streams keep different parts of it."""
    rng = torch.Generator().manual_seed(seed)
    width = -(-tokens // P)
    shape = (streams, width)
    count = torch.randint(1, width + 1, (streams,), generator=rng).int()
    page = torch.stack([torch.randperm(width, generator=rng) for _ in range(streams)])
    page[:, 0] = width - 1
    pool = torch.randint(pools, shape, generator=rng)
    return PageTable(pool.to(torch.int8), torch.randint(pages, shape, generator=rng).int(), page.int(), count)


def joined(tables: list[PageTable]) -> PageTable:
    """Rows of all, padded to the widest with entries that point nowhere."""
    width = max(t.pool.shape[1] for t in tables)

    def wide(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, width - x.shape[1]), value=-1)

    pool, slot, page = (torch.cat([wide(getattr(t, key)) for t in tables]) for key in ("pool", "slot", "page"))
    return PageTable(pool, slot, page, torch.cat([t.count for t in tables]))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 900), min_size=2, max_size=5),
    window=st.sampled_from([0, 100]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_attention_of_joined_tables_is_that_of_each(
    backend: str, lengths: list[int], window: int, threads: int, seed: int
) -> None:
    if backend == "cpu":
        needs_native()
    streams, pages = 2, 9
    pools = pools_for(pages, seed)
    tables = [sequence(streams, n, len(pools), pages, seed + i) for i, n in enumerate(lengths)]
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(streams * len(lengths), G, 1, D, generator=rng)
    first = torch.tensor(lengths).repeat_interleave(streams).int() - 1
    more = {"scale": D**-0.5, "window_tokens": window, "sink_tokens": 4, "want_mass": True, "backend": backend}
    schedule = Schedule(threads=threads)
    whole = attend(q, joined(tables), pools, first, schedule=schedule, **more)
    assert whole.mass is not None
    for i, table in enumerate(tables):
        rows = slice(i * streams, (i + 1) * streams)
        own = attend(q[rows], table, pools, first[rows], **more)
        assert own.mass is not None
        assert torch.equal(whole.out[rows], own.out)
        assert torch.equal(whole.lse[rows], own.lse)
        width = own.mass.shape[1]
        assert torch.equal(whole.mass[rows, :width], own.mass)
        assert not whole.mass[rows, width:].any()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_table_may_point_into_128_pools(backend: str) -> None:
    """As many as an int8 can name; each page differs, so that a pool taken for another shows."""
    fmt = page_format("fp32", P, D)
    rng = torch.Generator().manual_seed(0)
    k, v = (torch.randn(128, P, D, generator=rng) for _ in range(2))
    pools = [Pool(fmt, (blob[None].contiguous(),)) for blob in encode(fmt, k, v)]
    order = torch.randperm(128, generator=rng)
    table = PageTable(
        order[None].to(torch.int8),
        torch.zeros(1, 128, dtype=torch.int32),
        torch.arange(128)[None].int(),
        torch.tensor([128]).int(),
    )
    q = torch.randn(1, G, 1, D, generator=rng)
    got = attend(q, table, pools, torch.tensor([128 * P - 1]).int(), scale=0.3, backend=backend)
    keys, values = (x[order].flatten(0, 1).double() for x in (k, v))
    want = (0.3 * q[0, :, 0].double() @ keys.T).softmax(-1) @ values
    assert torch.allclose(got.out[0, :, 0].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_an_append_of_joined_streams_writes_each_its_own(backend: str) -> None:
    """B * Hk streams in a call; the bytes are those of a call a sequence."""
    fmt = page_format("bf16", P, D)
    rng = torch.Generator().manual_seed(0)
    sequences, heads = 4, 3
    k = torch.randn(sequences * heads, 1, D, generator=rng)
    position = torch.tensor([5, 15, 16, 77])
    slot = torch.randperm(24, generator=rng)[: sequences * heads, None].int()
    offset = (position % P).int().repeat_interleave(heads)[:, None]
    together, alone = (Pool(fmt, (torch.zeros(24, fmt.page_bytes, dtype=torch.uint8),)) for _ in range(2))
    append(k, -k, slot, offset, together, backend=backend)
    for i in range(sequences):
        rows = slice(i * heads, (i + 1) * heads)
        append(k[rows], -k[rows], slot[rows], offset[i * heads], alone, backend=backend)
    assert torch.equal(together.slabs[0], alone.slabs[0])
