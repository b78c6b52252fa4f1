"""The final table of a run: full cache and policy side by side, every row marked with the kind of its numbers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from testbed.results import notices, tiers
from testbed.results.display import ABSENT, Sheet, counted, number_text, policy_name
from testbed.results.record import Number, Record

PLAIN_WIDTH = 132


@dataclass(frozen=True)
class Row:
    """A line of the table: names of the results in its three columns, None for an empty cell."""

    label: str
    full: str | None
    policy: str | None
    compared: str | None
    compared_label: str = ""


ROWS = (
    Row("context length", "context.tokens", "context.tokens", None),
    Row("task score", "task.score_full", "task.score", "quality.kept", "kept"),
    Row("KV bytes on the device", "kv.full_bytes", "kv.device_bytes", "kv.device_saved", "saved"),
    Row("KV bytes in all tiers", "kv.full_bytes", "kv.total_bytes", "kv.total_saved", "saved"),
    Row("decode time", "decode.ms_per_token_full", "decode.ms_per_token", "decode.speedup", "speed"),
    Row("prefill time", None, "prefill.s", None),
    Row("planning, share of step", None, "policy.share", None),
    Row("waiting for pages", None, "tier.stall_ms_per_token", "tier.stall_share", "of step"),
    Row("pages found on the device", None, "tier.hit_rate", None),
    Row("prefetched pages used", None, "tier.prefetch_useful", None),
    Row("quality the guard saw", None, "guard.quality", None),
    Row("guard's probes, share of all time (decode time has none)", None, "guard.share", None),
    Row("KV bytes of the guard's reference", None, "guard.bytes", None),
    Row("predicted, this machine", "sim.local.ms_per_token_full", "sim.local.ms_per_token", None),
    Row("predicted, H200", "sim.h200.ms_per_token_full", "sim.h200.ms_per_token", None),
    Row("mean KL to full", None, "kl.mean", None),
    Row("top-1 agreement with full", None, "top1.agreement", None),
)


def cells(row: Row, record: Record) -> tuple[str, str, str, str, str] | None:
    """Label, full, policy, comparison and kind; None if the record has none of the row's numbers."""
    names = (row.full, row.policy, row.compared)
    numbers = [record.get(name) if name else None for name in names]
    if all(number is None for number in numbers[1:]):
        return None
    full, policy, compared = (number_text(number) for number in numbers)
    if compared != ABSENT:
        compared = f"{compared} {row.compared_label}"
    return row.label, full, policy, compared, kinds(numbers)


def kinds(numbers: list[Number | None]) -> str:
    """The kinds of some numbers, each once."""
    return ", ".join(dict.fromkeys(number.kind for number in numbers if number is not None))


def result_table(record: Record) -> Table:
    """The table of one record."""
    table = Table(title=f"{policy_name(record)}  ({record.run_id})", title_justify="left")
    table.add_column("")
    for header in ("full cache", policy_name(record), "policy against full"):
        table.add_column(header, justify="right")
    table.add_column("kind")
    for row in ROWS:
        line = cells(row, record)
        if line is not None:
            table.add_row(*line)
    return table


def show(record: Record, file: TextIO | None = None) -> None:
    """Prints the table, then status, alarms and notes; plain and wide where there is no terminal."""
    out = file or sys.stdout
    console = Console(file=out, width=None if out.isatty() else PLAIN_WIDTH, highlight=False)
    console.print(result_table(record))
    console.print(
        f"{_counted(record)}; [low, high]: 95 % interval over contexts (of a score that is the same in all of them, "
        "or of a single one, over samples); saved: against everything in bf16",
        style="dim",
        markup=False,
    )
    for sheet in tiers.sheets(record):
        console.print(sheet_table(sheet))
    for line in (*tiers.lines(record), *notices.lines(record.activity)):
        console.print(line, style="dim", markup=False)
    kernels = record.activity.get("kernel_calls")
    if kernels:
        total = sum(kernels.values())
        ranked = sorted(kernels.items(), key=lambda item: -item[1])
        said = ", ".join(f"{name} ({calls / total:.0%})" for name, calls in ranked)
        console.print(f"attention kernel: {said}", style="dim", markup=False)
    if record.status != "complete":
        console.print(f"{record.status}: {record.reason}", style="bold yellow", markup=False)
    said = (
        ("bold red", "ALARM", record.alarms),
        ("yellow", "warning", tiers.warnings(record)),
        ("dim", "note", record.notes),
    )
    for style, label, lines in said:
        for line in lines:
            console.print(f"{label}: {line}", style=style, markup=False)


def _counted(record: Record) -> str:
    """How many samples there are, and of how many contexts."""
    contexts = {sample.get("context_id") for sample in record.samples}
    return f"{counted(len(record.samples), 'sample')} of {counted(len(contexts), 'context')}"


def sheet_table(sheet: Sheet) -> Table:
    """A table of text for the terminal."""
    table = Table(title=Text(sheet.title, style="table.title"), title_justify="left")  # as text: names hold brackets
    for at, column in enumerate(sheet.columns):
        table.add_column(Text(column), justify="left" if at == 0 else "right")
    for row in sheet.rows:
        table.add_row(*map(Text, row))
    return table
