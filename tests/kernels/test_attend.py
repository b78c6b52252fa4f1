"""Every backend against the float64 oracle, and the oracle against torch's own attention."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import Case, any_case, make_case, with_formats_poisoned

from kernels.api import PageTable, Pool, Schedule, attend, choose_backend
from kernels.pages import encode, page_format
from kernels.prototypes import encode_prototypes
from kernels.state import Partial

FAST = ("cpu", "torch")
BACKENDS = (*FAST, "reference")
SETS = (("fp32",), ("bf16",), ("fp16",), ("fp32", "int8"), ("bf16", "int4"), ("fp32", "proto"))
ALL = ("fp32", "bf16", "fp16", "int8", "int4", "proto")


def assert_close(got: Partial, want: Partial, tolerance: float = 1e-5) -> None:
    assert torch.isfinite(got.out).all()
    assert torch.equal(got.lse.isinf(), want.lse.isinf())
    scale = want.out.abs().max().clamp(min=1e-3)
    assert (got.out - want.out).abs().max() <= tolerance * scale
    seen = ~want.lse.isinf()
    assert ((got.lse - want.lse)[seen].abs() <= tolerance * (1 + want.lse[seen].abs())).all()
    if want.mass is not None and got.mass is not None:
        assert (got.mass - want.mass).abs().max() <= tolerance


def lengths_for(page_tokens: int, tokens: int) -> tuple[int, ...]:
    edges = (0, 1, page_tokens - 1, page_tokens, page_tokens + 1, 2 * page_tokens, 421)
    return tuple(n for n in edges if n == 0 or n >= tokens) if tokens == 1 else (tokens, page_tokens + tokens, 421)


@pytest.mark.parametrize("page_tokens", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_matches_the_oracle(names: tuple[str, ...], head_dim: int, page_tokens: int) -> None:
    case = make_case(head_dim + page_tokens, names, lengths_for(page_tokens, 1), head_dim, page_tokens)
    want = case.run("reference", want_mass=True)
    for backend in FAST:
        assert_close(case.run(backend, want_mass=True), want)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    names=st.lists(st.sampled_from(ALL), max_size=5, unique=True),
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=4),
    head_dim=st.sampled_from([8, 40, 64, 80, 128]),
    page_tokens=st.sampled_from([16, 32, 64]),
    group=st.integers(1, 9),
    tokens=st.integers(1, 6),
    slabs=st.integers(1, 3),
    groups=st.integers(1, 5),
    windows=st.lists(st.sampled_from([0, 1, 17, 100]), min_size=1, max_size=4),
    sink_tokens=st.sampled_from([0, 5, 16, 33]),
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
    slabs: int,
    groups: int,
    windows: list[int],
    sink_tokens: int,
    alibi: bool,
) -> None:
    shape = {"head_dim": head_dim, "page_tokens": page_tokens, "slabs": slabs, "groups": groups}
    case, options = any_case(seed, names, lengths, windows, sink_tokens, alibi, tokens=tokens, group=group, **shape)
    options["want_mass"] = True
    want = case.run("reference", **options)
    for backend in FAST:
        assert_close(case.run(backend, **options), want)


@pytest.mark.parametrize("window_tokens", [0, 50])
def test_many_rows_match_the_oracle(window_tokens: int) -> None:
    case = make_case(5, ALL, (64, 90, 300), tokens=64, group=2)
    want = case.run("reference", window_tokens=window_tokens, want_mass=True)
    for backend in FAST:
        assert_close(case.run(backend, window_tokens=window_tokens, want_mass=True), want)


def test_long_stream_takes_several_splits() -> None:
    case = make_case(6, ("bf16", "int4"), (5000, 3, 1025))
    want = case.run("reference", want_mass=True)
    for backend in FAST:
        assert_close(case.run(backend, want_mass=True), want)


def dense(
    seed: int, name: str, length: int, tokens: int, page_tokens: int = 16
) -> tuple[Case, torch.Tensor, torch.Tensor]:
    """One stream in page order, and the keys and values it was made from (the last page is full)."""
    rng = torch.Generator().manual_seed(seed)
    pages = length // page_tokens
    k, v = (torch.randn(length, 64, generator=rng) for _ in range(2))
    fmt = page_format(name, page_tokens, 64)
    blobs = encode(fmt, k.view(pages, page_tokens, 64), v.view(pages, page_tokens, 64))
    index = torch.arange(pages, dtype=torch.int32)[None]
    table = PageTable(
        torch.zeros(1, pages, dtype=torch.int8), index, index.clone(), torch.tensor([pages], dtype=torch.int32)
    )
    q = torch.randn(1, 3, tokens, 64, generator=rng)
    first = torch.tensor([length - tokens], dtype=torch.int32)
    return Case(q, table, (Pool(fmt, (blobs,)),), first, (length,)), k, v


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 32])
def test_float_pages_are_plain_attention(backend: str, tokens: int) -> None:
    case, k, v = dense(1, "fp32", 320, tokens)
    mask = torch.arange(320) <= torch.arange(320 - tokens, 320)[:, None]
    want = torch.nn.functional.scaled_dot_product_attention(case.q[0].double(), k.double(), v.double(), mask)
    assert (case.run(backend).out[0] - want).abs().max() < 1e-5


@pytest.mark.parametrize(("name", "most"), [("bf16", 1e-2), ("fp16", 2e-3), ("int8", 1e-2), ("int4", 0.2)])
def test_rounded_pages_stay_near_plain_attention(name: str, most: float) -> None:
    case, k, v = dense(2, name, 320, 1)
    want = torch.nn.functional.scaled_dot_product_attention(case.q[0].double(), k.double(), v.double())
    assert (case.run("cpu").out[0] - want).norm() < most * want.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prototype_counts_as_its_tokens(backend: str) -> None:
    """Tokens that are all alike weigh the same as one prototype with their count."""
    case, _, _ = dense(3, "fp32", 64, 1)
    rng = torch.Generator().manual_seed(4)
    k, v = (torch.randn(1, 1, 64, generator=rng).bfloat16().float() for _ in range(2))
    copies = encode(page_format("fp32", 16, 64), k.expand(1, 16, 64), v.expand(1, 16, 64))
    stored = encode_prototypes(page_format("proto", 16, 64), k, v, torch.tensor([[4.0]]))
    both = []
    for fmt, blob in ((page_format("fp32", 16, 64), copies), (page_format("proto", 16, 64), stored)):
        table = PageTable(
            torch.tensor([[0, 0, 0, 1]], dtype=torch.int8),
            torch.tensor([[0, 1, 3, 0]], dtype=torch.int32),
            torch.tensor([[0, 1, 3, 2]], dtype=torch.int32),
            torch.tensor([4], dtype=torch.int32),
        )
        pools = (*case.pools, Pool(fmt, (blob,)))
        both.append(attend(case.q, table, pools, case.first_position, scale=0.125, backend=backend, want_mass=True))
    assert_close(both[1], both[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_mass_sums_to_one(backend: str) -> None:
    case = make_case(7, ALL, (0, 5, 200), tokens=1)
    mass = case.run(backend, want_mass=True).mass
    assert mass is not None
    assert torch.allclose(mass.sum(1).float(), torch.tensor([0.0, 1.0, 1.0]), atol=1e-6)
    assert not mass[1, 1:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_stream_gives_nothing(backend: str) -> None:
    case = make_case(8, ("fp32",), (0, 0))
    part = case.run(backend, want_mass=True)
    assert not part.out.any()
    assert (part.lse == -math.inf).all()
    assert part.mass is not None
    assert not part.mass.any()


@pytest.mark.parametrize("backend", FAST)
def test_bytes_no_table_lists_do_not_matter(backend: str) -> None:
    case = make_case(9, ALL, (70, 333), tokens=2)
    one, other = case.run(backend), with_formats_poisoned(case).run(backend)
    assert torch.equal(one.out, other.out)
    assert torch.equal(one.lse, other.lse)


def test_a_row_does_not_depend_on_the_batch_or_the_threads() -> None:
    case = make_case(10, ALL, (40, 1500, 3000, 17), tokens=2)
    threads = torch.get_num_threads()
    together = case.run("cpu", want_mass=True)
    try:
        torch.set_num_threads(2)
        again = case.run("cpu", want_mass=True)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together.out, again.out)
    for s in range(4):
        alone = case.only(s).run("cpu", want_mass=True)
        assert torch.equal(alone.out[0], together.out[s])
        assert torch.equal(alone.lse[0], together.lse[s])
        assert alone.mass is not None
        assert together.mass is not None
        assert torch.equal(alone.mass[0], together.mass[s, : alone.mass.shape[1]])
        assert_close(case.only(s).run("torch"), alone, 1e-5)


def test_a_visible_nan_is_not_swallowed() -> None:
    case, _, _ = dense(11, "fp32", 64, 1)
    case.pools[0].slabs[0].view(torch.float32)[1, 0] = float("nan")
    assert case.run("cpu").out.isnan().all()


def test_table_columns_may_be_a_slice_of_a_larger_table() -> None:
    case = make_case(12, ("bf16", "int4"), (100, 300))
    t = case.table
    wide = [torch.nn.functional.pad(x, (0, 7)) for x in (t.pool, t.slot, t.page)]
    cut = PageTable(*(x[:, : t.pool.shape[1]] for x in wide), t.count)
    assert torch.equal(replace(case, table=cut).run("cpu").out, case.run("cpu").out)


@pytest.mark.parametrize("backend", FAST)
def test_half_queries_are_taken(backend: str) -> None:
    case = make_case(13, ("bf16",), (100,))
    half = replace(case, q=case.q.bfloat16())
    assert_close(half.run(backend), replace(case, q=half.q.float()).run("reference"))


@pytest.mark.parametrize("page_tokens", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("names", [("bf16", "fp16", "proto"), ("bf16", "int8"), ("bf16", "int4")], ids="+".join)
def test_half_queries_match_the_oracle(names: tuple[str, ...], head_dim: int, page_tokens: int) -> None:
    case = make_case(head_dim + page_tokens, names, lengths_for(page_tokens, 1), head_dim, page_tokens)
    for dtype in (torch.bfloat16, torch.float16):
        half = replace(case, q=case.q.to(dtype))
        want = replace(case, q=half.q.float()).run("reference", want_mass=True)
        assert_close(half.run("cpu", want_mass=True), want, 1e-2)
    full = Schedule(arithmetic="float32")
    assert_close(half.run("cpu", want_mass=True, schedule=full), want)


def test_half_arithmetic_is_taken_and_refused() -> None:
    case = make_case(21, ("bf16", "int8"), (500,))
    half = case.run("cpu", schedule=Schedule(arithmetic="half"))
    full = case.run("cpu")
    want = case.run("reference")
    assert not torch.equal(half.out, full.out)
    assert_close(half, want, 1e-2)
    assert_close(full, want)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("shape", ["loud", "loud queries", "constant", "one token", "peaked", "flat", "zero"])
def test_integer_products_hold_for_odd_data(name: str, shape: str) -> None:
    rng = torch.Generator().manual_seed(22)
    k, v, q = (torch.randn(n, 128, generator=rng) for n in (512, 512, 4))
    if shape.startswith("loud"):
        k[:, 5] *= 30
        v[77] *= 30
        q[:, 9 if shape == "loud" else 5] *= 30
    elif shape == "constant":
        k[:], v[:] = k[:1], v[:1]
    elif shape == "one token":
        q = k[40:44] * 4
    elif shape in ("peaked", "flat"):
        q *= 12 if shape == "peaked" else 1e-4
    else:
        q *= 0
    fmt = page_format(name, 16, 128)
    blobs = encode(fmt, k.view(32, 16, 128), v.view(32, 16, 128))
    index = torch.arange(32, dtype=torch.int32)[None]
    table = PageTable(torch.zeros(1, 32, dtype=torch.int8), index, index, torch.tensor([32], dtype=torch.int32))
    rows = q.bfloat16()[None, :, None]
    case = Case(rows, table, (Pool(fmt, (blobs,)),), torch.tensor([511], dtype=torch.int32), (512,))
    assert_close(case.run("cpu", want_mass=True), replace(case, q=rows.float()).run("reference", want_mass=True), 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_spoils_no_other(dtype: torch.dtype, bad: float) -> None:
    case = make_case(23, ALL, (70, 333, 40), tokens=2)
    case = replace(case, q=case.q.to(dtype))
    q = case.q.clone()
    q[1, 1, 0, 3] = bad
    clean, spoilt = case.run("cpu"), replace(case, q=q).run("cpu")
    row = torch.zeros(clean.lse.shape, dtype=torch.bool)
    row[1, 1, 0] = True
    assert spoilt.out[row].isnan().all()
    assert spoilt.lse[row].isnan().all()
    assert torch.equal(spoilt.out[~row], clean.out[~row])
    assert torch.equal(spoilt.lse[~row], clean.lse[~row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_work_is_shared_is_no_part_of_the_result(dtype: torch.dtype) -> None:
    case = make_case(24, ALL, (40, 1500, 3000, 17), tokens=3)
    case = replace(case, q=case.q.to(dtype))
    one = case.run("cpu", want_mass=True, schedule=Schedule(threads=1))
    for threads in (1, 2, 3):
        for item_splits in (1, 2, 5):
            again = case.run("cpu", want_mass=True, schedule=Schedule(threads=threads, item_splits=item_splits))
            assert all(torch.equal(x, y) for x, y in zip(vars(one).values(), vars(again).values(), strict=True))


@pytest.mark.parametrize("split_tokens", [256, 2048])
def test_split_tokens_change_no_more_than_rounding(split_tokens: int) -> None:
    case = make_case(25, ("bf16", "int4", "proto"), (40, 1500, 3000))
    want = case.run("reference", want_mass=True)
    got = case.run("cpu", want_mass=True, schedule=Schedule(split_tokens=split_tokens))
    assert_close(got, want)
    assert not torch.equal(got.out, case.run("cpu").out)


@pytest.mark.parametrize(
    ("column", "value"), [("pool", 2), ("pool", -1), ("slot", 10**6), ("slot", -1), ("count", 5000), ("count", -3)]
)
def test_the_native_backend_reads_nothing_that_is_not_there(column: str, value: int) -> None:
    case = make_case(16, ("fp32", "int8"), (40, 70))
    wrong = getattr(case.table, column).clone()
    wrong[1] = value
    with pytest.raises(ValueError, match=rf"table\.{column}={value} of stream 1, entry 0: must be 0 to"):
        replace(case, table=replace(case.table, **{column: wrong})).run("cpu")


def test_bad_arguments_are_named() -> None:
    case = make_case(14, ("fp32",), (20,))
    with pytest.raises(ValueError, match="backend='gpu'.*cpu, triton, torch, reference"):
        choose_backend("gpu")
    with pytest.raises(ValueError, match="first_position"):
        attend(case.q[0], case.table, case.pools, case.first_position, scale=1.0)
    other = Pool(page_format("fp32", 32, 64), (torch.zeros(1, 16384, dtype=torch.uint8),))
    with pytest.raises(ValueError, match="P=32"):
        attend(case.q, case.table, (*case.pools, other), case.first_position, scale=1.0)
    with pytest.raises(ValueError, match="slopes"):
        case.run("cpu", slopes=torch.zeros(1, 1))
    with pytest.raises(ValueError, match=r"table\.slot"):
        replace(case.table, slot=case.table.slot.long())
    with pytest.raises(ValueError, match="slab"):
        Pool(page_format("fp32", 16, 64), (torch.zeros(2, 100, dtype=torch.uint8),))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_portable_backend_on_a_gpu() -> None:
    case = make_case(15, ALL, (0, 33, 900), tokens=3)
    t = case.table
    table = PageTable(*(x.cuda() for x in (t.pool, t.slot, t.page, t.count)))
    pools = tuple(Pool(p.fmt, tuple(s.cuda() for s in p.slabs)) for p in case.pools)
    moved = Case(case.q.cuda(), table, pools, case.first_position.cuda(), case.lengths)
    got = moved.run("torch", want_mass=True)
    assert got.mass is not None
    assert_close(Partial(got.out.cpu(), got.lse.cpu(), got.mass.cpu()), case.run("reference", want_mass=True))
