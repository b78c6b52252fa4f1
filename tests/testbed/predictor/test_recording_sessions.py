"""Recordings: what they hold is what a session by itself sees, and the truth is the full cache's next step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from driven import WINDOWS, course, document, measures
from tiny import CACHE, decoder
from torch import Tensor

from policies.base import Mode, Phase
from testbed.cache.layout import CacheConfig
from testbed.compose import compose_policy
from testbed.engine.prefill import prefill
from testbed.engine.session import Session, SessionConfig
from testbed.engine.signals import SignalContext
from testbed.engine.signals.core import CoreFeatures
from testbed.predictor.drive import Learn, Moment, TopShare, drive
from testbed.predictor.recall import caught
from testbed.predictor.recording import (
    SCHEMA,
    Recording,
    RecordingError,
    RecordingSettings,
    record,
    record_document,
)
from testbed.tensors import write_tensors

ALL_HEADS = RecordingSettings(heads_one_in=1, points=2)
STEPS = [at for begin, end in WINDOWS for at in range(begin, end)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("testbed.predictor.recording.cache_dir", lambda: folder)
        return record(decoder(), [document()], ALL_HEADS, course())[0]


def alone(watch: frozenset[str], share: float | None) -> tuple[Session, list[int]]:
    """A session of its own, without any recorder, just before the first window."""
    text, config = document(), CacheConfig(**CACHE)
    policy = compose_policy("full" if share is None else "quest")
    settings = SessionConfig(config)
    session = Session(decoder(), policy, settings, SignalContext(16, measures, decoder()), watch=watch)
    dense = prefill(decoder(), text.tokens[:180], config.torch_dtype, list(session.sources.values()), 64)
    session.start(dense, roles=text.roles[:180])
    return session, text.tokens


def test_truth_is_the_next_step_under_the_full_cache(recorded: Recording) -> None:
    """The signal `next_mass` of another session, which runs a full cache ahead of itself."""
    session, tokens = alone(frozenset({"next_mass"}), None)
    for at in STEPS[:4]:
        session.step(tokens[at])
        truth = session.signal("next_mass").flatten(0, 1)
        for share in (1.0, 0.25):
            rows = ((recorded.at == at) & (recorded.share == share)).nonzero().squeeze(1)
            assert recorded.head[rows].tolist() == list(range(6))
            candidate = recorded.candidate[rows[0], : truth.shape[1]]
            assert candidate.tolist() == [False] + [True] * 8 + [False] * (truth.shape[1] - 9)
            got = recorded.mass[rows, : truth.shape[1]].float()
            assert torch.allclose(got, truth * candidate, atol=2e-4, rtol=1e-2)
    session.close()


def test_features_are_those_of_a_session_in_use(recorded: Recording) -> None:
    session, tokens = alone(frozenset({"core_score"}), None)
    source = session.sources["core_score"]
    assert isinstance(source, CoreFeatures)
    for at in STEPS[:3]:
        source.watch_next(torch.tensor([tokens[at]]))
        pages = at // 16 + 1
        expected, context = source.features(session.observed(pages)).flatten(0, 1), source.context()
        rows = ((recorded.at == at) & (recorded.share == 1)).nonzero().squeeze(1)
        assert recorded.names == source.names
        seen = recorded.candidate[rows[0], :pages]
        assert torch.allclose(recorded.features[rows, :pages][:, seen].float(), expected[:, seen], atol=0.02, rtol=5e-3)
        assert torch.allclose(recorded.contexts[recorded.moment[rows[0]]].float(), context, atol=0.01, rtol=2e-3)
        session.step(tokens[at])
    session.close()


def test_recall_of_others_is_that_of_their_signals(recorded: Recording) -> None:
    session, tokens = alone(frozenset({"attention_ema", "retrieval"}), None)
    at = STEPS[0]
    rows = ((recorded.at == at) & (recorded.share == 1)).nonzero().squeeze(1)
    for name, signal in (("attention_ema", "attention_ema"), ("bm25", "retrieval")):
        score = session.sources[signal].value(session.observed(at // 16 + 1)).flatten(0, 1)
        n = score.shape[1]
        right = caught(score, recorded.mass[rows, :n].float(), recorded.candidate[rows[0], :n])
        assert torch.allclose(recorded.recall[name][rows], right.recall.float(), atol=5e-3)
    assert tokens[at] == document().tokens[at]
    session.close()


def test_contributions_come_with_every_head_once_in_a_window(recorded: Recording) -> None:
    marked = recorded.has_contribution
    assert sorted(set(recorded.at[marked].tolist())) == [182]  # the middle of the first window; the second has none
    assert recorded.head[marked].tolist() == list(range(6))
    assert bool((recorded.share[marked] == 1).all())
    assert bool((recorded.contribution[~marked] == 0).all())
    assert bool((recorded.contribution[marked].abs().sum(1) > 0).all())
    assert recorded.phase[marked].tolist() == [3] * 6


def test_the_sparse_session_sees_what_it_attends_to() -> None:
    """Pages that were skipped draw no mass; the truth told is nevertheless the full cache's."""
    seen: list[tuple[Moment, Tensor]] = []
    truths: dict[tuple[int, bool], Tensor] = {}

    def visit(moment: Moment) -> Learn:
        if moment.share is not None and moment.at > moment.document.windows[moment.window][0]:
            seen.append((moment, moment.signals["last_mass"].clone()))

        def learn(truth: Tensor) -> None:
            truths[moment.at, moment.share is None] = truth

        return learn

    drive(document(), decoder(), course(frozenset({"last_mass"})), visit)
    assert len(seen) == 5
    for moment, mass in seen:
        chosen = (mass[..., moment.candidates] > 0).sum(-1)
        assert bool((chosen <= 3).all())  # a quarter of 9 or 10 pages, and one may just have turned cold
        assert bool((chosen >= 1).all())
    assert set(truths) == {(at, full) for at in STEPS for full in (True, False)}
    for at in STEPS:
        assert torch.equal(truths[at, True], truths[at, False])


