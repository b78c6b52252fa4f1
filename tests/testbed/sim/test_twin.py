"""The twin against closed forms: rooflines, layer pipelines, two hops, prefetch, conservation, determinism."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy import Environment
from twin_samples import LLAMA_8B, TINY, decode, log, machine

from testbed.decisions import DecisionLog, LogError, Move, Step
from testbed.sim.hardware import Hardware, Quantity, load
from testbed.sim.links import FairLink
from testbed.sim.node import Node
from testbed.sim.timeline import TRACKS, write_trace
from testbed.sim.twin import PARTS, Prediction, predict
from testbed.sim.work import works

COMPUTE_US = 4000.0  # TINY's 4 MB of weights at 1 GB/s
LAYERS = TINY.layers


def us(prediction: Prediction) -> float:
    """Whole simulated time."""
    return prediction.ms_per_token * 1e3 * prediction.steps


def ideal(name: str) -> Hardware:
    """A real machine with efficiency 1 and no overhead."""
    real = load(name)
    changed = dict(real.quantities)
    for key in ("contiguous_efficiency", "paged_efficiency", "matmul_efficiency"):
        changed[key] = Quantity(1.0, "fraction", "ideal", "2026-11", "spec")
    for key in ("layer_overhead", "step_overhead", "plan_overhead"):
        changed[key] = Quantity(0.0, "us", "ideal", "2026-11", "spec")
    return Hardware(name, changed)


@pytest.mark.parametrize(
    ("name", "golden_ms"),
    [("a100", (8.4, 10.0, 16.3)), ("h100", (5.1, 6.1, 9.9)), ("h200", (3.6, 4.2, 6.9))],
)
def test_roofline_of_llama_8b(name: str, golden_ms: tuple[float, ...]) -> None:
    """Published figures: batch 1, bf16, 8k, 32k, 128k tokens."""
    for tokens, expected in zip((8192, 32768, 131072), golden_ms, strict=True):
        streams = LLAMA_8B.layers * LLAMA_8B.kv_heads
        step = Step(
            1,
            "decode",
            1,
            tokens,
            read_bytes={"L1": 131072 * tokens},
            read_tokens={"compute": streams * tokens},
        )
        found = predict(log(step, model=LLAMA_8B), ideal(name)).ms_per_token
        assert round(found, 1) == expected, (name, tokens, found)


@pytest.mark.parametrize("load_us", [100.0, 1000.0, 2500.0])
@pytest.mark.parametrize("setup_us", [0.0, 30.0])
@pytest.mark.parametrize("coalesce", [True, False])
def test_layer_pipeline(load_us: float, setup_us: float, coalesce: bool) -> None:
    """T = L max(c, x) + min(c, x), exposed T - L c."""
    size = round((load_us - setup_us) * 1000) * LAYERS
    step = decode(1, Move("L2", "L1", size, 1, "compute"))
    found = predict(log(step), machine(host_setup=setup_us), coalesce=coalesce)
    compute = COMPUTE_US / LAYERS
    whole = LAYERS * max(compute, load_us) + min(compute, load_us)
    assert us(found) == pytest.approx(whole, rel=1e-9)
    assert found.breakdown["moves_exposed"] * 1e3 == pytest.approx(whole - COMPUTE_US, rel=1e-9)


DEMAND = st.tuples(st.sampled_from(["L2", "L3"]), st.integers(1, 10**8))


@settings(deadline=None, max_examples=100)
@given(
    steps=st.lists(st.lists(DEMAND, max_size=2), min_size=1, max_size=4),
    rates=st.tuples(*[st.floats(0.5, 20.0)] * 3),
    setup=st.floats(0, 100),
    layers=st.integers(1, 7),
)
def test_coalesced_equals_layer_by_layer(steps, rates, setup, layers) -> None:
    host, disk, both = rates
    model = TINY.__class__("m", layers, 4, 2, 8, 4_000_000, 4_000_000)
    made = [
        decode(i, *(Move(tier, "L1", size * layers, 1, "int4") for tier, size in demand))
        for i, demand in enumerate(steps, 1)
    ]
    hardware = machine(host_read=host, disk_read=disk, host_both=both, host_setup=setup, disk_setup=setup)
    fast, slow = (predict(log(*made, model=model), hardware, coalesce=c) for c in (True, False))
    assert fast.ms_per_token == pytest.approx(slow.ms_per_token, rel=1e-9)
    assert fast.moved_bytes == slow.moved_bytes
    assert fast.breakdown == pytest.approx(slow.breakdown, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("chunks", [1, 4, 10])
def test_two_hops(chunks: int) -> None:
    """T = (s/m)(1/b1 + 1/b2) + (m - 1)(s/m)/min(b1, b2)."""
    size = 10_000_000
    hardware = machine(disk_read=2.0, host_read=5.0, chunk=size / chunks)
    found = predict(log(decode(1, Move("L3", "L1", size, 1, "int8", demand=False))), hardware)
    piece = size / chunks
    expected = piece * (1 / 2000 + 1 / 5000) + (chunks - 1) * piece / 2000
    # All of it runs beside the step's 4,000 us; what is left is drained.
    assert us(found) == pytest.approx(max(COMPUTE_US, expected), rel=1e-9)


@pytest.mark.parametrize("route", [("L2", "L1"), ("L1", "L2"), ("L0", "L2"), ("L2", "L3"), ("L3", "L2")])
@pytest.mark.parametrize("load_us", [3000.0, 9000.0])
def test_sustained_background_is_max_of_both(route: tuple[str, str], load_us: float) -> None:
    """Prefetch and demotion: step = max(c, x) whatever the lead."""
    moves = [decode(i, Move(*route, round(load_us * 1000), 1, "compute", demand=False)) for i in range(1, 11)]
    found = predict(log(*moves), machine())
    assert us(found) / 10 == pytest.approx(max(COMPUTE_US, load_us), rel=1e-9)
    assert found.breakdown["moves_exposed"] * 1e3 == pytest.approx(max(0.0, load_us - COMPUTE_US), abs=1e-6)


def test_prefetch_beats_demand_and_no_overlap_costs_all() -> None:
    moves = [Move("L2", "L1", 3_000_000, 1, "compute", demand=demand) for demand in (False, True)]
    prefetch, demand = (us(predict(log(decode(1, move)), machine())) for move in moves)
    serial = [us(predict(log(decode(1, move)), machine(overlap=False))) for move in moves]
    assert prefetch == pytest.approx(COMPUTE_US)
    assert demand == pytest.approx(4 * 1000 + 750)
    assert serial == pytest.approx([7000, 7000])


def test_demand_shares_the_link_with_a_prefetch() -> None:
    """Both wait together on one link: whatever the order, its bytes take bytes / rate."""
    step = decode(
        1,
        Move("L2", "L1", 8_000_000, 1, "int4"),
        Move("L2", "L1", 8_000_000, 1, "int4", demand=False),
    )
    found = predict(log(step), machine())
    # Fair share: each layer's 2 MB take 4,000 us, so the last has arrived at 16,000 and computes for 1,000.
    assert us(found) == pytest.approx(17_000, rel=1e-9)
    assert found.moved_bytes["host_read"] == 16_000_000


def test_repacking_inside_the_device_reads_and_writes() -> None:
    found = predict(log(decode(1, Move("L0", "L1", 1_000_000, 5, "int4"))), machine())
    assert us(found) == pytest.approx(COMPUTE_US + 2000)
    assert sum(found.moved_bytes.values()) == 0


def test_dropping_is_free() -> None:
    assert us(predict(log(decode(1, Move("L1", "DROPPED", 0, 9, "int4"))), machine())) == COMPUTE_US


def test_attention_by_tier_and_dequantisation() -> None:
    read = {"read_bytes": {"L0": 1_000_000, "L1": 1_000_000}, "read_tokens": {"compute": 10, "int4": 1000}}
    step = decode(1, **read)
    assert predict(log(step), machine(paged_efficiency=0.5)).breakdown["attention"] == pytest.approx(3.0)
    # 1000 int4 tokens of 2 x 8 values at .001 Gvalue/s: 16,000 us, which the 2,000 us of reading hide behind.
    slow = predict(log(step), machine(int4_dequant=0.001))
    assert slow.breakdown["attention"] == pytest.approx(16.0, rel=1e-3)


def test_overhead_of_layers_step_and_plan() -> None:
    hardware = machine(layer_overhead=10.0, step_overhead=3.0, plan_overhead=50.0)
    steps = [decode(1, planned=True), decode(2)]
    assert predict(log(*steps), hardware).breakdown["overhead"] * 1e3 == pytest.approx(43 + 25)


def test_compute_bound_linears() -> None:
    step = decode(1, tokens=100)
    assert us(predict(log(step), machine(bf16_flops=10.0))) == pytest.approx(4e6 * 100 / 1e4)


@pytest.mark.parametrize(("recorded", "wanted"), [(4, 2), (2, 4)])
def test_other_dtype_equals_a_log_recorded_in_it(recorded: int, wanted: int) -> None:
    """Halving or doubling a dtype's bytes must give what a run in that dtype would have logged."""

    def made(size: int) -> DecisionLog:
        tokens = {"compute": 1000, "int4": 2000}
        hot, compute, int4 = 16 * size * 600, 16 * size * 400, 16 * 2000 // 2
        step = decode(
            1,
            Move("L2", "L1", 100 * size, 1, "compute"),
            Move("L2", "L1", 100, 1, "int8"),
            read_bytes={"L0": hot, "L1": compute + int4},
            read_tokens=tokens,
        )
        model = TINY.__class__("m", 4, 4, 2, 8, 2_000_000 * size, 4_000_000)  # 2 M weights
        return log(step, model=model, value_bytes=size)

    hardware = machine(paged_efficiency=0.3)
    converted = predict(made(recorded), hardware, bytes_per_value=wanted)
    assert converted.breakdown == pytest.approx(predict(made(wanted), hardware).breakdown, rel=1e-12)


