"""`python -m testbed.heads show MAP`: what a head map says, and how far to trust it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from testbed.heads.headmap import HeadMap, HeadMapError, Measured
from testbed.heads.kept import kept, lines
from testbed.results.display import ABSENT, Sheet
from testbed.results.table import PLAIN_WIDTH, sheet_table

TOP = 3  # heads named for each measure
COLUMNS = ("measure", "task", "unit", "n", "highest: layer.head", "best [95 % interval]", "width", "ties")


def show(head_map: HeadMap, out: TextIO, name: str = "head map") -> None:
    """Prints tables and verdicts.

    Args:
        head_map: the map.
        out: where to.
        name: of the map, for errors.

    Raises:
        HeadMapError: the evidence is not such as `testbed.heads.evidence` gives.
    """
    console = Console(file=out, width=None if out.isatty() else PLAIN_WIDTH, highlight=False)
    try:
        sheets = (measures_sheet(head_map), *carry_over_sheets(head_map))
        said = [f"left out: {what}: {why}" for what, why in head_map.evidence.get("left_out", {}).items()]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise HeadMapError(f"{name}: evidence that can't be shown ({type(error).__name__}: {error})") from error
    for sheet in sheets:
        console.print(sheet_table(sheet))
    for line in (*said, *verdict_lines(head_map)):
        console.print(line, markup=False, soft_wrap=True)


def measures_sheet(head_map: HeadMap) -> Sheet:
    """One row a measure; those of other tasks are under carry-over."""
    stability = head_map.evidence.get("stability", {})
    title = (
        f"{head_map.model} ({head_map.fingerprint}): {head_map.layers} layers x {head_map.kv_heads} KV heads; "
        "rank correlation between halves of the texts, lengths (worst pair), seeds"
    )
    columns = (*COLUMNS, "texts", "lengths", "seeds")
    rows = [
        (
            name,
            measured.task,
            measured.unit,
            str(measured.samples),
            *highest(measured),
            number(float((measured.high - measured.low).mean())),
            str(measured.ties),
            *ranks(stability.get(name, {})),
        )
        for name, measured in head_map.measures.items()
        if "@" not in name
    ]
    return Sheet(title, columns, rows)


def highest(measured: Measured) -> tuple[str, str]:
    """The heads with the highest values, as "layer.head", and the value of the first with its interval."""
    order = measured.value.flatten().argsort(descending=True, stable=True)[:TOP].tolist()
    heads = [divmod(at, measured.value.shape[1]) for at in order]
    value, low, high = (number(float(each[heads[0]])) for each in (measured.value, measured.low, measured.high))
    return " ".join(f"{layer}.{head}" for layer, head in heads), f"{value} [{low}, {high}]"


def ranks(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    """Spearman between halves of the texts, lengths and seeds; the lowest where there are several."""
    found = (
        [entry["texts"]] if "texts" in entry else [],
        list(entry.get("lengths", {}).values()),
        list(entry.get("seeds", ())),
    )
    texts, lengths, seeds = (f"{min(each['spearman'] for each in some):.2f}" if some else ABSENT for some in found)
    return texts, lengths, seeds


def carry_over_sheets(head_map: HeadMap) -> Iterator[Sheet]:
    """How a measure of one task agrees with that of another: worst and best pair, overlap of the top against chance."""
    evidence = head_map.evidence
    if not evidence.get("carry_over"):
        return
    shares = [f"{share:g}" for share in evidence["shares"]]
    heard = [f"{float(share):.0%} ({number(round(evidence['chance'][share], 2))})" for share in shares]
    rows = []
    for name, pairs in evidence["carry_over"].items():
        ordered = sorted(pairs, key=lambda pair, pairs=pairs: pairs[pair]["spearman"])
        for tasks in ordered if name == "own" else dict.fromkeys((ordered[0], ordered[-1])):
            found = pairs[tasks]
            overlaps = (f"{found['jaccard'][share][0]:.2f}" for share in shares)
            label = "" if name == "own" else name
            rows.append((label, " / ".join(tasks.split()), f"{found['spearman']:+.2f}", f"{found['p']:.3f}", *overlaps))
    title = (
        "From task to task: worst and best pair of each measure, and measures that one task has alone; rank "
        "correlation, overlap (Jaccard) of the top heads, in brackets that of independent maps"
    )
    yield Sheet(title, ("measure", "between", "rank", "p", *heard), rows)


def verdict_lines(head_map: HeadMap) -> Iterator[str]:
    """What verdicts say of the map, or that there are none."""
    verdicts = {**kept(head_map.fingerprint), **head_map.verdicts}
    yield from lines(verdicts) if verdicts else ("no verdicts: python -m testbed.heads verdict MAP tries the map",)


def number(value: float) -> str:
    """Three digits, without a leading zero."""
    text = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def main(args: Sequence[str]) -> None:
    """The command.

    Raises:
        HeadMapError: no file, not a head map, or one with evidence that can't be shown; names the file.
    """
    if len(args) != 1:
        raise HeadMapError(f"show takes one head map, and was given {len(args)} words")
    show(HeadMap.read(Path(args[0])), sys.stdout, args[0])
