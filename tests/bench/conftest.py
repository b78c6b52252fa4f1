"""Collects the engine's benchmarks into one table at the end and into outputs/bench-<date>.json."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

ROWS = pytest.StashKey[list[dict[str, Any]]]()
Note = Callable[..., None]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """note(name, value, unit, target=None, **details): a row; a target is the most the value may be."""

    def add(name: str, value: float, unit: str, target: float | None = None, **details: Any) -> None:
        load = os.getloadavg()[0]
        row = {"name": name, "value": value, "unit": unit, "target": target, "threads": torch.get_num_threads()}
        request.config.stash[ROWS].append({**row, "load": round(load, 2), **details})

    return add


@pytest.fixture
def threads() -> Any:
    """Both contenders run on $TESTBED_BENCH_THREADS threads; one, unless said otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("TESTBED_BENCH_THREADS", "1")))
    yield torch.get_num_threads()
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if not rows:
        return
    from testbed.results.environment import environment
    from testbed.results.record import write_atomically

    terminalreporter.section("engine")
    for row in rows:
        said = "" if row["target"] is None else f"at most {row['target']:g}: "
        said += "" if row["target"] is None else "met" if row["value"] <= row["target"] else "MISSED"
        more = ", ".join(
            f"{key} {value}" for key, value in row.items() if key not in ("name", "value", "unit", "target")
        )
        terminalreporter.write_line(f"{row['name']:34} {row['value']:9.4g} {row['unit']:6} {said:20} ({more})")
    now = datetime.now(UTC)
    path = Path(config.rootpath) / "outputs" / f"bench-{now:%Y-%m-%dT%H-%M-%S}.json"
    body = {"schema": 1, "date": now.isoformat(timespec="seconds"), "environment": environment(), "results": rows}
    write_atomically(path, json.dumps(body, indent=1))
    terminalreporter.write_line(f"record: {path}")