def test_weights_and_pages_may_differ_in_dtype() -> None:
    """float32 weights beside bfloat16 pages, as on a CPU: asking for 2 bytes halves the weights only."""
    model = TINY.__class__("m", 4, 4, 2, 8, 8_000_000, 4_000_000)
    made = log(decode(1, read_bytes={"L1": 3_200_000}, read_tokens={"compute": 100_000}), model=model)
    slow_bf16 = machine(bf16_flops=1e-3, fp32_flops=1e9)
    assert predict(made, slow_bf16).breakdown["weights"] == pytest.approx(8.0)  # float32's peak counts
    found = predict(made, machine(), bytes_per_value=2).breakdown
    assert (found["weights"], found["attention"]) == pytest.approx((4.0, 3.2))


TIER = st.sampled_from(["L0", "L1", "L2", "L3"])
MOVE = st.builds(
    Move,
    TIER,
    st.sampled_from(["L0", "L1", "L2", "L3", "DROPPED"]),
    st.integers(0, 10**7),
    st.integers(0, 9),
    st.sampled_from(["compute", "int8", "int4"]),
    st.booleans(),
)
STEPS = st.lists(st.lists(MOVE, max_size=4), min_size=1, max_size=6)


@settings(deadline=None, max_examples=100)
@given(moves=STEPS, overlap=st.booleans(), both=st.floats(0.5, 4))
def test_bytes_time_and_parts_are_conserved(moves: list[list[Move]], overlap: bool, both: float) -> None:
    made = log(*(decode(i, *step) for i, step in enumerate(moves, 1)))
    hardware = machine(overlap=overlap, host_both=both, disk_read=0.7, disk_write=0.4, chunk=1e6)
    env = Environment()
    node = Node(env, hardware, LAYERS)
    env.run(env.process(node.replay(works(made, hardware))))
    device = {"L0", "L1"}
    expected = dict.fromkeys(node.links(), 0)
    for move in (move for step in moves for move in step if move.target != "DROPPED"):
        inside = {move.source, move.target} <= device
        expected["host_read"] += move.bytes * (move.target in device and not inside)
        expected["host_write"] += move.bytes * (move.source in device and not inside)
        expected["disk_read"] += move.bytes * (move.source == "L3" != move.target)
        expected["disk_write"] += move.bytes * (move.target == "L3" != move.source)
    assert {name: link.moved_bytes for name, link in node.links().items()} == expected
    found = predict(made, hardware)
    assert us(found) == pytest.approx(env.now, rel=1e-9)
    assert sum(found.breakdown.values()) == pytest.approx(found.ms_per_token, rel=1e-9)
    assert set(found.breakdown) == set(PARTS)
    compute = [row for row in found.rows if row.track == "compute"]
    assert sum(row.us for row in compute) == pytest.approx(us(found), rel=1e-9)
    assert found == predict(made, hardware)  # deterministic to the last bit


