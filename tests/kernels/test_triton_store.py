"""Triton's page copies, encoder and append in the interpreter, against `kernels.pages` and plain torch.

TRITON_INTERPRET=1 python -m pytest -m interp tests/kernels/test_triton_store.py
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in its own process", allow_module_level=True)

from kernels import api, linear_attention, pages, torch_store
from kernels.gpu import append as gpu_append
from kernels.gpu import encode as gpu_encode
from kernels.gpu import linear as gpu_linear
from kernels.gpu import store
from kernels.pages import FLOAT_DTYPES, page_format
from kernels.table import Pool
from kernels.upkeep import Upkeep

pytestmark = pytest.mark.interp


def tokens(count: int, page_tokens: int, head_dim: int, seed: int) -> torch.Tensor:
    """Rows with loud, offset and constant channels, as real keys have."""
    rng = torch.Generator().manual_seed(seed)
    loud = 1 + 9 * (torch.rand(head_dim, generator=rng) < 0.1)
    offset = 20 * (torch.rand(head_dim, generator=rng) < 0.1)
    x = torch.randn(count, page_tokens, head_dim, generator=rng) * loud + offset
    x[..., 3] = 0.7
    return x


def slabs(fmt: pages.PageFormat, number: int, slab_pages: int, seed: int) -> Pool:
    rng = torch.Generator().manual_seed(seed)
    made = (
        torch.randint(0, 256, (slab_pages, fmt.page_bytes), dtype=torch.uint8, generator=rng) for _ in range(number)
    )
    return Pool(fmt, tuple(made))


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["int4", "int8", "bf16", "proto"]),
    head_dim=st.sampled_from([64, 80]),
    number=st.integers(1, 3),
    slab_pages=st.integers(1, 5),
    wanted=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_pages_are_copied_byte_by_byte(
    name: str, head_dim: int, number: int, slab_pages: int, wanted: int, seed: int
) -> None:
    fmt = page_format(name, 16, head_dim)
    rng = torch.Generator().manual_seed(seed)
    source, target = slabs(fmt, number, slab_pages, seed), slabs(fmt, 2, 8, seed + 1)
    slots = torch.randint(0, source.pages, (wanted,), generator=rng)
    whole = torch.cat(source.slabs)
    assert torch.equal(api.gather(source, slots, "triton"), whole[slots])
    places = torch.randperm(target.pages, generator=rng)[:wanted]
    want = torch.cat(target.slabs).index_copy(0, places, whole[slots])
    api.scatter(target, places, whole[slots], "triton")
    assert torch.equal(torch.cat(target.slabs), want)
    other = slabs(fmt, 2, 8, seed + 1)
    store.copy_pages(source, slots.int(), other, places)
    assert torch.equal(torch.cat(other.slabs), want)
    another = slabs(fmt, 2, 8, seed + 1)
    api.copy_pages(source, slots, another, places, "triton")
    assert torch.equal(torch.cat(another.slabs), want)


def test_slots_outside_the_pool_are_skipped() -> None:
    fmt = page_format("int4", 16, 64)
    source, target = slabs(fmt, 2, 3, 0), slabs(fmt, 2, 2, 1)
    before = torch.cat(target.slabs)
    got = store.gather(source, torch.tensor([-1, 5, 6, 2**40]))
    assert torch.equal(
        got, torch.cat([torch.cat(source.slabs)[[0, 5, 0, 0]] * torch.tensor([[0], [1], [0], [0]])]).byte()
    )
    store.scatter(target, torch.tensor([-1, 4, 2**32 + 1, 3]), torch.ones(4, fmt.page_bytes, dtype=torch.uint8))
    assert torch.equal(torch.cat(target.slabs)[:3], before[:3])
    assert (target.slabs[1][1] == 1).all()


def test_copies_that_cannot_be_are_named() -> None:
    pool, other = slabs(page_format("int4", 16, 64), 1, 3, 0), slabs(page_format("int8", 16, 64), 1, 3, 0)
    two = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="int4 pages to int8"):
        store.copy_pages(pool, two, other, two)
    with pytest.raises(ValueError, match=r"target_slots \(1,\)"):
        store.copy_pages(pool, two, pool, two[:1])
    with pytest.raises(ValueError, match=r"source_slots torch\.float32"):
        store.gather(pool, two.float())
    odd = torch.zeros(3 * pool.fmt.page_bytes + 8, dtype=torch.uint8)[8:].view(3, -1)
    with pytest.raises(ValueError, match="aligned to 16"):
        store.gather(Pool(pool.fmt, (odd,)), two)


@pytest.mark.parametrize(("page_tokens", "head_dim"), [(16, 64), (32, 72), (64, 128), (16, 256)])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "int8", "int4"])
def test_encoded_bytes_are_those_of_the_definition(name: str, page_tokens: int, head_dim: int) -> None:
    fmt = page_format(name, page_tokens, head_dim)
    k, v = tokens(5, page_tokens, head_dim, 0), tokens(5, page_tokens, head_dim, 1)
    k[1], v[1] = 3.25, -3.25  # a constant page
    k[2] *= 1e-6
    assert torch.equal(pages.encode(fmt, k.double(), v, "triton"), pages.encode(fmt, k, v, "torch"))


@pytest.mark.parametrize("name", FLOAT_DTYPES)
def test_a_float_page_is_quantised_from_its_views(name: str) -> None:
    source, target = page_format(name, 16, 80), page_format("int4", 16, 80)
    k, v = tokens(4, 16, 80, 2), tokens(4, 16, 80, 3)
    blobs = pages.encode(source, k, v, "torch")
    arrays = pages.views(source, blobs)
    rounded = [x.to(FLOAT_DTYPES[name]).float() for x in (k, v)]
    got = gpu_encode.encode(target, arrays["k"].transpose(1, 2), arrays["v"])
    assert torch.equal(got, pages.encode(target, rounded[0], rounded[1], "torch"))


def test_bf16_rounds_to_nearest_even_and_keeps_nan_and_infinity() -> None:
    fmt = page_format("bf16", 16, 8)
    bits = torch.randint(-(2**31), 2**31 - 1, (8, 16, 8), generator=torch.Generator().manual_seed(0))
    bits[0, :4, 0] = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000])
    x = bits.to(torch.int32).view(torch.float32)
    x[1, 0] = float("nan")
    got = pages.decode(fmt, gpu_encode.encode(fmt, x, -x))
    for mine, theirs in zip(got, (x, -x), strict=True):
        assert torch.equal(mine.nan_to_num(123.0), theirs.bfloat16().float().nan_to_num(123.0))


def test_what_cannot_be_encoded_is_named() -> None:
    fmt, x = page_format("int8", 16, 64), torch.zeros(1, 16, 64)
    with pytest.raises(ValueError, match="'proto'"):
        gpu_encode.encode(page_format("proto", 16, 64), x, x)
    with pytest.raises(ValueError, match=r"encode v .*\(1, 15, 64\)"):
        gpu_encode.encode(fmt, x, x[:, 1:])


@dataclass(frozen=True)
class Writing:
    """Pages and what is kept of them, before or after the same appends."""

    pool: Pool
    upkeep: dict[str, Any]

    def copy(self) -> Writing:
        """The same in other memory."""
        kept = {key: _copy(x) for key, x in self.upkeep.items()}
        return Writing(_copy(self.pool), kept)

    def tensors(self) -> dict[str, torch.Tensor]:
        parts = {"pool": self.pool, **self.upkeep}
        return {key: torch.cat(x.slabs) if isinstance(x, Pool) else x for key, x in parts.items()}


def _copy(x: torch.Tensor | Pool) -> Any:
    return Pool(x.fmt, tuple(slab.clone() for slab in x.slabs)) if isinstance(x, Pool) else x.clone()


def make_writing(
    fmt: pages.PageFormat, streams: int, columns: int, sealed: str | None, groups: int, bounds: torch.dtype | None
) -> Writing:
    def filled(name: str, groups: int = 1) -> Pool:
        its = page_format(name, fmt.page_tokens, fmt.head_dim, groups)
        made = (torch.full((-(-streams * columns // 2), its.page_bytes), 0xFF, dtype=torch.uint8) for _ in range(2))
        return Pool(its, tuple(made))

    kept: dict[str, Any] = {}
    if bounds is not None:
        shape = (streams, columns, fmt.head_dim)
        kept |= {"lowest": torch.full(shape, float("inf"), dtype=bounds)}
        kept |= {"highest": torch.full(shape, float("-inf"), dtype=bounds)}
    if sealed is not None:
        kept["sealed"] = filled(sealed)
    if groups:
        kept["prototypes"] = filled("proto", groups)
    return Writing(filled(fmt.name), kept)


def append_all(writing: Writing, run: Any, k: torch.Tensor, v: torch.Tensor, cuts: list[int], seed: int) -> None:
    """Appends tokens 0 to cuts[-1] of each stream in calls that end at the cuts."""
    streams, fmt = len(k), writing.pool.fmt
    columns = -(-cuts[-1] // fmt.page_tokens)
    places = torch.randperm(streams * columns, generator=torch.Generator().manual_seed(seed)).view(streams, -1).int()
    start = 0
    for end in cuts:
        at = torch.arange(start, end)
        page, offset = (at // fmt.page_tokens).int(), (at % fmt.page_tokens).int()
        slot = places[:, page.long()]
        upkeep = dict(writing.upkeep)
        for key, name in (("sealed", "sealed_slot"), ("prototypes", "prototype_slot")):
            if key in upkeep:  # elsewhere than the page itself
                upkeep[name] = torch.where(offset == fmt.page_tokens - 1, streams * columns - 1 - slot, -1).int()
        run(k[:, start:end], v[:, start:end], slot, offset, writing.pool, Upkeep(page, **upkeep) if upkeep else None)
        start = end


@settings(max_examples=10, deadline=None)
@given(
    name=st.sampled_from(["fp32", "bf16", "fp16"]),
    shape=st.sampled_from([(16, 64), (32, 72), (16, 80)]),
    streams=st.integers(1, 3),
    steps=st.lists(st.sampled_from([1, 1, 2, 5, 16, 33]), min_size=1, max_size=4),
    sealed=st.sampled_from([None, "int8", "int4", "bf16"]),
    groups=st.sampled_from([0, 1, 2]),
    bounds=st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_append_equals_the_steps_one_by_one(
    name: str,
    shape: tuple[int, int],
    streams: int,
    steps: list[int],
    sealed: str | None,
    groups: int,
    bounds: torch.dtype | None,
    seed: int,
) -> None:
    page_tokens, head_dim = shape
    fmt = page_format(name, page_tokens, head_dim)
    cuts = torch.tensor([page_tokens - 2, *steps]).cumsum(0).tolist()
    k, v = tokens(streams, cuts[-1], head_dim, seed), tokens(streams, cuts[-1], head_dim, seed + 1)
    columns = -(-cuts[-1] // page_tokens)
    mine = make_writing(fmt, streams, columns, sealed, groups, bounds)
    theirs = mine.copy()
    channel_major = v.transpose(1, 2).contiguous().transpose(1, 2)
    append_all(mine, partial(api.append, backend="triton"), k, channel_major, cuts, seed)
    append_all(theirs, torch_store.append, k, v, cuts, seed)
    got, want = mine.tensors(), theirs.tensors()
    for key in want:
        if key == "prototypes" and groups == 1:  # sums of another order, so another bfloat16 at times
            its = page_format("proto", page_tokens, head_dim)
            assert_prototypes_alike(its, got[key], want[key])
        else:
            assert torch.equal(got[key], want[key]), key


def assert_prototypes_alike(fmt: pages.PageFormat, got: torch.Tensor, want: torch.Tensor) -> None:
    mine, theirs = pages.views(fmt, got), pages.views(fmt, want)
    assert torch.equal(mine["log2_count"].view(torch.int32), theirs["log2_count"].view(torch.int32))
    for key in ("k", "v"):
        a, b = mine[key].float().nan_to_num(7.0), theirs[key].float().nan_to_num(7.0)
        assert torch.allclose(a, b, rtol=2**-7, atol=1e-6)
        assert (a != b).float().mean() < 0.05
    used = fmt.fields["log2_count"].offset_bytes + 4
    assert torch.equal(got[:, used:], want[:, used:])


@settings(max_examples=6, deadline=None)
@given(
    starts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    tokens_each=st.sampled_from([1, 1, 2, 19]),
    alike=st.booleans(),
    seed=st.integers(0, 99),
)
def test_streams_at_different_offsets(starts: list[int], tokens_each: int, alike: bool, seed: int) -> None:
    """`alike`: the offset of all streams is given once, the page of each stream."""
    streams, rng = len(starts), torch.Generator().manual_seed(seed)
    fmt = page_format("fp32", 16, 64)
    mine = make_writing(fmt, streams, 4, "int8", 1, torch.float32)
    for slab in mine.pool.slabs:
        slab.zero_()  # tokens before the first
    theirs = mine.copy()
    first = torch.tensor(starts if not alike else starts[:1] * streams)
    places = torch.randperm(streams * 4, generator=rng).view(streams, 4).int()
    k = tokens(streams, tokens_each, 64, seed)
    position = first[:, None] + torch.arange(tokens_each)
    page, offset = (position // 16).int(), (position % 16).int()
    slot = places.gather(1, page.long())
    fills = torch.where(offset == 15, slot, -1)
    for writing, run in ((mine, partial(api.append, backend="triton")), (theirs, torch_store.append)):
        kept: dict[str, Any] = writing.upkeep | {"sealed_slot": fills, "prototype_slot": fills}
        run(k, -k, slot, offset[0] if alike else offset, writing.pool, Upkeep(page, **kept))
    got, want = mine.tensors(), theirs.tensors()
    for key in ("pool", "lowest", "highest", "sealed"):
        assert torch.equal(got[key], want[key]), key
    assert_prototypes_alike(page_format("proto", 16, 64), got["prototypes"], want["prototypes"])


def test_append_skips_what_lies_outside_and_a_nan_moves_no_bound() -> None:
    fmt = page_format("fp32", 16, 64)
    writing = make_writing(fmt, 2, 1, "int8", 1, torch.float32)
    before = writing.copy().tensors()
    k = tokens(2, 3, 64, 0)
    slot = torch.tensor([[-1, 2, 2**31 - 1], [-7, 2, 9]], dtype=torch.int32)
    offset, page = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 0, 0], dtype=torch.int32)
    kept = writing.upkeep | {"sealed_slot": torch.zeros_like(slot), "prototype_slot": torch.zeros_like(slot)}
    gpu_append.append(k, k, slot, offset, writing.pool, Upkeep(page, **kept))
    for key, x in writing.tensors().items():
        assert torch.equal(x.view(torch.uint8), before[key].view(torch.uint8)), key
    k[0, 1, 5] = float("nan")
    low, high = writing.upkeep["lowest"], writing.upkeep["highest"]
    one = torch.zeros(2, 3, dtype=torch.int32)
    one[1] = 1
    for column in (-1, 1):
        gpu_append.append(k, k, one, offset, writing.pool, Upkeep(page + column, low, high))
        assert low.isinf().all()
    gpu_append.append(k, k, one, offset, writing.pool, Upkeep(page, low, high))
    assert torch.equal(low[:, 0], k.nan_to_num(1e9).amin(1))
    assert torch.equal(high[:, 0], k.nan_to_num(-1e9).amax(1))
    assert pages.views(fmt, writing.pool.slabs[0])["k"][0, 5, 1].isnan()


def test_append_needs_slabs_it_can_reach() -> None:
    fmt = page_format("fp32", 16, 64)
    odd = Pool(fmt, (torch.zeros(fmt.page_bytes + 4, dtype=torch.uint8)[4:][None],))
    one = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="pool: slab at .* aligned to 16"):
        gpu_append.append(torch.zeros(1, 1, 64), torch.zeros(1, 1, 64), one, one[0], odd)


@pytest.mark.parametrize("name", ["favor", "anchors", "elu"])
def test_appended_tokens_go_into_the_linear_state(name: str) -> None:
    """What the state then answers is what float64 says of the tokens that count; the others may be NaN."""
    streams, head_dim, scale = 3, 72, 72**-0.5
    rng = torch.Generator().manual_seed(0)
    centre, anchors = (torch.randn(*shape, generator=rng) for shape in ((streams, head_dim), (streams, 70, head_dim)))
    fmap = {
        "favor": linear_attention.favor_map(head_dim, 70, scale, seed=1, centre=centre / 9),
        "anchors": linear_attention.FeatureMap("anchors", scale, anchors, centre / 9),
        "elu": linear_attention.elu_map(scale),
    }[name]
    state = linear_attention.empty_state(streams, fmap.features(head_dim), head_dim)
    fmt = page_format("fp32", 16, head_dim)
    pool = Pool(fmt, (torch.zeros(streams, fmt.page_bytes, dtype=torch.uint8),))
    k, v = (torch.randn(streams, head_dim, 7, generator=rng).transpose(1, 2) * 2 for _ in range(2))
    valid = torch.rand(streams, 7, generator=rng) < 0.6
    valid[1] = False
    k[~valid], v[~valid] = float("nan"), float("nan")
    slot = torch.arange(streams, dtype=torch.int32)[:, None].expand(-1, 7)
    at = torch.arange(7, dtype=torch.int32)
    for some in (slice(0, 5), slice(5, 6), slice(6, 7)):
        upkeep = Upkeep(at[some] * 0, linear=state, feature_map=fmap, linear_tokens=valid[:, some])
        api.append(k[:, some], v[:, some], slot[:, some], at[some], pool, upkeep, "triton")
    q = torch.randn(streams, 2, 1, head_dim, generator=rng)
    got = linear_attention.attend(q, state, fmap)
    want = linear_attention.reference(q, torch.where(valid[..., None], k, 0), v, fmap, valid)
    assert torch.equal(state.tokens, valid.sum(1).int())
    assert (got.lse[1] == -torch.inf).all()
    assert torch.allclose(got.lse[[0, 2]].double(), want.lse[[0, 2]], atol=1e-5)
    assert torch.allclose(got.out.double(), want.out, rtol=1e-5, atol=1e-5)


def test_a_state_that_cannot_be_added_to_is_named() -> None:
    fmap = linear_attention.elu_map(0.1)
    state = linear_attention.empty_state(2, 8, 8)
    with pytest.raises(ValueError, match="linear state"):
        gpu_linear.add(state, fmap, torch.zeros(2, 1, 16), torch.zeros(2, 1, 16))
    strided = linear_attention.LinearState(state.s.transpose(1, 2), state.z, state.log2_scale, state.peak, state.tokens)
    with pytest.raises(ValueError, match="linear state s .*contiguous"):
        gpu_linear.add(strided, fmap, torch.zeros(2, 1, 8), torch.zeros(2, 1, 8))
