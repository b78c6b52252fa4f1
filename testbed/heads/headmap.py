"""A head map: what was measured of every head of one model, with intervals, in one JSON file.

A policy never reads such a file: the measures reach it as signals [L, Hk] (`testbed.heads.library`).

    head_map = HeadMap.read("experiments/heads/smollm2.json")
    head_map.measures["retrieval_score"].value        # [L, Hk]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from testbed.models.base import Decoder
from testbed.results.record import RecordError, write_atomically

SCHEMA = 2
DIGITS = 6  # significant ones in a file
RESAMPLES = 1000
LEVEL = 0.95
UNITS = ("share", "bits", "tokens", "nats", "ratio", "score")
ARRAYS = ("value", "mean", "low", "high")
SHAPE = ("layers", "kv_heads", "query_heads")


class HeadMapError(ValueError):
    """A head map that can't be made, read, written or used for a model."""


@dataclass(frozen=True)
class Measured:
    """One measure of every head.

    Attributes:
        value: [L, Hk] float32, maximum over the query heads of a group, mean over samples.
        mean: [L, Hk], mean over group and samples.
        low, high: [L, Hk], 95 % bootstrap interval of `value` over samples; `value` itself with one sample.
        samples: how many texts.
        task: on what: "text", "needle", "code", "induction", "dialogue", "other_language", ...
        unit: one of `UNITS`; "ratio" is mass as a multiple of the share of tokens.
        each: [n, L, Hk], `value` of every sample, or None where it was not kept.
        length_tokens: of every sample, or empty.
    """

    value: Tensor
    mean: Tensor
    low: Tensor
    high: Tensor
    samples: int
    task: str
    unit: str
    each: Tensor | None = None
    length_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Checks shapes, numbers and unit."""
        for key in ARRAYS:
            given = getattr(self, key)
            if given.dim() != 2 or given.shape != self.value.shape:
                raise HeadMapError(f"{key}: shape {tuple(given.shape)}, must be [L, Hk] = {tuple(self.value.shape)}")
            if not bool(torch.isfinite(given).all()):
                layer, head = (int(x) for x in (~torch.isfinite(given)).nonzero()[0])
                raise HeadMapError(f"{key}: layer {layer}, head {head} is {float(given[layer, head])}, not a number")
        if bool((self.low > self.high).any()):
            layer, head = (int(x) for x in (self.low > self.high).nonzero()[0])
            raise HeadMapError(f"low: layer {layer}, head {head} lies above high")
        check_whole("samples", self.samples, 1)
        for length in self.length_tokens:
            check_whole("length_tokens", length, 1)
        if self.unit not in UNITS:
            raise HeadMapError(f"unit={self.unit!r}: must be one of {', '.join(UNITS)}")
        if self.each is not None and self.each.shape != (self.samples, *self.value.shape):
            raise HeadMapError(f"each: shape {tuple(self.each.shape)}, must be [{self.samples}, L, Hk]")
        if self.each is not None and not bool(torch.isfinite(self.each).all()):
            sample, layer, head = (int(x) for x in (~torch.isfinite(self.each)).nonzero()[0])
            raise HeadMapError(f"each: sample {sample}, layer {layer}, head {head} is not a number")

    @staticmethod
    def of(
        query_heads: Sequence[Tensor], task: str, unit: str, length_tokens: Sequence[int] = (), seed: int = 0
    ) -> Measured:
        """From the samples' values of every query head.

        Args:
            query_heads: [L, Hk, G] of each sample.
            task: see `Measured`.
            unit: see `Measured`.
            length_tokens: of each sample.
            seed: of the bootstrap.
        """
        each = torch.stack([sample.float().cpu() for sample in query_heads])
        best = each.amax(-1)
        low, high = bootstrap(best, seed)
        mean = each.mean((0, -1))
        return Measured(best.mean(0), mean, low, high, len(best), task, unit, best, tuple(length_tokens))

    @property
    def ties(self) -> int:
        """Heads whose value another head has too."""
        _, counts = self.value.flatten().unique(return_counts=True)
        return int(counts[counts > 1].sum())


def bootstrap(each: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """95 % percentile interval of the mean over samples: [n, ...] -> low [...], high [...], all heads at once.

    Few samples give too narrow an interval; it says how much heads differ between these texts, no more.
    """
    n = len(each)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(n, (RESAMPLES, n), generator=generator)
    weights = torch.zeros(RESAMPLES, n, dtype=torch.float64).scatter_add_(
        1, drawn, torch.full((RESAMPLES, n), 1 / n, dtype=torch.float64)
    )
    means = (weights @ each.flatten(1).double()).view(RESAMPLES, *each.shape[1:])
    tail = (1 - LEVEL) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0).float()
    return low, high


@dataclass(frozen=True)
class HeadMap:
    """Measures of all heads of one model.

    Attributes:
        model: its name.
        fingerprint: of its weights (`Decoder.fingerprint`).
        layers, kv_heads, query_heads: L, Hk, Hq.
        measures: name -> measure; "name@task" and "name@task@seed1" are the same measure under other conditions.
        settings: calibration settings, versions.
        evidence: how stable the measures are, see `testbed.heads.evidence`.
        verdicts: classifier -> whether it beats a random map at equal bytes, see `testbed.heads.verdict`.
    """

    model: str
    fingerprint: str
    layers: int
    kv_heads: int
    query_heads: int
    measures: Mapping[str, Measured]
    settings: Mapping[str, Any]
    evidence: Mapping[str, Any] = field(default_factory=dict)
    verdicts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks numbers of heads, and every measure's shape."""
        for key in SHAPE:
            check_whole(key, getattr(self, key), 1)
        for name, measured in self.measures.items():
            if measured.value.shape != (self.layers, self.kv_heads):
                raise HeadMapError(
                    f"measure {name}: shape {tuple(measured.value.shape)}, the model has "
                    f"{self.layers} layers x {self.kv_heads} KV heads"
                )

    @staticmethod
    def of(decoder: Decoder, measures: Mapping[str, Measured], settings: Mapping[str, Any]) -> HeadMap:
        """A map of this model."""
        geometry = decoder.geometry
        shape = (geometry.layers, geometry.kv_heads, geometry.query_heads)
        return HeadMap(decoder.name, decoder.fingerprint, *shape, measures, settings)

    def measure(self, name: str) -> Measured:
        """The measure of that name.

        Raises:
            HeadMapError: there is none.
        """
        if name not in self.measures:
            raise HeadMapError(f"the head map has no measure {name!r}; it has {', '.join(sorted(self.measures))}")
        return self.measures[name]

    def check_model(self, decoder: Decoder) -> None:
        """Raises HeadMapError unless the map was made on this model's weights."""
        geometry = decoder.geometry
        mine = (self.layers, self.kv_heads, self.query_heads)
        its = (geometry.layers, geometry.kv_heads, geometry.query_heads)
        if mine != its:
            raise HeadMapError(
                f"head map of {self.model}: {mine[0]} layers x {mine[1]} KV heads ({mine[2]} query heads), "
                f"but {decoder.name} has {its[0]} x {its[1]} ({its[2]})"
            )
        if self.fingerprint != decoder.fingerprint:
            raise HeadMapError(
                f"head map of {self.model} ({self.fingerprint}): {decoder.name} has other weights "
                f"({decoder.fingerprint})"
            )

    def with_measures(self, measures: Mapping[str, Measured]) -> HeadMap:
        """The map with more measures, or newer ones of a name."""
        return replace(self, measures={**self.measures, **measures})

    def with_evidence(self, evidence: Mapping[str, Any]) -> HeadMap:
        """The map with this evidence beside what it has."""
        return replace(self, evidence={**self.evidence, **evidence})

    def with_verdict(self, classifier: str, verdict: Mapping[str, Any]) -> HeadMap:
        """The map with a verdict about a classifier."""
        return replace(self, verdicts={**self.verdicts, classifier: verdict})

    def write(self, path: str | Path, digits: int = DIGITS, with_each: bool = True) -> None:
        """Writes the file in one step.

        Args:
            path: where.
            digits: significant ones kept.
            with_each: also the values of every sample.

        Raises:
            HeadMapError: the file system refused; nothing half-written stays.
        """
        head = {
            "schema": SCHEMA,
            **{key: getattr(self, key) for key in ("model", "fingerprint", *SHAPE)},
            **{key: dict(getattr(self, key)) for key in ("settings", "evidence", "verdicts")},
        }
        lines = [f"{json.dumps(key)}: {json.dumps(_rounded(value, digits))}" for key, value in head.items()]
        body = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(_plain(measured, digits, with_each))}"
            for name, measured in self.measures.items()
        )
        lines.append(f'"measures": {{\n{body}\n}}')
        try:
            write_atomically(Path(path), "{\n" + ",\n".join(lines) + "\n}\n")
        except RecordError as error:
            raise HeadMapError(f"can't keep the head map: {error}") from error

    @staticmethod
    def read(path: str | Path) -> HeadMap:
        """The map in a file.

        Raises:
            HeadMapError: not a head map of this version; names the file.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["schema"] != SCHEMA:
                raise HeadMapError(f"schema {data['schema']!r}, this version reads {SCHEMA}")
            return HeadMap(
                model=str(data["model"]),
                fingerprint=str(data["fingerprint"]),
                **{key: data[key] for key in SHAPE},
                measures={str(name): _measured(name, each) for name, each in data["measures"].items()},
                settings=dict(data["settings"]),
                evidence=dict(data["evidence"]),
                verdicts={str(name): read_verdict(name, each) for name, each in data["verdicts"].items()},
            )
        except HeadMapError as error:
            raise HeadMapError(f"{path}: {error}") from error
        except OSError as error:
            raise HeadMapError(f"{path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise HeadMapError(f"{path}: not a head map ({type(error).__name__}: {error})") from error


def read_verdict(name: str, data: Any) -> dict[str, Any]:
    """A verdict about a classifier from JSON values.

    Raises:
        HeadMapError: it does not say whether the classifier beats chance, and why.
    """
    for key, kind, said in (("beats_random", bool, "true or false"), ("why", str, "a text")):
        if not isinstance(data, Mapping) or not isinstance(data.get(key), kind):
            raise HeadMapError(f"verdict {name}: holds {str(data)[:40]}, must have {key}, {said}")
    return dict(data)


def check_whole(key: str, value: object, least: int) -> None:
    """Raises HeadMapError naming key and value unless value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise HeadMapError(f"{key}={value!r}: must be a whole number of at least {least}")


