"""The evaluation: counted on test documents only, recall as it is counted by hand, costs and record complete."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from driven import WINDOWS, course, document
from tiny import decoder
from torch import Tensor

from policies.predictors.from_signal import FromSignal
from testbed.predictor.drive import Learn, Moment, drive
from testbed.predictor.evaluate import Evaluation, EvaluationError, best_singles, evaluate, parts
from testbed.predictor.recall import SHARES
from testbed.predictor.recording import RecordingSettings, record
from testbed.predictor.report import tables
from testbed.predictor.tally import Slice
from testbed.results.record import RecordError

NAMES = ("oracle", "attention_ema", "quest", "random")
BEST = {"full": "attention_ema", "sparse": "quest", "held": "quest", "contribution": "attention_ema"}


@pytest.fixture(scope="module")
def judged() -> Evaluation:
    corpus = [document(), document("test", 4), document("test", 5)]
    return evaluate(decoder(), corpus, parts(NAMES), BEST, course(), points=2)


def by_hand(name: str, share: float) -> dict[str, float]:
    """Recall under the full cache, page by page in plain Python."""
    signal = {"attention_ema": "attention_ema", "quest": "query_bound"}.get(name)
    out = {}
    for seed in (4, 5):
        found: list[float] = []

        def visit(moment: Moment, found: list[float] = found) -> Learn:
            score = None if signal is None else moment.signals[signal].flatten(0, 1).tolist()
            pages = [at for at, hot in enumerate(moment.signals.hot.tolist()) if not hot]

            def learn(truth: Tensor) -> None:
                if moment.share is None:
                    for head, mass in enumerate(truth.flatten(0, 1).tolist()):
                        worth = mass if score is None else score[head]
                        best = sorted(pages, key=lambda at: -worth[at])[: math.ceil(share * len(pages))]
                        found.append(sum(mass[at] for at in best) / sum(mass[at] for at in pages))

            return learn

        drive(document("test", seed), decoder(), course(frozenset({"attention_ema", "query_bound"})), visit)
        out[f"d{seed}"] = sum(found) / len(found)
    return out


def test_recall_is_that_counted_by_hand(judged: Evaluation) -> None:
    for name in ("oracle", "attention_ema", "quest"):
        assert judged.tallies.by_document(name, 0.25, Slice("full")) == pytest.approx(by_hand(name, 0.25), abs=1e-5)


def test_nobody_beats_the_oracle(judged: Evaluation) -> None:
    for case in ("full", "sparse"):
        for share in SHARES:
            best = judged.tallies.by_document("oracle", share, Slice(case))
            for name in NAMES[1:]:
                mine = judged.tallies.by_document(name, share, Slice(case))
                assert all(mine[document] <= best[document] + 1e-9 for document in best)
    held, fresh = (judged.tallies.by_document("oracle", 0.25, Slice(case)) for case in ("held", "sparse"))
    assert all(held[document] < fresh[document] for document in held)  # a step's truth is not the next step's


def test_only_test_documents_are_judged(judged: Evaluation) -> None:
    assert judged.tallies.documents == ["d4", "d5"]
    steps = sum(end - begin for begin, end in WINDOWS)
    for name in NAMES[1:]:
        assert len(judged.costs[name].seconds) == 2 * steps * 2  # two documents, full and sparse
    rows = judged.tallies.counted["quest", "d4"].rows
    assert float(rows[:, :, 0].sum()) == steps * 6
    assert float(rows[:, :, 3].sum()) == 2 * 6  # contributions of one step a window


def test_record_tells_everything(judged: Evaluation, tmp_path: Path) -> None:
    judged.write(tmp_path / "evaluation.json")
    said = json.loads((tmp_path / "evaluation.json").read_text())
    assert said["best_single_on_train"] == BEST
    assert said["test_documents"] == ["d4", "d5"]
    recall = said["recall"]["full"]["quest"]["0.25"]
    expected = judged.tallies.mean("quest", 0.25, Slice("full"))
    assert expected is not None
    assert recall["value"] == pytest.approx(expected.value, abs=1e-5)
    assert recall["documents"] == 2
    assert set(said["recall_by_layer"]) == {"0", "1", "2"}
    assert set(said["cost"]) == set(NAMES[1:])
    assert 0 < said["cost"]["quest"]["share_of_step_every_16_steps"] < said["cost"]["quest"]["share_of_step_every_step"]
    assert said["step"]["flops"] == 2 * decoder().weights
    with pytest.raises(RecordError):
        judged.write(tmp_path / "evaluation.json" / "below")
    titles = [sheet.title for sheet in tables(judged)]
    assert len(titles) == len(set(titles)) >= 4
    assert all(len(row) == len(sheet.columns) for sheet in tables(judged) for row in sheet.rows)


def test_best_single_is_chosen_on_training_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testbed.predictor.recording.cache_dir", lambda: tmp_path)
    corpus = [document(), document("test", 4)]
    recordings = record(decoder(), corpus, RecordingSettings(heads_one_in=1, points=0), course())
    train, other = recordings

    def best(full: bool) -> str:
        means = {name: float(x[(train.share == 1) == full, :2].nanmean()) for name, x in train.recall.items()}
        return max(means, key=lambda name: means[name])

    expected = {"full": best(True), "sparse": best(False), "held": best(False), "contribution": best(True)}
    assert best_singles(recordings) == expected
    for name, found in other.recall.items():  # what test documents say does not count
        other.recall[name] = torch.ones_like(found) if name == "bm25" else found * 0
    assert best_singles(recordings) == expected
    train.recall["bm25"][train.share < 1] = 1.0
    assert best_singles(recordings) == expected | {"sparse": "bm25", "held": "bm25"}
    with pytest.raises(EvaluationError, match="no recording of a training document"):
        best_singles(recordings[1:])


def test_bad_input() -> None:
    with pytest.raises(EvaluationError, match="unknown predictor 'nobody'; there are: age"):
        parts(("nobody",))
    with pytest.raises(EvaluationError, match="no test document"):
        evaluate(decoder(), [document()], {"quest": FromSignal("query_bound")}, {"full": "quest"}, course(), points=0)
