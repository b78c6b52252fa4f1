"""The table and the page of a run: every number, its kind, nothing from the network, nothing unescaped."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from testbed.results import html, table
from testbed.results.display import number_text, value_text
from testbed.results.names import UNITS
from testbed.results.plots import Point, svg
from testbed.results.record import Number, Record

VALUES = {
    "context.tokens": 2048,
    "task.score": 0.9,
    "task.score_full": 1.0,
    "quality.kept": 0.9,
    "kl.mean": 0.031,
    "top1.agreement": 0.987,
    "kv.device_bytes": 9 * 2**20,
    "kv.total_bytes": 10 * 2**20,
    "kv.full_bytes": 45 * 2**20,
    "kv.device_saved": 0.8,
    "kv.total_saved": 0.7777,
    "prefill.s": 7.25,
    "decode.ms_per_token": 22.34,
    "decode.ms_per_token_full": 33.5,
    "decode.speedup": 1.5,
    "policy.share": 0.031,
    "sim.local.ms_per_token": 20.1,
    "sim.h200.ms_per_token": 0.314,
}


def make(**keys: Any) -> Record:
    numbers = tuple(
        Number(
            name,
            value,
            UNITS[name],
            "simulated" if name.startswith("sim.") else "measured",
            (0.7, 1.0) if name == "task.score" else None,
            20,
        )
        for name, value in VALUES.items()
    )
    config = {"policy": {"name": "redknot+elastic"}, "budget": {"fraction": 0.25}}
    return Record(**{"run_id": "r1", "config": config, "environment": {}, "seed": 0, "results": numbers, **keys})


class Cells(HTMLParser):
    """Rows of all tables of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "action")]
        if tag in ("script", "link", "iframe"):
            self.links.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.open = True

    def handle_endtag(self, tag: str) -> None:
        self.open = self.open and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.open:
            self.rows[-1][-1] += data


def shown(record: Record) -> str:
    out = io.StringIO()  # no terminal
    table.show(record, out)
    return out.getvalue()


def test_table_has_every_row_of_the_main_job() -> None:
    text = shown(make())
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    expected = {
        "context length": ["2,048 tokens"],
        "task score": ["100.0 %", "90.0 % [70.0, 100.0 %]", "90.0 % kept"],
        "KV bytes on the device": ["45.00 MiB", "9.00 MiB", "80.0 % saved"],
        "KV bytes in all tiers": ["45.00 MiB", "10.00 MiB", "77.8 % saved"],
        "decode time": ["33.5 ms/token", "22.3 ms/token", "1.50×"],
        "planning, share of step": ["3.1 %"],
        "predicted, this machine": ["20.1 ms/token", "simulated"],
        "predicted, H200": ["0.314 ms/token", "simulated"],
        "mean KL to full": ["0.031 nats"],
        "top-1 agreement with full": ["98.7 %"],
    }
    for label, parts in expected.items():
        for part in parts:
            assert part in lines[label]
        assert ("simulated" in lines[label]) == label.startswith("predicted")
    assert "\x1b" not in text


def test_table_of_a_partial_run_says_so() -> None:
    text = shown(
        make(status="partial", reason="interrupted after 3 of 9", results=(), alarms=("odd [x]",), notes=("n",))
    )
    assert "partial: interrupted after 3 of 9" in text
    assert "ALARM: odd [x]" in text
    assert "note: n" in text
    assert "task score" not in text


def test_page_shows_every_number_in_the_column_of_its_kind() -> None:
    rows = Cells(html.render(html.record_page(make()))).rows
    assert rows[0] == ["name", "measured", "simulated", "unit", "samples"]
    cells = {row[0]: row for row in rows}
    for name, value in VALUES.items():
        measured, simulated = cells[name][1:3]
        here, there = (simulated, measured) if name.startswith("sim.") else (measured, simulated)
        assert here.startswith(value_text(value, UNITS[name]))
        assert there == "–"


def test_page_shows_config_activity_bytes_and_samples() -> None:
    record = make(
        activity={"pages": {"dropped": 1234}},
        bytes={"L1": {"int4": 5678}},
        samples=({"id": "s1", "score": 1.0}, {"id": "s2", "score": 0.0}),
        environment={"cpu": "a & b"},
    )
    text = html.render(html.record_page(record))
    rows = Cells(text).rows
    assert ["pages.dropped", "1,234"] in rows
    assert ["L1.int4", "5,678"] in rows
    assert ["s1", "1"] in rows
    assert "redknot+elastic" in text
    assert "a &amp; b" in text


def test_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    path = html.write(make(alarms=(evil,), samples=({"id": evil},)), tmp_path / "report.html")
    text = path.read_text()
    assert evil not in text
    assert Cells(text).links == []
    assert not re.search(r"url\(|@import", text)


def test_plot_is_svg_with_every_line() -> None:
    lines = [("full", [Point(45, 1.0)]), ("snapkv", [Point(20, 0.5, (0.2, 0.8)), Point(10, 0.1, (0.0, 0.4))])]
    text = svg(lines, "Quality", "MiB", "score")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for word in ("full", "snapkv", "Quality", "MiB"):
        assert f"<!-- {word} -->" in text
    assert text == svg(lines, "Quality", "MiB", "score")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "s", "–"),
        (0.5, "fraction", "50.0 %"),
        (1023, "bytes", "1023 B"),
        (1536, "bytes", "1.50 KiB"),
        (3 * 2**30, "bytes", "3.00 GiB"),
        (1.25, "ratio", "1.25×"),
        (4096, "tokens", "4,096 tokens"),
        (0.01234, "s", "0.0123 s"),
        (12345.6, "ms/token", "12,346 ms/token"),
    ],
)
def test_numbers_for_people(value: float | None, unit: str, text: str) -> None:
    assert value_text(value, unit) == text


def test_interval_says_its_unit_once() -> None:
    assert number_text(Number("x", 2.0, "s", "measured", (1.0, 3.0))) == "2 s [1, 3 s]"
    assert number_text(None) == "–"
