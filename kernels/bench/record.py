"""What a benchmark finds: rows with targets, the table they make, the JSON record they are kept in."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "numpy", "flashinfer-python", "flash-attn")
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile")
UNITS = {"ms": "ms", "median_ms": "ms", "cpu_ms": "ms", "read_bytes": "B", "gbps": "GB/s"}
UNITS |= {"of_read": "1", "over_sdpa": "1", "error": "1"}
SCHEMA = 1
EXACTNESS = ("error", "differing")  # names of targets that no clock is behind


@dataclass(frozen=True)
class Target:
    """A bound, and what was found.

    Attributes:
        name: what is bounded.
        value: found.
        unit: of value and bound; "1" for a ratio.
        bound: the limit.
        at_least: whether the value must be at least the bound; else at most.
    """

    name: str
    value: float
    unit: str
    bound: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether the value keeps the bound; NaN does not."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        unit = "" if self.unit == "1" else f" {self.unit}"
        return f"{self.name} {self.value:.3g}{unit} ({sign} {self.bound:g}: {'met' if self.met else 'MISSED'})"


@dataclass(frozen=True)
class Row:
    """One line of the table; what was not measured is None.

    Attributes:
        case: name of the case, e.g. "uniform".
        contender: who ran, or what was derived.
        threads: of the host; 0 on a GPU.
        ms: the shortest call.
        median_ms: the median call.
        cpu_ms: the least processor time of a call, all threads together; well below `ms`, the machine was busy.
        calls: how many were timed.
        read_bytes: what a call must read: pages listed, or K and V without padding.
        of_read: share of the bandwidth a plain read (on a GPU: a copy) reached in the same run.
        over_sdpa: how many times faster than torch's packed, bucketed SDPA in the same run.
        error: relative, |out - truth| / |truth|, against float64 attention over what was stored before rounding.
        targets: bounds that apply.
        note: what a reader must know, e.g. why a contender is missing.
    """

    case: str
    contender: str
    threads: int
    ms: float | None = None
    median_ms: float | None = None
    cpu_ms: float | None = None
    calls: int = 0
    read_bytes: int | None = None
    of_read: float | None = None
    over_sdpa: float | None = None
    error: float | None = None
    targets: tuple[Target, ...] = ()
    note: str = ""

    @property
    def gbps(self) -> float | None:
        """Bytes that must be read over the time."""
        return self.read_bytes / self.ms / 1e6 if self.ms and self.read_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        found = [{**asdict(t), "met": t.met} for t in self.targets]
        return {**asdict(self), "gbps": self.gbps, "targets": found, "kind": "measured"}


def row_from(fields: dict[str, Any]) -> Row:
    """The row that `Row.to_dict` wrote."""
    targets = tuple(Target(**{k: v for k, v in t.items() if k != "met"}) for t in fields["targets"])
    return Row(**{**{k: v for k, v in fields.items() if k not in ("gbps", "kind")}, "targets": targets})


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one line each under a header."""
    head = ("case", "contender", "thr", "ms", "cpu ms", "GB/s", "% read", "x SDPA", "error", "targets")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        lines.append(
            (
                row.case,
                row.contender,
                str(row.threads or "-"),
                _said(row.ms, "{:.3f}"),
                _said(row.cpu_ms, "{:.3f}"),
                _said(row.gbps, "{:.1f}"),
                _said(None if row.of_read is None else 100 * row.of_read, "{:.0f}"),
                _said(row.over_sdpa, "{:.2f}"),
                _said(row.error, "{:.1e}"),
                "; ".join([*map(str, row.targets), *([row.note] if row.note else [])]),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    left = (0, 1)
    return "\n".join(
        "  ".join(
            [(x.ljust(w) if i in left else x.rjust(w)) for i, (x, w) in enumerate(zip(line, widths, strict=False))]
            + [line[-1]]
        ).rstrip()
        for line in lines
    )


def _said(value: float | None, pattern: str) -> str:
    return "" if value is None else pattern.format(value)


@dataclass
class Record:
    """The record of one run, written again after every case.

    Attributes:
        path: the file.
        settings: what was asked for.
        rows: what was found so far.
        stages: how each case or stage ended.
        environment: what it ran on.
    """

    path: Path
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=lambda: environment())
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    complete: bool = False

    def add(self, rows: Sequence[Row]) -> list[Row]:
        """Takes rows in; times of a dry run have no targets. Returns them as taken."""
        if self.settings["dry_run"]:
            rows = [replace(row, targets=tuple(t for t in row.targets if t.name in EXACTNESS)) for row in rows]
        self.rows += rows
        return list(rows)

    def write(self) -> None:
        """Replaces the file in one step.

        Raises:
            OSError: the file system refused; an earlier file is untouched.
        """
        body = {
            "schema": SCHEMA,
            "what": "kernels.bench",
            "started": self.started,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "complete": self.complete,
            "settings": self.settings,
            "environment": self.environment,
            "load_at_end": _load(),
            "units": UNITS,
            "stages": self.stages,
            "rows": [row.to_dict() for row in self.rows],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(_finite(body), file, indent=1, allow_nan=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(self.path)
        finally:
            Path(temporary).unlink(missing_ok=True)

    def report(self) -> str:
        """What was found, in a few lines."""
        where = f"load {self.environment['load_at_start']} at the start, {_load()} now; record: {self.path}"
        if self.settings["dry_run"]:
            where = f"dry run: times mean nothing\n{where}"
        judged = [(row, target) for row in self.rows for target in row.targets]
        missed = [f"  missed: {row.case}, {row.contender}: {t}" for row, t in judged if not t.met]
        return "\n".join([f"targets: {len(judged) - len(missed)} of {len(judged)} met", *missed, where])


def _finite(value: Any) -> Any:
    """JSON has no NaN: such numbers become text."""
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def environment() -> dict[str, Any]:
    """Machine, versions, load and commit; what cannot be found out is None."""
    return {
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": _found(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo"),
        "cpu_features": [x for x in CPU_FEATURES if _found(rf"^flags.*\b({x})\b", "/proc/cpuinfo")],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "l3_bytes": l3_bytes(),
        "memory": _found(r"^MemTotal:\s*(.+)$", "/proc/meminfo"),
        "load_at_start": _load(),
        "git": _git(),
    }


def l3_bytes() -> int:
    """The last cache's size; 32 MiB where the machine does not say."""
    found = _found(r"^(\d+)K", "/sys/devices/system/cpu/cpu0/cache/index3/size")
    return int(found) << 10 if found else 32 << 20


def gpu_environment() -> dict[str, Any]:
    """The device torch uses; needs one."""
    props = torch.cuda.get_device_properties(0)
    return {
        "gpu": props.name,
        "sm_count": props.multi_processor_count,
        "l2_bytes": props.L2_cache_size,
        "memory_bytes": props.total_memory,
        "capability": list(torch.cuda.get_device_capability(0)),
        "cuda": torch.version.cuda,
    }


def _load() -> float:
    """Processes that ran or waited, over the last minute."""
    return round(os.getloadavg()[0], 2)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _found(pattern: str, path: str) -> str | None:
    try:
        found = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return found.group(1) if found else None


def _git() -> dict[str, Any] | None:
    """The commit the code comes from and whether files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
