"""The decision log: what a policy decided at every step, as bytes and counts, replayable and diffable.

JSON lines, one header and one line a step. The engine writes it, the SimPy twin reads it; neither knows the
other. Moves and reads are sums over streams, never a line per page: a log grows with steps, not with context.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from policies.base import Format, Mode, Tier
from testbed.files import replacing

SCHEMA = 1
PHASES = ("prefill", "compress", "turn", "extend", "decode")
MODES = tuple(mode.name.lower() for mode in Mode)
FORMATS = tuple(fmt.name.lower() for fmt in Format)
READ_FORMATS = (*FORMATS, "prototype", "background")  # what attention may read besides pages of a format
TIERS = tuple(tier.name for tier in Tier if tier is not Tier.DROPPED)
DROPPED = Tier.DROPPED.name


class LogError(ValueError):
    """A decision log, or a value meant for one, that can't be used."""


def _count(key: str, value: object, least: int = 0) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise LogError(f"{key}={value!r}: must be a whole number of at least {least}")


def _text(key: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise LogError(f"{key}={value!r}: must be a text that is not empty")


def _one_of(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise LogError(f"{key}={value!r}: must be one of {', '.join(allowed)}")


def _counts(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, Mapping):
        raise LogError(f"{key}={value!r}: must map names to whole numbers")
    for name, count in value.items():
        _one_of(f"{key} name", name, allowed)
        _count(f"{key}.{name}", count)


@dataclass(frozen=True)
class ModelShape:
    """What the twin must know of the model.

    Attributes:
        weights_bytes: bytes of weights that one decode step reads.
        flops_per_token: operations of the linears for one token (2 per weight used), without attention.
    """

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    weights_bytes: int
    flops_per_token: int

    def __post_init__(self) -> None:
        _text("model.name", self.name)
        for key in ("layers", "query_heads", "kv_heads", "head_dim", "weights_bytes", "flops_per_token"):
            _count(f"model.{key}", getattr(self, key), 1)
        if self.query_heads % self.kv_heads:
            raise LogError(f"model.query_heads={self.query_heads}: no multiple of kv_heads={self.kv_heads}")

    @property
    def bytes_per_weight(self) -> int:
        """Size of one weight, 1, 2 or 4 bytes: two operations a weight say how many weights there are."""
        each = 2 * self.weights_bytes / self.flops_per_token
        return min((1, 2, 4), key=lambda size: abs(math.log(each / size)))


@dataclass(frozen=True)
class Header:
    """First line of a log.

    Attributes:
        full_bytes_per_token: K and V of one token in all layers and KV heads, compute dtype.
        compute_bytes_per_value: size of one number of the compute dtype (2 for bf16, 4 for float32).
    """

    model: ModelShape
    page_tokens: int
    policy: str
    full_bytes_per_token: int
    compute_bytes_per_value: int

    def __post_init__(self) -> None:
        _text("policy", self.policy)
        for key in ("page_tokens", "full_bytes_per_token", "compute_bytes_per_value"):
            _count(key, getattr(self, key), 1)


@dataclass(frozen=True)
class Move:
    """Pages of all streams that changed tier together at one step.

    Attributes:
        source: tier they left.
        target: tier they went to, or DROPPED.
        bytes: what travels (0 for DROPPED).
        format: as what they are stored at the target.
        demand: of a promotion: the step's own attention reads these pages, so it waits; false for a prefetch.
            Demotions never wait, whatever this says.
    """

    source: str
    target: str
    bytes: int
    pages: int
    format: str
    demand: bool = True  # a promotion not known to be early must count as late

    def __post_init__(self) -> None:
        _one_of("move.from", self.source, TIERS)
        _one_of("move.to", self.target, (*TIERS, DROPPED))
        _one_of("move.format", self.format, FORMATS)
        _count("move.bytes", self.bytes)
        _count("move.pages", self.pages)
        if not isinstance(self.demand, bool):
            raise LogError(f"move.demand={self.demand!r}: must be true or false")


@dataclass(frozen=True)
class Step:
    """One run of the model, or one plan (tokens = 0), as sums over all layers and KV heads.

    Attributes:
        step: decode steps since the context was compressed, 0 before the first.
        phase: one of `PHASES`.
        tokens: queries run.
        length_tokens: positions held after the step.
        planned: the policy was asked.
        pages: mode -> pages in it.
        read_bytes: tier -> bytes of K and V (or their prototypes) that attention reads on this step.
        read_tokens: format -> sum over streams of tokens attended in that format.
        moves: what changed tier before the step.
        held_bytes: tier -> bytes held after the step.
        digest: hash of the plan tensors in force.
    """

    step: int
    phase: str
    tokens: int
    length_tokens: int
    planned: bool = False
    pages: Mapping[str, int] = field(default_factory=dict)
    read_bytes: Mapping[str, int] = field(default_factory=dict)
    read_tokens: Mapping[str, int] = field(default_factory=dict)
    moves: tuple[Move, ...] = ()
    held_bytes: Mapping[str, int] = field(default_factory=dict)
    digest: str = ""

    def __post_init__(self) -> None:
        for key in ("step", "tokens", "length_tokens"):
            _count(key, getattr(self, key))
        _one_of("phase", self.phase, PHASES)
        if not isinstance(self.planned, bool):
            raise LogError(f"planned={self.planned!r}: must be true or false")
        _counts("pages", self.pages, MODES)
        _counts("read_bytes", self.read_bytes, TIERS)
        _counts("read_tokens", self.read_tokens, READ_FORMATS)
        _counts("held_bytes", self.held_bytes, TIERS)
        if not all(isinstance(move, Move) for move in self.moves):
            raise LogError(f"moves={self.moves!r}: must all be Move")
        if not isinstance(self.digest, str):
            raise LogError(f"digest={self.digest!r}: must be a text")


@dataclass(frozen=True)
class Difference:
    """The first place where two logs part: `step` is its index in both, or None for the header."""

    step: int | None
    why: str


@dataclass(frozen=True)
class DecisionLog:
    """All decisions of one sample."""

    header: Header
    steps: tuple[Step, ...]

    @property
    def decode(self) -> tuple[Step, ...]:
        """The decode steps only."""
        return tuple(step for step in self.steps if step.phase == "decode")

    def write(self, path: Path | str) -> None:
        """Writes the log whole or not at all.

        Raises:
            LogError: the file can't be written (folder missing, no rights, no space).
        """
        target = Path(path)
        lines = [_header_line(self.header), *(_step_line(step) for step in self.steps)]
        try:
            with replacing(target, make_folder=False) as partial, open(partial, "w", encoding="utf-8") as out:
                out.writelines(line + "\n" for line in lines)
        except OSError as error:
            raise LogError(f"can't write the decision log {target}: {error.strerror or error}") from error

    @staticmethod
    def read(path: Path | str) -> DecisionLog:
        """Reads what `write` wrote.

        Raises:
            LogError: unreadable, not a decision log, of another schema, or cut short; names the line.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LogError(f"can't read the decision log {path}: {error}") from error
        lines = text.splitlines()
        if not lines:
            raise LogError(f"{path} is empty, not a decision log")
        if not text.endswith("\n"):
            raise LogError(f"{path} line {len(lines)}: cut short, the run that wrote it was killed")
        parsed = [_parse(line, f"{path} line {number}") for number, line in enumerate(lines, 1)]
        header = _header_from(parsed[0], f"{path} line 1")
        return DecisionLog(header, tuple(_step_from(raw, f"{path} line {n}") for n, raw in enumerate(parsed[1:], 2)))


def diff(a: DecisionLog, b: DecisionLog) -> Difference | None:
    """The first difference between two logs and which field it is in, or None."""
    if a.header != b.header:
        return Difference(None, _why(asdict(a.header), asdict(b.header)))
    for index, (left, right) in enumerate(zip(a.steps, b.steps, strict=False)):
        if left != right:
            return Difference(index, _why(asdict(left), asdict(right)))
    if len(a.steps) != len(b.steps):
        return Difference(min(len(a.steps), len(b.steps)), f"{len(a.steps)} steps against {len(b.steps)}")
    return None


def _why(left: Mapping[str, Any], right: Mapping[str, Any]) -> str:
    return "; ".join(f"{key}: {left[key]!r} against {right[key]!r}" for key in left if left[key] != right[key])


def _header_line(header: Header) -> str:
    return json.dumps({"kind": "header", "schema": SCHEMA, **asdict(header)})


def _step_line(step: Step) -> str:
    raw = {item.name: getattr(step, item.name) for item in fields(step)}
    raw["moves"] = [
        {
            "from": move.source,
            "to": move.target,
            "bytes": move.bytes,
            "pages": move.pages,
            "format": move.format,
            "demand": move.demand,
        }
        for move in step.moves
    ]
    return json.dumps({"kind": "step", **raw}, default=dict)


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise LogError(f"{where}: no JSON ({error})") from error
    if not isinstance(raw, dict):
        raise LogError(f"{where}: {type(raw).__name__}, not an object")
    return raw


def _exactly(raw: Mapping[str, Any], required: Iterable[str], where: str) -> None:
    wanted = set(required)
    missing, unknown = sorted(wanted - set(raw)), sorted(set(raw) - wanted)
    if missing or unknown:
        raise LogError(f"{where}: missing keys {missing}, unknown keys {unknown}")


def _header_from(raw: dict[str, Any], where: str) -> Header:
    if raw.pop("kind", None) != "header":
        raise LogError(f"{where}: no header, so this is not a decision log")
    schema = raw.pop("schema", None)
    if schema != SCHEMA:
        raise LogError(f"{where}: schema {schema!r}, this version reads schema {SCHEMA} only")
    _exactly(raw, [item.name for item in fields(Header)], where)
    model = raw.pop("model")
    if not isinstance(model, dict):
        raise LogError(f"{where}: model={model!r}: must be an object")
    _exactly(model, [item.name for item in fields(ModelShape)], f"{where}, model")
    try:
        return Header(model=ModelShape(**model), **raw)
    except LogError as error:
        raise LogError(f"{where}: {error}") from error


def _step_from(raw: dict[str, Any], where: str) -> Step:
    if raw.pop("kind", None) != "step":
        raise LogError(f"{where}: not a step")
    _exactly(raw, [item.name for item in fields(Step)], where)
    moves = raw.pop("moves")
    if not isinstance(moves, list) or not all(isinstance(move, dict) for move in moves):
        raise LogError(f"{where}: moves={moves!r}: must be a list of objects")
    for move in moves:
        _exactly(move, ("from", "to", "bytes", "pages", "format", "demand"), f"{where}, moves")
    try:
        built = tuple(Move(m["from"], m["to"], m["bytes"], m["pages"], m["format"], m["demand"]) for m in moves)
        return Step(moves=built, **raw)
    except LogError as error:
        raise LogError(f"{where}: {error}") from error
