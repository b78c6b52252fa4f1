"""Weights & Biases beside the record, never in its way.

A record is complete on disk before W&B hears of it. Logging runs in a process of its own with closed input and a
time limit, so that a prompt, a dead network, a full disk or a crash inside W&B costs one warning line and a note in
the record, never a result, an exit code or a hang. Offline is the default; `wandb sync <run folder>/wandb/offline-*`
sends a run later.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from testbed.results.record import Record, RecordError, save

log = logging.getLogger(__name__)

Mode = Literal["offline", "online", "disabled"]


class TrackerError(ValueError):
    """A tracker that cannot be configured."""


@dataclass(frozen=True)
class Tracker:
    """Settings of W&B.

    Attributes:
        mode: offline (files in the run folder), online or disabled.
        project: W&B project.
        entity: W&B entity, None for the account's default.
        group: W&B group of runs that belong together, None for none.
        timeout_s: after this W&B is given up.
    """

    mode: Mode = "offline"
    project: str = "testbed"
    entity: str | None = None
    group: str | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Checks what Hydra's instantiate does not."""
        if self.mode not in get_args(Mode):
            raise TrackerError(f"wandb.mode={self.mode!r}: must be one of {', '.join(get_args(Mode))}")
        if not self.project:
            raise TrackerError(f"wandb.project={self.project!r}: must be a non-empty text")
        if isinstance(self.timeout_s, bool) or not 0 < self.timeout_s < float("inf"):
            raise TrackerError(f"wandb.timeout_s={self.timeout_s!r}: must be a finite number above 0")

    def publish(self, record: Record, path: Path) -> Record:
        """Sends a saved record to W&B.

        Args:
            record: what was saved.
            path: the file `record.save` returned; W&B's own files go beside it.

        Returns:
            The record; where W&B failed, with a note, and saved again with it.
        """
        if self.mode == "disabled":
            return record
        note = self._run(path)
        if note is None:
            return record
        log.warning("%s; the record is complete at %s", note, path)
        noted = replace(record, notes=(*record.notes, note))
        try:
            save(noted, path)
        except RecordError:
            return record  # the record without the note is on disk, and the note has been printed
        return noted

    def publish_comparison(self, path: Path) -> str | None:
        """Sends a saved compare.json to W&B; the reason of a failure in one line, or None."""
        return None if self.mode == "disabled" else self._run(path)

    def _run(self, path: Path) -> str | None:
        """Logs in a child process; the reason of a failure in one line, or None."""
        problem = self._child(path)
        return None if problem is None else f"W&B ({self.mode}) failed: {problem}"

    def _child(self, path: Path) -> str | None:
        root = str(Path(__file__).resolve().parents[2])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        command = [sys.executable, "-m", __spec__.name, str(path), "--mode", self.mode, "--project", self.project]
        for key, value in (("--entity", self.entity), ("--group", self.group)):
            command += [key, value] if value else []
        command += ["--timeout-s", str(self.timeout_s)]
        try:
            child = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # W&B starts a service of its own; a time-out ends both
            )
        except OSError as error:
            return f"cannot start: {error}"
        try:
            _, errors = child.communicate(timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            _kill(child)
            return f"no answer within {self.timeout_s:g} s"
        except BaseException:
            _kill(child)
            raise
        if child.returncode == 0:
            return None
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"exit code {child.returncode}"


def _kill(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def send(path: Path, mode: Mode, project: str, entity: str | None, group: str | None, wait_s: float) -> None:
    """Logs a record or a comparison; raises what W&B raises."""
    folder = path.parent / "wandb"
    if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder}: not writable")  # W&B would quietly use a temporary folder instead
    os.environ.setdefault("WANDB_DATA_DIR", str(folder))  # artifacts stage inside the run folder
    import wandb

    what = read_payload(path)
    quiet = wandb.Settings(silent=True, console="off", init_timeout=wait_s, finish_timeout=wait_s, x_disable_stats=True)
    run = wandb.init(
        dir=str(path.parent),
        mode=mode,
        project=project,
        entity=entity,
        group=group,
        name=what.name,
        job_type=what.kind,
        config=what.config,
        settings=quiet,
    )
    tables = {
        name: wandb.Table(columns=list(columns), data=list(rows), allow_mixed_types=True)
        for name, (columns, rows) in what.tables.items()
    }
    run.log({**what.metrics, **tables})
    run.summary.update(what.summary)
    artifact = wandb.Artifact(f"{what.kind}-{run.id}", type=what.kind)
    for file in what.files:
        artifact.add_file(str(file), name=file.name)
    run.log_artifact(artifact)
    run.finish()
    if what.kind == "comparison" and mode == "online" and find_spec("wandb_workspaces"):
        _report(what, project, entity)


def _report(what: Payload, project: str, entity: str | None) -> None:
    """A W&B report with the comparison's table, where the optional package for it is installed."""
    from wandb_workspaces.reports import v2  # pyright: ignore[reportMissingImports]

    columns, rows = what.tables["comparison"]
    lines = [columns, ["---"] * len(columns), *rows]
    text = "\n".join("| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |" for line in lines)
    v2.Report(project=project, entity=entity or "", title=what.name, blocks=[v2.MarkdownBlock(text=text)]).save()


@dataclass(frozen=True)
class Payload:
    """What one W&B run is given; tables are name -> (columns, rows)."""

    name: str
    kind: Literal["record", "comparison"]
    config: dict[str, Any]
    metrics: dict[str, float]
    tables: dict[str, tuple[list[str], list[list[Any]]]]
    summary: dict[str, Any]
    files: list[Path]


def read_payload(path: Path) -> Payload:
    """What to log of a record.json or a compare.json."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if "comparison" in data:
        summary = {"alarms": data["alarms"], "notes": data["notes"]}
        files = [file for file in (path, path.with_suffix(".html")) if file.exists()]
        return Payload(data["comparison"], "comparison", {}, {}, {"comparison": _table(data["rows"])}, summary, files)
    record = Record.from_dict(data, str(path))
    results = [
        {"name": n.name, "value": n.value, "unit": n.unit, "kind": n.kind}
        | dict(zip(("low", "high"), n.ci or (None, None), strict=True))
        | {"n": n.n}
        for n in record.results
    ]
    return Payload(
        name=record.run_id,
        kind="record",
        config={"config": dict(record.config), "config_hash": record.config_hash, "seed": record.seed},
        metrics={number.name: number.value for number in record.results if number.value is not None},
        tables={"results": _table(results), "samples": _table(record.samples)},
        summary={
            "status": record.status,
            "reason": record.reason,
            "alarms": list(record.alarms),
            "tiers": dict(record.tiers),
        },
        files=[path],
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return columns, [[_cell(row.get(key)) for key in columns] for row in rows]


def _cell(value: object) -> object:
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """The child process of `Tracker.publish`: one line on stderr and exit code 1 on failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--mode", choices=get_args(Mode), required=True)
    parser.add_argument("--project", required=True)
    parser.add_argument("--entity")
    parser.add_argument("--group")
    parser.add_argument("--timeout-s", type=float, required=True)
    args = parser.parse_args(arguments)
    try:
        send(args.path, args.mode, args.project, args.entity, args.group, 0.8 * args.timeout_s)
    except Exception as error:  # whatever W&B raises becomes the parent's one line
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