def test_staying_in_a_tier_moves_nothing() -> None:
    found = predict(log(decode(1, Move("L3", "L3", 10**6, 1, "int4"))), machine())
    assert sum(found.moved_bytes.values()) == 0


def test_samples_replay_on_idle_machines() -> None:
    one = log(decode(1, Move("L1", "L2", 9_000_000, 1, "int4")))
    single, double = predict(one, machine()), predict([one, one], machine())
    assert double.ms_per_token == pytest.approx(single.ms_per_token)
    assert max(row.start_us + row.us for row in double.rows) == pytest.approx(us(double))


def test_assumed_share() -> None:
    step = decode(1, Move("L2", "L1", 8_000_000, 1, "int4"))
    assert predict(log(step), machine()).assumed_share == 0
    assert predict(log(step), machine(assumed=("memory_bandwidth",))).assumed_share == pytest.approx(4 / 9)
    assert predict(log(step), machine(assumed=("host_read",))).assumed_share == pytest.approx(5 / 9)
    assert predict(log(step), machine(assumed=("disk_read", "layer_overhead"))).assumed_share == 0


def test_refusals() -> None:
    with pytest.raises(LogError, match="no decode step"):
        predict(log(Step(0, "prefill", 5, 5)), machine())
    with pytest.raises(LogError, match="no decode step"):
        predict([], machine())
    with pytest.raises(LogError, match="several policies"):
        predict([log(decode(1)), log(decode(1), policy="other")], machine())
    with pytest.raises(LogError, match="bytes_per_value=8"):
        predict(log(decode(1)), machine(), bytes_per_value=8)
    with pytest.raises(LogError, match="device tiers take"):
        predict(log(decode(1, held_bytes={"L1": 10**6})), machine(memory_capacity=4.5e6))


