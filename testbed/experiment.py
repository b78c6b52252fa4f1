"""One experiment: a policy and the full cache on the same samples, measured, then replayed in the twin.

config -> model, workload, policy -> per context: prefill once -> full cache and policy answer -> record
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from policies.base import Policy
from testbed.cache.layout import CacheConfig
from testbed.calibrate import CalibrationConfig, head_measures
from testbed.compose import full_policy, policy_from
from testbed.decisions import DecisionLog
from testbed.engine.evaluate import Agreement, Answer, agreement, answer
from testbed.engine.prefill import check_length, prefill
from testbed.engine.session import Session, SessionConfig
from testbed.engine.signals import SignalContext
from testbed.models.base import Decoder
from testbed.results.progress import Progress
from testbed.results.tracker import Tracker
from testbed.workloads.base import Sample, Workload


class ConfigError(ValueError):
    """A value of the configuration that can't be used; names key, value and what is allowed."""


@dataclass(frozen=True)
class Setup:
    """Everything a run needs, built and checked before the model is loaded."""

    policy: Policy
    full: Policy
    workload: Workload
    cache: CacheConfig
    calibration: CalibrationConfig
    tracker: Tracker
    budget_fraction: float | None
    chunk_tokens: int
    kernel: str | None
    threads: int | None
    signals: dict[str, dict[str, object]]
    twin: tuple[str, ...]
    seed: int

    @property
    def compresses(self) -> bool:
        """False for the full cache itself, under whatever name."""
        return replace(self.policy, name="", budget_fraction=None) != replace(self.full, name="", budget_fraction=None)

    def session_config(self, full: bool) -> SessionConfig:
        """Of the policy's sessions, or of the full cache's."""
        fraction = self.budget_fraction if self.compresses and not full else None
        return SessionConfig(self.cache, fraction, self.kernel, self.seed, {} if full else self.signals)


def build(node: Any, what: str) -> Any:
    """Instantiates a config node; what a part refuses comes out as its own error, without Hydra's wrapping."""
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, (ValueError, RuntimeError)):
            raise error.__cause__ from None
        raise ConfigError(f"{what}: {str(error).splitlines()[0]}") from error


def setup(cfg: DictConfig) -> Setup:
    """Checks the whole configuration and builds all that is cheap.

    Raises:
        ValueError: naming key, value and what is allowed.
    """
    policy = policy_from(cfg)
    fraction = cfg.budget.fraction if cfg.budget.fraction is not None else policy.budget_fraction
    ok = isinstance(fraction, (int, float)) and not isinstance(fraction, bool) and math.isfinite(fraction)
    if fraction is not None and (not ok or not 0.0 < fraction <= 1.0):
        raise ConfigError(f"budget.fraction={fraction!r}: must be above 0 and at most 1, or null for no limit")
    for key, value, optional in (
        ("seed", cfg.seed, False),
        ("engine.chunk_tokens", cfg.engine.chunk_tokens, False),
        ("engine.threads", cfg.engine.threads, True),
    ):
        least = 0 if key == "seed" else 1
        if value is None and optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{key}={value!r}: must be a whole number of at least {least}")
    signals: Any = OmegaConf.to_container(cfg.signals, resolve=True)
    return Setup(
        policy=policy,
        full=full_policy(),
        workload=build(cfg.workload, "workload"),
        cache=build(cfg.cache, "cache"),
        calibration=build(cfg.calibration, "calibration"),
        tracker=build(cfg.wandb, "wandb"),
        budget_fraction=None if fraction is None else float(fraction),
        chunk_tokens=cfg.engine.chunk_tokens,
        kernel=cfg.engine.kernel,
        threads=cfg.engine.threads,
        signals=signals,
        twin=tuple(cfg.twin),
        seed=cfg.seed,
    )


@dataclass(frozen=True)
class Outcome:
    """One question, answered by the full cache and by the policy."""

    sample: Sample
    full: Answer
    policy: Answer
    agreement: Agreement
    score_full: float | None
    score: float | None
    prefill_s: float
    answer_full: str = ""
    answer: str = ""


