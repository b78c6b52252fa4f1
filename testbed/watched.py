"""What the quality guard and the online head analysis saw in a run: numbers and counts."""

from __future__ import annotations

from typing import Any

from policies.base import Reclassifying
from testbed.engine.reclassify import summary
from testbed.experiment import Experiment, Outcome
from testbed.heads.verdict import label
from testbed.results import stats
from testbed.results.names import UNITS
from testbed.results.record import Number


def numbers(run: Experiment) -> list[Number]:
    """Quality, bytes and share of time of the guard; nothing if there was none."""
    guarded = [each for each in run.outcomes if each.policy.probes]
    if not guarded:
        return []
    groups, seed = [each.sample.context_id for each in guarded], run.settings.seed
    probes = [each.policy.probes for each in guarded]
    qualities = [sum(probe.quality for probe in each) for each in probes]
    seconds = [sum(probe.seconds for probe in each) for each in probes]
    run_s = [sum(step.total_s for step in (*each.policy.turn_times, *each.policy.times)) for each in guarded]
    both = [probe + own for probe, own in zip(seconds, run_s, strict=True)]
    ones = [1.0] * len(guarded)
    estimates = {
        "guard.quality": stats.ratio(qualities, [float(len(each)) for each in probes], seed, groups),
        "guard.share": stats.ratio(seconds, both, seed, groups),
        "guard.bytes": stats.ratio([float(each.policy.guard_bytes) for each in guarded], ones, seed, groups),
    }
    return [
        Number(name, estimate.value, UNITS[name], "measured", estimate.ci, estimate.n)
        for name, estimate in estimates.items()
    ]


def activity(run: Experiment) -> dict[str, Any]:
    """Probes and what followed from them; heads that changed their class. Empty where there was nothing of it."""
    out: dict[str, Any] = {}
    probes = [probe for each in run.outcomes for probe in each.policy.probes]
    if run.settings.guard.active:
        out["guard"] = {
            "probes": len(probes),
            "below_threshold": sum(bool(probe.action) for probe in probes),
            "raised": sum(probe.action == "raise" for probe in probes),
            "switched": sum(probe.action == "switch" for probe in probes),
            "answers": len(run.outcomes),
            "threshold": run.settings.guard.threshold,
            "reference": str(run.settings.guard.reference),
        }
    said = label(run.settings.policy.classifier, run.decoder.fingerprint)
    if said:
        out["head_map"] = said
    if isinstance(run.settings.policy.classifier, Reclassifying):
        out["head_changes"] = summary([change for each in run.outcomes for change in each.policy.changes])
    return out


def sample_keys(each: Outcome) -> dict[str, Any]:
    """What one sample's row says of both."""
    out: dict[str, Any] = {}
    if each.policy.probes:
        out["guard"] = [probe.plain() for probe in each.policy.probes]
    if each.policy.changes:
        out["head_changes"] = [change.plain() for change in each.policy.changes]
    return out
