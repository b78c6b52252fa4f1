"""What a benchmark case is given and what it answers: options in, rows out, one table, one JSON file.

A case is `testbed/bench/<case>.py` with `run(options: Options) -> list[Row]`; nothing else lists it. Numbers that
are compared come from one run in which the contenders take turns (`kernels.bench.timing.take_turns`), and targets are
ratios, so that a noisy machine hits both sides. A missed target is said, not raised: a timing is no test.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Protocol, cast

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import testbed.bench
from testbed.results.record import write_atomically

SCHEMA = 1
NO_CASES = ("base", "__main__")


@dataclass(frozen=True)
class Options:
    """What a case may use.

    Attributes:
        threads: OpenMP threads of torch, already set.
        quick: small sizes and few rounds: shows that everything runs; its numbers mean little, no target is judged.
    """

    threads: int = 1
    quick: bool = False

    def __post_init__(self) -> None:
        """Refuses what is no number of threads."""
        if type(self.threads) is not int or self.threads < 1:
            raise ValueError(f"threads={self.threads!r}: must be an int of at least 1")


@dataclass(frozen=True)
class Row:
    """One number.

    Attributes:
        case: name of the case, its file's.
        name: what was measured.
        value: found; NaN where it could not be, with the reason in the name.
        unit: of the value; "1" for a ratio.
        target: bound in words, e.g. ">= 0.8"; "" for none.
        met: whether the value keeps it; None where nothing is judged.
    """

    case: str
    name: str
    value: float
    unit: str = "1"
    target: str = ""
    met: bool | None = None

    def __post_init__(self) -> None:
        """A judgement needs a target."""
        if self.met is not None and not self.target:
            raise ValueError(f"row {self.case}/{self.name}: met={self.met} without a target")


def at_least(case: str, name: str, value: float, bound: float, unit: str = "1") -> Row:
    """A row whose value must be at least the bound; NaN is not."""
    return Row(case, name, value, unit, f">= {bound:g}", value >= bound)


def at_most(case: str, name: str, value: float, bound: float, unit: str = "1") -> Row:
    """A row whose value must be at most the bound; NaN is not."""
    return Row(case, name, value, unit, f"<= {bound:g}", value <= bound)


def within(case: str, name: str, value: float, low: float, high: float, unit: str = "1") -> Row:
    """A row whose value must lie in [low, high]; NaN does not."""
    return Row(case, name, value, unit, f"{low:g} to {high:g}", low <= value <= high)


def unjudged(rows: Sequence[Row]) -> list[Row]:
    """The same numbers without judgements, for quick runs."""
    return [replace(row, met=None) for row in rows]


class Case(Protocol):
    """A module of this package."""

    def run(self, options: Options) -> list[Row]:
        """Measures; at least one row."""
        ...


def case_names() -> list[str]:
    """Every case there is, by name."""
    return sorted(x.name for x in iter_modules(testbed.bench.__path__) if x.name not in NO_CASES)


def case(name: str) -> Case:
    """The case of that name."""
    return cast(Case, import_module(f"testbed.bench.{name}"))


def table(rows: Sequence[Row], width: int = 120) -> str:
    """The rows as text, one line each under a header."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("case", "what", "value", "unit", "target", ""):
        out.add_column(name, justify="right" if name == "value" else "left")
    for row in rows:
        verdict = "" if row.met is None else "met" if row.met else "MISSED"
        unit = "" if row.unit == "1" else row.unit
        out.add_row(*map(Text, (row.case, row.name, f"{row.value:.4g}", unit, row.target, verdict)))
    text = StringIO()
    Console(file=text, width=width, color_system=None).print(out)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())


def write(path: Path, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """Replaces the JSON file in one step: {"schema", "what", **about, "rows"}.

    Raises:
        RecordError: the file system refused; an earlier file is untouched.
    """
    body = [asdict(row) | {"value": row.value if math.isfinite(row.value) else str(row.value)} for row in rows]
    whole = {"schema": SCHEMA, "what": "testbed.bench", **about, "rows": body}
    write_atomically(path, json.dumps(whole, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
