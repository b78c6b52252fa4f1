"""Text: loading, splits, stretches, continuations."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from word_tokens import DOCUMENTS, Words, prose

from testbed.workloads.base import Workload, WorkloadError
from testbed.workloads.haystack import documents, split_documents
from testbed.workloads.text import Continuation


def test_split_is_a_partition_and_stable() -> None:
    test, calibration = (split_documents(DOCUMENTS, split) for split in ("test", "calibration"))
    assert test.keys() | calibration.keys() == DOCUMENTS.keys()
    assert test
    assert calibration
    assert test.keys().isdisjoint(calibration)
    # One more document moves no other.
    more = split_documents({**DOCUMENTS, "zzz.txt": "More."}, "test")
    assert test.keys() <= more.keys()


def test_a_single_document_is_cut() -> None:
    body = prose("only", 300)
    test, calibration = (split_documents({"only.txt": body}, split)["only.txt"] for split in ("test", "calibration"))
    assert test + calibration == body
    assert len(calibration) == pytest.approx(len(body) / 3, abs=1)


def test_text_from_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("B text.")
    (tmp_path / "a.txt").write_text("A text.")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "other.md").write_text("Not read.")
    assert documents(str(tmp_path)) == {"a.txt": "A text.", "b.txt": "B text."}
    assert list(documents(tmp_path)) == ["a.txt", "b.txt"]
    assert documents(tmp_path / "b.txt") == {"b.txt": "B text."}


def test_no_text_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for text, words in (
        (tmp_path / "empty.txt", "holds no text"),
        ({}, "holds no text"),
        (tmp_path / "missing.txt", "missing.txt.*cannot read"),
        (tmp_path / "binary.txt", "binary.txt.*cannot read"),
    ):
        with pytest.raises(WorkloadError, match=f"text=.*{words}"):
            documents(text)


def test_continuation_follows_the_context() -> None:
    words = Words()
    work = Continuation(lengths=[100, 150], continuation_tokens=40, samples_per_length=3, text=DOCUMENTS)
    assert isinstance(work, Workload)
    found = list(work.samples(words.encode, words.decode, 5))
    assert len(found) == work.total_samples == 6
    whole = "\n\n".join(split_documents(documents(DOCUMENTS), "test").values())
    for sample in found:
        assert (len(sample.context_tokens), len(sample.continuation_tokens)) == (sample.meta["length_tokens"], 40)
        assert words.decode(sample.context_tokens + sample.continuation_tokens).strip() in whole
        assert work.score("anything", sample) is None
    assert found == list(work.samples(words.encode, words.decode, 5))
    assert found != list(work.samples(words.encode, words.decode, 6))


def test_continuation_splits_share_no_text() -> None:
    words = Words()
    seen: list[set[str]] = []
    for split in ("test", "calibration"):
        work = Continuation(lengths=[500], samples_per_length=30, split=split, text=DOCUMENTS)
        seen.append(
            {w for s in work.samples(words.encode, words.decode, 0) for w in words.decode(s.context_tokens).split()}
        )
    assert seen[0].isdisjoint(seen[1])


@pytest.mark.parametrize("key", ["lengths", "continuation_tokens", "samples_per_length"])
def test_continuation_refuses_bad_values(key: str) -> None:
    with pytest.raises(WorkloadError, match=f"workload.{key}=-1"):
        Continuation(**{"text": DOCUMENTS, key: [-1] if key == "lengths" else -1})  # type: ignore[arg-type]


CONF = Path(__file__).resolve().parents[3] / "conf" / "workload"
CONFIGS = sorted(file.stem for file in CONF.glob("*.yaml"))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_builds_a_workload_and_states_all_its_keys(name: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(name)
    work = instantiate(config, text=DOCUMENTS, lengths=[200], _convert_="all")
    assert isinstance(work, Workload)
    words = Words()
    assert len(list(work.samples(words.encode, words.decode, 0))) == work.total_samples
    assert set(inspect.signature(type(work)).parameters) == set(config) - {"_target_"}
