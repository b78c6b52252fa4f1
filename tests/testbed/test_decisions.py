"""The decision log: what is written is read back; what is broken is named; the first difference is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.decisions import (
    FORMATS,
    MODES,
    PHASES,
    READ_FORMATS,
    SCHEMA,
    TIERS,
    DecisionLog,
    Difference,
    Header,
    LogError,
    ModelShape,
    Move,
    Step,
    diff,
)

HEADER = Header(ModelShape("m", 2, 4, 2, 8, 800, 400), 16, "full", 128, 2)
MOVE = Move("L1", "L2", 5, 1, "int4")
STEP = Step(1, "decode", 1, 17, True, {"exact": 4}, {"L0": 10}, {"compute": 3}, (MOVE,), {"L0": 3}, "ab")
LOG = DecisionLog(HEADER, (replace(STEP, phase="compress", tokens=0), STEP))

WHOLE = st.integers(0, 2**50)


def counts(names: tuple[str, ...]) -> st.SearchStrategy[dict[str, int]]:
    return st.dictionaries(st.sampled_from(names), WHOLE)


MOVES = st.builds(
    Move,
    st.sampled_from(TIERS),
    st.sampled_from((*TIERS, "DROPPED")),
    WHOLE,
    WHOLE,
    st.sampled_from(FORMATS),
    st.booleans(),
)
STEPS = st.builds(
    Step,
    WHOLE,
    st.sampled_from(PHASES),
    WHOLE,
    WHOLE,
    st.booleans(),
    counts(MODES),
    counts(TIERS),
    counts(READ_FORMATS),
    st.lists(MOVES, max_size=3).map(tuple),
    counts(TIERS),
    st.text(),
)


@settings(deadline=None, max_examples=50)
@given(steps=st.lists(STEPS, max_size=5), policy=st.text(min_size=1))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, steps: list[Step], policy: str) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    log = DecisionLog(replace(HEADER, policy=policy), tuple(steps))
    log.write(path)
    assert DecisionLog.read(path) == log
    assert diff(log, DecisionLog.read(path)) is None


def test_one_line_a_step(tmp_path: Path) -> None:
    LOG.write(tmp_path / "log.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["header", "step", "step"]
    assert lines[0]["schema"] == SCHEMA
    assert lines[2]["moves"][0] == {
        "from": "L1",
        "to": "L2",
        "bytes": 5,
        "pages": 1,
        "format": "int4",
        "demand": True,
    }
    assert list(tmp_path.iterdir()) == [tmp_path / "log.jsonl"]  # no temporary file left


def test_decode_steps() -> None:
    assert LOG.decode == (STEP,)


def test_size_of_a_weight() -> None:
    assert HEADER.model.bytes_per_weight == 4
    assert replace(HEADER.model, flops_per_token=750).bytes_per_weight == 2


def edited(tmp_path: Path, line: int, edit: Any) -> Path:
    path = tmp_path / "log.jsonl"
    LOG.write(path)
    lines = path.read_text().splitlines()
    raw = json.loads(lines[line])
    changed = edit(raw)
    lines[line] = json.dumps(changed if isinstance(changed, list) else raw)  # most edits change raw in place
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("line", "edit", "message"),
    [
        (0, lambda raw: raw.update(schema=2), "line 1: schema 2, this version reads schema 1 only"),
        (0, lambda raw: raw.update(kind="step"), "line 1: no header"),
        (0, lambda raw: raw.pop("page_tokens"), "missing keys .'page_tokens'"),
        (0, lambda raw: raw.update(page_tokens=0), "page_tokens=0: must be a whole number of at least 1"),
        (0, lambda raw: raw["model"].update(layers=-2), "line 1: model.layers=-2"),
        (0, lambda raw: raw["model"].update(kv_heads=3), "no multiple of kv_heads=3"),
        (0, lambda raw: raw["model"].update(size=3), "unknown keys .'size'"),
        (0, lambda raw: raw.update(model="llama"), "model='llama': must be an object"),
        (1, lambda raw: raw.update(kind="header"), "line 2: not a step"),
        (2, lambda raw: raw.update(phase="sleep"), "line 3: phase='sleep': must be one of prefill"),
        (2, lambda raw: raw.update(tokens=1.5), "line 3: tokens=1.5"),
        (2, lambda raw: raw.update(tokens=True), "line 3: tokens=True"),
        (2, lambda raw: raw.update(planned=1), "planned=1: must be true or false"),
        (2, lambda raw: raw.update(read_bytes={"L9": 1}), "read_bytes name='L9': must be one of L0, L1"),
        (2, lambda raw: raw.update(pages={"exact": -1}), "pages.exact=-1"),
        (2, lambda raw: raw.update(held_bytes=[1]), "held_bytes="),
        (2, lambda raw: raw["moves"][0].update({"to": "L7"}), "move.to='L7'"),
        (2, lambda raw: raw["moves"][0].pop("demand"), "moves: missing keys .'demand'"),
        (2, lambda raw: raw.update(moves={}), "moves=.*: must be a list"),
        (2, lambda raw: raw.update(colour=1), "line 3: missing keys .., unknown keys .'colour'"),
        (2, lambda raw: [raw], "line 3: list, not an object"),
    ],
)
def test_broken_log_names_line_and_key(tmp_path: Path, line: int, edit: Any, message: str) -> None:
    with pytest.raises(LogError, match=message):
        DecisionLog.read(edited(tmp_path, line, edit))


def test_cut_short_at_every_byte(tmp_path: Path) -> None:
    """A file that stops anywhere is refused, or is the whole log up to a line's end."""
    path = tmp_path / "log.jsonl"
    LOG.write(path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        if size and whole[size - 1 : size] == b"\n":
            assert DecisionLog.read(path).steps == LOG.steps[: whole[:size].count(b"\n") - 1]
        else:
            with pytest.raises(LogError):
                DecisionLog.read(path)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\n", b"hello\n", b"[1]\n", b"{}\n", b"null\n"])
def test_not_a_log(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    with pytest.raises(LogError, match=r"log\.jsonl"):
        DecisionLog.read(path)


def test_unreadable_and_unwritable(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="can't read"):
        DecisionLog.read(tmp_path / "none.jsonl")
    with pytest.raises(LogError, match="can't write"):
        LOG.write(tmp_path / "missing" / "log.jsonl")


def test_full_disk_leaves_the_old_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    LOG.write(path)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("testbed.files.os.fsync", full)
    with pytest.raises(LogError, match="No space left"):
        DecisionLog(HEADER, ()).write(path)
    assert DecisionLog.read(path) == LOG
    assert list(tmp_path.iterdir()) == [path]


def test_first_difference() -> None:
    other = replace(STEP, digest="cd", tokens=2)
    assert diff(LOG, replace(LOG, steps=(LOG.steps[0], other))) == Difference(
        1, "tokens: 1 against 2; digest: 'ab' against 'cd'"
    )
    assert diff(LOG, replace(LOG, steps=LOG.steps[:1])) == Difference(1, "2 steps against 1")
    found = diff(LOG, replace(LOG, header=replace(HEADER, policy="h2o")))
    assert found == Difference(None, "policy: 'full' against 'h2o'")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(MOVE, bytes=-1), "move.bytes=-1"),
        (lambda: replace(MOVE, source="DROPPED"), "move.from='DROPPED'"),
        (lambda: replace(MOVE, format="fp8"), "move.format='fp8': must be one of compute, int8, int4"),
        (lambda: replace(MOVE, demand=1), "move.demand=1"),
        (lambda: replace(STEP, moves=({"from": "L1"},)), "must all be Move"),
        (lambda: replace(STEP, digest=3), "digest=3"),
        (lambda: replace(STEP, read_tokens={"compute": 2.0}), "read_tokens.compute=2.0"),
        (lambda: replace(HEADER, policy=""), "policy=''"),
    ],
)
def test_bad_values_are_refused_when_made(make: Any, message: str) -> None:
    with pytest.raises(LogError, match=message):
        make()
