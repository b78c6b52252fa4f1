"""One experiment: a policy and the full cache on the same samples, measured, then replayed in the twin.

config -> model, workload, policy -> per context: prefill once -> full cache and policy answer -> record
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import FrameType

import torch

from policies.base import Phase, Plan, Share, Signals, fit, fixed_bytes
from testbed.cache.layout import Hot
from testbed.cache.pool import CacheError
from testbed.cache.traffic import Traffic
from testbed.decisions import DecisionLog
from testbed.engine.evaluate import Agreement, Answer, agreement, answer
from testbed.engine.prefill import check_length, prefill
from testbed.engine.session import Session
from testbed.engine.signals import SignalContext, build_sources
from testbed.heads.library import head_measures
from testbed.models.base import Decoder
from testbed.results.progress import Progress
from testbed.setup import Setup
from testbed.workloads.base import Sample


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
    loading: list[Traffic] = field(default_factory=list)  # of each context, until its questions are asked
    head_classes: torch.Tensor | None = None
    _stopped: bool = False

    def interrupt(self, frame: FrameType | None) -> None:
        """Stops the run now; inside a finaliser, where Python drops exceptions, after this sample.

        Raises:
            KeyboardInterrupt: outside of finalisers.
        """
        self._stopped = True
        while frame is not None and frame.f_code.co_name != "__del__":
            frame = frame.f_back
        if frame is None:
            raise KeyboardInterrupt

    def samples(self) -> list[Sample]:
        """All samples, checked against the model's limit before anything runs."""
        work = self.settings.workload
        check_length(self.decoder, work.max_length_tokens)  # before the text is encoded
        samples = list(work.samples(self.decoder.encode, self.decoder.decode, self.settings.seed))
        longest = 0
        for sample in samples:
            more = len(sample.question_tokens) + max(work.max_new_tokens, len(sample.continuation_tokens))
            more += sample.history_tokens
            check_length(self.decoder, len(sample.context_tokens), more)
            self._check_budget(len(sample.context_tokens))
            longest = max(longest, len(sample.context_tokens) + more)
        self._check_capacity(longest)
        return samples

    def _check_budget(self, length_tokens: int) -> None:
        """Raises PolicyError if the budget can't hold what must stay of such a context."""
        config, geometry = self.settings.session_config(full=False), self.decoder.geometry
        if config.budget_fraction is None or length_tokens < self.settings.policy.cold_start_tokens:
            return
        budget = int(config.budget_fraction * length_tokens * geometry.token_bytes(torch.bfloat16))
        signals = self._signals(length_tokens, False, budget)
        nothing = torch.zeros(geometry.layers, geometry.kv_heads, dtype=torch.float64)
        fit(signals, Share(nothing, torch.zeros(signals.shape, dtype=torch.bool)), nothing)

    def _check_capacity(self, length_tokens: int) -> None:
        """Raises CacheError if the device's capacity can't hold what must stay of a sequence that long."""
        config = self.settings.session_config(full=False)
        capacity = config.cache.capacities(self.decoder.device).l1_bytes
        if capacity is None:
            return
        sources = build_sources(self.settings.policy.needs, self._signal_context(), config.signals)
        bounds = any(source.wants_bounds for source in sources.values())
        fixed = float(fixed_bytes(self._signals(length_tokens, bounds, None)).sum())
        slack = config.cache.device_slab_bytes(self.decoder.geometry.head_dim)
        least = math.ceil((fixed + slack) / config.cache.swap_threshold)
        if capacity < least:
            raise CacheError(
                f"cache.l1_bytes={config.cache.l1_bytes!r}: {capacity} bytes can't hold sinks, recent window and "
                f"metadata of {length_tokens} tokens below cache.swap_threshold={config.cache.swap_threshold}; at "
                f"least {least}, or lower cache.sink_tokens, cache.hot_tokens"
            )

    def _signals(self, length_tokens: int, with_bounds: bool, budget_bytes: int | None) -> Signals:
        """What a policy would be told of a sequence of that length of which nothing is known yet."""
        geometry, cache = self.decoder.geometry, self.settings.cache
        hot = Hot(cache.page_tokens, cache.sink_tokens, cache.hot_tokens).mask(length_tokens)
        return Signals(
            phase=Phase.COMPRESS,
            step=0,
            length_tokens=length_tokens,
            page_tokens=cache.page_tokens,
            hot=hot,
            held=Plan.dense(geometry.layers, geometry.kv_heads, len(hot)),
            page_bytes=cache.page_bytes(geometry.head_dim, with_bounds),
            device_budget_bytes=budget_bytes,
        )

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
                if self._stopped:
                    raise KeyboardInterrupt

    def _signal_context(self) -> SignalContext:
        """Head measures are looked up, or made, only if a part of the policy wants them."""
        measures = head_measures(self.decoder, self.settings.calibration, self.progress.fraction)
        return SignalContext(self.settings.cache.page_tokens, lambda: measures, self.decoder)

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
            full.start(dense, roles=group[0].roles)
            session.start(dense, free_source=True, roles=group[0].roles)
            self.head_classes = session.classes
            del dense
            for sample in group:
                yield self._ask(sample, full, session, seconds)
            self.loading.append(session.cache.traffic)
        finally:
            full.close()
            session.close()

    def _ask(self, sample: Sample, full: Session, session: Session, prefill_s: float) -> Outcome:
        work = self.settings.workload
        answers, texts = [], []
        for each in (full, session):
            fork = each.fork(own_pools=True)
            try:
                answers.append(
                    answer(
                        fork,
                        sample.question_tokens,
                        sample.continuation_tokens,
                        work.max_new_tokens,
                        wants_answer=bool(sample.answer),
                        history=sample.history,
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
