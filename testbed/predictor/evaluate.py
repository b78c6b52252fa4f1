"""How well predictors find what the next step attends to, on documents that trained none of them.

    python -m testbed.predictor evaluate [key=value ...]

Test documents are driven as in `testbed.predictor.drive`; at every step every predictor scores the pages from what it
would know in use, and its recall of the step's true mass is counted, by layer and phase. Which single signal is the
best to beat is decided on training documents. Time and arithmetic of each predictor are measured beside it.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from rich.console import Console
from torch import Tensor

from policies.base import Predictor, Signals
from testbed.commands import check_output, set_threads
from testbed.compose import compose_named
from testbed.heads.differentiable import Differentiable
from testbed.models.base import Decoder
from testbed.predictor.agents import PHASES
from testbed.predictor.contribution import contributions, step_of
from testbed.predictor.corpus import Document, contents, corpus_hash, documents, settings_of
from testbed.predictor.drive import Course, Learn, Moment, drive
from testbed.predictor.recall import SHARES, caught
from testbed.predictor.recording import FEATURES, SINGLES, Recording, RecordingSettings, record
from testbed.predictor.report import LEARNED, ORACLE, tables
from testbed.predictor.tally import CASES, Slice, Tallies
from testbed.predictor.weights import find_weights, read_weights
from testbed.results.environment import environment
from testbed.results.progress import Progress
from testbed.results.record import write_atomically
from testbed.results.stats import Estimate
from testbed.results.table import PLAIN_WIDTH, sheet_table
from testbed.setup import build
from testbed.workloads.base import check_distinct, check_list

Tell = Callable[[str, float], None]


class EvaluationError(ValueError):
    """An evaluation that can't be made."""


def parts(names: Sequence[str]) -> dict[str, Predictor]:
    """Predictor parts by the names of their YAML in conf/policy/predictor.

    Raises:
        EvaluationError: no such YAML.
        WorkloadError: a name twice.
    """
    folder = resources.files("conf") / "policy" / "predictor"
    known = sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    names = list(map(str, names))
    check_distinct("predictors", names)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise EvaluationError(f"unknown predictor {unknown[0]!r}; there are: {', '.join(known)}")
    return {name: instantiate(OmegaConf.create((folder / f"{name}.yaml").read_text())) for name in names}


def check_judged(best: Iterable[str], predictors: Mapping[str, Predictor]) -> None:
    """Raises EvaluationError if a single signal to beat is not judged itself."""
    for name in best:
        if name not in predictors:
            raise EvaluationError(f"best={name}: must be one of the judged predictors, {', '.join(predictors)}")


def best_singles(recordings: Sequence[Recording]) -> dict[str, str]:
    """The single signals to beat: for each case, the best mean recall at 5 and 10 % over training documents.

    Chosen where sessions attend to few pages and where they attend to all; scores that are held are the former's,
    contributions the latter's.

    Raises:
        EvaluationError: no training document.
    """
    training = [each for each in recordings if each.part == "train"]
    if not training:
        raise EvaluationError("no recording of a training document: the best single signal is chosen on those")

    def best(is_full: bool) -> str:
        rows = [(each, (each.share == 1) == is_full) for each in training]
        found = {
            name: float(
                np.mean([each.recall[name][chosen, :2].nanmean() for each, chosen in rows if bool(chosen.any())])
            )
            for name in training[0].recall
        }
        return max(sorted(found), key=lambda name: found[name])

    full, sparse = best(True), best(False)
    return {"full": full, "sparse": sparse, "held": sparse, "contribution": full}


