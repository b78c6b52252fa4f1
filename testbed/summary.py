"""From the outcomes of a run to its record: results with intervals, activity, bytes, twin, alarms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from kernels.api import choose_backend
from policies.base import Head, Tier
from testbed import tiers, watched
from testbed.decisions import DecisionLog
from testbed.engine.evaluate import Answer
from testbed.experiment import Experiment, Outcome, logs
from testbed.results import stats
from testbed.results.environment import environment
from testbed.results.names import UNITS
from testbed.results.record import Kind, Number, Record, Status
from testbed.sim import hardware, twin


class ActivityError(RuntimeError):
    """A policy that claims to compress and did nothing."""


def number(name: str, estimate: stats.Estimate | float | None, kind: Kind = "measured", n: int | None = None) -> Number:
    """A result with the unit its name has."""
    if isinstance(estimate, stats.Estimate):
        return Number(name, estimate.value, UNITS[name], kind, estimate.ci, estimate.n)
    return Number(name, estimate, UNITS[name], kind, None, n)


def results(run: Experiment) -> list[Number]:
    """All numbers of a run with at least one outcome."""
    outcomes, seed = run.outcomes, run.settings.seed
    groups = [each.sample.context_id for each in outcomes]
    out = [
        number(
            "context.tokens", float(np.mean([len(each.sample.context_tokens) for each in outcomes])), n=len(outcomes)
        ),
        *_quality(outcomes, seed, groups),
        *_bytes(outcomes, seed, groups),
        number("prefill.s", _mean([each.prefill_s for each in outcomes], seed, groups)),
        *_times(outcomes, seed, groups),
        *tiers.numbers(run),
        *watched.numbers(run),
        *_twins(outcomes, run.settings.twin),
    ]
    return out


def _mean(values: Sequence[float], seed: int, groups: Sequence[str]) -> stats.Estimate:
    return stats.ratio(values, [1.0] * len(values), seed, groups)


def _quality(outcomes: Sequence[Outcome], seed: int, groups: Sequence[str]) -> list[Number]:
    out = [
        number("kl.mean", _mean([each.agreement.kl for each in outcomes], seed, groups)),
        number("top1.agreement", _mean([each.agreement.top1 for each in outcomes], seed, groups)),
    ]
    scored = [(each.score, each.score_full) for each in outcomes if each.score is not None]
    if scored:
        policy, full = ([float(x or 0.0) for x in side] for side in zip(*scored, strict=True))
        out += [
            number("task.score", stats.proportion(policy, seed, groups)),
            number("task.score_full", stats.proportion(full, seed, groups)),
            number("quality.kept", stats.kept(policy, full, seed, groups)),
        ]
    return out


def _bytes(outcomes: Sequence[Outcome], seed: int, groups: Sequence[str]) -> list[Number]:
    def column(get: Any) -> list[float]:
        return [float(get(each)) for each in outcomes]

    full = column(lambda each: each.policy.full_bytes)
    out = [
        number("kv.full_bytes", float(np.mean(full)), n=len(full)),
        number("kv.device_bytes_full", float(np.mean(column(lambda each: each.full.device_bytes))), n=len(full)),
    ]
    for name, held in (
        ("device", column(lambda each: each.policy.device_bytes)),
        ("total", column(lambda each: each.policy.total_bytes)),
    ):
        saved = stats.ratio([a - b for a, b in zip(full, held, strict=True)], full, seed, groups)
        out += [number(f"kv.{name}_bytes", float(np.mean(held)), n=len(held)), number(f"kv.{name}_saved", saved)]
    return out


def decode_ms(answer: Answer) -> float:
    """Time per token of one answer: the median run of the model plus the mean of planning and of waiting for pages.

    The median keeps a hiccup of the machine out; planning and waiting happen in few steps, so their median would be
    nothing.
    """
    run = float(np.median([step.total_s - step.plan_s - step.stall_s for step in answer.times]))
    return 1e3 * (run + float(np.mean([step.plan_s + step.stall_s for step in answer.times])))


def _times(outcomes: Sequence[Outcome], seed: int, groups: Sequence[str]) -> list[Number]:
    """Means over questions; the planning share counts the question's runs too, where most plans are made."""
    policy, full = ([decode_ms(getattr(each, side)) for each in outcomes] for side in ("policy", "full"))
    steps = [[*each.policy.turn_times, *each.policy.times] for each in outcomes]
    spent = [sum(step.total_s for step in each) for each in steps]
    planned = [sum(step.plan_s for step in each) for each in steps]
    return [
        number("decode.ms_per_token", _mean(policy, seed, groups)),
        number("decode.ms_per_token_full", _mean(full, seed, groups)),
        number("decode.speedup", stats.ratio(full, policy, seed, groups)),
        number("policy.share", stats.ratio(planned, spent, seed, groups)),
    ]


def _twins(outcomes: Sequence[Outcome], names: Sequence[str]) -> list[Number]:
    out = []
    for name in names:
        machine = hardware.load(name)
        for suffix, side in (("", logs(outcomes, full=False)), ("_full", logs(outcomes, full=True))):
            # A log says what was run here; another machine would run weights and cache in bf16.
            prediction = twin.predict(side, machine, bytes_per_value=None if name == "local" else 2)
            out.append(
                Number(
                    f"sim.{name}.ms_per_token{suffix}",
                    prediction.ms_per_token,
                    "ms/token",
                    "simulated",
                    None,
                    prediction.steps,
                )
            )
    return out


