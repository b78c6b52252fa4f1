"""Texts of the tasks: which rows ask, and for what."""

from __future__ import annotations

import io
import sysconfig
import tokenize
from pathlib import Path

import numpy as np
import pytest
from tiny_run import save_model

from policies.base import Role
from testbed.heads.brackets import matched
from testbed.heads.calibration import CalibrationConfig, CalibrationError
from testbed.heads.tasks import code_group, dialogue_group, induction_group, needle_group, other_language_group
from testbed.heads.texts import spoken, standard_modules, texts
from testbed.models import load
from testbed.models.hf import HfDecoder

CONFIG = CalibrationConfig(
    needle_lengths=(400,),
    needle_samples_per_cell=1,
    text_tokens=500,
    text_samples=2,
    local_window_tokens=64,
    long_range_tokens=128,
    edge_window_tokens=100,
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> HfDecoder:
    """A token a byte."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, positions=4096)
    return load(folder, name="tiny")


@pytest.fixture(autouse=True)
def own_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    body = " ".join(f"Sentence {at} says nothing at all." for at in range(200))
    for name in ("essays", "foreign_texts"):
        monkeypatch.setattr(f"testbed.assets.{name}", lambda: {f"essay{at}.txt": body for at in range(12)})
    monkeypatch.setenv("TESTBED_DATA", str(tmp_path))


def by_tokenize(source: str) -> set[tuple[int, int]]:
    """Characters of matching brackets and of single quotes, by Python's own tokenizer."""
    starts = np.cumsum([0, *(len(line) for line in source.splitlines(keepends=True))])
    open_at: list[int] = []
    pairs = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        begin = int(starts[token.start[0] - 1]) + token.start[1]
        end = int(starts[token.end[0] - 1]) + token.end[1]
        if token.type == tokenize.OP and token.string in "([{":
            open_at.append(begin)
        elif token.type == tokenize.OP and token.string in ")]}":
            pairs.add((open_at.pop(), begin))
        elif token.type == tokenize.STRING:
            quote = token.string.lstrip("rRbBfFuU")
            if quote[:3] not in ("'''", '"""'):
                pairs.add((end - len(quote), end - 1))
    return pairs


@pytest.mark.parametrize("module", ["argparse.py", "textwrap.py", "tokenize.py"])
def test_brackets_are_those_of_pythons_tokenizer(module: str) -> None:
    """A piece a character: then every pair that is far enough apart counts."""
    source = (Path(sysconfig.get_path("stdlib")) / module).read_text(encoding="utf-8")
    expected = {(opening, closing) for opening, closing in by_tokenize(source) if closing - opening >= 6}
    assert len(expected) > 100
    assert set(matched(source, 6)) == expected
    cut = len(source) // 2  # the text may end anywhere
    assert set(matched(source[:cut], 6)) <= expected


def test_tokens_with_two_brackets_do_not_count() -> None:
    pieces = ["f", "(", "a", ", ", "b", "([", "1", "]", ")", " + 'x", " y", " z", "' ", ")", " # ("]
    assert matched(pieces, 1) == [(9, 12), (1, 13)]
    assert matched(pieces, 4) == [(1, 13)]
    assert matched([*pieces, "\n", ")", "(", "1", ")"], 1) == [(9, 12), (1, 13)]  # no Python from there on
    assert matched(["((", "a", "))"], 1) == []
    assert matched(["('", "a", "' ", ")"], 1) == [(0, 2), (0, 3)]
    assert matched(["(", "'", "a", "')"], 1) == [(0, 3)]  # closes both: the later pair


def test_code_asks_for_opening_brackets(decoder: HfDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testbed.heads.texts.MODULE_BYTES", (16_000, 18_000))  # a few
    made = texts("code", decoder, 3000, 2, 0)
    modules = [path.read_text(encoding="utf-8") for path in standard_modules()]
    for text in made:
        source = decoder.decode(text.tokens)
        assert len(text.tokens) == text.context_tokens == 3000
        (module,) = [module for module in modules if source in module]
        asking = text.asks["head_bracket"]
        for row, spans in zip(asking.rows, asking.spans, strict=True):
            ((begin, end),) = spans
            assert end == begin + 1
            assert source[begin] + source[row] in ("()", "[]", "{}", "''", '""')
        assert module.count("(") > 3
    assert made[0].tokens != made[1].tokens
    assert [text.tokens for text in texts("code", decoder, 3000, 2, 0)] == [text.tokens for text in made]
    with pytest.raises(CalibrationError, match=r"code: 999 modules .* asked for, the library has \d+"):
        texts("code", decoder, 3000, 999, 0)


def test_induction_asks_for_what_came_after_the_token(decoder: HfDecoder) -> None:
    first, second = texts("induction", decoder, 300, 2, 0)
    assert first.tokens != second.tokens
    assert len(set(first.tokens[:150])) == 150
    asking = first.asks["head_induction"]
    assert asking.rows == tuple(range(150, 300))
    for row, spans in zip(asking.rows, asking.spans, strict=True):
        (begin, _), *more = spans
        assert not more
        assert first.tokens[begin - 1] == first.tokens[row]
        assert begin <= row
    long = texts("induction", decoder, 1000, 1, 0)[0]  # more than twice the vocabulary
    assert len(long.asks["head_induction"].spans[-1]) == len(long.tokens) // len(set(long.tokens)) - 1 > 1


def test_generated_tokens_ask_for_the_last_result_and_the_orders() -> None:
    roles = [Role.SYSTEM] * 2 + [Role.TOOL] + [Role.USER] * 3 + [Role.GENERATED] * 2
    roles += [Role.RESULT] * 4 + [Role.GENERATED] * 2 + [Role.RESULT] * 2 + [Role.USER] + [Role.GENERATED]
    text = spoken(list(range(len(roles))), [int(role) for role in roles])
    follow, result = text.asks["head_role_following"], text.asks["head_tool_result"]
    assert follow.rows == (6, 7, 12, 13, 17)
    assert follow.spans == (((0, 2), (3, 6)),) * 4 + (((0, 2), (3, 6), (16, 17)),)
    assert result.rows == (12, 13, 17)
    assert result.spans == (((8, 12),), ((8, 12),), ((14, 16),))
    assert not spoken([1, 2], [int(Role.USER)] * 2).asks


def test_dialogue_without_traces_is_made_up(decoder: HfDecoder) -> None:
    for text in texts("dialogue", decoder, 600, 2, 0):
        assert text.roles is not None
        for row in text.asks["head_tool_result"].rows:
            assert text.roles[row] == Role.GENERATED
        ((begin, end),) = set(text.asks["head_tool_result"].spans[0])
        assert "Result of the search" in decoder.decode(text.tokens[begin:end])


def test_dialogue_from_traces(decoder: HfDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "traces" / "lmcache_agent"
    folder.mkdir(parents=True)
    steps = ["Task: mend it. " * 9, "\n<output>one</output>", "\n<output>two</output>"]
    for name in "abc":
        lines = [
            f'{{"timestamp": {at}, "input": {"".join(steps[: at + 1])!r}, "output": "say {at} {name} ```bash ls``` "}}'
            for at in range(3)
        ]
        body = "\n".join(line.replace("'", '"').replace('"T', '"T') for line in lines)
        (folder / f"miniswe_{name}.jsonl").write_text(body.replace("\n<output>", "\\n<output>"))
    monkeypatch.setenv("TESTBED_DATA", str(tmp_path))
    made = texts("dialogue", decoder, 200, 2, 0)  # b is one that judges the predictor
    said = [decoder.decode(text.tokens) for text in made]
    (more,) = [text for text in texts("dialogue", decoder, 600, 1, 0) if "say 0" not in decoder.decode(text.tokens)]
    assert "Result of the search" in decoder.decode(more.tokens)  # the sessions are not that long
    assert sorted(("say 0 a" in each, "say 0 c" in each) for each in said) == [(False, True), (True, False)]
    assert all(set(text.asks) == {"head_tool_result", "head_role_following"} for text in made)


def test_groups_give_their_measures(decoder: HfDecoder) -> None:
    own = {
        induction_group: ("induction", "head_induction", "share"),
        code_group: ("code", "head_bracket", "share"),
        dialogue_group: ("dialogue", "head_role_following", "ratio"),
        needle_group: ("needle", "head_local_ratio_copying", "share"),
    }
    for group, (task, name, unit) in own.items():
        made = group(decoder, CONFIG, lambda part: None)
        assert made[name].unit == unit
        assert made[name].task == made[f"head_entropy@{task}"].task == task
        assert made[name].samples == (1 if task == "needle" else 2)
    # Random weights attend to all alike: mass is the share of tokens.
    assert made["head_local_ratio_copying"].value.mean() == pytest.approx(64 / 450, abs=0.03)
    foreign = other_language_group(decoder, CONFIG, lambda part: None)
    assert set(foreign) == {name for name in made if "@" in name for name in [name.replace("needle", "other_language")]}


def test_unknown_task(decoder: HfDecoder) -> None:
    with pytest.raises(CalibrationError, match="task='poems': must be one of text, needle, induction"):
        texts("poems", decoder, 100, 1, 0)
