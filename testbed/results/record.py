"""The run record: one immutable, versioned JSON file a run, from which every table and figure is made.

Every number says whether it was measured, simulated or quoted, and carries its unit. Saving is atomic: a
reader finds the old record, the new one or none, never half of one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from testbed.files import replacing
from testbed.results.names import UNITS

SCHEMA = 2
READ_SCHEMAS = (1, SCHEMA)  # 1 had no tiers
FILE_NAME = "record.json"

SAMPLE_KEYS = ("id", "context_id", "score", "score_full", "kl", "top1", "ms_per_token", "ms_per_token_full")
"""Of every sample: its id and context, and what `testbed.compare` pairs (each may be missing or None but `id`)."""

Kind = Literal["measured", "simulated", "quoted"]
Status = Literal["complete", "partial", "failed"]


class RecordError(ValueError):
    """A record that cannot be built, written or read."""


@dataclass(frozen=True)
class Number:
    """One result.

    Attributes:
        name: dotted name; those in `names.UNITS` have a fixed unit.
        value: finite, or None where the run could not say.
        unit: never empty; "ratio" or "fraction" for pure numbers.
        kind: where the number comes from.
        ci: (low, high), 95 % interval, or None.
        n: samples behind the value, None where that has no meaning.
    """

    name: str
    value: float | None
    unit: str
    kind: Kind
    ci: tuple[float, float] | None = None
    n: int | None = None

    def __post_init__(self) -> None:
        """Refuses what a table could not print honestly."""
        if not isinstance(self.name, str) or not self.name.strip():
            raise RecordError(f"result name={self.name!r}: must be a non-empty text")
        where = f"result {self.name!r}"
        if not isinstance(self.unit, str) or not self.unit.strip():
            raise RecordError(f"{where}: unit={self.unit!r}: must be a non-empty text")
        if self.unit != UNITS.get(self.name, self.unit):
            raise RecordError(f"{where}: unit={self.unit!r}: must be {UNITS[self.name]!r}")
        if self.kind not in get_args(Kind):
            raise RecordError(f"{where}: kind={self.kind!r}: must be one of {', '.join(get_args(Kind))}")
        if self.value is not None:
            object.__setattr__(self, "value", _finite(f"{where}: value", self.value))
        if self.ci is not None:
            object.__setattr__(self, "ci", _interval(where, self.ci))
        if self.n is not None and (not isinstance(self.n, int) or isinstance(self.n, bool) or self.n < 0):
            raise RecordError(f"{where}: n={self.n!r}: must be a whole number of at least 0 or null")


@dataclass(frozen=True)
class Record:
    """What one run did, saw and measured.

    Attributes:
        run_id: names the run, unique in practice.
        config: the resolved configuration, plain JSON values.
        environment: versions, CPU, threads, commit; see `environment.environment`.
        seed: the run's seed.
        status: complete, partial (stopped early, finished samples kept) or failed.
        reason: why the run is not complete; empty if it is.
        results: numbers, unique by name.
        activity: proof that the policy acted: pages kept, dropped, attended per mode, heads per class.
        bytes: bytes per tier and format, as the allocator and the ledger say.
        tiers: capacity, residency, traffic, prefetches and failures of the tiers; see `testbed.tiers.section`.
        samples: one plain dict a sample; keys that others read are in `SAMPLE_KEYS`.
        alarms: one line each for what looks wrong with the comparison.
        notes: one line each for what went wrong beside the result (a tracker that failed).
    """

    run_id: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    seed: int
    status: Status = "complete"
    reason: str = ""
    results: tuple[Number, ...] = ()
    activity: Mapping[str, Any] = field(default_factory=dict)
    bytes: Mapping[str, Any] = field(default_factory=dict)
    tiers: Mapping[str, Any] = field(default_factory=dict)
    samples: tuple[Mapping[str, Any], ...] = ()
    alarms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    schema: int = SCHEMA
    config_hash: str = ""

    def __post_init__(self) -> None:
        """Checks the parts against each other and fills the hash of the configuration."""
        if self.schema != SCHEMA:
            raise RecordError(f"record schema={self.schema!r}: this version reads {SCHEMA}")
        if not isinstance(self.run_id, str) or not self.run_id.strip():
            raise RecordError(f"record run_id={self.run_id!r}: must be a non-empty text")
        if self.status not in get_args(Status):
            raise RecordError(f"record status={self.status!r}: must be one of {', '.join(get_args(Status))}")
        if (self.status == "complete") == bool(self.reason):
            raise RecordError(f"record reason={self.reason!r}: must be given if and only if status is not complete")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise RecordError(f"record seed={self.seed!r}: must be a whole number")
        for key in ("config", "environment", "activity", "bytes", "tiers"):
            if not isinstance(getattr(self, key), Mapping):
                raise RecordError(f"record {key}={getattr(self, key)!r}: must be a mapping")
        for key in ("results", "samples", "alarms", "notes"):
            object.__setattr__(self, key, tuple(getattr(self, key)))
        if any(not isinstance(sample, Mapping) or "id" not in sample for sample in self.samples):
            raise RecordError("record samples: every entry must be a mapping with an id")
        if any(not isinstance(number, Number) for number in self.results):
            raise RecordError("record results: every entry must be a Number")
        names = [number.name for number in self.results]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise RecordError(f"record results: {', '.join(twice)} given more than once")
        expected = config_hash(self.config)
        if self.config_hash not in ("", expected):
            raise RecordError(f"record config_hash={self.config_hash!r}: the configuration hashes to {expected}")
        object.__setattr__(self, "config_hash", expected)

    def __getitem__(self, name: str) -> Number:
        """The result of that name.

        Raises:
            KeyError: the record has no such result.
        """
        for number in self.results:
            if number.name == name:
                return number
        raise KeyError(f"record {self.run_id} has no result {name!r}; it has {[n.name for n in self.results]}")

    def get(self, name: str) -> Number | None:
        """The result of that name, or None."""
        return next((number for number in self.results if number.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any], source: str = "record") -> Record:
        """The inverse of `to_dict`.

        Args:
            data: what a record file holds.
            source: named in errors.

        Raises:
            RecordError: not a record, or one of another schema.
        """
        if not isinstance(data, Mapping) or "schema" not in data:
            raise RecordError(f"{source}: not a run record (no schema key)")
        if data["schema"] not in READ_SCHEMAS:
            known_schemas = " and ".join(map(str, READ_SCHEMAS))
            raise RecordError(f"{source}: schema {data['schema']!r}, this version reads {known_schemas}")
        if data["schema"] == 1 and "tiers" not in data:
            data = {**data, "schema": SCHEMA, "tiers": {}}
        known = {f.name for f in fields(Record)}
        if set(data) != known:
            missing, unknown = sorted(known - set(data)), sorted(set(data) - known)
            raise RecordError(f"{source}: not a run record: missing keys {missing}, unknown keys {unknown}")
        try:
            numbers = tuple(Number(**number) for number in data["results"])
            return Record(**{**data, "results": numbers})
        except (TypeError, RecordError) as error:
            raise RecordError(f"{source}: not a valid run record: {error}") from error


def config_hash(config: Mapping[str, Any]) -> str:
    """sha256 of the configuration as canonical JSON, hex.

    Raises:
        RecordError: the configuration holds something JSON cannot.
    """
    return hashlib.sha256(_dump(config, "config").encode()).hexdigest()


def save(record: Record, path: str | Path) -> Path:
    """Writes the record atomically: temporary file in the same folder, fsync, rename.

    Args:
        record: what to write.
        path: the file, or a folder that gets `record.json`; missing folders are made.

    Returns:
        The file written.

    Raises:
        RecordError: the record holds what JSON cannot, or the file system refused (full, read-only);
            an earlier record at that place is untouched.
    """
    path = Path(path)
    if path.is_dir() or path.suffix != ".json":
        path = path / FILE_NAME
    text = _dump(record.to_dict(), f"record {record.run_id}", indent=1)
    write_atomically(path, text)
    return path


def write_atomically(path: Path, text: str) -> None:
    """Replaces a text file in one step.

    Raises:
        RecordError: see `replacing`; nothing half-written stays.
    """
    try:
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecordError(f"{path}: cannot write: {error.strerror}") from error


def load(path: str | Path) -> Record:
    """Reads a record.

    Args:
        path: the file, or the folder that holds `record.json`.

    Raises:
        RecordError: no such file, unreadable, not JSON, not a record, or of another schema.
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path}: cannot read: {error.strerror or error}") from error
    except ValueError as error:
        raise RecordError(f"{path}: not a run record: {error}") from error
    return Record.from_dict(data, str(path))


def _dump(value: object, where: str, indent: int | None = None) -> str:
    try:
        return json.dumps(value, sort_keys=indent is None, indent=indent, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{where}: holds a value that JSON cannot: {error}") from error


def _finite(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
        raise RecordError(f"{where}={value!r}: must be a finite number or null")
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise RecordError(f"{where}={value!r}: must be finite or null")
    return number


def _interval(where: str, ci: Sequence[float]) -> tuple[float, float]:
    if not isinstance(ci, (tuple, list)) or len(ci) != 2:
        raise RecordError(f"{where}: ci={ci!r}: must be (low, high) or null")
    low, high = (_finite(f"{where}: ci", end) for end in ci)
    if low > high:
        raise RecordError(f"{where}: ci={ci!r}: low must not exceed high")
    return low, high
