"""Every backend, mode, format, head size and page size against an oracle that shares no code with kernels/.

Unwritten slots are NaN (paged_case.py), unwritten memory is NaN (`poisoned_memory`), lengths are ragged. The Triton
rows run in the interpreter's own process: `TRITON_INTERPRET=1 python -m pytest -m interp`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TypedDict

import pytest
import torch
from exactness import (
    LOG2E,
    TOLERANCE,
    check,
    oracle,
    permuted,
    poisoned_memory,
    slice_table,
    stream_rows,
    with_background,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_case import Case, make_case
from torch import Tensor

from kernels.api import PageTable, Pool, Schedule, append, attend, gather, scatter
from kernels.linear_attention import add, empty_state, favor_map
from kernels.linear_attention import attend as linear_attend
from kernels.mixture import attend_mixture
from kernels.pages import page_format
from kernels.state import Partial, merge

FAST = ("cpu", "torch")
STORED = ("fp32", "bf16", "fp16", "int8", "int4")
MODES = ("exact", "window", "cluster", "background", "mixture")
ANY = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
interp = pytest.mark.skipif(not os.environ.get("TRITON_INTERPRET"), reason="needs TRITON_INTERPRET=1, its own process")


@pytest.fixture(autouse=True)
def _poison(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is not written is NaN; not where gigabytes are mapped and never touched."""
    if request.node.get_closest_marker("gpu") or "mapped" in request.fixturenames:
        yield
        return
    with poisoned_memory():
        yield


def formats_of(mode: str, name: str) -> tuple[str, ...]:
    """Formats of a case; a float one must be among them, for the last page."""
    base = (name,) if name in ("fp32", "bf16", "fp16") else ("fp32", name)
    if mode == "cluster":
        return (*base, "proto")
    return (*base, *(n for n in ("int8", "int4", "proto") if n not in base)) if mode == "mixture" else base


def build(mode: str, name: str, lengths: tuple[int, ...], head_dim: int, page_tokens: int, tokens: int) -> Case:
    seed = head_dim + page_tokens + tokens + 7 * MODES.index(mode)
    case = make_case(seed, formats_of(mode, name), lengths, head_dim, page_tokens, 4, tokens, groups=3)
    if mode in ("background", "mixture"):
        case = with_background(case, seed)
    return replace(case, q=case.q.bfloat16().float())  # so that one oracle serves queries of every type


class Windows(TypedDict):
    """What the window modes add to a call."""

    window_tokens: int | Tensor
    sink_tokens: int


def window_of(mode: str, streams: int) -> Windows:
    if mode not in ("window", "mixture"):
        return {"window_tokens": 0, "sink_tokens": 0}
    windows = torch.tensor([0, 1, 7, 0, 9, 200][:streams], dtype=torch.int32)  # all shorter than the stream, or none
    return {"window_tokens": windows, "sink_tokens": 3}