@dataclass
class Experiment:
    """A run in progress; `outcomes` grows, so that what is finished survives an interruption."""

    settings: Setup
    decoder: Decoder
    progress: Progress
    outcomes: list[Outcome] = field(default_factory=list)
    head_classes: torch.Tensor | None = None

    def samples(self) -> list[Sample]:
        """All samples, checked against the model's limit before anything runs."""
        work = self.settings.workload
        samples = list(work.samples(self.decoder.encode, self.decoder.decode, self.settings.seed))
        for sample in samples:
            more = len(sample.question_tokens) + max(work.max_new_tokens, len(sample.continuation_tokens))
            check_length(self.decoder, len(sample.context_tokens), more)
        return samples

    def run(self) -> None:
        """Runs every context."""
        samples = self.samples()
        context = self._signal_context()
        contexts = [list(group) for _, group in groupby(samples, key=lambda sample: sample.context_id)]
        self.progress.start("prefill and decode", sum(len(group[0].context_tokens) for group in contexts))
        for group in contexts:
            for outcome in self._context(group, context):
                self.outcomes.append(outcome)
                self.progress.note(_line(outcome, len(self.outcomes), len(samples)))

    def _signal_context(self) -> SignalContext:
        """Head measures are looked up, or made, only if a part of the policy wants them."""
        kept: dict[str, torch.Tensor] = {}

        def measures() -> Mapping[str, torch.Tensor]:
            if not kept:
                kept.update(head_measures(self.decoder, self.settings.calibration, self.progress.fraction))
            return kept

        return SignalContext(self.settings.cache.page_tokens, measures)

    def _context(self, group: Sequence[Sample], context: SignalContext) -> Iterator[Outcome]:
        """Prefills one context and asks its questions of both caches, in turn, so that both see the same machine."""
        session = Session(self.decoder, self.settings.policy, self.settings.session_config(False), context)
        full = Session(self.decoder, self.settings.full, self.settings.session_config(True), context)
        started = time.perf_counter()
        dense = prefill(
            self.decoder,
            group[0].context_tokens,
            self.settings.cache.torch_dtype,
            list(session.sources.values()),
            self.settings.chunk_tokens,
            self.progress.advance,
        )
        seconds = time.perf_counter() - started
        try:
            full.start(dense)
            session.start(dense, free_source=True)
            self.head_classes = session.classes
            del dense
            for sample in group:
                yield self._ask(sample, full, session, seconds)
        finally:
            full.close()
            session.close()

    def _ask(self, sample: Sample, full: Session, session: Session, prefill_s: float) -> Outcome:
        work = self.settings.workload
        answers, texts = [], []
        for each in (full, session):
            fork = each.fork()
            try:
                answers.append(
                    answer(
                        fork,
                        sample.question_tokens,
                        sample.continuation_tokens,
                        work.max_new_tokens,
                        wants_answer=bool(sample.answer),
                    )
                )
            finally:
                fork.close()
            texts.append(self.decoder.decode(answers[-1].tokens))
        return Outcome(
            sample=sample,
            full=answers[0],
            policy=answers[1],
            agreement=agreement(answers[1].logprobs, answers[0].logprobs),
            score_full=work.score(texts[0], sample),
            score=work.score(texts[1], sample),
            prefill_s=prefill_s,
            answer_full=texts[0],
            answer=texts[1],
        )


def _line(outcome: Outcome, done: int, total: int) -> str:
    """What the progress bar says of a finished sample."""
    said = "" if outcome.score is None else f" full {outcome.score_full:.0f} policy {outcome.score:.0f}"
    return f"{done}/{total} {outcome.sample.id}:{said} KL {outcome.agreement.kl:.4f}"


def logs(outcomes: Sequence[Outcome], full: bool) -> list[DecisionLog]:
    """Decision logs of all samples."""
    return [(each.full if full else each.policy).log for each in outcomes]


def write_logs(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Decision logs of the policy, one file a sample."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in outcomes:
        each.policy.log.write(folder / f"{each.sample.id.replace('/', '_')}.jsonl")
