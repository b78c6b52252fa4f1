"""Times the testbed's own machinery: `python -m testbed.bench`.

    python -m testbed.bench                                  # every case, one thread; alone on the machine
    python -m testbed.bench --cases pipeline,copy --threads 1
    python -m testbed.bench --quick                          # small: shows that everything runs

A target that is missed is said, not raised. A case that fails is said, the others go on and the command ends with 1.
Ctrl-C keeps what is finished and ends with 130.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kernels.bench.record import environment
from testbed.bench.base import Options, Row, case, case_names, table, unjudged, write

OUTPUTS = Path("outputs")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 also where a target is missed, 1 where a case failed, 130 after Ctrl-C."""
    parser = _parser()
    given = parser.parse_args(arguments)
    names = case_names()
    chosen = given.cases.split(",") if given.cases else names
    if unknown := [x for x in chosen if x not in names]:
        parser.error(f"--cases {','.join(unknown)}: must be of {', '.join(names)}")
    if given.threads < 1:
        parser.error(f"--threads {given.threads}: must be at least 1")
    out = given.out or OUTPUTS / f"bench-{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}.json"
    before = torch.get_num_threads()
    torch.set_num_threads(given.threads)
    try:
        return run(chosen, Options(given.threads, given.quick), out)
    finally:
        torch.set_num_threads(before)


def run(names: Sequence[str], options: Options, out: Path) -> int:
    """All cases in this process; the file is written after each."""
    rows: list[Row] = []
    stages: list[dict[str, Any]] = []
    about: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": {"threads": options.threads, "quick": options.quick, "cases": list(names)},
        "environment": environment(),
        "stages": stages,
    }
    outcome = "done"
    for name in names:
        started = time.monotonic()
        print(f"{name} ...", file=sys.stderr, flush=True)
        found: list[Row] = []
        try:
            found = case(name).run(options)
            outcome = "done"
        except KeyboardInterrupt:
            outcome = "interrupted"
        except Exception as error:  # one broken case must not cost the others' numbers
            outcome = f"failed: {type(error).__name__}: {error}"
            print(f"{name} {outcome}", file=sys.stderr, flush=True)
        found = unjudged(found) if options.quick else found
        rows += found
        stages.append({"name": name, "seconds": round(time.monotonic() - started, 1), "outcome": outcome})
        write(out, rows, about | {"load_at_end": round(os.getloadavg()[0], 2)})
        if found:
            print(table(found) + "\n", flush=True)
        if outcome == "interrupted":
            break
    judged = [row for row in rows if row.met is not None]
    missed = [f"  missed: {x.case}, {x.name}: {x.value:.3g} ({x.target})" for x in judged if not x.met]
    print("\n".join([f"targets: {len(judged) - len(missed)} of {len(judged)} met", *missed, f"record: {out}"]))
    if outcome == "interrupted":
        return 130
    return 1 if any(stage["outcome"].startswith("failed") for stage in stages) else 0


def _parser() -> argparse.ArgumentParser:
    title, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m testbed.bench",
        description=title,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", default="", help="some of the cases, with commas between; by default all")
    parser.add_argument(
        "--threads", type=int, default=1, help="OpenMP threads of torch; 1 on a machine with other work"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that everything runs, judges nothing")
    parser.add_argument("--out", type=Path, help="the JSON file; by default dated, in outputs/")
    return parser


if __name__ == "__main__":
    sys.exit(main())
