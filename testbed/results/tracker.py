"""Weights & Biases beside the record, never in its way.

A record is complete on disk before W&B hears of it. Logging runs in a process of its own with closed input and a
time limit, so that a prompt, a dead network, a full disk or a crash inside W&B costs one warning line and a note in
the record, never a result, an exit code or a hang. Offline is the default; `wandb sync <run folder>/wandb/offline-*`
sends a run later.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from testbed.results.record import Record, RecordError, load, save

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
        problem = self._run(path)
        if problem is None:
            return record
        note = f"W&B ({self.mode}) failed: {problem}"
        log.warning("%s; the record is complete at %s", note, path)
        noted = replace(record, notes=(*record.notes, note))
        try:
            save(noted, path)
        except RecordError:
            return record  # the record without the note is on disk, and the note has been printed
        return noted

    def _run(self, path: Path) -> str | None:
        """Logs in a child process; the reason of a failure in one line, or None."""
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


def log_record(path: Path, mode: Mode, project: str, entity: str | None, group: str | None, wait_s: float) -> None:
    """Logs configuration, metrics, tables and the record itself as an artifact; raises what W&B raises."""
    os.environ.setdefault("WANDB_DATA_DIR", str(path.parent / "wandb"))  # artifacts stage inside the run folder
    import wandb

    record = load(path)
    folder = path.parent / "wandb"
    if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder}: not writable")  # W&B would quietly use a temporary folder instead
    run = wandb.init(
        dir=str(path.parent),
        mode=mode,
        project=project,
        entity=entity,
        group=group,
        name=record.run_id,
        config={"config": dict(record.config), "config_hash": record.config_hash, "seed": record.seed},
        settings=wandb.Settings(
            silent=True, console="off", init_timeout=wait_s, finish_timeout=wait_s, x_disable_stats=True
        ),
    )
    run.log(metrics(record) | {"results": _results_table(wandb, record), "samples": _samples_table(wandb, record)})
    run.summary.update({"status": record.status, "reason": record.reason, "alarms": list(record.alarms)})
    artifact = wandb.Artifact(f"record-{run.id}", type="record", metadata={"schema": record.schema})
    artifact.add_file(str(path), name="record.json")
    run.log_artifact(artifact)
    run.finish()


def metrics(record: Record) -> dict[str, float]:
    """Name -> value of every result that has one."""
    return {number.name: number.value for number in record.results if number.value is not None}


def _results_table(wandb: Any, record: Record) -> Any:
    columns = ["name", "value", "unit", "kind", "low", "high", "n"]
    rows = [
        [n.name, n.value, n.unit, n.kind, *(n.ci if n.ci is not None else (None, None)), n.n] for n in record.results
    ]
    return wandb.Table(columns=columns, data=rows)


def _samples_table(wandb: Any, record: Record) -> Any:
    columns = list(dict.fromkeys(key for sample in record.samples for key in sample))
    rows = [[_cell(sample.get(key)) for key in columns] for sample in record.samples]
    return wandb.Table(columns=columns, data=rows, allow_mixed_types=True)


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
        log_record(args.path, args.mode, args.project, args.entity, args.group, 0.8 * args.timeout_s)
    except Exception as error:  # whatever W&B raises becomes the parent's one line
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
