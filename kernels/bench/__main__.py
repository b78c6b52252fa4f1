"""Times the kernels beside their rivals in one run, prints one table and writes one record.

    python -m kernels.bench                              # this machine's CPU: a few minutes, alone on the machine
    python -m kernels.bench --cases uniform,mixed --threads 1
    python -m kernels.bench --device cuda                # `make gpu`: a GPU's correctness, bandwidth, variants
    python -m kernels.bench --device cuda --dry-run      # the same code path, tiny, in Triton's interpreter

The contenders of a case take turns, read memory that no cache holds, and are judged by their shortest call. A row's
error is its distance from float64 attention over what was stored, before any format rounded it. Targets that are missed
are said, not raised: a timing is no test. Ctrl-C keeps what is finished.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kernels.bench.cases import CASES, TINY, Bench, Sizes
from kernels.bench.record import Record, Row, environment, gpu_environment, table
from kernels.bench.stages import STAGES
from kernels.pages import PAGE_TOKENS

OUTPUTS = Path("outputs")
PUBLISHED = Path("experiments/kernels")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 also where a target is missed or a GPU stage failed, 130 after Ctrl-C."""
    parser = _parser()
    given = parser.parse_args(arguments)
    names = list(CASES) if given.device == "cpu" else list(STAGES)
    cases = given.cases.split(",") if given.cases else names
    if unknown := [x for x in cases if x not in names]:
        parser.error(f"--cases {','.join(unknown)}: must be of {', '.join(names)} with --device {given.device}")
    threads = _threads(parser, given.threads)
    if given.device == "cuda":
        from kernels.bench import gpu

        if given.stage_file is not None:
            return gpu.run_stage(cases[0], given.stage_file, given.dry_run)
        there = torch.cuda.is_available()
        if not there and not given.dry_run:
            print("kernels.bench: no CUDA device here: dry run, tiny shapes in Triton's interpreter", flush=True)
        dry_run = given.dry_run or not there
        record = _record(given, cases, (), dry_run, torch.cuda.get_device_name(0) if there else "none")
        if there:
            record.environment |= gpu_environment()
        return gpu.run(record, cases, dry_run)
    record = _record(given, cases, threads, given.dry_run, environment()["cpu"] or "unknown")
    sizes = TINY if given.dry_run else Sizes()
    if given.page_tokens:
        sizes = replace(sizes, page_tokens=(given.page_tokens,))
    return run_cpu(record, cases, Bench(sizes, threads))


def run_cpu(record: Record, cases: Sequence[str], bench: Bench) -> int:
    """All cases in this process; the record is written after each."""
    before, name = torch.get_num_threads(), ""
    try:
        for name in cases:
            started = time.monotonic()
            print(f"{name} ...", file=sys.stderr, flush=True)
            rows = record.add([_judged(row) for row in CASES[name](bench)])
            record.stages.append({"name": name, "seconds": round(time.monotonic() - started, 1), "outcome": "done"})
            record.write()
            print(table(rows) + "\n", flush=True)
        record.complete = True
    except KeyboardInterrupt:
        record.stages.append({"name": name, "outcome": "interrupted"})
    finally:
        torch.set_num_threads(before)
    record.write()
    print(record.report())
    return 0 if record.complete else 130


def _judged(row: Row) -> Row:
    """Targets are for one thread; with more their values are notes."""
    if row.threads == 1 or not row.targets:
        return row
    said = [f"{t.name} {t.value:.3g}" for t in row.targets]
    return replace(row, targets=(), note="; ".join([*said, *([row.note] if row.note else [])]))


def _slug(name: str) -> str:
    """A machine's name as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _record(
    given: argparse.Namespace, cases: Sequence[str], threads: Sequence[int], dry_run: bool, name: str
) -> Record:
    kind = "gpu" if given.device == "cuda" else "cpu"
    if given.out is not None:
        path = given.out
    else:
        folder = PUBLISHED if kind == "gpu" and not dry_run else OUTPUTS
        now = datetime.now(UTC)
        path = folder / f"{kind}-{_slug(name)}-{now:%Y-%m-%dT%H-%M-%S}{'-dry' if dry_run else ''}.json"
    settings: dict[str, Any] = {
        "device": given.device,
        "dry_run": dry_run,
        "cases": list(cases),
        "threads": list(threads),
        "page_tokens": given.page_tokens,
    }
    return Record(path, settings)


def _threads(parser: argparse.ArgumentParser, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        parser.error(f"--threads {text}: must be positive numbers with commas between, e.g. 1,2")
    return tuple(map(int, parts))


def _parser() -> argparse.ArgumentParser:
    title, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench",
        description=title,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", default="1,2", help="CPU: numbers of threads, timed one after the other")
    parser.add_argument("--cases", default="", help="some of the cases (CPU) or stages (GPU), with commas between")
    parser.add_argument(
        "--page-tokens", type=int, choices=PAGE_TOKENS, help="CPU: pages of this size in every case; by default of 16"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes: shows that everything runs, times nothing")
    parser.add_argument("--out", type=Path, help="the record; by default dated, in outputs/ or experiments/kernels/")
    parser.add_argument("--stage-file", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
