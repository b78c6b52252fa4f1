"""The Triton attention in its interpreter, against the float64 oracle.

    TRITON_INTERPRET=1 python -m pytest -m interp tests/kernels/test_triton_attend.py

No bf16 queries here: the interpreter multiplies the bits of bf16 numbers (they are taken as float32 there).
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import Case, any_case, make_case, with_formats_poisoned

from kernels.api import PageTable, Pool, Schedule, attend
from kernels.pages import encode, page_format, views
from kernels.state import Partial

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a process of its own", allow_module_level=True)

from kernels.gpu import attend as gpu
from kernels.gpu.prepare import prepare, prepared_for

pytestmark = [pytest.mark.interp, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
ALL = ("fp32", "bf16", "fp16", "int8", "int4", "proto")
SHORT = Schedule(split_tokens=256)


def assert_close(got: Partial, want: Partial, tolerance: float = 1e-5) -> None:
    assert torch.isfinite(got.out).all()
    assert torch.equal(got.lse.isinf(), want.lse.isinf())
    scale = want.out.abs().max().clamp(min=1e-3)
    assert (got.out - want.out).abs().max() <= tolerance * scale
    seen = ~want.lse.isinf()
    assert ((got.lse - want.lse)[seen].abs() <= tolerance * (1 + want.lse[seen].abs())).all()
    if want.mass is not None:
        assert got.mass is not None
        assert (got.mass - want.mass).abs().max() <= tolerance


def check(case: Case, tolerance: float = 1e-5, **options: object) -> Partial:
    got = case.run("triton", want_mass=True, **options)
    assert_close(got, case.run("reference", want_mass=True, **options), tolerance)
    return got


def edges(page_tokens: int) -> tuple[int, ...]:
    return (0, 1, page_tokens - 1, page_tokens, page_tokens + 1, 7 * page_tokens + 5)


@pytest.mark.parametrize("page_tokens", [16, 32, 64])
@pytest.mark.parametrize("names", [(n,) for n in ALL[:3]] + [("fp32", n) for n in ALL[3:]], ids="+".join)
def test_every_format_matches_the_oracle(names: tuple[str, ...], page_tokens: int) -> None:
    case = make_case(page_tokens + 1, names, edges(page_tokens), 64, page_tokens)
    assert set(case.table.pool[-1, :8].tolist()) == set(range(len(names)))
    check(case)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 128, 256])
def test_every_head_size_matches_the_oracle(head_dim: int) -> None:
    check(make_case(head_dim, ALL, (100, 17), head_dim))


@pytest.mark.parametrize("names", [("fp16",), ("fp16", "int8"), ("fp16", "int4"), ("bf16", "proto")], ids="+".join)
def test_half_precision_products(names: tuple[str, ...]) -> None:
    case = make_case(3, names, (200, 33), 128)
    case = replace(case, q=case.q.half())
    got = case.run("triton", want_mass=True)
    assert_close(got, replace(case, q=case.q.float()).run("reference", want_mass=True), 1e-2)
    wide = case.run("triton", want_mass=True, schedule=Schedule(arithmetic="float32"))
    assert_close(wide, replace(case, q=case.q.float()).run("reference", want_mass=True))
    assert not torch.equal(got.out, wide.out)


def test_bf16_queries_are_taken() -> None:
    case = make_case(4, ("bf16", "int8"), (40,))
    half = replace(case, q=case.q.bfloat16())
    assert_close(half.run("triton"), replace(case, q=half.q.float()).run("reference"))


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    names=st.lists(st.sampled_from(ALL), max_size=4, unique=True),
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    head_dim=st.sampled_from([16, 24, 64]),
    page_tokens=st.sampled_from([16, 32, 64]),
    group=st.integers(1, 9),
    tokens=st.integers(1, 5),
    groups=st.integers(1, 5),
    windows=st.lists(st.sampled_from([0, 1, 17, 60]), min_size=1, max_size=3),
    sink_tokens=st.sampled_from([0, 5, 33]),
    alibi=st.booleans(),
)
def test_any_case_matches_the_oracle(
    seed: int,
    names: list[str],
    lengths: list[int],
    head_dim: int,
    page_tokens: int,
    group: int,
    tokens: int,
    groups: int,
    windows: list[int],
    sink_tokens: int,
    alibi: bool,
) -> None:
    shape = {"head_dim": head_dim, "page_tokens": page_tokens, "slabs": 3, "groups": groups}
    case, options = any_case(seed, names, lengths, windows, sink_tokens, alibi, tokens=tokens, group=group, **shape)
    check(case, **options)


@pytest.mark.parametrize("tokens", [8, 64])
def test_many_rows_match_the_oracle(tokens: int) -> None:
    case = make_case(5, ("fp32", "int8", "proto"), (64, 90), tokens=tokens, group=2)
    wide = case.q.transpose(1, 2).contiguous().transpose(1, 2)  # of other strides
    check(replace(case, q=wide), window_tokens=30)


def test_splits_are_joined() -> None:
    case = make_case(6, ALL, (1300, 3, 0, 300), head_dim=16)
    whole = check(case)
    parts = check(case, schedule=SHORT)
    assert not torch.equal(whole.out, parts.out)


def test_a_row_does_not_depend_on_the_batch() -> None:
    case = make_case(10, ALL, (40, 700, 17), tokens=2, head_dim=16)
    together = case.run("triton", want_mass=True, schedule=SHORT)
    assert together.mass is not None
    for s in range(3):
        alone = case.only(s).run("triton", want_mass=True, schedule=SHORT)
        assert torch.equal(alone.out[0], together.out[s])
        assert torch.equal(alone.lse[0], together.lse[s])
        assert alone.mass is not None
        assert torch.equal(alone.mass[0], together.mass[s, : alone.mass.shape[1]])


def test_prototype_pools_of_different_sizes() -> None:
    one, other = (make_case(seed, ("fp32", "proto"), (150,), groups=c) for seed, c in ((1, 1), (2, 5)))
    t, u = one.table, other.table
    pool = torch.cat((t.pool[:, :-1], torch.where(u.pool == 1, 2, 3).to(torch.int8)[:, :-1]), 1)
    table = PageTable(
        pool, *(torch.cat((getattr(t, k)[:, :-1], getattr(u, k)[:, :-1]), 1) for k in ("slot", "page")), t.count * 2
    )
    pools = (one.pools[0], one.pools[1], other.pools[1], other.pools[0])
    check(Case(one.q, table, pools, one.first_position, one.lengths))


def test_an_empty_call_gives_nothing() -> None:
    for lengths in ((0, 0), (0,)):
        part = make_case(8, ("fp32",), lengths).run("triton", want_mass=True)
        assert not part.out.any()
        assert (part.lse == -math.inf).all()
        assert part.mass is not None
        assert not part.mass.any()
    case = make_case(8, ("fp32",), (20,))
    table = PageTable(*(x[:, :0] for x in (case.table.pool, case.table.slot, case.table.page)), case.table.count * 0)
    assert (replace(case, table=table).run("triton").lse == -math.inf).all()


def test_bytes_no_table_lists_do_not_matter() -> None:
    case = make_case(9, ALL, (70, 133), tokens=2)
    one, other = case.run("triton"), with_formats_poisoned(case).run("triton")
    assert torch.equal(one.out, other.out)
    assert torch.equal(one.lse, other.lse)


def test_a_nan_query_spoils_its_own_row_only() -> None:
    case = make_case(11, ("fp32", "int8"), (90,), group=3, tokens=2)
    clean = case.run("triton", schedule=SHORT)
    case.q[0, 1, 0, 5] = math.nan
    got = case.run("triton", schedule=SHORT)
    spoilt = torch.zeros(3, 2, dtype=torch.bool)
    spoilt[1, 0] = True
    assert got.out[0][spoilt].isnan().all()
    assert got.lse[0][spoilt].isnan().all()
    assert torch.equal(got.out[0][~spoilt], clean.out[0][~spoilt])


def test_a_visible_nan_is_not_swallowed() -> None:
    case = make_case(12, ("fp32",), (64,))
    views(case.pools[0].fmt, case.pools[0].slabs[0])["v"][:] = math.nan
    assert case.run("triton").out.isnan().any()


def test_addresses_beyond_31_bits() -> None:
    """Two pages of a pool that is larger than any 32-bit offset; untouched memory is never mapped."""
    fmt = page_format("fp32", 64, 256)
    pages = 5 * 2**30 // fmt.page_bytes
    slab = torch.empty(pages, fmt.page_bytes, dtype=torch.uint8)
    rng = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 2, 64, 256, generator=rng)
    slots = torch.tensor([3, pages - 1])
    slab[slots] = encode(fmt, k, v, backend="torch")
    index = torch.arange(2, dtype=torch.int32)[None]
    count = torch.tensor([2], dtype=torch.int32)
    table = PageTable(torch.zeros(1, 2, dtype=torch.int8), slots.int()[None], index, count)
    q = torch.randn(1, 2, 1, 256, generator=rng)
    first = torch.tensor([127], dtype=torch.int32)
    got = attend(q, table, (Pool(fmt, (slab,)),), first, scale=0.0625, backend="triton")
    want = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, 0].double(), k.flatten(0, 1)[None].double(), v.flatten(0, 1)[None].double(), scale=0.0625
    )
    assert (got.out[:, :, 0] - want).abs().max() < 1e-5


def test_prepared_tables_are_kept_until_written_to() -> None:
    case = make_case(13, ("fp32", "int8"), (100, 40))
    first = prepared_for(case.table, case.pools, 1024)
    assert prepared_for(case.table, case.pools, 1024) is first
    before = case.run("triton")
    case.table.count[0] -= 2
    again = prepared_for(case.table, case.pools, 1024)
    assert again is not first
    assert_close(case.run("triton"), case.run("reference"))
    # At old addresses, as a captured graph needs it.
    case.table.count[0] += 2
    assert prepare(case.table, case.pools, 1024, out=first) is first
    options = gpu_options(case)
    assert torch.equal(gpu.attend(case.q, case.table, case.pools, case.first_position, options, first).out, before.out)
    with pytest.raises(ValueError, match="out for a table"):
        prepare(case.only(0).table, case.pools, 1024, out=first)


def gpu_options(case: Case):  # noqa: ANN201
    from kernels.api import Options

    return Options(scale=case.q.shape[3] ** -0.5)


def test_a_bound_on_the_entries_bounds_the_work_list() -> None:
    case = make_case(14, ("fp32", "int8"), (600, 0, 20, 20))
    tight = prepare(case.table, case.pools, 256, most_entries=int(case.table.count.sum()))
    loose = prepare(case.table, case.pools, 256)
    items = int(tight.item_start[-1])
    assert items == int(loose.item_start[-1]) == 5
    assert len(tight.item_stream) < len(loose.item_stream)
    assert tight.item_stream[:items].tolist() == [0, 0, 0, 2, 3]


def test_entries_are_sorted_by_format() -> None:
    case = make_case(15, ALL, (1500 * 16, 90), head_dim=8)
    got = prepare(case.table, case.pools, 1024)
    for s, count in enumerate(case.table.count.tolist()):
        order = torch.argsort(case.table.pool[s, :count], stable=True)  # pools of this case are in the order of kinds
        assert (got.origin[s, :count] & (2**24 - 1)).equal(order.int())
        assert got.page[s, :count].equal(case.table.page[s, :count][order])
        kinds = case.table.pool[s, :count].long().bincount(minlength=6)
        assert got.segment[s].tolist() == [*(kinds.cumsum(0) - kinds).tolist(), count, count]
        for n, i in enumerate(order.tolist()[:50]):
            pool, slot = case.pools[int(case.table.pool[s, i])], int(case.table.slot[s, i])
            page = pool.slabs[slot // pool.slab_pages][slot % pool.slab_pages]
            assert int(got.address[s, n]) + got.base.data_ptr() == page.data_ptr()


def test_bad_arguments_are_named() -> None:
    case = make_case(16, ("fp32",), (20,))
    raw = torch.zeros(4 * case.pools[0].fmt.page_bytes + 64, dtype=torch.uint8)
    odd = raw[4:-60].view(4, -1)
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        replace(case, pools=(Pool(case.pools[0].fmt, (odd,)), *case.pools)).run("triton")
    wide = make_case(16, ("fp32",), (20,), head_dim=520)
    with pytest.raises(ValueError, match="D=520"):
        wide.run("triton")