@dataclass
class Cost:
    """What one predictor costs a step that it is asked in.

    Attributes:
        seconds: of every score: its signals' values and its own arithmetic.
        flops: of one score with as many pages as the last had; None where nobody counted them.
    """

    seconds: list[float] = field(default_factory=list)
    flops: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Everything that was counted.

    Attributes:
        about: model, corpus, weights, versions.
        best: case -> the single signal that was best on training documents.
        tallies: recall.
        costs: predictor -> its cost.
        step_s: seconds of decode steps without planning.
        step_flops: of one decode step, weights only.
    """

    about: Mapping[str, Any]
    best: Mapping[str, str]
    tallies: Tallies
    costs: Mapping[str, Cost]
    step_s: Sequence[float]
    step_flops: float

    def time_share(self, predictor: str, every_steps: int = 1) -> float:
        """Median time of a score as a share of the median step, if it is asked every so many steps."""
        score, step = statistics.median(self.costs[predictor].seconds), statistics.median(self.step_s)
        return score / (score + every_steps * step)

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        write_atomically(path, json.dumps(self.record(), indent=1) + "\n")

    def record(self) -> dict[str, Any]:
        """Plain values: every recall with its interval, by case, phase and layer; tests; costs."""
        tallies, names = self.tallies, self.tallies.predictors

        def table(where: Slice, weighted: bool = False) -> dict[str, Any]:
            count = tallies.weighted if weighted else tallies.mean
            return {name: {f"{share:g}": _plain(count(name, share, where)) for share in SHARES} for name in names}

        def compared(where: Slice) -> list[dict[str, Any]]:
            singles = [name for name in SINGLES if name in names]
            pairs = [(name, single) for name in LEARNED if name in names for single in singles]
            found = [(share, tallies.compare(*pair, share, where)) for pair in pairs for share in SHARES]
            return [
                {"better": c.better, "than": c.than, "share": s, "difference": _plain(c.difference), "p": c.p}
                for s, c in found
                if c is not None
            ]

        closed = [name for name in names if name not in (ORACLE, "quest", "random")]
        sparse = Slice("sparse")
        return {
            "schema": 1,
            **self.about,
            "best_single_on_train": dict(self.best),
            "recall": {case: table(Slice(case)) for case in CASES},
            "recall_weighted_by_mass": {case: table(Slice(case), weighted=True) for case in CASES},
            "recall_by_phase": {
                phase: {case: table(Slice(case, phase=at)) for case in CASES} for at, phase in enumerate(PHASES)
            },
            "recall_by_layer": {str(layer): table(Slice("sparse", layer)) for layer in range(tallies.layers)},
            "against_single_signals": {case: compared(Slice(case)) for case in CASES},
            "gap_from_quest_to_oracle_closed": {
                name: {f"{s:g}": _plain(tallies.closed(name, "quest", ORACLE, s, sparse)) for s in SHARES}
                for name in closed
            }
            if {"quest", ORACLE} <= set(names)
            else {},
            "cost": {name: self._cost(name) for name in self.costs},
            "step": {"seconds": statistics.median(self.step_s), "flops": self.step_flops, "steps": len(self.step_s)},
        }

    def _cost(self, name: str) -> dict[str, float | None]:
        cost = self.costs[name]
        return {
            "seconds": statistics.median(cost.seconds),
            "share_of_step_every_step": self.time_share(name),
            "share_of_step_every_16_steps": self.time_share(name, 16),
            "flops": cost.flops,
        }


def _plain(estimate: Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    low, high = (None, None) if estimate.ci is None else (round(end, 5) for end in estimate.ci)
    return {"value": round(estimate.value, 5), "low": low, "high": high, "documents": estimate.n}


def evaluate(
    decoder: Decoder,
    corpus: Sequence[Document],
    predictors: Mapping[str, Predictor],
    best: Mapping[str, str],
    course: Course,
    points: int = 8,
    about: Mapping[str, Any] | None = None,
    progress: Tell = lambda what, done: None,
) -> Evaluation:
    """Drives the corpus's test documents and counts.

    Args:
        decoder: the model.
        corpus: documents; those of the training part are left out.
        predictors: who is judged; the one called "oracle" is given the truth and asked nothing.
        best: case -> the single signal to beat.
        course: how sessions are driven.
        points: of the integration of contributions; 0 = none.
        about: what the record says besides, such as the weights.
        progress: called with the share that is done.

    Raises:
        EvaluationError: no test document, or one of `best` is not judged.
    """
    judging = [document for document in corpus if document.part == "test"]
    if not judging:
        raise EvaluationError("no test document: predictors are judged on those")
    check_judged(best.values(), predictors)
    asked = {name: part for name, part in predictors.items() if name != ORACLE}
    needs = frozenset().union(*(part.needs for part in asked.values()))
    course = replace(course, beside=course.beside | needs)
    judge = _Judge(decoder, predictors, points)
    for index, document in enumerate(judging):
        progress(f"judging {document.name} ({index + 1} of {len(judging)})", index / len(judging))
        drive(document, decoder, course, judge.visit, remember=points > 0)
    said = {
        "model": decoder.name,
        "fingerprint": decoder.fingerprint,
        "corpus": corpus_hash(corpus),
        "contents": contents(corpus),
        "test_documents": [document.name for document in judging],
        "page_tokens": course.cache.page_tokens,
        "sparse_shares": list(course.shares),
        "threads": torch.get_num_threads(),
        "environment": environment(),
        **(about or {}),
    }
    return Evaluation(said, best, judge.tallies, judge.costs, judge.step_s, 2.0 * decoder.weights)


class _Judge:
    """Looks at every step of the test documents."""

    def __init__(self, decoder: Decoder, predictors: Mapping[str, Predictor], points: int) -> None:
        self.predictors, self.points = predictors, points
        self.layers = decoder.geometry.layers
        self.tallies = Tallies(self.layers)
        self.costs = {name: Cost() for name in predictors if name != ORACLE}
        self.step_s: list[float] = []
        self.model = Differentiable(decoder) if points else None
        self._held: dict[str, Tensor] = {}  # scores of the first step of the window

    def visit(self, moment: Moment) -> Learn:
        """Asks everybody before the step, counts after it."""
        begin, end = moment.document.windows[moment.window]
        scores = {name: self._asked(name, moment) for name in self.costs}
        candidate = moment.candidates
        if moment.share is not None and moment.at == begin:
            self._held = scores

        def learn(truth: Tensor) -> None:
            done = moment.session.times[-1]
            self.step_s.append(done.total_s - done.plan_s)
            mass = truth.flatten(0, 1)
            if moment.share is not None and moment.at == begin:
                self._held = self._held | {ORACLE: mass}
            if moment.share is None:
                self._count(moment, scores | {ORACLE: mass}, mass, candidate, "full")
                if self.points and moment.at == (begin + end) // 2:
                    self._contribution(moment, scores | {ORACLE: mass}, candidate)
            else:
                self._count(moment, scores | {ORACLE: mass}, mass, candidate, "sparse")
                self._count(moment, self._held, mass, candidate, "held")

        return learn

    def _asked(self, name: str, moment: Moment) -> Tensor:
        """[L * Hk, N], timed with the signals it needs."""
        part, signals, session = self.predictors[name], moment.signals, moment.session
        started = time.perf_counter()
        observed = session.observed(signals.shape[2])
        values = {signal: session.sources[signal].value(observed).cpu() for signal in sorted(part.needs)}
        score = part.score(replace(signals, values=values))
        self.costs[name].seconds.append(time.perf_counter() - started)
        self.costs[name].flops = _flops(part, moment, signals)
        return score.expand(signals.shape).flatten(0, 1)

    def _count(self, moment: Moment, scores: Mapping[str, Tensor], worth: Tensor, candidate: Tensor, case: str) -> None:
        document, pages = moment.document.name, worth.shape[1]
        for name in self.predictors:
            score = torch.nn.functional.pad(scores[name], (0, pages - scores[name].shape[1]))
            found = caught(score, worth, candidate)
            self.tallies.tally(name, document).add(found, self.layers, moment.phase, case)

    def _contribution(self, moment: Moment, scores: Mapping[str, Tensor], candidate: Tensor) -> None:
        assert self.model is not None
        gains = contributions(self.model, step_of(moment), self.points).value.flatten(0, 1)
        self._count(moment, scores, gains.abs(), candidate, "contribution")


def _flops(part: Predictor, moment: Moment, signals: Signals) -> float | None:
    """Of the sources that count theirs; None where none does."""
    sources: list[Any] = [moment.session.sources[name] for name in part.needs]
    counted = [source.flops(signals.shape[2]) for source in sources if hasattr(source, "flops")]
    return float(sum(counted)) if counted else None


def weights_said(decoder: Decoder, predictors: Mapping[str, Predictor]) -> dict[str, Any]:
    """Which trained weights predictors read: by signal the hash of their file, what they were trained on and how.

    Raises:
        WeightsError: there are none.
    """
    needs = frozenset().union(*(part.needs for part in predictors.values()))
    out = {}
    for signal, names in FEATURES.items():
        if signal in needs:
            path = find_weights(decoder, names)
            about = read_weights(path)[1]
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            said = {"sha256": digest, "data": about.data, "seed": about.seed, "settings": about.settings}
            out[signal] = {"file": path.name, **said}
    return {"weights": out} if out else {}


def main(args: Sequence[str]) -> None:
    """The command; see conf/evaluation.yaml."""
    cfg = compose_named("evaluation", args)
    set_threads(cfg.threads)
    predictors = parts(check_list("predictors", cfg.predictors))
    check_judged([] if cfg.best is None else [str(cfg.best)], predictors)
    path, texts = check_output("record", cfg.record), settings_of(cfg.corpus)
    settings = RecordingSettings(heads_one_in=cfg.heads_one_in, points=cfg.points)
    course = Course(settings.chooser, shares=cfg.shares, cache=build(cfg.cache, "cache"))
    check_distinct("shares", course.shares)
    decoder: Decoder = build(cfg.model, "model")
    corpus = documents(decoder, **texts)
    with Progress() as bar:
        best = dict.fromkeys(CASES, str(cfg.best))
        if cfg.best is None:
            training = [document for document in corpus if document.part == "train"]
            best = best_singles(record(decoder, training, settings, course, bar.fraction))
        said = weights_said(decoder, predictors)
        done = evaluate(decoder, corpus, predictors, best, course, cfg.points, said, bar.fraction)
    if path is not None:
        done.write(path)
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    for sheet in tables(done):
        console.print(sheet_table(sheet))
