"""One self-contained page a run or comparison: no script, no network, everything inline.

Measured, simulated and quoted numbers stand in columns of their own and are never mixed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from testbed.results import tiers
from testbed.results.display import ABSENT, Sheet, number_text, policy_name
from testbed.results.record import Record, write_atomically

KINDS = ("measured", "simulated", "quoted")


@dataclass(frozen=True)
class Page:
    """What a page shows, top to bottom. Plots are SVG elements; blocks are (title, preformatted text)."""

    title: str
    subtitle: str
    tables: Sequence[Sheet]
    alarms: Sequence[str] = ()
    notes: Sequence[str] = ()
    plots: Sequence[str] = ()
    blocks: Sequence[tuple[str, str]] = ()


def render(page: Page) -> str:
    """The page as HTML; every text is escaped."""
    environment = Environment(loader=PackageLoader("testbed.results", "."), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html.j2").render(page=page)


def write(what: Page | Record, path: Path) -> Path:
    """Renders a page, or the page of a record, and writes it atomically.

    Raises:
        RecordError: the file system refused.
    """
    write_atomically(path, render(record_page(what) if isinstance(what, Record) else what))
    return path


def record_page(record: Record) -> Page:
    """The page of one run."""
    status = record.status if record.status == "complete" else f"{record.status}: {record.reason}"
    tables = [_results(record), *tiers.sheets(record)]
    for title, values in (("Activity", record.activity), ("Bytes", record.bytes)):
        if values:
            rows = [(key, _plain(value)) for key, value in flatten(values).items()]
            tables.append(Sheet(title, ("", "value"), rows))
    if record.samples:
        tables.append(_samples(record))
    return Page(
        title=f"{policy_name(record)} ({record.run_id})",
        subtitle=f"{status}; seed {record.seed}; configuration {record.config_hash[:12]}",
        tables=tables,
        alarms=record.alarms,
        notes=(*tiers.lines(record), *(f"warning: {line}" for line in tiers.warnings(record)), *record.notes),
        blocks=[("Configuration", _json(record.config)), ("Environment", _json(record.environment))],
    )


def _results(record: Record) -> Sheet:
    used = [kind for kind in KINDS if any(number.kind == kind for number in record.results)]
    rows = []
    for number in record.results:
        by_kind = [number_text(number) if number.kind == kind else ABSENT for kind in used]
        rows.append((number.name, *by_kind, number.unit, ABSENT if number.n is None else str(number.n)))
    return Sheet("Results", ("name", *used, "unit", "samples"), rows)


def _samples(record: Record) -> Sheet:
    columns = list(dict.fromkeys(key for sample in record.samples for key in sample))
    rows = [[_plain(sample.get(key)) for key in columns] for sample in record.samples]
    return Sheet("Samples", columns, rows)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            out.update(flatten(value, f"{name}."))
        else:
            out[name] = value
    return out


def _plain(value: object) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def _json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True)