@pytest.mark.parametrize("page_tokens", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("name", STORED)
def test_every_mode(name: str, head_dim: int, page_tokens: int) -> None:
    p = page_tokens
    half = torch.bfloat16 if p != 32 else torch.float16
    for mode, tokens in product(MODES, (1, 1 + p // 2)):
        lengths = (0, 1, p - 1, p, p + 1, 1100 + p if tokens == 1 else 2 * p)
        case = build(mode, name, lengths, head_dim, p, tokens)
        options = window_of(mode, len(lengths))
        want = oracle(case, head_dim**-0.5, **options)
        for backend, dtype in product(FAST, (torch.float32, half)):
            got = replace(case, q=case.q.to(dtype)).run(backend, want_mass=True, **options)
            check(got, want, TOLERANCE[dtype], f"{backend} {mode} {dtype} T={tokens}")


@pytest.mark.parametrize("backend", FAST)
def test_a_stream_of_many_blocks(backend: str) -> None:
    """Longer than what any backend works on at a time, so that masses of several blocks are joined."""
    case = make_case(9, ("bf16", "int4"), (9000, 4097, 5))
    check(case.run(backend, want_mass=True), oracle(case, 0.125), 1e-5)


@ANY
@given(
    seed=st.integers(0, 10_000),
    names=st.lists(st.sampled_from((*STORED, "proto")), max_size=4, unique=True),
    base=st.sampled_from(["fp32", "bf16", "fp16"]),
    lengths=st.lists(st.one_of(st.integers(0, 130), st.integers(0, 5000)), min_size=1, max_size=4),
    head_dim=st.sampled_from([8, 64, 80, 96, 128, 256]),
    page_tokens=st.sampled_from([16, 32, 64]),
    group=st.integers(1, 8),
    tokens=st.sampled_from([1, 1, 2, 7, 16, 33, 64]),
    windows=st.lists(st.sampled_from([0, 1, 16, 100, 2000]), min_size=4, max_size=4),
    sink_tokens=st.sampled_from([0, 1, 16, 100]),
    background=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    split_tokens=st.sampled_from([256, 1024, 4096]),
    threads=st.integers(1, 3),
    item_splits=st.integers(1, 3),
)
def test_any_mixture(
    seed: int,
    names: list[str],
    base: str,
    lengths: list[int],
    head_dim: int,
    page_tokens: int,
    group: int,
    tokens: int,
    windows: list[int],
    sink_tokens: int,
    background: bool,
    dtype: torch.dtype,
    split_tokens: int,
    threads: int,
    item_splits: int,
) -> None:
    """Streams may be shorter than the T new tokens: rows before position 0 see nothing."""
    formats = (base, *(n for n in names if n != base))
    case = make_case(seed, formats, tuple(lengths), head_dim, page_tokens, group, tokens, groups=1 + seed % 5)
    if background:
        case = with_background(case, seed)
    case = replace(case, q=case.q.to(dtype))
    window = torch.tensor(windows[: len(lengths)], dtype=torch.int32)
    options: Windows = {"window_tokens": window, "sink_tokens": sink_tokens}
    want = oracle(case, head_dim**-0.5, **options)
    schedule = Schedule(split_tokens=split_tokens, threads=threads, item_splits=item_splits)
    for backend in FAST:
        got = case.run(backend, want_mass=True, schedule=schedule, **options)
        check(got, want, TOLERANCE[dtype], backend)
    if sum(lengths) * group * tokens < 4000:
        check(as_float(case.run("reference", want_mass=True, **options)), want, 1e-6, "reference")


def as_float(part: Partial) -> Partial:
    return Partial(part.out.float(), part.lse.float(), part.mass)


@pytest.mark.interp
@interp
@pytest.mark.parametrize(("head_dim", "page_tokens"), [(64, 16), (80, 32), (128, 64)])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_in_triton(mode: str, head_dim: int, page_tokens: int) -> None:
    """Few and short: a tile takes 10 ms in the interpreter, and bf16 products are wrong there."""
    p, name = page_tokens, {64: "fp16", 80: "int8", 128: "int4"}[head_dim]
    case = build(mode, name, (0, p - 1, 5 * p + 1), head_dim, p, 2)
    options = window_of(mode, 3)
    want = oracle(case, head_dim**-0.5, **options)
    for dtype in (torch.float32, torch.float16):
        got = replace(case, q=case.q.to(dtype)).run("triton", want_mass=True, **options)
        check(got, want, TOLERANCE[dtype], f"triton {mode} {dtype}")


def assert_same(got: Partial, want: Partial, streams: slice | list[int], where: str) -> None:
    """Bitwise; `got` may be of a narrower table."""
    assert got.mass is not None
    assert want.mass is not None
    assert torch.equal(got.out, want.out[streams]), f"{where}: out"
    assert torch.equal(got.lse, want.lse[streams]), f"{where}: lse"
    width = got.mass.shape[1]
    assert torch.equal(got.mass, want.mass[streams][:, :width]), f"{where}: mass"


@settings(ANY, max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from(list(TOLERANCE)),
    head_dim=st.sampled_from([64, 72, 128]),
    tokens=st.sampled_from([1, 3, 20]),
    order=st.permutations(range(5)),
    schedule=st.builds(Schedule, threads=st.integers(1, 3), item_splits=st.sampled_from([1, 2, 5])),
)
def test_rows_are_bitwise_the_same_in_any_batch(
    seed: int, dtype: torch.dtype, head_dim: int, tokens: int, order: list[int], schedule: Schedule
) -> None:
    lengths = (2600, 0, 17, 1025, 300)
    names = ("bf16", "int8", "int4", "proto")
    case = make_case(seed, names, lengths, head_dim, 16, 3, tokens)
    case = replace(case, q=case.q.to(dtype))
    options = {"window_tokens": torch.tensor([0, 9, 9, 800, 100], dtype=torch.int32), "sink_tokens": 3}
    for backend in FAST:
        whole = case.run(backend, want_mass=True, **options)
        moved = {**options, "window_tokens": options["window_tokens"][order]}
        assert_same(permuted(case, order).run(backend, want_mass=True, **moved), whole, order, f"{backend} permuted")
        cut = case.run(backend, want_mass=True, schedule=schedule, **options)
        assert_same(cut, whole, slice(None), f"{backend} {schedule}")
        for s in range(5):
            own = {**options, "window_tokens": options["window_tokens"][s : s + 1]}
            assert_same(case.only(s).run(backend, want_mass=True, **own), whole, [s], f"{backend} stream {s} alone")


def test_what_a_call_leaves_behind_reaches_no_other() -> None:
    """A call of NaN queries fills whatever buffers a backend keeps; the next call must not see them."""
    case = make_case(1, ("bf16", "int4", "proto"), (70, 0, 2100, 5), tokens=3)
    nan = replace(case, q=torch.full_like(case.q, math.nan))
    for backend in FAST:
        want = case.run(backend, want_mass=True)
        assert nan.run(backend, want_mass=True).out[[0, 2, 3]].isnan().all()
        got = case.run(backend, want_mass=True)
        assert_same(got, want, slice(None), backend)


@pytest.mark.parametrize("backend", [*FAST, pytest.param("triton", marks=[pytest.mark.interp, interp])])
def test_parts_merge_to_the_oracle_in_any_order(backend: str) -> None:
    length = 400 if backend == "triton" else 3000
    case = with_background(make_case(2, ("fp32", "int8", "proto"), (0, 90, length)), 3)
    want = oracle(case, 0.125)
    width, n = case.table.pool.shape[1], 5
    edges = [i * width // n for i in range(n + 1)]
    parts = [
        attend(case.q, slice_table(case.table, slice(a, b)), case.pools, case.first_position, scale=0.125,
               backend=backend)
        for a, b in zip(edges, edges[1:], strict=False)
    ]  # fmt: skip
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        picked = [parts[i] for i in order]
        check(merge(picked), want, 1e-5, f"{order}")
        check(merge([merge(picked[:2]), merge(picked[2:])]), want, 1e-5, f"{order}, nested")


@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_a_million_tokens_in_one_stream(name: str) -> None:
    """65,536 entries over 64 slots, so that the pages stay small; the newest page is half written."""
    base = make_case(3, ("bf16", name) if name != "bf16" else ("bf16",), (64 * 16,), group=2)
    n = 1 << 16
    slots = torch.randint(0, 60, (1, n), generator=torch.Generator().manual_seed(0))
    table = PageTable(
        base.table.pool[:, slots[0]],
        base.table.slot[:, slots[0]],
        torch.arange(n, dtype=torch.int32)[None],
        torch.tensor([n], dtype=torch.int32),
    )
    first = torch.tensor([n * 16 - 9], dtype=torch.int32)
    case = replace(base, table=table, first_position=first, lengths=(n * 16 - 8,))
    # A key that stands in many pages weighs as often: the oracle sees each slot once, with the log of its count.
    want = _repeated(base, slots[0], 0.125, unwritten=8)
    for backend in FAST:
        got = case.run(backend, want_mass=True, scale=0.125)
        assert got.mass is not None
        assert abs(float(got.mass.double().sum()) - 1) < 1e-5
        check(Partial(got.out, got.lse), want, 1e-5, backend)


@pytest.mark.parametrize("backend", FAST)
def test_a_mixture_with_a_linear_state(backend: str) -> None:
    """Exact, quantised, prototype and background entries and a linear state (FAVOR+) are one softmax."""
    case = with_background(make_case(6, ("fp32", "int4", "proto"), (5, 90, 300), group=2), 6)
    rng = torch.Generator().manual_seed(6)
    k, v = torch.randn(3, 40, 64, generator=rng), torch.randn(3, 40, 64, generator=rng)
    fmap = favor_map(64, 128, 0.125, seed=1)
    state = empty_state(3, 128, 64)
    add(state, fmap, k, v)
    part = linear_attend(case.q, state, fmap)
    got = attend_mixture(case.q, case.table, case.pools, case.first_position, [part], scale=0.125, want_mass=True,
                         backend=backend)  # fmt: skip
    assert fmap.projection is not None
    w, x, y = fmap.projection.double(), case.q.double() * 0.125**0.5, k.double() * 0.125**0.5
    phi_q = x @ w.T - x.square().sum(3, keepdim=True) / 2
    phi_k = y @ w.T - y.square().sum(2, keepdim=True) / 2
    logit = (phi_q[:, :, :, None] + phi_k[:, None, None]).logsumexp(4) - math.log(128)
    want = oracle(case, 0.125, extra={s: (logit[s] * LOG2E, v[s].double()) for s in range(3)})
    assert want.mass is not None
    check(got, replace(want, mass=torch.cat([want.mass, 1 - want.mass.sum(1, keepdim=True)], 1)), 1e-5)


def _repeated(base: Case, columns: Tensor, scale: float, unwritten: int) -> Partial:
    """The oracle of a stream that lists columns of `base` over and over; the last entry's last tokens are unseen."""
    rows = stream_rows(base, 0)
    count = torch.bincount(columns, minlength=64).double()[rows.column]
    last = (rows.column == columns[-1]) & (rows.position % 16 >= 16 - unwritten)
    count -= last.double()
    logit = base.q[0].double() @ rows.k.T * scale * LOG2E + count.log2()
    lse = (logit / LOG2E).logsumexp(2) * LOG2E
    weight = torch.exp2(logit - lse[..., None])
    return Partial((weight @ torch.where(count[:, None] > 0, rows.v, 0.0))[None], lse[None])


@pytest.fixture
def mapped() -> Tensor:
    """Five gigabytes of addresses; pages that nobody touches take no memory."""
    return torch.empty(5 << 30, dtype=torch.uint8)


@pytest.mark.parametrize("name", ["bf16", "int8", "proto"])
def test_addresses_beyond_two_gigabytes(name: str, mapped: Tensor) -> None:
    fmt = page_format(name, 16, 64, 2 if name == "proto" else 1)
    near = make_case(4, ("bf16", name) if name != "bf16" else ("bf16",), (1000,), slabs=1)
    which = len(near.pools) - 1
    pages = len(mapped) // fmt.page_bytes
    far = Pool(fmt, (mapped[: pages * fmt.page_bytes].view(pages, fmt.page_bytes),))
    mine = near.table.pool[0] == which
    # The first page past each power of two of bytes, and the very last ones.
    held = near.table.slot[0, mine]
    places = torch.arange(pages - len(held), pages, dtype=torch.int32)
    places[:2] = torch.tensor([-(-(2**31) // fmt.page_bytes), -(-(2**32) // fmt.page_bytes)], dtype=torch.int32)
    far.slabs[0][places.long()] = near.pools[which].slabs[0][held.long()]
    slot = near.table.slot.clone()
    slot[0, mine] = places
    case = replace(near, table=replace(near.table, slot=slot), pools=(*near.pools[:which], far))
    for backend in FAST:
        assert_same(case.run(backend, want_mass=True), near.run(backend, want_mass=True), slice(None), backend)


@pytest.mark.parametrize("backend", FAST)
def test_writes_beyond_two_gigabytes(backend: str, mapped: Tensor) -> None:
    fmt = page_format("bf16", 16, 64)
    pages = len(mapped) // fmt.page_bytes
    far = Pool(fmt, (mapped.view(pages, fmt.page_bytes),))
    near = Pool(fmt, (torch.zeros(2, fmt.page_bytes, dtype=torch.uint8),))
    k, v = torch.randn(1, 2, 64), torch.randn(1, 2, 64)
    offset = torch.tensor([3, 15], dtype=torch.int32)
    places = torch.tensor([2**31 // fmt.page_bytes + 1, pages - 1])
    scatter(far, places, gather(near, torch.tensor([0, 1]), backend), backend)
    append(k, v, places.int()[None], offset, far, backend=backend)
    append(k, v, torch.tensor([[0, 1]], dtype=torch.int32), offset, near, backend=backend)
    assert torch.equal(gather(far, places, backend), near.slabs[0])
    assert near.slabs[0].any()


@pytest.mark.parametrize("backend", [*FAST, "reference", pytest.param("triton", marks=[pytest.mark.interp, interp])])
def test_nothing_at_all(backend: str) -> None:
    """No stream, no entry, no pool, no token, no head, a pool without slabs: shapes kept, 0 and -inf."""
    case = make_case(5, ("fp32",), (0, 0))
    empty_pool = Pool(page_format("fp32", 16, 64), ())
    no_entry = slice_table(case.table, slice(0, 0))
    for table, pools in ((case.table, ()), (no_entry, case.pools), (no_entry, ()), (case.table, (empty_pool,))):
        part = attend(case.q, table, pools, case.first_position, scale=1.0, want_mass=True, backend=backend)
        assert part.out.shape == case.q.shape
        assert not part.out.any()
        assert (part.lse == -math.inf).all()
        assert part.mass is not None
        assert part.mass.shape == table.pool.shape
        assert not part.mass.any()
    for q in (case.q[:, :0], case.q[:, :, :0]):
        assert replace(case, q=q).run(backend).out.shape == q.shape
    none = make_case(5, ("fp32",), ())
    part = none.run(backend, want_mass=True)
    assert part.out.shape == (0, 3, 1, 64)
    assert part.lse.shape == (0, 3, 1)
