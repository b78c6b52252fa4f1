"""The scheduler: features by hand, a fit that finds the coefficients times were made from, choices without regret."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import make_case

from kernels.api import Options, Schedule
from kernels.cost import FEATURES, KINDS, CostModel, Load, Variant, all_variants, features, run, safe_variants
from kernels.fit import fit, grid, regrets
from kernels.fit import make_case as grid_case

LOAD = Load(
    streams=2,
    rows=8,
    head_dim=64,
    page_tokens=16,
    half=False,
    pages={"float": 100, "int8": 0, "int4": 30, "proto": 70},
    page_bytes={"float": 4096, "int4": 1216, "proto": 320},
    longest_pages=150,
)


def test_features_by_hand() -> None:
    one = dict(zip(FEATURES, features(LOAD, Variant("cpu", Schedule(threads=1))), strict=True))
    # 200 pages of 16 tokens in splits of 64 pages: 4 items, twice since 8 rows take two blocks of 6.
    assert one == {
        "launch": 1.0,
        "wake": 0.0,
        "items": 8.0,
        "float_read": 100 * 4096 * 2,
        "float_multiply": 100 * 16 * 64 * 8,
        "int8_read": 0,
        "int8_multiply": 0,
        "int4_read": 30 * 1216 * 2,
        "int4_multiply": 30 * 16 * 64 * 8,
        "proto_read": 70 * 320 * 2,
        "proto_multiply": 70 * 64 * 8,
    }
    two = dict(zip(FEATURES, features(LOAD, Variant("cpu", Schedule(threads=2), fused=False)), strict=True))
    assert two["launch"] == 2.0
    assert two["wake"] == 1.0
    assert two["float_read"] == one["float_read"] / 2  # 8 items deal out evenly to 2 threads


def test_the_largest_item_bounds_what_threads_can_do() -> None:
    alone = replace(LOAD, streams=1, rows=4, longest_pages=200)
    whole = Schedule(threads=8, item_splits=4)  # one item covers 256 pages
    assert features(alone, Variant("cpu", whole))[3] == features(alone, Variant("cpu", Schedule(threads=1)))[3]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_a_fit_finds_what_times_were_made_from(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    variants = all_variants("cpu", 2, half=True)
    truth = {}
    for kernel in {v.kernel for v in variants}:
        scale = torch.tensor([20, 5, 1] + [1e-4, 1e-5] * len(KINDS))
        truth[kernel] = tuple((scale * (0.5 + torch.rand(len(FEATURES), generator=rng))).tolist())
    model = CostModel(truth)
    loads = []
    for _ in range(60):
        pages = {kind: int(torch.randint(0, 3000, (1,), generator=rng)) for kind in KINDS}
        streams, longest = int(torch.randint(1, 9, (1,), generator=rng)), max(pages.values())
        sizes = {"float": 4096, "int8": 2240, "int4": 1216, "proto": 320}
        loads.append(Load(streams, 4 * streams, 64, 16, True, pages, sizes, longest))
    times = [[model.predict_us(load, v) for v in variants] for load in loads]
    found = fit(loads, variants, times)
    for load, row in zip(loads, times, strict=True):
        assert [found.predict_us(load, v) for v in variants] == pytest.approx(row, rel=1e-3)
        assert model.predict_us(load, found.choose(load, variants)) <= min(row) * 1.002


def test_regret_is_time_of_the_choice_over_the_fastest() -> None:
    case = grid_case((3, 3, 64), 64, "elastic", 1, False, True)
    variants = safe_variants("cpu", 2)
    likes_threads = CostModel({"cpu-float32": (0.0, *[1.0] * (len(FEATURES) - 1))})
    chosen = likes_threads.choose(case.load, variants)
    times = [10.0 + 5 * (v == chosen) for v in variants]
    (found,) = regrets(likes_threads, [case], variants, [times])
    assert found.ratio == 1.5
    assert found.chosen == chosen.describe()


@pytest.mark.parametrize("half", [False, True])
def test_every_variant_means_the_same(half: bool) -> None:
    case = make_case(3, ("fp32", "bf16", "int8", "int4", "proto"), (0, 40, 1500), tokens=2)
    case = replace(case, q=case.q.bfloat16()) if half else case
    options = Options(scale=0.125, window_tokens=700, sink_tokens=16)
    want = case.run("reference", scale=0.125, window_tokens=700, sink_tokens=16)
    for variant in all_variants("cpu", 2, half):
        got = run(variant, case.q, case.table, case.pools, case.first_position, options)
        bound = 1e-2 if half and variant.schedule.arithmetic == "half" else 1e-5
        assert (got.out - want.out).abs().max() <= bound * want.out.abs().max(), variant.describe()


def test_safe_variants_agree_in_every_bit() -> None:
    case = make_case(4, ("bf16", "int8", "proto"), (90, 5000), tokens=1)
    first, *others = (
        run(v, case.q, case.table, case.pools, case.first_position, Options(scale=0.125))
        for v in safe_variants("cpu", 2)
    )
    assert others
    for other in others:
        assert torch.equal(first.out, other.out)
        assert torch.equal(first.lse, other.lse)


def test_load_counts_what_the_table_lists() -> None:
    case = make_case(5, ("bf16", "fp32", "int4", "proto"), (100, 333, 0))
    load = Load.of(case.q, case.table, case.pools)
    listed = [case.pools[int(case.table.pool[s, n])].fmt for s in range(3) for n in range(int(case.table.count[s]))]
    assert load.pages["float"] == sum(f.is_float for f in listed)
    assert load.pages["int8"] == 0
    assert load.pages["int4"] == sum(f.name == "int4" for f in listed)
    assert load.pages["proto"] == sum(f.name == "proto" for f in listed)
    assert load.longest_pages == 21


def test_the_grid_has_all_kinds_and_both_shapes() -> None:
    names = {case.name for case in grid(True)[:4]}
    assert len(names) == 4


def test_a_model_survives_its_file(tmp_path: Path) -> None:
    model = CostModel({"cpu-float32": tuple(float(i) for i in range(len(FEATURES)))}, {"machine": "x"})
    model.write(tmp_path / "deep" / "costs.json")
    assert CostModel.read(tmp_path / "deep" / "costs.json") == model


def test_the_model_that_comes_along_knows_what_the_engine_offers() -> None:
    model = CostModel.read()
    for half in (False, True):
        assert all(model.predict_us(replace(LOAD, half=half), v) > 0 for v in safe_variants("cpu", 2, half))


def test_bad_models_and_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="coefficients of 'cpu-float32': must be 11 numbers, are 2"):
        CostModel({"cpu-float32": (1.0, 2.0)})
    with pytest.raises(ValueError, match="choose among 0 variants"):
        CostModel({}).choose(LOAD, [])
    case = make_case(6, ("fp32",), (20,))
    variant = Variant("cpu", Schedule(threads=1), fused=False)
    with pytest.raises(ValueError, match=r"fused=False"):
        run(variant, case.q, case.table, case.pools, case.first_position, Options(scale=1.0, want_mass=True))
