"""What the tiers did in a run, for its record: what was where, what moved over which link, what waited, what was lost.

Nothing of it is made where everything stays on the device and no capacity is set.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from policies.base import Tier
from testbed.cache.traffic import Traffic
from testbed.decisions import TIERS, Step
from testbed.engine.evaluate import Answer
from testbed.engine.session import StepTime
from testbed.experiment import Experiment
from testbed.results import stats
from testbed.results.names import UNITS
from testbed.results.record import Number

OFF_DEVICE = (Tier.L2.name, Tier.L3.name)
OUTCOMES = ("useful", "late", "useless", "harmful")


def tiered(run: Experiment) -> bool:
    """Whether there is anything to say: a page lived or moved off the device, or the device has a capacity."""
    if not run.outcomes:
        return False
    answers = [each.policy for each in run.outcomes]
    away = any(name.startswith(OFF_DEVICE) and count for answer in answers for name, count in answer.pages.items())
    asked = [traffic for answer in answers for traffic in (answer.history_traffic, answer.traffic)]
    moved = any(traffic.links for traffic in (*run.loading, *asked))
    return away or moved or run.settings.cache.l1_bytes is not None


def steps_of(answer: Answer) -> list[StepTime]:
    """All runs of the model that an answer took: those of the question and those of the generation."""
    return [*answer.turn_times, *answer.times]


def numbers(run: Experiment) -> list[Number]:
    """Results named `tier.*`, means and ratios over samples with their intervals; none where tiers did nothing."""
    if not tiered(run):
        return []
    seed, answers = run.settings.seed, [each.policy for each in run.outcomes]
    groups = [each.sample.context_id for each in run.outcomes]
    out: list[Number] = []

    def put(name: str, tops: Sequence[float], bottoms: Sequence[float] | None = None) -> None:
        below = [1.0] * len(tops) if bottoms is None else bottoms
        if sum(below) <= 0:
            return  # nobody looked anything up, nothing was prefetched: there is no such share
        estimate = stats.ratio(tops, below, seed, groups)
        out.append(Number(name, estimate.value, UNITS[name], "measured", estimate.ci, estimate.n))

    traffic = [answer.traffic for answer in answers]
    put("tier.hit_rate", [each.lookups["hit"] for each in traffic], [each.lookups["attended"] for each in traffic])
    stalls = [sum(step.stall_s for step in steps_of(answer)) for answer in answers]
    put("tier.stall_share", stalls, [sum(step.total_s for step in steps_of(answer)) for answer in answers])
    tokens = [_tokens(answer) for answer in answers]
    put("tier.stall_ms_per_token", [1e3 * stall for stall in stalls], tokens)
    moved = [sum(link["bytes"] for link in each.links.values()) for each in traffic]
    put("tier.moved_bytes_per_token", moved, tokens)
    held = [_held(answer) for answer in answers]
    for tier in TIERS:
        put(f"tier.{tier.lower()}_bytes", [each[tier] for each in held])
    issued = [each.prefetch["issued"] for each in traffic]
    for outcome in OUTCOMES:
        put(f"tier.prefetch_{outcome}", [each.prefetch[outcome] for each in traffic], issued)
    late = [each.prefetch["late"] for each in traffic]
    put("tier.prefetch_late_ms", [1e3 * each.prefetch["late_s"] for each in traffic], late)
    return out


def section(run: Experiment) -> dict[str, Any]:
    """The record's `tiers`: plain values, units in the names; empty where tiers did nothing.

    at_end, held_at_end_bytes (with slack), pools and mean_held_bytes are means over samples, the last over steps too;
    everything else is a sum over samples. All is of question and answer; failures and events also of compressing the
    contexts and of the turns before the question. busy_share is of the time of all steps.
    """
    if not tiered(run):
        return {}
    answers = [each.policy for each in run.outcomes]
    capacity = run.settings.cache.capacities(run.decoder.device)
    answering = Traffic.merge(answer.traffic for answer in answers)
    earlier = Traffic.merge([*run.loading, *(answer.history_traffic for answer in answers)])
    step_s = sum(step.total_s for answer in answers for step in steps_of(answer))
    out = answering.summary()
    for link in out["links"].values():
        link["busy_share"] = link["busy_s"] / step_s if step_s else 0.0
    held = [_held(answer) for answer in answers]
    return {
        "capacity_bytes": {"L1": capacity.l1_bytes, "L2": capacity.l2_bytes, "L3": capacity.l3_bytes},
        "at_end": _at_end(answers),
        "held_at_end_bytes": {tier: float(np.mean([a.held.get(tier, 0) for a in answers])) for tier in TIERS},
        "pools": _pools(answers),
        "mean_held_bytes": {tier: float(np.mean([each[tier] for each in held])) for tier in TIERS},
        **out,
        "failures": Traffic.merge((earlier, answering)).failures,
        "events": grouped([*earlier.events, *answering.events]),
        "step_s": step_s,
    }


def sample_keys(run: Experiment) -> list[dict[str, float]]:
    """For each sample what `testbed.compare` adds up over samples."""
    if not tiered(run):
        return [{} for _ in run.outcomes]
    return [
        {
            "tier_hits": answer.traffic.lookups["hit"],
            "tier_lookups": answer.traffic.lookups["attended"],
            "stall_s": sum(step.stall_s for step in steps_of(answer)),
            "step_s": sum(step.total_s for step in steps_of(answer)),
        }
        for answer in (each.policy for each in run.outcomes)
    ]


def grouped(events: Iterable[str]) -> dict[str, int]:
    """Warnings that differ only in their numbers as one: the first of each kind -> how many there were."""
    first: dict[str, str] = {}
    count = Counter[str]()
    for event in events:
        kind = re.sub(r"\d+", "0", event)
        count[first.setdefault(kind, event)] += 1
    return dict(count)


def _at_end(answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """Place ("L2/int8", "dropped") -> mean pages and bytes by the page table; each only where there are any."""
    out: dict[str, dict[str, float]] = {}
    for key in ("bytes", "pages"):
        total = Counter[str]()
        for answer in answers:
            total.update(getattr(answer, key))
        for name, count in sorted(total.items()):
            out.setdefault(name, {})[key] = count / len(answers)
    return dict(sorted(out.items()))


def _pools(answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """Mean use of the device's pools at the end, by "format/head class"."""
    names = sorted({name for answer in answers for name in answer.arenas})
    keys = ("block_pages", "used_pages", "held_pages", "slack_bytes")
    return {
        name: {key: float(np.mean([answer.arenas.get(name, {}).get(key, 0) for answer in answers])) for key in keys}
        for name in names
    }


def _ran(answer: Answer) -> list[Step]:
    """Steps that ran tokens of question and answer."""
    return [step for step in answer.log.steps[answer.first_step :] if step.phase in ("extend", "decode")]


def _tokens(answer: Answer) -> int:
    return sum(step.tokens for step in _ran(answer))


def _held(answer: Answer) -> dict[str, float]:
    """Tier -> bytes its allocators held, mean over steps."""
    return {tier: float(np.mean([step.held_bytes.get(tier, 0) for step in _ran(answer)])) for tier in TIERS}
