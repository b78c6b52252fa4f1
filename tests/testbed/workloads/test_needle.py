"""The needle grid: exact lengths, depths, determinism, disjoint splits, scoring, bad values."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from word_tokens import DOCUMENTS, Words

from testbed.workloads.base import Sample, Workload, WorkloadError
from testbed.workloads.haystack import documents, split_documents
from testbed.workloads.needle import KEYS, NUMBERS, Needle, insert

LONGEST_SENTENCE = 12


def samples(seed: int = 0, words: Words | None = None, **keys: object) -> list[Sample]:
    words = words or Words()
    return list(Needle(text=DOCUMENTS, **keys).samples(words.encode, words.decode, seed))  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(40, 1500),
    depths=st.lists(st.floats(0, 1), min_size=1, max_size=5, unique=True),
    shared=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_length_is_exact_and_each_needle_stands_where_it_says(
    length: int, depths: list[float], shared: int, seed: int
) -> None:
    words = Words()
    found = samples(seed, words, lengths=[length], depths=depths, needles_per_context=min(shared, len(depths), 3))
    assert len(found) == len(depths)
    for sample, depth in zip(found, depths, strict=True):
        assert len(sample.context_tokens) == length
        begin, size = sample.meta["needle_position"], sample.meta["needle_tokens"]
        text = words.decode(sample.context_tokens[begin : begin + size])
        assert text == f" The {sample.meta['key']} is {sample.answer}."
        # Within a sentence of the depth, the other needles of the context aside.
        assert abs(begin - depth * length) <= LONGEST_SENTENCE + 3 * size
        assert words.decode(sample.context_tokens).count(sample.answer) == 1


def test_needles_stand_between_sentences() -> None:
    words = Words()
    for sample in samples(words=words, lengths=[600], depths=[0.1, 0.5, 0.9], samples_per_cell=5):
        begin = sample.meta["needle_position"]
        assert words.decode(sample.context_tokens[:begin]).endswith(".")
        assert words.decode(sample.context_tokens[:1]).strip().endswith("x0")  # first word of a sentence


def test_depth_is_within_a_sentence_when_alone() -> None:
    for sample in samples(lengths=[1000], depths=[0.0, 0.1, 0.33, 0.5, 0.9, 1.0], samples_per_cell=3):
        plain = 1000 - sample.meta["needle_tokens"]
        assert abs(sample.meta["needle_position"] - sample.meta["depth"] * plain) <= LONGEST_SENTENCE / 2 + 1


def test_rest_of_the_context_is_one_stretch_of_the_text() -> None:
    words = Words()
    (sample,) = samples(words=words, lengths=[300], depths=[0.5])
    begin, size = sample.meta["needle_position"], sample.meta["needle_tokens"]
    rest = words.decode(sample.context_tokens[:begin] + sample.context_tokens[begin + size :]).strip()
    assert rest in "\n\n".join(split_documents(documents(DOCUMENTS), "test").values())


def test_same_seed_same_samples_other_seed_others() -> None:
    assert samples(3, lengths=[200, 300], samples_per_cell=2) == samples(3, lengths=[200, 300], samples_per_cell=2)
    assert {s.answer for s in samples(3, lengths=[200])}.isdisjoint(s.answer for s in samples(4, lengths=[200]))


def test_a_wider_grid_changes_no_sample() -> None:
    words = Words()
    few = {s.id: s for s in samples(words=words, lengths=[200])}
    many = {s.id: s for s in samples(words=words, lengths=[200, 400], samples_per_cell=3)}
    assert len(many) == 18
    assert all(many[name] == sample for name, sample in few.items())


def test_shared_contexts_follow_each_other_and_are_equal() -> None:
    found = samples(lengths=[300, 200], depths=[0.1, 0.5, 0.9], needles_per_context=3, samples_per_cell=2)
    runs = [(key, list(group)) for key, group in groupby(found, key=lambda sample: sample.context_id)]
    assert len(runs) == len({key for key, _ in runs}) == 4
    for _, group in runs:
        assert len(group) == 3
        assert all(sample.context_tokens == group[0].context_tokens for sample in group)
        assert len({sample.meta["key"] for sample in group}) == 3
    assert len({sample.id for sample in found}) == len(found)


def test_question_names_its_key_and_never_the_answer() -> None:
    words = Words()
    for sample in samples(words=words, lengths=[300], needles_per_context=3):
        question = words.decode(sample.question_tokens)
        assert sample.meta["key"] in question
        assert sample.answer not in question
        assert words.decode(sample.continuation_tokens) == f" {sample.answer}"


def test_splits_share_no_text_key_or_number() -> None:
    words = Words()
    keys: dict[str, object] = {"lengths": [1000], "depths": [0.2, 0.5], "samples_per_cell": 40}
    test = samples(words=words, split="test", **keys)
    calibration = samples(words=words, split="calibration", **keys)

    def haystack_words(found: list[Sample]) -> set[str]:
        return {word for s in found for word in words.decode(s.context_tokens).split() if word.startswith("doc")}

    assert haystack_words(test)
    assert haystack_words(calibration)
    assert haystack_words(test).isdisjoint(haystack_words(calibration))
    assert {s.answer for s in test}.isdisjoint(s.answer for s in calibration)
    assert set(KEYS["test"]).isdisjoint(KEYS["calibration"])
    for split, found in (("test", test), ("calibration", calibration)):
        low, high = NUMBERS[split]
        assert all(low <= int(s.answer) <= high and len(s.answer) == 7 for s in found)
        assert {s.meta["key"] for s in found} <= set(KEYS[split])
    assert max(NUMBERS["test"]) < min(NUMBERS["calibration"])


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (" 1234567", 1.0),
        (" 1234567.\n\nThe", 1.0),
        ("the number is 1234567 and not 7654321", 1.0),
        (" 1,234,567", 1.0),
        (" 3 of them: 1234567", 1.0),
        (" 1234568", 0.0),
        (" 12345678", 0.0),
        (" 123456", 0.0),
        ("01234567", 0.0),
        (" 7654321, then 1234567", 0.0),
        ("", 0.0),
        ("one two three", 0.0),
    ],
)
def test_score(text: str, score: float) -> None:
    sample = Sample("a", "a", [1], [2], "1234567")
    assert Needle(text=DOCUMENTS).score(text, sample) == score


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_insert_keeps_every_token(data: st.DataObject) -> None:
    stretch = list(range(data.draw(st.integers(0, 30))))
    offsets = data.draw(st.lists(st.integers(0, len(stretch)), max_size=4))
    needles = [[1000 + 10 * at + i for i in range(1 + at)] for at in range(len(offsets))]
    context, positions = insert(stretch, needles, offsets)
    assert [token for token in context if token < 1000] == stretch
    for needle, position, offset in zip(needles, positions, offsets, strict=True):
        assert context[position : position + len(needle)] == needle
        assert len([token for token in context[:position] if token < 1000]) == offset


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lengths": [0]}, "workload.lengths=0"),
        ({"lengths": [-5]}, "workload.lengths=-5"),
        ({"lengths": [2.5]}, "workload.lengths=2.5"),
        ({"lengths": [True]}, "workload.lengths=True"),
        ({"lengths": []}, "workload.lengths"),
        ({"lengths": "2048"}, "workload.lengths"),
        ({"depths": [1.1]}, "workload.depths=1.1"),
        ({"depths": [-0.1]}, "workload.depths=-0.1"),
        ({"depths": [float("nan")]}, "workload.depths=nan"),
        ({"samples_per_cell": 0}, "workload.samples_per_cell=0"),
        ({"needles_per_context": 17}, "workload.needles_per_context=17"),
        ({"max_new_tokens": 0}, "workload.max_new_tokens=0"),
        ({"split": "train"}, "workload.split='train'"),
        ({"needle": "no holes"}, "workload.needle='no holes'"),
        ({"question": "which?"}, "workload.question='which?'"),
    ],
)
def test_bad_values_are_refused_by_name(keys: dict[str, object], words: str) -> None:
    with pytest.raises(WorkloadError, match="^" + words.replace("[", r"\[").replace("?", r"\?")):
        Needle(text=DOCUMENTS, **keys)  # type: ignore[arg-type]


def test_lengths_the_text_or_the_needle_cannot_fill() -> None:
    with pytest.raises(WorkloadError, match="workload.lengths=.*beyond the text"):
        samples(lengths=[10**6])
    with pytest.raises(WorkloadError, match="workload.lengths=5: too short"):
        samples(lengths=[5])


def test_it_is_a_workload() -> None:
    grid = Needle(lengths=[100, 200], text=DOCUMENTS, samples_per_cell=2)
    assert isinstance(grid, Workload)
    assert grid.total_samples == len(samples(lengths=[100, 200], samples_per_cell=2))
    assert grid.max_length_tokens == 200


@pytest.mark.assets
def test_real_tokens_are_exact_too() -> None:
    from transformers import AutoTokenizer

    from testbed.assets import model_path

    tokenizer = AutoTokenizer.from_pretrained(model_path())

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    found = list(Needle(lengths=[2048, 8192], needles_per_context=3).samples(encode, tokenizer.decode, 0))
    assert {len(sample.context_tokens) for sample in found} == {2048, 8192}
    for sample in found:
        begin, size = sample.meta["needle_position"], sample.meta["needle_tokens"]
        text = tokenizer.decode(sample.context_tokens[begin : begin + size])
        assert text == f" The {sample.meta['key']} is {sample.answer}."
        assert len(sample.continuation_tokens) == 8  # a space, then one token a digit


@pytest.mark.parametrize("key", ["lengths", "depths"])
def test_the_same_cell_twice_is_refused(key: str) -> None:
    """Its samples would be the same ones again, counted as new."""
    with pytest.raises(WorkloadError, match=rf"workload\.{key}.*twice"):
        Needle(**{key: [0.5, 0.5] if key == "depths" else [512, 512]})  # type: ignore[arg-type]