def _rounded(value: Any, digits: int) -> Any:
    """Numbers in nested JSON values, to so many significant digits."""
    if isinstance(value, Mapping):
        return {str(key): _rounded(each, digits) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each, digits) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    return value


def _plain(measured: Measured, digits: int, with_each: bool) -> dict[str, Any]:
    """A measure as JSON values."""
    arrays = {key: _rounded(getattr(measured, key).tolist(), digits) for key in ARRAYS}
    about: dict[str, Any] = {key: getattr(measured, key) for key in ("task", "unit", "samples", "ties")}
    if with_each and measured.each is not None:
        about["each"] = _rounded(measured.each.tolist(), digits)
    return {**about, "length_tokens": list(measured.length_tokens), **arrays}


def _measured(name: str, data: Mapping[str, Any]) -> Measured:
    """A measure from JSON values."""
    try:
        arrays = {key: torch.tensor(data[key], dtype=torch.float32) for key in ARRAYS}
        each = torch.tensor(data["each"], dtype=torch.float32) if "each" in data else None
        return Measured(
            **arrays,
            samples=data["samples"],
            task=str(data["task"]),
            unit=str(data["unit"]),
            each=each,
            length_tokens=tuple(data["length_tokens"]),
        )
    except HeadMapError as error:
        raise HeadMapError(f"measure {name}: {error}") from error
