"""Compare runs: `python -m testbed.compare multirun/... [more folders] [--baseline snapkv] [--output DIR]`.

Prints policies by budget with intervals and paired differences, and writes compare.html, compare.json and a W&B run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, get_args

from rich.console import Console

from testbed.commands import guarded
from testbed.results import html, stats
from testbed.results.comparison import CompareError, Setting, Variant, alarms, find_records, paired, settings
from testbed.results.display import Sheet, value_text
from testbed.results.names import UNITS
from testbed.results.plots import Point, svg
from testbed.results.record import write_atomically
from testbed.results.table import PLAIN_WIDTH, sheet_table
from testbed.results.tracker import Mode, Tracker

MEASURED = ("task.score", "quality.kept", "kl.mean", "kv.total_bytes", "kv.total_saved", "decode.ms_per_token")
TIERED = {"tier.hit_rate": ("tier_hits", "tier_lookups"), "tier.stall_share": ("stall_s", "step_s")}
SAMPLE_KEY = {"task.score": "score", "kl.mean": "kl", "decode.ms_per_token": "ms_per_token"}


@dataclass(frozen=True)
class Comparison:
    """Everything the outputs show.

    Attributes:
        sheets: tables of text, two a setting (measured, simulated).
        plots: SVG elements.
        alarms: one line each.
        notes: runs left out or cut short.
        rows: the same numbers as plain values, for compare.json and W&B.
        runs: records compared.
    """

    sheets: tuple[Sheet, ...]
    plots: tuple[str, ...]
    alarms: tuple[str, ...]
    notes: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    runs: int


def compare(paths: Sequence[str | Path], baseline: str | None = None, seed: int = 0) -> Comparison:
    """Reads records and compares them.

    Args:
        paths: folders searched for record.json, or such files.
        baseline: policy or label the differences are taken against; None for the full cache.
        seed: of the bootstrap.

    Raises:
        CompareError: nothing to compare, unreadable, mixed schemas, or no such baseline.
    """
    records, notes = find_records(paths)
    sheets: list[Sheet] = []
    plots: list[str] = []
    lines: list[str] = []
    rows: list[dict[str, Any]] = []
    for setting in settings(records):
        other = setting.find(baseline) if baseline else None
        if baseline and other is None:
            names = ", ".join(variant.label for variant in setting.variants)
            raise CompareError(f"--baseline {baseline}: not among the runs of {setting.label}; they are {names}")
        against = other.label if other else "full cache"
        setting_rows = [_row(setting, variant, other, seed) for variant in setting.variants]
        sheets += [_measured(setting, setting_rows, against), *_simulated(setting)]
        plots += _plots(setting)
        lines += alarms(setting)
        rows += setting_rows
    return Comparison(tuple(sheets), tuple(plots), tuple(lines), tuple(notes), tuple(rows), len(records))


def _row(setting: Setting, variant: Variant, other: Variant | None, seed: int) -> dict[str, Any]:
    """Measured numbers of a variant as plain values; intervals as name.low and name.high."""
    row: dict[str, Any] = {
        "setting": setting.label,
        "policy": variant.policy,
        "budget": variant.budget,
        "detail": variant.detail,
        "runs": len(variant.records),
        "samples": len(variant.samples()),
    }
    for name in MEASURED:
        estimate = variant.estimate(SAMPLE_KEY[name], seed) if name in SAMPLE_KEY else None
        _put(row, name, estimate or variant.mean(name))
    for name, (top, bottom) in TIERED.items():
        _put(row, name, variant.ratio(top, bottom, seed))
    score, full, groups = paired(variant, None, "score")
    if score:
        _put(row, "quality.kept", stats.kept(score, full, seed, groups))
    mine, theirs, groups = paired(variant, other, "score")
    _put(row, "score.delta", stats.delta(mine, theirs, seed, groups) if mine else None)
    mine, theirs, groups = paired(variant, other, "ms_per_token")
    _put(row, "speedup", stats.ratio(theirs, mine, seed, groups) if mine else None)
    return row


def _put(row: dict[str, Any], name: str, value: stats.Estimate | float | None) -> None:
    ci = value.ci if isinstance(value, stats.Estimate) else None
    row[name] = value.value if isinstance(value, stats.Estimate) else value
    row[f"{name}.low"], row[f"{name}.high"] = ci or (None, None)


def _measured(setting: Setting, rows: Sequence[dict[str, Any]], against: str) -> Sheet:
    columns = ["policy", "budget", "samples", "score", f"Δ score to {against}", "kept", "KL", "KV in all tiers",
               "saved", "ms/token", f"speed against {against}"]  # fmt: skip
    names = [
        ("task.score", "fraction"),
        ("score.delta", "fraction"),
        *((name, UNITS[name]) for name in MEASURED[1:]),
        ("speedup", "ratio"),
    ]
    if any(row["tier.hit_rate"] is not None for row in rows):  # somebody fetched something
        columns += ["hits in L1", "exposed stall"]
        names += [(name, UNITS[name]) for name in TIERED]
    body = [
        (
            " ".join(part for part in (row["policy"], row["detail"]) if part),
            row["budget"],
            str(row["samples"]),
            *(_cell(row, name, unit) for name, unit in names),
        )
        for row in rows
    ]
    return Sheet(f"Measured: {setting.label}", columns, body)


def _cell(row: dict[str, Any], name: str, unit: str) -> str:
    # The column's header carries a unit that all its rows share.
    short = "" if unit in ("ms/token", "nats") else unit
    text = _short(row[name], short)
    if row.get(f"{name}.low") is None:
        return text
    return f"{text} [{_short(row[f'{name}.low'], short)}, {_short(row[f'{name}.high'], short)}]"


def _short(value: float | None, unit: str) -> str:
    return value_text(value, unit).strip()


def _simulated(setting: Setting) -> list[Sheet]:
    """Predictions of the twin, in a table of their own."""
    names = sorted(
        {
            number.name
            for variant in setting.variants
            for record in variant.records
            for number in record.results
            if number.kind == "simulated"
        }
    )
    if not names:
        return []
    body = [
        (v.label, *(value_text(v.mean(name), UNITS.get(name, "ms/token")) for name in names)) for v in setting.variants
    ]
    return [Sheet(f"Simulated: {setting.label}", ("policy", *names), body)]


def _plots(setting: Setting) -> list[str]:
    """Quality and time against bytes; a plot without points is left out."""
    wanted: tuple[tuple[str, str, str, Callable[[Variant], stats.Estimate | None]], ...] = (
        ("Quality against bytes", "score (fraction)", "score", lambda v: v.estimate("score")),
        ("Time against bytes", "ms/token", "ms", lambda v: v.estimate("ms_per_token")),
    )
    out = []
    for title, y_label, _, get in wanted:
        lines: dict[str, list[Point]] = {}
        for variant in setting.variants:
            estimate, held = get(variant), variant.mean("kv.total_bytes")
            if estimate is not None and held is not None:
                point = Point(held / 2**20, estimate.value, estimate.ci)
                lines.setdefault(" ".join(filter(None, (variant.policy, variant.detail))), []).append(point)
        if lines:
            out.append(svg(list(lines.items()), f"{title}: {setting.label}", "KV bytes in all tiers (MiB)", y_label))
    return out


def show(comparison: Comparison, file: TextIO) -> None:
    """Prints the tables, alarms and notes."""
    console = Console(file=file, width=None if file.isatty() else 2 * PLAIN_WIDTH, highlight=False)
    for sheet in comparison.sheets:
        console.print(sheet_table(sheet))
    for style, label, lines in (("bold red", "ALARM", comparison.alarms), ("dim", "note", comparison.notes)):
        for line in lines:
            console.print(f"{label}: {line}", style=style, markup=False)


def write(comparison: Comparison, folder: Path, title: str) -> tuple[Path, Path]:
    """Writes compare.html and compare.json.

    Raises:
        RecordError: the file system refused.
    """
    page = html.Page(
        title=title,
        subtitle=f"{comparison.runs} runs; differences are paired over the same samples, intervals are 95 %",
        tables=comparison.sheets,
        alarms=comparison.alarms,
        notes=comparison.notes,
        plots=comparison.plots,
    )
    data = {"comparison": title, "rows": comparison.rows, "alarms": comparison.alarms, "notes": comparison.notes}
    path = folder / "compare.json"
    write_atomically(path, json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False))
    return html.write(page, folder / "compare.html"), path


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m testbed.compare", description="Compare finished runs.")
    parser.add_argument("paths", nargs="+", type=Path, help="folders of runs (searched deeply) or record.json files")
    parser.add_argument("--baseline", help="policy to take differences against; default: the full cache")
    parser.add_argument("--output", type=Path, help="folder for compare.html and compare.json; default: the first path")
    parser.add_argument("--wandb", choices=get_args(Mode), default="offline")
    parser.add_argument("--project", default="testbed", help="W&B project")
    return parser.parse_args(argv)


def run(argv: Sequence[str] | None = None) -> None:
    """The command without its error handling."""
    args = _arguments(argv)
    comparison = compare(args.paths, args.baseline)
    show(comparison, sys.stdout)
    first: Path = args.paths[0]
    folder = args.output or (first if first.is_dir() else first.parent)
    page, path = write(comparison, folder, f"Comparison of {', '.join(map(str, args.paths))}")
    print(f"page: {page}")
    tracker = replace(Tracker(project=args.project), mode=args.wandb)
    problem = tracker.publish_comparison(path)
    if problem is not None:
        print(f"warning: {problem}; the comparison is complete at {path}", file=sys.stderr)


def main() -> None:
    """The command line; one line and exit code 2 for what the user can mend."""
    guarded(run)


if __name__ == "__main__":
    main()
