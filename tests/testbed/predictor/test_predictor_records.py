"""The published records of predictors: of the weights that are shipped, and what the README says of them."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from testbed.engine.signals.core import LIGHT, NAMES
from testbed.predictor.weights import read_weights

HOUSE = Path(__file__).parents[3]
WEIGHTS = HOUSE / "testbed" / "predictor" / "weights"
RECORDS = ("evaluation.json", "needles.json")


def record(name: str) -> dict[str, Any]:
    return json.loads((HOUSE / "experiments" / "predictor" / name).read_text())


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_of_the_weights_that_are_shipped(name: str) -> None:
    said = record(name)["weights"]
    assert "core_score" in said
    for each in said.values():
        assert hashlib.sha256((WEIGHTS / each["file"]).read_bytes()).hexdigest() == each["sha256"]


def test_shipped_weights_are_of_one_recording_and_of_the_features_there_are() -> None:
    abouts = [read_weights(path)[1] for path in sorted(WEIGHTS.glob("core-*.safetensors"))]
    assert {about.names for about in abouts} == {NAMES, LIGHT}
    assert len({about.data for about in abouts}) == 1


def test_the_readme_repeats_the_evaluation() -> None:
    text = (HOUSE / "README.md").read_text().partition("## Which tokens")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+)[^|]*\| (\.\d+)[^|]*\| (\.\d+)[^|]*\| (\.\d+)[^|]*\|$", text, re.MULTILINE)
    found = record("evaluation.json")["recall"]["sparse"]
    assert {"oracle", "hybrid", "hybrid_light", "quest", "random"} <= {name for name, *_ in rows}
    for name, *values in rows:
        assert values == [f"{found[name][share]['value']:.3f}".lstrip("0") for share in ("0.05", "0.1", "0.25")], name
