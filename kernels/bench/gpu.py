"""The GPU bundle: stages in processes of their own, each with a time limit, and one record written after each.

A stage that crashes, hangs or breaks the CUDA context takes only itself away: what it found so far is kept, how it
ended is in the record, and the next one starts with a fresh process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from kernels.bench.record import Record, Row, row_from, table
from kernels.bench.stages import STAGES, Context

TOTAL_S = 450.0  # for all stages together, so that the whole stays under 8 minutes
DRY_FACTOR = 4.0  # of all limits in a dry run: the interpreter is slow, more so on a busy machine
GRACE_S = 5.0  # between asking a stage to end and ending it


def run(record: Record, names: Sequence[str], dry_run: bool) -> int:
    """Runs the stages; returns the command's exit code."""
    slower = DRY_FACTOR if dry_run else 1.0
    end = time.monotonic() + TOTAL_S * slower
    try:
        for name in names:
            limit_s = min(STAGES[name].limit_s * slower, end - time.monotonic())
            print(f"{name}: at most {limit_s:.0f} s ...", file=sys.stderr, flush=True)
            rows = _stage(record, name, limit_s, dry_run)
            rows = record.add(rows)
            record.write()
            print(table(rows) if rows else f"{name}: nothing found", flush=True)
            print(f"{name}: {record.stages[-1]['outcome']}\n{record.stages[-1]['log']}", flush=True)
        record.complete = True
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    record.write()
    print(record.report())
    return 0 if record.complete else 130


def _stage(record: Record, name: str, limit_s: float, dry_run: bool) -> list[Row]:
    """One stage in its own process; notes how it ended."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows.jsonl", Path(folder) / "log.txt"
        rows.touch()
        asked = ["--device", "cuda", "--cases", name, "--stage-file", str(rows)]
        command = [sys.executable, "-m", "kernels.bench", *asked]
        environment = dict(os.environ)
        if dry_run:
            command.append("--dry-run")
            environment["TRITON_INTERPRET"] = "1"
        with log.open("w") as sink:
            process = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink)
            outcome = "interrupted"
            try:
                code = process.wait(max(limit_s, 1.0))
                outcome = "done" if code == 0 else f"failed with {code}"
            except subprocess.TimeoutExpired:
                outcome = f"cut off after {limit_s:.0f} s"
            finally:
                _end(process)
                said = "" if outcome == "done" else log.read_text(errors="replace")[-2000:]
                seconds = round(time.monotonic() - started, 1)
                record.stages.append({"name": name, "seconds": seconds, "outcome": outcome, "log": said})
        return [row_from(json.loads(line)) for line in rows.read_text().splitlines() if line.endswith("}")]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_stage(name: str, rows: Path, dry_run: bool) -> int:
    """The process of one stage: a line of JSON a row, written as it is found."""
    if dry_run:
        torch.set_num_threads(1)
    with rows.open("a", encoding="utf-8") as file:
        for row in STAGES[name].run(Context.here(dry_run)):
            file.write(json.dumps(row.to_dict()) + "\n")
            file.flush()
    return 0
