"""Several records side by side: which may be compared, what each policy is worth, paired over the same samples.

Runs are comparable when model, workload and cache are configured alike (one setting); how large the tiers are and how
pages move between them is part of what is compared. Within a setting, runs that differ only in their seed are one
variant and their samples are pooled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from testbed.results import stats
from testbed.results.display import budget_fraction, budget_text, plain_policy_name, policy_name
from testbed.results.html import flatten
from testbed.results.record import FILE_NAME, Record, RecordError, load

SETTING_KEYS = ("model", "workload", "cache")
IGNORED_KEYS = ("seed", "wandb", "twin", "experiment")
TIER_DEFAULTS: dict[str, Any] = {
    "l1_bytes": None,
    "l2_bytes": None,
    "l3_bytes": None,
    "l3_path": None,
    "swap_threshold": 0.8,
    "overlap": True,
    "l3_io": "auto",
    "l3_direct": "auto",
    "l3_failures": 3,
    "on_lost": "recompute",
}
"""Keys of `cache` that make a variant, not a setting, and what a record that lacks them was run with."""
FULL = "full"


class CompareError(ValueError):
    """Records that cannot be compared."""


@dataclass(frozen=True)
class Variant:
    """Runs that differ only in their seed.

    Attributes:
        policy: its name, and whether it was guarded.
        plain_policy: its name alone.
        budget: for people.
        fraction: of the full cache in bf16, None for no limit.
        detail: other keys in which this variant differs from those of the same policy and budget.
        records: complete or partial, at least one.
    """

    policy: str
    plain_policy: str
    budget: str
    fraction: float | None
    detail: str
    records: tuple[Record, ...]

    @property
    def label(self) -> str:
        """Unique within a setting."""
        at = "" if self.fraction is None else f"@{self.budget}"
        return " ".join(part for part in (self.policy, at, self.detail) if part)

    def samples(self) -> dict[tuple[int, str], Mapping[str, Any]]:
        """(seed, sample id) -> sample."""
        return {(record.seed, str(sample["id"])): sample for record in self.records for sample in record.samples}

    def column(self, key: str) -> dict[tuple[int, str], float]:
        """(seed, sample id) -> value of a sample's key, where it has one."""
        found = {at: sample.get(key) for at, sample in self.samples().items()}
        return {at: float(value) for at, value in found.items() if isinstance(value, (int, float))}

    def mean(self, name: str) -> float | None:
        """Mean of a result over the runs, None if none has it."""
        numbers = [record.get(name) for record in self.records]
        values = [number.value for number in numbers if number is not None and number.value is not None]
        return float(np.mean(values)) if values else None

    def estimate(self, key: str, seed: int = 0) -> stats.Estimate | None:
        """Mean of a sample's key with its interval, whole contexts resampled."""
        column = self.column(key)
        interval = stats.proportion if key == "score" else stats.mean
        return interval(list(column.values()), seed, self.groups(list(column))) if column else None

    def ratio(self, top: str, bottom: str, seed: int = 0) -> stats.Estimate | None:
        """Sum of one key of the samples over the sum of another, with its interval; None where nothing can be said."""
        tops, bottoms = self.column(top), self.column(bottom)
        shared = [at for at in tops if at in bottoms]
        if not sum(bottoms[at] for at in shared):
            return None
        return stats.ratio([tops[at] for at in shared], [bottoms[at] for at in shared], seed, self.groups(shared))

    def groups(self, at: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
        """What each sample shares with others: its context."""
        samples = self.samples()
        return [(seed, str(samples[seed, name].get("context_id", name))) for seed, name in at]


@dataclass(frozen=True)
class Setting:
    """What makes runs comparable, and the variants that share it, ordered by policy and budget."""

    label: str
    variants: tuple[Variant, ...]

    def find(self, name: str) -> Variant | None:
        """The variant with that label or policy name, an unguarded one first; the largest budget if several."""
        for key in ("label", "policy", "plain_policy"):
            named = [variant for variant in self.variants if getattr(variant, key) == name]
            if named:
                return max(named, key=lambda variant: variant.fraction or 1.0)
        return None


def find_records(paths: Iterable[str | Path]) -> tuple[list[Record], list[str]]:
    """All records below some folders, oldest first, and a note on each run that was left out.

    Raises:
        CompareError: no such path, unreadable, no record there, or a file that is no record of this schema.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise CompareError(f"{path}: no such file or folder")
        try:
            files += [path] if path.is_file() else _walk(path)
        except OSError as error:
            raise CompareError(f"{path}: cannot read: {error.strerror or error}") from error
    if not files:
        raise CompareError(f"no {FILE_NAME} below {', '.join(map(str, paths))}; a run writes one when it ends")
    files = sorted(set(files), key=lambda file: (file.stat().st_mtime, str(file)))
    try:
        records = [load(file) for file in files]
    except RecordError as error:
        raise CompareError(str(error)) from error
    notes = [f"{r.run_id}: {r.status}, left out ({r.reason})" for r in records if r.status == "failed"]
    notes += [f"{r.run_id}: {r.status} ({r.reason})" for r in records if r.status == "partial"]
    usable = [record for record in records if record.status != "failed"]
    if not usable:
        raise CompareError(f"all {len(records)} runs failed: {'; '.join(notes)}")
    return usable, notes


def _walk(folder: Path) -> list[Path]:
    def fail(error: OSError) -> None:
        raise error

    return [Path(at) / FILE_NAME for at, _, names in os.walk(folder, onerror=fail) if FILE_NAME in names]


def settings(records: Sequence[Record]) -> list[Setting]:
    """Groups records by what makes them comparable."""
    by_setting: dict[str, list[Record]] = {}
    for record in records:
        by_setting.setdefault(_canonical(_setting(record)), []).append(record)
    labels = _differences([_setting(group[0]) for group in by_setting.values()])
    return [
        Setting(label or _setting_name(group[0]), _variants(group))
        for label, group in zip(labels, by_setting.values(), strict=True)
    ]


def _setting_name(record: Record) -> str:
    names = []
    for key in ("model", "workload"):
        value = record.config.get(key)
        name = value.get("name") or value.get("path") if isinstance(value, Mapping) else value
        names += [str(name)] if name else []
    return ", ".join(names) or "all runs"


def _variants(records: Sequence[Record]) -> tuple[Variant, ...]:
    by_config: dict[str, list[Record]] = {}
    for record in records:
        by_config.setdefault(_canonical(_relevant(record)), []).append(record)
    groups = list(by_config.values())
    same_label: dict[tuple[str, str], list[int]] = {}
    for at, group in enumerate(groups):
        same_label.setdefault((policy_name(group[0]), budget_text(group[0])), []).append(at)
    details = [""] * len(groups)
    for members in same_label.values():
        for at, text in zip(members, _differences([_relevant(groups[at][0]) for at in members]), strict=True):
            details[at] = text
    found = [
        Variant(policy_name(g[0]), plain_policy_name(g[0]), budget_text(g[0]), budget_fraction(g[0]), detail, tuple(g))
        for g, detail in zip(groups, details, strict=True)
    ]
    return tuple(sorted(found, key=lambda v: (v.plain_policy != FULL, v.policy, v.fraction or 1.0, v.detail)))


def _setting(record: Record) -> dict[str, Any]:
    kept = {key: record.config.get(key) for key in SETTING_KEYS}
    return kept | {"cache": _without_tiers(kept["cache"], lambda key, value: True)}


def _relevant(record: Record) -> dict[str, Any]:
    kept = {key: value for key, value in record.config.items() if key not in IGNORED_KEYS}
    return kept | {"cache": _without_tiers(kept.get("cache"), lambda key, value: value == TIER_DEFAULTS[key])}


def _without_tiers(cache: object, left_out: Callable[[str, object], bool]) -> object:
    if not isinstance(cache, Mapping):
        return cache
    return {key: value for key, value in cache.items() if key not in TIER_DEFAULTS or not left_out(key, value)}


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _differences(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each configuration, "key=value" of the keys that are not the same in all of them."""
    flat = [flatten(config) for config in configs]
    keys = sorted({key for each in flat for key in each})
    differing = [key for key in keys if len({_canonical(each.get(key)) for each in flat}) > 1]
    return [" ".join(f"{key}={each.get(key)}" for key in differing) for each in flat]


def paired(variant: Variant, baseline: Variant | None, key: str) -> tuple[list[float], list[float], list[Any]]:
    """A sample key of variant and baseline over the same samples, and their contexts.

    Without a baseline, against the full cache that the variant's own runs measured (`<key>_full`).
    """
    own = variant.column(key)
    other = variant.column(f"{key}_full") if baseline is None else baseline.column(key)
    shared = [at for at in own if at in other]
    return [own[at] for at in shared], [other[at] for at in shared], variant.groups(shared)


def alarms(setting: Setting) -> list[str]:
    """What looks wrong: task beyond the full cache, sparse beats dense, a larger budget that is worse."""
    found: dict[str, None] = {}
    for variant in setting.variants:
        scores, full, _ = paired(variant, None, "score")
        if scores:
            found.update({f"{variant.label}: {line}": None for line in stats.alarms(scores, full)})
    by_policy: dict[tuple[str, str], list[Variant]] = {}
    for variant in setting.variants:
        if variant.fraction is not None:
            by_policy.setdefault((variant.policy, variant.detail), []).append(variant)
    for ladder in by_policy.values():
        for smaller, larger in zip(ladder, ladder[1:], strict=False):
            small, large, _ = paired(smaller, larger, "score")
            if small and stats.significantly_greater(small, large):
                line = f"{larger.label} is significantly worse than {smaller.label}: a larger budget should not be"
                found[line] = None
    return list(found)
