"""How far measures of heads can be trusted: between texts, lengths, seeds, and from one task to another.

Rank correlation (Spearman) of all heads, and the overlap (Jaccard) of the top 15, 25 and 50 % with what two independent
maps would have in common; ties are broken at random many times (`testbed.heads.agreement`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from testbed.heads.agreement import SHARES, agreement
from testbed.heads.calibration import CalibrationConfig
from testbed.heads.headmap import Measured
from testbed.heads.measures.shape import UNITS

PERMUTATIONS = 199
OWN_TASKS = {
    "retrieval_score": "needle",
    "head_induction": "induction",
    "head_bracket": "code",
    "head_tool_result": "dialogue",
    "head_role_following": "dialogue",
}
"""Measures that only one task has."""


def pair(a: Tensor, b: Tensor) -> dict[str, Any]:
    """How far two maps [L, Hk] agree, as JSON values."""
    found = agreement(a, b, permutations=PERMUTATIONS)
    return {
        "spearman": found.spearman.value,
        "p": found.spearman.p,
        "jaccard": {f"{each.share:g}": [each.jaccard, each.low, each.high] for each in found.overlaps},
    }


def chance(heads: int) -> dict[str, float]:
    """The overlap of two independent maps, for each share."""
    nothing = torch.arange(heads).view(1, -1)
    return {f"{each.share:g}": each.chance for each in agreement(nothing, nothing, permutations=1).overlaps}


def halves(measured: Measured) -> tuple[Tensor, Tensor] | None:
    """The means of every second sample and of the others, or None with one sample: lengths fall to both sides."""
    if measured.each is None or measured.samples < 2:
        return None
    return measured.each[0::2].mean(0), measured.each[1::2].mean(0)


def by_length(found: Sequence[Measured]) -> dict[int, Tensor]:
    """Mean of the samples of each length, ascending."""
    samples: dict[int, list[Tensor]] = {}
    for measured in found:
        if measured.each is not None:
            for length, sample in zip(measured.length_tokens, measured.each, strict=False):
                samples.setdefault(length, []).append(sample)
    return {length: torch.stack(samples[length]).mean(0) for length in sorted(samples)}


def stability(
    measures: Mapping[str, Measured],
    seeds: Sequence[Mapping[str, Measured]] = (),
    lengths: Sequence[Mapping[str, Measured]] = (),
) -> dict[str, Any]:
    """Of every measure: halves of its texts, lengths, seeds.

    Args:
        measures: name -> measure.
        seeds: the same, made with other seeds; each may hold fewer.
        lengths: the same, made on texts of other lengths; each may hold fewer.
    """
    out: dict[str, Any] = {}
    for name, measured in measures.items():
        entry: dict[str, Any] = {}
        cut = halves(measured)
        if cut is not None:
            entry["texts"] = pair(*cut)
        parts = by_length([measured, *(other[name] for other in lengths if name in other)])
        if len(parts) > 1:
            entry["lengths"] = {f"{a} {b}": pair(parts[a], parts[b]) for a, b in combinations(parts, 2)}
        others = [other[name].value for other in seeds if name in other]
        if others:
            entry["seeds"] = [pair(measured.value, other) for other in others]
        if entry:
            out[name] = entry
    return out


def carry_over(measures: Mapping[str, Measured]) -> dict[str, Any]:
    """Whether a measure of one task says the same as that of another.

    Returns:
        Shape measure -> "task task" -> agreement; under "own", the same between the measures that one task has alone.
    """
    out: dict[str, Any] = {}
    for name in UNITS:
        tasks = {measured.task: measured.value for measured in _of(measures, name)}
        out[name] = {f"{a} {b}": pair(tasks[a], tasks[b]) for a, b in combinations(tasks, 2)}
    own = [name for name in OWN_TASKS if name in measures]
    out["own"] = {f"{a} {b}": pair(measures[a].value, measures[b].value) for a, b in combinations(own, 2)}
    return {name: pairs for name, pairs in out.items() if pairs}


def _of(measures: Mapping[str, Measured], name: str) -> Iterator[Measured]:
    """A measure on every task."""
    return (measured for key, measured in measures.items() if key.partition("@")[0] == name)


def evidence(
    measures: Mapping[str, Measured],
    seeds: Sequence[Mapping[str, Measured]] = (),
    lengths: Sequence[Mapping[str, Measured]] = (),
) -> dict[str, Any]:
    """All of it, as JSON values; arguments as in `stability`."""
    heads = next(iter(measures.values())).value.numel()
    return {
        "heads": heads,
        "shares": list(SHARES),
        "chance": chance(heads),
        "ties": {name: measured.ties for name, measured in measures.items() if "@" not in name},
        "stability": stability(measures, seeds, lengths),
        "carry_over": carry_over(measures),
    }


def longer(config: CalibrationConfig, length_tokens: int) -> CalibrationConfig:
    """Settings under which needle texts have that length, one of them."""
    return replace(config, needle_lengths=(length_tokens,), needle_samples_per_cell=1)
