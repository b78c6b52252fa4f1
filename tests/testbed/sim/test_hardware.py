"""Hardware descriptions: every number typed and sourced, every error names its key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from twin_samples import machine, quantity

import conf
from testbed.sim.hardware import KINDS, QUANTITIES, HardwareError, Quantity, build, load

FILES = sorted(Path(next(iter(conf.__path__)), "hardware").glob("*.yaml"))


@pytest.mark.parametrize("name", [path.stem for path in FILES if path.stem != "local"])
def test_every_machine_is_complete_and_sane(name: str) -> None:
    hardware = load(name)
    assert hardware.name == name
    assert set(hardware.quantities) == set(QUANTITIES)
    assert all(item.kind in KINDS and item.source for item in hardware.quantities.values())
    # Physics that no machine breaks: each tier is slower than the one above it.
    assert hardware["memory_bandwidth"] > hardware["host_read"] > hardware["disk_read"]
    assert hardware["host_both"] <= hardware["host_read"] + hardware["host_write"]


def test_units() -> None:
    hardware = load("h200")
    assert hardware["memory_bandwidth"] == pytest.approx(4.8e6)  # bytes a microsecond
    assert hardware["memory_capacity"] == pytest.approx(141e9)
    assert hardware["bf16_flops"] == pytest.approx(989.5e6)
    assert hardware["disk_setup"] == pytest.approx(80)


GOOD = {"value": 1.0, "unit": "GB/s", "source": "a test", "date": "2026-11", "kind": "spec"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"value": -1.0}, "value=-1.0 GB/s: must be above 0"),
        ({"value": 0.0}, "must be above 0"),
        ({"value": math.nan}, "finite"),
        ({"value": math.inf}, "finite"),
        ({"value": "fast"}, "finite"),
        ({"value": True}, "finite"),
        ({"unit": "GiB/s"}, "unit='GiB/s': must be one of"),
        ({"unit": "us"}, "host_read: unit='us': must be one of GB/s, TB/s"),
        ({"kind": "guessed"}, "kind='guessed': must be one of spec, measured, assumed"),
        ({"source": " "}, "source"),
        ({"date": "yesterday"}, "date='yesterday'"),
        ({"colour": "red"}, "exactly date, kind, source, unit, value"),
    ],
)
def test_bad_number_names_machine_and_key(changed: dict[str, Any], message: str) -> None:
    good = {key: vars(item) for key, item in machine().quantities.items()}
    with pytest.raises(HardwareError, match="host_read") as caught:
        build("mine", **{**good, "host_read": {**GOOD, **changed}})
    assert message in str(caught.value)
    assert "mine" in str(caught.value)


def test_fraction_above_one() -> None:
    with pytest.raises(HardwareError, match="at most 1"):
        quantity("paged_efficiency", 1.5)


def test_missing_and_unknown_keys() -> None:
    good = {key: vars(item) for key, item in machine().quantities.items()}
    del good["disk_read"]
    with pytest.raises(HardwareError, match=r"missing \['disk_read'\], unknown \['disc_read'\]"):
        build("mine", disc_read=GOOD, **good)


def test_not_a_mapping() -> None:
    with pytest.raises(HardwareError, match="host_read=5"):
        build("mine", host_read=5)


def test_unknown_machine_lists_the_known() -> None:
    with pytest.raises(HardwareError, match="known: a100, h100, h200, local"):
        load("tpu")


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text, message in (("a: [", "can't be read"), ("name: x\n", "_target_"), ("- 1\n", "_target_")):
        path.write_text(text)
        with pytest.raises(HardwareError, match=message):
            load(str(path))
    with pytest.raises(HardwareError, match="not found"):
        load(str(tmp_path / "none.yaml"))


def test_errors_reach_the_user_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(FILES[0].read_text().replace("value: 2.039", "value: -2.039"))
    with pytest.raises(HardwareError, match=r"memory_bandwidth: value=-2.039 TB/s: must be above 0"):
        load(str(path))


def test_overlap_is_a_truth_value() -> None:
    with pytest.raises(HardwareError, match="overlap='yes'"):
        build("mine", overlap="yes", **{k: vars(v) for k, v in machine().quantities.items()})  # pyright: ignore


def test_zero_is_a_time_but_no_rate() -> None:
    assert Quantity(0, "us", "a test", "2026", "spec").base == 0