def test_trace_opens_in_perfetto(tmp_path) -> None:
    step = decode(1, Move("L3", "L1", 8_000_000, 1, "int4"), Move("L1", "L2", 9_000_000, 1, "int4"))
    found = predict(log(step), machine())
    path = tmp_path / "trace.json"
    write_trace(found.rows, path)
    events = json.loads(path.read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in bars} == {"compute", "host_read", "host_write", "disk_read"}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert all(names[bar["tid"]] == bar["cat"] and bar["dur"] >= 0 for bar in bars)
    assert set(names.values()) == set(TRACKS)
    with pytest.raises(OSError, match="No such file"):
        write_trace(found.rows, tmp_path / "missing" / "trace.json")


@pytest.mark.bench
def test_bench_replay_of_a_whole_run(benchmark: Callable[..., object]) -> None:
    """20 samples of 40 steps, a promotion and a demotion each: aim below .3 s."""
    steps = [
        decode(i, Move("L2", "L1", 10**6, 9, "int4"), Move("L1", "L2", 10**6, 9, "int4", demand=False))
        for i in range(1, 41)
    ]
    benchmark(predict, [log(*steps)] * 20, machine(host_both=1.5))


def test_closed_form_books_what_the_link_would() -> None:
    env = Environment()
    link = FairLink(env, 1000.0)
    link.account(5000, 5.0)
    env.run(link.transfer(1000))
    assert (link.moved_bytes, link.busy_us) == (6000, 6.0)