def test_top_share_takes_the_best_pages() -> None:
    session, _ = alone(frozenset(), None)
    signals = session._signals(Phase.DECODE, 1)
    score = torch.rand(signals.shape, generator=torch.Generator().manual_seed(0))
    mode = TopShare(0.25).modes(signals, score, torch.ones(signals.shape, dtype=torch.bool), torch.zeros(3, 2))
    candidates = (~signals.hot).nonzero().squeeze(1)
    assert len(candidates) == 8
    for layer in range(3):
        for head in range(2):
            right = set(candidates[score[layer, head, candidates].argsort(descending=True)[:2]].tolist())
            right |= set(signals.hot.nonzero().squeeze(1).tolist())
            assert set((mode[layer, head] == int(Mode.EXACT)).nonzero().squeeze(1).tolist()) == right
    session.close()


def test_kept_recordings_are_read_and_missing_ones_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Recording
) -> None:
    monkeypatch.setattr("testbed.predictor.recording.cache_dir", lambda: tmp_path)
    corpus = [document(), document("test", 4)]
    settings = RecordingSettings(heads_one_in=1, points=0)
    steps: list[str] = []
    first = record(decoder(), corpus, settings, course(), lambda what, done: steps.append(what))
    assert steps == ["recording d3 (1 of 2)", "recording d4 (2 of 2)", "recorded"]
    files = sorted(tmp_path.glob("recordings/*/*.safetensors"))
    assert len(files) == 2
    files[1].unlink()
    kept = files[0].stat().st_mtime_ns
    steps.clear()
    again = record(decoder(), corpus, settings, course(), lambda what, done: steps.append(what))
    assert steps == ["recording d4 (2 of 2)", "recorded"]
    assert files[0].stat().st_mtime_ns == kept
    for one, other in zip(first, again, strict=True):
        for key, value in vars(one).items():
            if isinstance(value, Tensor):
                assert torch.equal(value, getattr(other, key)), key
    assert torch.equal(first[0].features, recorded.features)
    files[0].write_bytes(b"nothing")
    with pytest.raises(RecordingError, match=r"not a recording .* delete the file"):
        record(decoder(), corpus, settings, course())
    record(decoder(), [document("train", 5)], settings, course())
    assert len(list(tmp_path.glob("recordings/*"))) == 2  # another corpus, another place
    assert not list(tmp_path.glob("recordings/*/.*"))


def test_interrupted_recording_keeps_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testbed.predictor.recording.cache_dir", lambda: tmp_path)

    def stop(what: str, done: float) -> None:
        if done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(
            decoder(), [document(), document("test", 4)], RecordingSettings(heads_one_in=6, points=0), course(), stop
        )
    assert [path.name for path in tmp_path.glob("recordings/*/*")] == ["00-d3.safetensors"]


def test_bad_recordings(recorded: Recording) -> None:
    with pytest.raises(RecordingError, match="recording d3: head has 1 rows"):
        replace(recorded, head=recorded.head[:1])
    broken = recorded.features.clone()
    broken[0, 0, 0] = torch.nan
    with pytest.raises(RecordingError, match="features holds numbers that are not finite"):
        replace(recorded, features=broken)
    with pytest.raises(RecordingError, match="recording.heads_one_in=0"):
        RecordingSettings(heads_one_in=0)
    settings = replace(ALL_HEADS, source="attention_ema")
    beside = replace(course(frozenset({"attention_ema"})), beside=frozenset({"attention_ema"}))
    with pytest.raises(RecordingError, match="recording.source='attention_ema'"):
        record_document(document(), decoder(), settings, beside, None)


@pytest.mark.parametrize("damage", ["about", "indices", "numbers", "rows", "version"])
def test_a_damaged_recording_is_named_by_its_file(damage: str, recorded: Recording, tmp_path: Path) -> None:
    tensors, about = dict(recorded._tensors()), {"document": "d3", "kind": "essay", "part": "train", "names": ["a"]}
    said: object = {**about, "schema": SCHEMA}
    if damage == "about":
        said = 5
    elif damage == "version":
        said = {**about, "schema": 99}
    elif damage == "indices":
        tensors["head"] = tensors["head"].int()
    elif damage == "numbers":
        tensors["mass"] = tensors["mass"].long()
    else:
        tensors["share"] = tensors["share"][1:]
    path = tmp_path / "one.safetensors"
    write_tensors(path, tensors, {"about": json.dumps(said)})
    with pytest.raises(RecordingError, match=r"one\.safetensors: not a recording .* delete the file"):
        Recording.read(path)
