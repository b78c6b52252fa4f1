"""Logs of full tiers: cascades over L2 and L3, prefetches, early demotion; bytes and times worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from twin_samples import decode, log, machine

from testbed.decisions import DecisionLog, Move
from testbed.sim.twin import Prediction, predict

MB = 1_000_000  # 1000 us on a link of `machine()`
COMPUTE_US = 4000.0
# L1 overflows into L2, L2 into L3, and what L3 has no room for is gone.
CASCADE = (
    Move("L1", "L2", 3 * MB, 30, "int8"),
    Move("L2", "L3", 2 * MB, 20, "int8"),
    Move("L1", "L3", MB, 10, "int8"),
    Move("L3", "DROPPED", 0, 5, "int8"),
)


def us(prediction: Prediction) -> float:
    return prediction.ms_per_token * 1e3 * prediction.steps


@pytest.mark.parametrize("overlap", [True, False])
def test_a_cascade_books_each_move_on_its_own_links(overlap: bool) -> None:
    found = predict(log(decode(1, *CASCADE), decode(2)), machine(overlap=overlap))
    # L1 to L3 crosses both links; L2 to L3 starts in host memory.
    assert found.moved_bytes == {"host_read": 0, "host_write": 4 * MB, "disk_read": 0, "disk_write": 3 * MB}


def test_a_page_comes_up_a_tier_without_touching_the_device() -> None:
    up = Move("L3", "L2", 2 * MB, 20, "int4")
    found = predict(log(decode(1, up), decode(2)), machine())
    assert found.moved_bytes == {"host_read": 0, "host_write": 0, "disk_read": 2 * MB, "disk_write": 0}
    assert us(found) == pytest.approx(2 * COMPUTE_US)  # hidden behind the first step
    # Two swaps at once, each way on its own direction of the disk.
    swap = predict(log(decode(1, up, Move("L2", "L3", 2 * MB, 20, "int4")), decode(2)), machine())
    assert us(swap) == pytest.approx(2 * COMPUTE_US)
    assert swap.moved_bytes["disk_read"] == swap.moved_bytes["disk_write"] == 2 * MB


def test_a_step_demands_beside_prefetch_and_demotion() -> None:
    moves = (
        Move("L2", "L1", 2 * MB, 20, "int8", demand=True),
        Move("L2", "L1", MB, 10, "int8", demand=False),
        Move("L3", "L1", MB, 10, "int8", demand=False),
        Move("L1", "L2", 3 * MB, 30, "int8"),
    )
    found = predict(log(decode(1, *moves), decode(2)), machine())
    assert found.moved_bytes == {"host_read": 4 * MB, "host_write": 3 * MB, "disk_read": MB, "disk_write": 0}
    late = predict(log(decode(1, *(Move(m.source, m.target, m.bytes, m.pages, m.format) for m in moves))), machine())
    assert late.moved_bytes == found.moved_bytes
    assert late.breakdown["moves_exposed"] > found.breakdown["moves_exposed"]


def test_demotion_below_the_threshold_is_hidden_at_the_threshold_it_is_not() -> None:
    """The same bytes leave: all at the step that needs the room, or a part at each step before, as the device fills."""
    steps, each = 8, 3 * MB
    early = log(*(decode(n, Move("L1", "L2", each, 30, "int8")) for n in range(1, steps + 1)))
    at_once = log(
        *(decode(n) for n in range(1, steps)),
        decode(steps, Move("L1", "L2", steps * each, 30 * steps, "int8")),
    )
    found, late = predict(early, machine()), predict(at_once, machine())
    assert found.moved_bytes == late.moved_bytes
    assert found.moved_bytes["host_write"] == steps * each
    assert us(found) == pytest.approx(steps * COMPUTE_US)
    # 24 ms of writing begin with the last step, which computes for 4.
    assert us(late) == pytest.approx((steps - 1) * COMPUTE_US + steps * each / 1000)


def test_a_written_log_replays_the_same(tmp_path: Path) -> None:
    whole = log(decode(1, *CASCADE), decode(2, Move("L3", "L2", MB, 10, "int8")), decode(3))
    whole.write(tmp_path / "log.jsonl")
    again = DecisionLog.read(tmp_path / "log.jsonl")
    assert again == whole
    assert predict(again, machine()) == predict(whole, machine())
