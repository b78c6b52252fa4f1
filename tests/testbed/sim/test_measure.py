"""This machine's numbers: physically possible, typed as measured, kept once per host, never from a broken file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from twin_samples import TINY, decode, log

from testbed.sim import measure
from testbed.sim.hardware import QUANTITIES, Hardware, Quantity, load
from testbed.sim.twin import predict


@pytest.fixture(scope="module")
def measured() -> dict[str, Quantity]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure.measure()
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "busy", lambda: False)
    return tmp_path / "hardware"


def test_numbers_are_complete_measured_and_possible(measured: dict[str, Quantity]) -> None:
    hardware = Hardware("local", measured, overlap=False)
    assert set(measured) == set(QUANTITIES)
    assert {item.kind for item in measured.values()} == {"measured"}
    assert hardware.assumed == frozenset()
    # Wide bounds of any machine that can run the suite, so that a slip of units (1e3) shows.
    assert 2e2 < hardware["memory_bandwidth"] < 2e6
    assert 1e2 < hardware["host_read"] < 2e6
    assert 5e2 < hardware["fp32_flops"] < 1e8
    assert 1e9 < hardware["memory_capacity"] < 1e14
    assert 1 < hardware["layer_overhead"] < 1e5


def test_prediction_scales_with_weights(measured: dict[str, Quantity]) -> None:
    """4 bytes a weight at the measured rate: the weights' part is bytes over bandwidth, nothing fitted."""
    hardware = Hardware("local", measured, overlap=False)
    model = TINY.__class__("m", 30, 9, 3, 64, 538_000_000, 269_000_000)
    found = predict(log(decode(1), model=model, value_bytes=2), hardware)
    rate = hardware["memory_bandwidth"] * hardware["contiguous_efficiency"]
    expected = max(538e6 / rate, 269e6 / hardware["fp32_flops"])
    assert found.breakdown["weights"] * 1e3 == pytest.approx(expected)
    assert found.assumed_share == 0


def test_kept_once_and_read_back(measured: dict[str, Quantity], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(measure, "measure", lambda: calls.append(1) or measured)
    first, second = load("local"), load("local")
    assert first == second
    assert first.overlap is False
    assert calls == [1]
    assert [path.name for path in cache.iterdir()] == [f"{measure.fingerprint()}.json"]
    measure.local(fresh=True)
    assert calls == [1, 1]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"memory_bandwidth": {"value": -1}}'])
def test_broken_file_is_measured_again(
    text: str, measured: dict[str, Quantity], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    path = cache / f"{measure.fingerprint()}.json"
    path.write_text(text)
    monkeypatch.setattr(measure, "measure", lambda: measured)
    assert measure.local().quantities == measured
    assert set(json.loads(path.read_text())) == set(QUANTITIES)


def test_busy_machine_keeps_nothing(
    measured: dict[str, Quantity], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "busy", lambda: True)
    monkeypatch.setattr(measure, "measure", lambda: measured)
    assert measure.local().quantities == measured
    assert not cache.exists()


def test_a_folder_that_cannot_be_made_costs_no_more_than_a_measurement(
    measured: dict[str, Quantity], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("no folder")
    monkeypatch.setattr(measure, "measure", lambda: measured)
    assert measure.local().quantities == measured
    assert cache.read_text() == "no folder"


def test_other_thread_count_is_another_machine() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = measure.fingerprint()
        torch.set_num_threads(2)
        assert measure.fingerprint() != one
    finally:
        torch.set_num_threads(threads)
