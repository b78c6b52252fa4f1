"""What a better predictor buys: needles found, and KL to the full cache, where so many pages are read and no more.

    python -m testbed.predictor needles [key=value ...]

Contexts are prefilled once and asked under every predictor, share of the pages and treatment of the others: skipped, or
attended by one mean prototype a page. Plans are made before every step; sinks and the last tokens are always exact. All
read the same number of pages, so the same bytes.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from omegaconf import OmegaConf

from policies.base import Predictor
from testbed.cache.layout import CacheConfig
from testbed.commands import check_output, check_some, set_threads
from testbed.compose import compose_named, full_policy
from testbed.engine.evaluate import Answer, agreement, answer
from testbed.engine.prefill import DenseKV, prefill
from testbed.engine.session import Session, SessionConfig
from testbed.engine.signals import SignalContext, SignalSource, build_sources
from testbed.models.base import Decoder
from testbed.predictor.drive import TopShare
from testbed.predictor.evaluate import parts, weights_said
from testbed.results.display import Sheet
from testbed.results.environment import environment
from testbed.results.record import write_atomically
from testbed.results.stats import Estimate, mean, proportion
from testbed.setup import build
from testbed.workloads.base import Sample, Workload, check_distinct, check_fraction, check_list, check_whole

Say = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """One needle under one predictor.

    Attributes:
        sample: its id.
        score, kl: 1 or 0, and mean nats along question and right answer.
        score_full: of the full cache on the same needle.
    """

    sample: str
    score: float
    kl: float
    score_full: float


@dataclass(frozen=True)
class Found:
    """One predictor at one share.

    Attributes:
        predictor: its name.
        share: of the candidate pages that are read exactly.
        prototypes: whether the others are attended by prototypes.
        questions: all needles.
    """

    predictor: str
    share: float
    prototypes: bool
    questions: tuple[Question, ...]

    @property
    def score(self) -> Estimate:
        """Share of the needles found; contexts, not needles, are independent."""
        return proportion([each.score for each in self.questions], groups=self._contexts())

    @property
    def kl(self) -> Estimate:
        """Mean KL to the full cache, nats."""
        return mean([each.kl for each in self.questions], groups=self._contexts())

    def _contexts(self) -> list[str]:
        return [each.sample.partition("/")[0] for each in self.questions]


def ask(
    decoder: Decoder,
    workload: Workload,
    predictors: Mapping[str, Predictor],
    grid: Sequence[tuple[float, bool]],
    cache: CacheConfig,
    seed: int = 0,
    say: Say = lambda line: None,
) -> list[Found]:
    """Asks all needles under all predictors.

    Args:
        decoder: the model.
        workload: with right answers.
        predictors: by name.
        grid: (share of the pages, prototypes for the others) of each cell.
        cache: of the sessions.
        seed: of the samples.
        say: told of each cell of each context.
    """
    cells = [(name, share, prototypes) for name in predictors for share, prototypes in grid]
    found: dict[tuple[str, float, bool], list[Question]] = {cell: [] for cell in cells}
    samples = list(workload.samples(decoder.encode, decoder.decode, seed))
    for _, group in groupby(samples, key=lambda sample: sample.context_id):
        context = _Context(decoder, workload, list(group), predictors, cache)
        for cell in cells:
            questions = list(context.asked(*cell))
            found[cell] += questions
            kl = statistics.fmean(each.kl for each in questions)
            say(f"{cell}: {sum(each.score for each in questions):g} of {len(questions)}, KL {kl:.4f}")
    return [Found(*cell, tuple(questions)) for cell, questions in found.items()]


class _Context:
    """One context, prefilled once."""

    def __init__(
        self,
        decoder: Decoder,
        workload: Workload,
        samples: Sequence[Sample],
        predictors: Mapping[str, Predictor],
        cache: CacheConfig,
    ) -> None:
        self.decoder, self.workload, self.samples = decoder, workload, samples
        self.predictors, self.config = predictors, SessionConfig(cache)
        self.context = SignalContext(cache.page_tokens, dict, decoder)
        needs = frozenset().union(*(part.needs for part in predictors.values()))
        self.sources: dict[str, SignalSource] = build_sources(needs, self.context)
        self.dense: DenseKV = prefill(
            decoder, samples[0].context_tokens, cache.torch_dtype, list(self.sources.values())
        )
        full = Session(decoder, full_policy(), self.config, self.context)
        full.start(self.dense, roles=samples[0].roles)
        self.full = [self._answer(full, sample) for sample in samples]
        full.close()

    def asked(self, name: str, share: float, prototypes: bool) -> Iterator[Question]:
        """Every needle of the context in one cell."""
        part = self.predictors[name]
        policy = replace(full_policy(), name=name, every_steps=1, predictor=part, attention=TopShare(share, prototypes))
        session = Session(self.decoder, policy, self.config, self.context)
        session.sources = {signal: self.sources[signal].fork() for signal in session.sources}
        session.start(self.dense, roles=self.samples[0].roles)
        try:
            for sample, full in zip(self.samples, self.full, strict=True):
                got = self._answer(session, sample)
                yield Question(
                    sample.id,
                    self._score(got, sample),
                    agreement(got.logprobs, full.logprobs).kl,
                    self._score(full, sample),
                )
        finally:
            session.close()

    def _answer(self, session: Session, sample: Sample) -> Answer:
        fork = session.fork(own_pools=True)
        try:
            return answer(fork, sample.question_tokens, sample.continuation_tokens, self.workload.max_new_tokens)
        finally:
            fork.close()

    def _score(self, got: Answer, sample: Sample) -> float:
        score = self.workload.score(self.decoder.decode(got.tokens), sample)
        return 0.0 if score is None else score


def sheet(found: Sequence[Found]) -> Sheet:
    """Needles found and KL by predictor and cell."""
    grid = sorted({(each.prototypes, each.share) for each in found})
    columns = [f"{share:.0%}{', prototypes' if prototypes else ''}" for prototypes, share in grid]
    rows = []
    for name in dict.fromkeys(each.predictor for each in found):
        by_cell = {(each.prototypes, each.share): each for each in found if each.predictor == name}
        rows.append([name, *(_said(by_cell[cell]) if cell in by_cell else "" for cell in grid)])
    right = [each.score_full for each in found[0].questions]
    return Sheet(
        f"needles found and mean KL; the full cache finds {sum(right):g} of {len(right)}", ["predictor", *columns], rows
    )


def _said(found: Found) -> str:
    right = sum(each.score for each in found.questions)
    return f"{right:g} of {len(found.questions)}, {found.kl.value:.3f}"


def main(args: Sequence[str]) -> None:
    """The command; see conf/needles.yaml."""
    cfg = compose_named("needles", args)
    set_threads(cfg.threads)
    check_whole("seed", cfg.seed, 0)
    path = check_output("record", cfg.record)
    grid = []
    for key, prototypes in (("shares", False), ("with_prototypes", True)):
        shares = check_some(key, cfg[key])
        for share in shares:
            check_fraction(key, share)
            grid.append((float(share), prototypes))
        check_distinct(key, shares)
    check_list("shares and with_prototypes", grid)
    predictors = parts(check_list("predictors", cfg.predictors))
    workload, cache = build(cfg.workload, "workload"), build(cfg.cache, "cache")
    decoder: Decoder = build(cfg.model, "model")
    found = ask(
        decoder,
        workload,
        predictors,
        grid,
        cache,
        cfg.seed,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    table = sheet(found)
    print(table.title)
    for row in (table.columns, *table.rows):
        print(" | ".join(row))
    if path is not None:
        about: dict[str, Any] = {
            "schema": 1,
            "model": decoder.name,
            "fingerprint": decoder.fingerprint,
            "environment": environment(),
        }
        about |= weights_said(decoder, predictors)
        said = {**about, "config": OmegaConf.to_container(cfg, resolve=True), "found": [asdict(each) for each in found]}
        write_atomically(path, json.dumps(said, indent=1) + "\n")
