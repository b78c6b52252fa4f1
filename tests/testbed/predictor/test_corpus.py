"""The corpus: what is copied, where windows lie, what agents' sessions become, and that test text never trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import save_model
from word_tokens import prose

from policies.base import Role
from testbed.models import load
from testbed.models.hf import HfDecoder
from testbed.predictor.agents import PHASES, sessions
from testbed.predictor.corpus import (
    COPY_APART_TOKENS,
    COPY_TOKENS,
    Amounts,
    CorpusError,
    Document,
    contents,
    copied,
    corpus_hash,
    documents,
    place,
)
from testbed.workloads.haystack import split_documents

FEW = {"train": Amounts(1, 2, 1, 1), "test": Amounts(1, 1, 1, 1)}
ESSAYS = {f"doc{at}.txt": prose(f"doc{at}", 120) for at in range(12)}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> HfDecoder:
    """A token a byte."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, positions=4096)
    return load(folder, name="tiny")


def lines(path: Path, turns: list[tuple[int, str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    said = [{"timestamp": when, "input": given, "output": out, "session_id": "x"} for when, given, out in turns]
    path.write_text("".join(json.dumps(line) + "\n" for line in said))


def traces(root: Path) -> Path:
    """One session of each kind that trains and one that judges; the lines are not in the order of time."""
    prompt = "task" * 20 + "<instructions>tools" * 30
    result = "<returncode>0</returncode>" * 12
    for name in "ab":
        turns = [
            (3, prompt + result + result, f"end {name}"),
            (1, prompt, "THOUGHT one\n```bash\nls -la\n```\nbye"),
            (2, prompt + result, "THOUGHT two " * 40 + "```bash\ncat x\n```"),
        ]
        lines(root / "traces" / "lmcache_agent" / f"miniswe_{name}.jsonl", turns)
        talk = [
            (1, "Hi!", f"My name is {name}"),
            (2, "My name", "Hello " * 20),
            (3, "Hi!", ""),
            (4, "My", '{"name": 1}'),
        ]
        lines(root / "traces" / "lmcache_agent" / f"taubench_{name}.jsonl", talk)
    return root


def test_session_of_a_software_agent(tmp_path: Path) -> None:
    found = {session.name: session for session in sessions(traces(tmp_path), lambda text: [ord(x) for x in text])}
    pieces = found["miniswe_a"].pieces
    text = [("".join(map(chr, piece.tokens)), piece.role, piece.phase) for piece in pieces]
    assert text[0] == ("task" * 20, Role.USER, "instruction")
    assert text[1] == ("<instructions>tools" * 30, Role.TOOL, "instruction")
    assert text[3:6] == [
        ("THOUGHT one\n", Role.GENERATED, "answer"),
        ("```bash\nls -la\n```", Role.GENERATED, "tool_call"),
        ("\nbye", Role.GENERATED, "answer"),
    ]
    assert text[6] == ("<returncode>0</returncode>" * 12, Role.RESULT, "instruction")
    assert text[-1] == ("end a", Role.GENERATED, "answer")
    assert [found[name].judges for name in ("miniswe_a", "miniswe_b", "taubench_a", "taubench_b")] == [0, 1, 0, 1]


def test_session_of_customer_and_agent(tmp_path: Path) -> None:
    found = {session.name: session for session in sessions(traces(tmp_path), lambda text: [ord(x) for x in text])}
    said = [("".join(map(chr, piece.tokens)), piece.role, piece.phase) for piece in found["taubench_b"].pieces]
    assert said == [
        ("Assistant: Hi!", Role.SYSTEM, "instruction"),
        ("\n\nUser: My name is b", Role.USER, "instruction"),
        ("\n\nAssistant: ", Role.GENERATED, "answer"),
        ("Hello " * 20, Role.GENERATED, "answer"),
        ("\n\nAssistant: ", Role.GENERATED, "answer"),
        ('{"name": 1}', Role.GENERATED, "tool_call"),
    ]


def test_no_test_text_trains(decoder: HfDecoder, tmp_path: Path) -> None:
    corpus = documents(decoder, 1024, windows=2, window_tokens=8, amounts=FEW, text=ESSAYS, data=traces(tmp_path))
    train, test = ([each for each in corpus if each.part == part] for part in ("train", "test"))
    assert [each.kind for each in train] == ["essay", "code", "code", "agent", "needle"]
    assert [each.kind for each in test] == ["essay", "code", "agent", "needle"]
    held_out = "".join(split_documents(ESSAYS, "test").values())
    for each in train:
        if each.kind in ("essay", "needle"):
            words = decoder.decode(each.tokens).split()
            assert not any(word in held_out for word in words if "x" in word and word.startswith("doc"))
        assert each.name not in {other.name for other in test if other.kind != "needle"}
    needle = next(each for each in test if each.kind == "needle")
    text, windows = decoder.decode(needle.tokens), needle.windows
    answer = text[windows[-1][0] + 1 : windows[-1][1] + 1]  # a step predicts the next token
    assert answer in text[: windows[0][0]]
    assert 1_000_000 <= int(answer[-7:]) <= 6_999_999
    assert [PHASES[needle.phases[at + 1]] for at in range(*windows[-1])] == ["retrieval"] * 8


def test_absent_sessions_are_told_and_hashed(
    decoder: HfDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("TESTBED_DATA", str(tmp_path / "empty"))
    amounts = {"train": Amounts(1, 0, 1, 0), "test": Amounts(1, 0, 1, 0)}
    without = documents(decoder, 1024, amounts=amounts, text=ESSAYS)
    with_them = documents(decoder, 1024, amounts=amounts, text=ESSAYS, data=traces(tmp_path))
    assert "no agents' sessions" in contents(without)
    assert "no agents' sessions" not in contents(with_them)
    assert corpus_hash(without) != corpus_hash(with_them)
    assert corpus_hash(without) == corpus_hash(documents(decoder, 1024, amounts=amounts, text=ESSAYS))
    whole = documents(decoder, 1024, amounts=amounts, text=ESSAYS, windows=0)
    assert [each.windows for each in whole] == [(), ()]
    assert whole[0].context_tokens == len(whole[0].tokens) >= 512


def test_bad_corpora(decoder: HfDecoder) -> None:
    with pytest.raises(CorpusError, match="length_tokens=100: must be at least 1024"):
        documents(decoder, 100)
    with pytest.raises(CorpusError, match="document x: 3 tokens, 2 roles, 3 phases"):
        Document("x", "code", "train", [1, 2, 3], [0, 0], [0, 0, 0])
    with pytest.raises(CorpusError, match="document x: windows"):
        Document("x", "code", "train", [1, 2, 3], [0] * 3, [0] * 3, ((1, 3),))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 1), min_size=8, max_size=40), st.integers(0, 60), st.integers(0, 200), st.integers(0, 5))
def test_copied_runs(run: list[int], before: int, between: int, seed: int) -> None:
    """Against the definition, written out."""
    apart = [1000 + at for at in range(COPY_APART_TOKENS - 40 + between)]
    tokens = [*range(10, 10 + before), *run, *apart, *run, *range(5000, 5000 + seed)]
    expected = [False] * len(tokens)
    for begin in range(len(tokens) - COPY_TOKENS + 1):
        for earlier in range(begin - COPY_APART_TOKENS + 1):
            if tokens[earlier : earlier + COPY_TOKENS] == tokens[begin : begin + COPY_TOKENS]:
                expected[begin : begin + COPY_TOKENS] = [True] * COPY_TOKENS
    assert copied(tokens) == expected


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 150)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 20),
)
def test_windows_are_apart_and_show_every_phase(runs: list[tuple[int, int]], windows: int, window_tokens: int) -> None:
    phases = [0] * 50 + [phase for phase, length in runs for _ in range(length)]
    found = place(phases, 50, windows, window_tokens)
    assert len(found) <= windows
    ends = [49, *(at for window in found for at in window)]
    assert ends == sorted(ends)
    assert all(end - begin == window_tokens and end < len(phases) for begin, end in found)
    possible = {phases[at] for at in range(50, len(phases)) if at - 1 <= len(phases) - window_tokens - 1}
    if len(possible) == 1 and found:
        assert {phases[begin + 1] for begin, _ in found} == possible
    assert bool(found) == bool(possible)