def activity(run: Experiment) -> dict[str, Any]:
    """What the policy did, summed over samples: pages by mode, moves by kind, heads by class, kernels run."""
    decisions = logs(run.outcomes, full=False)
    moved, modes, formats = Counter[str](), Counter[str](), Counter[str]()
    for log in decisions:
        for step in log.steps:
            for move in step.moves:
                moved[_kind_of(move.source, move.target)] += move.pages
                if move.format != "compute" and move.target != Tier.DROPPED.name:
                    formats[move.format] += move.pages
        modes.update({name: count for name, count in log.steps[-1].pages.items()})
    classes = {}
    if run.head_classes is not None:
        classes = {head.name.lower(): int((run.head_classes == head).sum()) for head in Head}
    return {
        "pages_moved": dict(moved),
        "pages_quantised": dict(formats),
        "pages_by_mode_at_end": dict(modes),
        "heads_by_class": classes,
        "kernel_calls": dict(sum((Counter(each.policy.kernels) for each in run.outcomes), Counter[str]())),
        "planned_steps": sum(step.planned for log in decisions for step in log.steps),
        "identical_to_full": all(each.agreement.identical for each in run.outcomes),
        "same_decisions_digest": _digest(decisions),
        **watched.activity(run),
    }


def _kind_of(source: str, target: str) -> str:
    if target == Tier.DROPPED.name:
        return "dropped"
    if source == target:
        return "converted_in_place"
    if target == Tier.L0.name:
        return "placed_hot"
    if source in (Tier.L2.name, Tier.L3.name):
        return "promoted" if target == Tier.L1.name else "moved_off_device"
    return "demoted_off_device" if target in (Tier.L2.name, Tier.L3.name) else "left_hot"


def _digest(decisions: Sequence[DecisionLog]) -> str:
    import hashlib

    text = "".join(step.digest for log in decisions for step in log.steps)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def idle(run: Experiment) -> str:
    """Why the run proves nothing: a policy other than the full cache that left every page as it was; else empty."""
    if not run.settings.compresses:
        return ""
    seen = activity(run)
    acted = seen["pages_quantised"] or any(seen["pages_moved"].get(kind) for kind in ("dropped", "demoted_off_device"))
    if acted or any(seen["pages_by_mode_at_end"].get(mode) for mode in ("cluster", "background", "skip")):
        return ""
    return (
        f"policy {run.settings.policy.name} dropped, demoted, quantised and approximated nothing: it is the full cache "
        "under another name; lower budget.fraction or lengthen the context"
    )


def bytes_by_place(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """Mean bytes by "tier/format" at the end of the answers, of both caches."""
    out: dict[str, dict[str, float]] = {}
    for side in ("policy", "full"):
        total = Counter[str]()
        for each in outcomes:
            total.update(getattr(each, side).bytes)
        out[side] = {name: count / len(outcomes) for name, count in sorted(total.items())}
    return out


def sample_row(each: Outcome) -> dict[str, Any]:
    """One sample as plain values."""
    return {
        "id": each.sample.id,
        "context_id": each.sample.context_id,
        **each.sample.meta,
        "right_answer": each.sample.answer,
        "answer": each.answer,
        "answer_full": each.answer_full,
        "score": each.score,
        "score_full": each.score_full,
        "kl": each.agreement.kl,
        "top1": each.agreement.top1,
        "positions": each.agreement.positions,
        "device_bytes": each.policy.device_bytes,
        "total_bytes": each.policy.total_bytes,
        "full_bytes": each.policy.full_bytes,
        "ms_per_token": decode_ms(each.policy),
        "ms_per_token_full": decode_ms(each.full),
        "prefill_s": each.prefill_s,
        **watched.sample_keys(each),
    }


def record(
    run: Experiment,
    cfg: DictConfig,
    folder: Path,
    status: Status = "complete",
    reason: str = "",
    notes: Sequence[str] = (),
) -> Record:
    """The record of a run, complete or not; results need at least one outcome."""
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    scored = [each for each in run.outcomes if each.score is not None]
    alarms: tuple[str, ...] = ()
    if scored:
        alarms = stats.alarms(
            [float(each.score or 0) for each in scored], [float(each.score_full or 0) for each in scored]
        )
    return Record(
        run_id="-".join(folder.parts[-2:]),
        config=config,
        environment=environment() | {"kernel": choose_backend(run.settings.kernel)},
        seed=run.settings.seed,
        status=status,
        reason=reason,
        results=tuple(results(run)) if run.outcomes else (),
        activity=activity(run) if run.outcomes else {},
        bytes=bytes_by_place(run.outcomes) if run.outcomes else {},
        tiers=tiers.section(run),
        samples=tuple(sample_row(each) | more for each, more in zip(run.outcomes, tiers.sample_keys(run), strict=True)),
        alarms=alarms,
        notes=tuple(notes),
    )
