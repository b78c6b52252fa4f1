"""Conversations: exact lengths, facts where they are said to be, told before they are asked for, roles, bad values."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from word_tokens import DOCUMENTS, Words

from policies.base import Role
from testbed.workloads.base import Sample, Turn, WorkloadError
from testbed.workloads.conversation import MOST_TURNS, Conversation


def samples(seed: int = 0, words: Words | None = None, **keys: object) -> list[Sample]:
    words = words or Words()
    work = Conversation(text=DOCUMENTS, **keys)  # type: ignore[arg-type]
    return list(work.samples(words.encode, words.decode, seed))


def said_before(sample: Sample) -> list[int]:
    return sample.context_tokens + [token for turn in sample.history for token in turn.tokens]


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(120, 1500),
    turns=st.integers(1, MOST_TURNS),
    turn_tokens=st.integers(12, 200),
    documents=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_lengths_are_exact_and_every_fact_stands_where_it_says(
    length: int, turns: int, turn_tokens: int, documents: int, seed: int
) -> None:
    words = Words()
    found = samples(seed, words, lengths=[length], turns=turns, turn_tokens=turn_tokens, documents=documents)
    assert len(found) == turns
    for at, sample in enumerate(found):
        assert len(sample.context_tokens) == length
        text = said_before(sample)
        assert len(text) == length + sample.history_tokens
        begin, size = sample.meta["needle_position"], sample.meta["needle_tokens"]
        assert words.decode(text[begin : begin + size]) == f" The {sample.meta['key']} is {sample.answer}."
        assert words.decode(text).count(sample.answer) == 1  # said once, before it is asked for
        assert sample.meta["distance_tokens"] == len(text) - begin
        told = [turn for turn in sample.history if len(turn.tokens) == turn_tokens and turn.role == Role.USER]
        assert len(told) >= at + 1
        roles = [*sample.roles, *(turn.role for turn in sample.history for _ in turn.tokens)]  # type: ignore[misc]
        expected = {"document": Role.DOCUMENT, "tool": Role.RESULT, "user": Role.USER}[sample.meta["asked_about"]]
        assert set(roles[begin : begin + size]) == {expected}


def test_history_of_a_question_is_what_was_asked_and_answered_before() -> None:
    for _, group in groupby(samples(samples_per_length=2, lengths=[300, 400]), key=lambda sample: sample.context_id):
        before: Sample | None = None
        for sample in group:
            if before is not None:
                asked = (
                    Turn(before.question_tokens, Role.USER),
                    Turn(before.continuation_tokens, Role.GENERATED, True),
                )
                assert sample.history[:-1] == before.history + asked
                assert sample.context_tokens == before.context_tokens
            before = sample


def test_context_holds_system_prompt_documents_and_tool_result_in_order() -> None:
    words = Words()
    (sample,) = samples(words=words, lengths=[400], turns=1, documents=3)
    assert sample.roles is not None
    order = [role for role, _ in groupby(sample.roles)]
    assert order == [Role.SYSTEM, Role.DOCUMENT, Role.RESULT]
    text = words.decode(sample.context_tokens)
    assert [text.count(f"Document {at}:") for at in range(1, 5)] == [1, 1, 1, 0]


def test_same_seed_same_samples_and_lengths_do_not_disturb_each_other() -> None:
    words = Words()
    one = samples(3, words, lengths=[300])
    both = samples(3, words, lengths=[400, 300])
    assert [x for x in both if x.meta["length_tokens"] == 300] == one
    assert samples(4, words, lengths=[300]) != one


def test_pauses_are_as_wanted() -> None:
    for pause in (True, False):
        last = samples(lengths=[300], pause=pause)[-1]
        assert [turn.pause for turn in last.history if turn.role == Role.GENERATED] == [pause] * 3
        assert not any(turn.pause for turn in last.history if turn.role == Role.USER)


def test_score() -> None:
    (sample,) = samples(turns=1, lengths=[300])
    work = Conversation(text=DOCUMENTS)
    assert work.score(f"it is {sample.answer}, I think 1234567", sample) == 1.0
    assert work.score("1234567", sample) == 0.0
    assert work.score("", sample) == 0.0


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"turns": MOST_TURNS + 1}, f"workload.turns={MOST_TURNS + 1}: at most {MOST_TURNS}"),
        ({"turns": 0}, "workload.turns=0"),
        ({"turn_tokens": -1}, "workload.turn_tokens=-1"),
        ({"documents": 1.5}, "workload.documents=1.5"),
        ({"pause": "yes"}, "workload.pause='yes': must be true or false"),
        ({"lengths": []}, "workload.lengths="),
        ({"lengths": [300, 300]}, "workload.lengths=.*twice"),
        ({"split": "train"}, "workload.split='train'"),
        ({"lengths": [20]}, "workload.lengths=20: too short for 3 documents; at least"),
        ({"turn_tokens": 3, "lengths": [300]}, "workload.turn_tokens=3: too short for a fact"),
        ({"lengths": [10**6]}, "workload.lengths=.*beyond the text"),
    ],
)
def test_bad_values(keys: dict[str, object], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        samples(**keys)  # type: ignore[arg-type]


def test_an_empty_turn_is_refused() -> None:
    with pytest.raises(WorkloadError, match="without tokens"):
        Turn([], int(Role.USER))
