"""Head maps of others: read, checked and written again to the byte; what they become inside a policy."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tiny_heads import tiny

from policies.base import Head
from testbed.engine.signals import Observed, SignalContext, SignalError, build_sources
from testbed.heads import formats
from testbed.heads.convert import KINDS, convert
from testbed.heads.formats import FormatError, load, read, render
from testbed.heads.headmap import HeadMap, Measured
from testbed.heads.published import PublishedError, headmaps
from testbed.heads.words import Words

GATES = "1.000000000000000000e+00\t-9.584426879882812500e-05\n5.000000000000000000e-01\t4.375000000000000000e-01\n"
REDKNOT: dict[str, Any] = {
    "model": "toy",
    "rationale": "前 1 层",
    "num_layers": 3,
    "num_kv_heads": 2,
    "num_q_heads": 4,
    "kv_head_classification": [["local", "global"], ["retrieval", "local_full"], ["dense", "streaming"]],
    "kv_head_max_distance": [[96, -1], [-1, 128], [-1, 0]],
    "kv_head_sink_size": [[4, 4], [4, 8], [0, 4]],
}
HEADKV = {
    "1-1": [0.25, 0.5],
    "0-3": [0.1],
    "0-0": [0],
    "0-1": [3],
    "0-2": [1.5],
    "1-0": [0.0],
    "1-3": [2],
    "1-2": [2.5],
}


def written(folder: Path, content: object, name: str = "map.json", **options: Any) -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content, **options), encoding="utf-8")
    return str(path)


def published_files() -> list[Path]:
    try:
        folder = headmaps()
    except PublishedError:
        return []
    return sorted(path for path in folder.glob("*/*") if not path.name.endswith(".config.json"))


def test_published_files_come_back_to_the_byte(tmp_path: Path) -> None:
    files = published_files()
    if not files:
        pytest.skip("the published head maps are not here (TESTBED_DATA)")
    assert len(files) >= 9
    for path in files:
        formats.write(read(path), tmp_path / path.name)
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    "options", [{"indent": 2}, {"indent": 4}, {"indent": 1}, {}, {"indent": 2, "ensure_ascii": False}]
)
@pytest.mark.parametrize("document", [REDKNOT, HEADKV], ids=["redknot", "headkv"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_json_comes_back_to_the_byte(tmp_path: Path, document: Any, options: dict[str, Any], end: str) -> None:
    text = json.dumps(document, **options) + end
    assert render(read(written(tmp_path, text))) == text


def test_json_written_by_hand_comes_back_to_the_value(tmp_path: Path) -> None:
    text = "{'0-0':   [.5]}".replace("'", '"').replace(".5", "0.5e0")
    assert json.loads(render(read(written(tmp_path, text)))) == {"0-0": [0.5]}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=3, max_size=3), min_size=1, max_size=4)
)
def test_gates_come_back_to_the_byte(gates: list[list[float]]) -> None:
    text = "".join("\t".join(f"{gate:.18e}" for gate in row) + "\n" for row in gates)
    imported = formats.parse_duoattention(text, "gates")
    assert render(imported) == text
    assert imported.score.tolist() == gates


def test_redknot_classes_windows_and_sinks(tmp_path: Path) -> None:
    local, everything, special, dense = Head.LOCAL, Head.GLOBAL, Head.SPECIAL, Head.DENSE
    imported = read(written(tmp_path, REDKNOT))
    assert imported.head_classes().tolist() == [[local, everything], [special, local], [dense, local]]
    assert imported.score.tolist() == [[0, 1], [0.5, 0], [1, 0]]
    assert imported.windows().tolist() == [[96, 0], [0, 128], [0, 512]]  # 512: RedKnot's default
    assert imported.sink_tokens is not None
    assert imported.sink_tokens.tolist() == [[4, 4], [4, 8], [0, 4]]
    first = read(written(tmp_path, {**REDKNOT, "dense_prefix_layers": 1}))
    assert first.head_classes().tolist() == [[dense, dense], [special, local], [dense, local]]
    assert first.windows()[0].tolist() == [0, 0]


def test_headkv_scores_are_means_and_kv_heads_take_the_maximum_of_their_group(tmp_path: Path) -> None:
    imported = read(written(tmp_path, HEADKV))
    assert imported.score.tolist() == [[0, 3, 1.5, 0.1], [0, 0.375, 2.5, 2]]
    assert imported.per_kv_head(2).score.tolist() == [[3, 1.5], [0.375, 2.5]]
    with pytest.raises(FormatError, match="4 query heads don't make 3 equal groups"):
        imported.per_kv_head(3)
    with pytest.raises(FormatError, match="scores query heads"):
        imported.head_classes(0.5)


def test_scores_become_classes_by_threshold_or_share(tmp_path: Path) -> None:
    gates = read(written(tmp_path, GATES, "gates.tsv"))
    local, everything = Head.LOCAL, Head.GLOBAL
    assert gates.head_classes().tolist() == [[everything, local], [everything, local]]
    assert gates.head_classes(0.75).tolist() == [[everything, local], [everything, everything]]
    assert gates.head_classes(0.0).tolist() == [[local, local], [local, local]]
    with pytest.raises(FormatError, match="global_share=1.5"):
        gates.head_classes(1.5)
    with pytest.raises(FormatError, match="global_share must say"):
        read(written(tmp_path, HEADKV)).per_kv_head(2).head_classes()
    with pytest.raises(FormatError, match="global_share=0.5 can't be followed"):
        read(written(tmp_path, REDKNOT)).head_classes(0.5)


def ours(folder: Path) -> str:
    scores = [torch.tensor([[[0.5, 0.25], [1.0, 0.0]], [[0.0, 0.125], [0.75, 0.5]]])]
    measures = {name: Measured.of(scores, "needle", "share") for name in ("retrieval_score", "head_local_ratio")}
    path = folder / "ours.json"
    HeadMap("toy", "abc", 2, 2, 4, measures, {}).write(path)
    return str(path)


def test_ours_goes_through_every_format_and_back(tmp_path: Path) -> None:
    source = ours(tmp_path)
    score = [[0.5, 1.0], [0.125, 0.75]]
    assert load(source).score.tolist() == score
    assert load(f"{source}:-head_local_ratio").score.tolist() == [[-x for x in row] for row in score]
    for target, options in (("duo.tsv", {}), ("kv.json", {"to": "headkv"})):
        convert(source, tmp_path / target, Words((), options))
        assert load(str(tmp_path / target), kv_heads=2).score.tolist() == score, target
    convert(source, tmp_path / "red.json", Words((), {"to": "redknot", "global_share": 0.5, "window_tokens": 64}))
    back = read(tmp_path / "red.json")
    assert back.head_classes().tolist() == [[Head.LOCAL, Head.GLOBAL], [Head.LOCAL, Head.GLOBAL]]
    assert back.windows().tolist() == [[64, 0], [64, 0]]


def test_every_foreign_format_becomes_every_other(tmp_path: Path) -> None:
    sources = {
        "duoattention": written(tmp_path, GATES, "a.tsv"),
        "redknot": written(tmp_path, REDKNOT, "b.json"),
        "headkv": written(tmp_path, HEADKV, "c.json"),
    }
    needs: dict[str, dict[str, Any]] = {
        "duoattention": {},
        "headkv": {"query_heads": 4},
        "redknot": {"global_share": 0.5},
    }
    for kind, source in sources.items():
        first = load(source, kv_heads=2)
        for to, options in needs.items():
            given = {} if to == kind else options
            if (kind, to) in (("duoattention", "redknot"), ("redknot", "redknot")):
                given = {}
            made = convert(source, tmp_path / "out", Words((), {"to": to, "kv_heads": 2, **given}))
            again = load(str(tmp_path / "out"), kv_heads=2)
            if to == "redknot":
                assert torch.equal(again.head_classes(), first.head_classes(given.get("global_share"))), (kind, to)
            else:
                assert torch.equal(again.score, first.score), (kind, to)
            assert made.kind == to
            if to == kind:
                assert (tmp_path / "out").read_text() == Path(source).read_text(), kind


def broken_redknot(**changes: Any) -> dict[str, Any]:
    return {**REDKNOT, **changes}


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (
            broken_redknot(kv_head_classification=[["local", "globl"], *REDKNOT["kv_head_classification"][1:]]),
            "'globl'",
        ),
        (broken_redknot(num_layers=4), "kv_head_classification must hold 4 lists of 2"),
        (broken_redknot(num_kv_heads="2"), "num_kv_heads='2'"),
        (broken_redknot(kv_head_max_distance=[[96, -1], [-1, 128], [-1, 1.5]]), "layer 2, head 1 is 1.5"),
        (broken_redknot(kv_head_sink_size=[[4, 4], [4, -8], [0, 4]]), "layer 1, head 1 is -8"),
        ({"0-0": [1], "1-1": [1], "0-1": [2]}, "1-0 is missing"),
        ({"0-0": []}, "must be a list of numbers"),
        ({"0-0": ["x"]}, "must be a list of numbers"),
        ('{"0-0": [NaN]}', "holds NaN"),
        ('{"0-0": [1], "0-0": [2]}', "'0-0' is given twice"),
        ('{"0-0": [1]', "no JSON"),
        ({"something": 1}, "no head map"),
        ([1, 2], "no head map"),
        ("1.0\t2.0\n3.0\n", "line 2 has 1 gates, line 1 has 2"),
        ("1.0\tnan\n", "layer 0, head 1 is nan"),
        ("1.0\tabc\n", "line 1 holds no row of gates"),
        ("1.0\t2.0\n\n3.0\t4.0\n", "line 2 has 0 gates, line 1 has 2"),
        ("\n1.0\n", "line 1 has 0 gates, line 1 has 0"),
        ("", "empty"),
        (" \n\n", "empty"),
        ("5", "holds one number, no map of heads"),
        ({"0-0": [1], "00-0": [2], "0-1": [3]}, "00-0 names layer 0, head 0 a second time"),
        ({"0-0": [1], "\u0660-0": [2], "0-1": [3]}, "no head map"),
        ({"9" * 5000 + "-0": [1]}, "no head map"),
        ({"0-0": [1e308, 1e308, 1e308]}, "0-0 holds numbers too large to add up"),
        ({"0-0": [10**400]}, "0-0 holds .* must be a list of numbers"),
        ('{"0-0": [' + "9" * 5000 + "]}", "no JSON"),
        ('{"a":' * 100_000, "no JSON"),
        (broken_redknot(kv_head_classification=[[["local"], "local"]] * 3), r"is of class \['local'\]; known"),
        (broken_redknot(kv_head_classification=[[{}, "local"]] * 3), "is of class {}; known"),
        (broken_redknot(kv_head_max_distance=[[10**30, -1], [-1, 1], [-1, 1]]), "head 0 is 10+, must be a whole"),
        (broken_redknot(kv_head_sink_size=[[4, 4], [4, 2**63], [0, 4]]), "layer 1, head 1 is 9223372036854775808"),
    ],
)
def test_broken_files_are_refused_by_name(tmp_path: Path, content: object, error: str) -> None:
    with pytest.raises(FormatError, match=error) as caught:
        load(written(tmp_path, content))
    assert "map.json" in str(caught.value)


def test_nesting_of_any_depth_is_refused_by_name(tmp_path: Path) -> None:
    """Python reads a little more than it writes, so that some depths can be read and not written."""
    texts = ['{"kv_head_classification": ' + "[" * depth + "]" * depth + "}" for depth in range(1, 140)]
    paths = [written(tmp_path, text, f"{at}.json") for at, text in enumerate(texts)]
    limit, said = sys.getrecursionlimit(), []
    sys.setrecursionlimit(len(inspect.stack()) + 120)  # Python's own takes a minute to reach
    try:
        for path in paths:
            with pytest.raises(FormatError) as caught:
                load(path)
            said.append((path, str(caught.value)))
    finally:
        sys.setrecursionlimit(limit)
    assert all(error.startswith(f"{path}: ") for path, error in said)
    for words in ("num_layers=None", "nested too deeply", "no JSON"):
        assert any(words in error for _, error in said), words


@pytest.mark.parametrize("content", [GATES, REDKNOT, HEADKV], ids=["duoattention", "redknot", "headkv"])
def test_files_of_other_systems_are_read(tmp_path: Path, content: object) -> None:
    """With a byte order mark, and with carriage returns at the ends of lines; written again they have neither."""
    plain = written(tmp_path, content, "plain", **({} if isinstance(content, str) else {"indent": 2}))
    data = Path(plain).read_bytes()
    (tmp_path / "other").write_bytes(b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"))
    found = load(str(tmp_path / "other"))
    assert found.kind == load(plain).kind
    assert torch.equal(found.score, load(plain).score)
    assert render(found).encode() == data


def test_numbers_that_are_no_gates_have_no_threshold(tmp_path: Path) -> None:
    scores = load(written(tmp_path, "-0.1\t0.7\n0.5\t0.2\n"))
    with pytest.raises(FormatError, match=r"map: numbers from -0.1 to 0.7 are no gates.* global_share"):
        scores.head_classes()
    with pytest.raises(FormatError, match=r"numbers from 0.5 to 5 are no gates"):
        load(written(tmp_path, "0.5\t5\n")).head_classes()
    assert scores.head_classes(0.25).tolist() == [[Head.LOCAL, Head.GLOBAL], [Head.LOCAL, Head.LOCAL]]


def test_words_that_name_no_map_are_refused(tmp_path: Path) -> None:
    source = ours(tmp_path)
    with pytest.raises(FormatError, match=r"gone.json: No such file"):
        load(str(tmp_path / "gone.json"))
    with pytest.raises(FormatError, match="no measure 'head_entropy'; it has head_local_ratio, retrieval_score"):
        load(f"{source}:head_entropy")
    with pytest.raises(FormatError, match="only our own head maps have measures"):
        load(written(tmp_path, HEADKV) + ":retrieval_score")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="not a text file"):
        load(str(tmp_path / "binary"))


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["in", "out"], "to=None: must be one of duoattention, headkv, redknot"),
        (["in", "out", "to=csv"], "to=csv"),
        (["in"], "takes two files"),
        (["in", "out.tsv", "window_tokens=4"], "window_tokens means nothing to duoattention"),
        (["in", "out", "to=headkv"], "query_heads"),
        (["in", "out", "to=headkv", "query_heads=5"], "query_heads=5: must be a multiple of the 2 KV heads"),
        (["in", "out", "to=headkv", "heads=5"], "unknown key 'heads'"),
        (["in", "out", "to=headkv", "query_heads=x"], "query_heads=x"),
        (["in", "out", "to=headkv", "to=headkv"], "to is given twice"),
        (["in", "out", "to=headkv", "query_heads=0"], "query_heads=0: must be a whole number of at least 1"),
        (["in", "out", "to=headkv", "query_heads=-4"], "query_heads=-4: must be a whole number of at least 1"),
        (["in", "out", "to=redknot", "window_tokens=0"], "window_tokens=0: must be a whole number of at least 1"),
        (["in", "out", "to=redknot", "window_tokens=-1"], "window_tokens=-1: must be a whole number of at least 1"),
        (["in", "out", "to=redknot", f"window_tokens={10**30}"], "window_tokens=10+: must be a whole number"),
        (["in", "out", "to=redknot", "sink_tokens=-1"], "sink_tokens=-1: must be a whole number of at least 0"),
        (["in", "out", "to=redknot", "kv_heads=77"], "gates: 2 KV heads a layer, must be 77"),
        (["red", "out", "to=redknot", "window_tokens=8"], "red states windows and sinks, so window_tokens=8 can't be"),
        (["red", "out", "to=redknot", "sink_tokens=8"], "red states windows and sinks, so sink_tokens=8 can't be"),
        (["red", "out", "to=headkv", "query_heads=8"], "query_heads=8: red says that there are 4"),
        (["kv", "out", "to=headkv", "query_heads=64"], "query_heads=64: kv says that there are 4"),
        (["kv", "out", "to=headkv", "kv_heads=3"], "4 query heads don't make 3 equal groups"),
    ],
)
def test_conversions_that_make_no_sense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "in": written(tmp_path, GATES, "gates.tsv"),
        "red": written(tmp_path, REDKNOT, "red.json"),
        "kv": written(tmp_path, HEADKV, "kv.json"),
    }
    from testbed.heads.convert import main

    with pytest.raises(FormatError, match=error):
        main([files.get(arg, arg) for arg in args])
    assert not Path("out").exists()
    assert set(KINDS) >= {"to", "kv_heads"}


def imported_signals(name: str, **options: Any) -> torch.Tensor:
    overrides = OmegaConf.to_container(OmegaConf.create({name: options}))
    assert isinstance(overrides, dict)
    sources = build_sources(frozenset({name}), SignalContext(16, dict), overrides)  # type: ignore[arg-type]
    source = sources[name]
    shape = (3, 2, 5) if str(options["path"]).endswith("map.json") else (2, 2, 5)
    observed = Observed(shape, 16, lambda: (torch.zeros(0), torch.zeros(0)))
    first = source.value(observed)
    again = build_sources(frozenset({name}), SignalContext(16, dict), overrides)[name]  # type: ignore[arg-type]
    again.restore(source.state())
    assert torch.equal(again.value(observed), first)
    return first


def test_imported_maps_as_signals(tmp_path: Path) -> None:
    redknot = written(tmp_path, REDKNOT)
    assert imported_signals("head_imported", path=redknot).tolist() == [[0, 1], [2, 0], [3, 0]]
    assert imported_signals("head_window_tokens", path=redknot).tolist() == [[96, 0], [0, 128], [0, 512]]
    gates = written(tmp_path, GATES, "gates.tsv")
    assert imported_signals("head_imported", path=gates).tolist() == [[1, 0], [1, 0]]
    scores = written(tmp_path, HEADKV, "kv.json")
    assert imported_signals("head_imported", path=scores, global_share=0.25).tolist() == [[1, 0], [0, 0]]
    assert imported_signals("head_imported", path=ours(tmp_path), global_share=0.5).tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("name", "file", "options", "error"),
    [
        ("head_imported", None, {}, r"path=None: name its file, e.g. \+signals.head_imported.path=FILE"),
        ("head_window_tokens", "gates.tsv", {}, "states no windows"),
        ("head_imported", "gone.tsv", {}, "No such file"),
        ("head_imported", "kv.json", {}, "global_share must say"),
        ("head_imported", "gates.tsv", {"global_share": "x"}, "global_share"),
    ],
)
def test_imported_maps_that_cannot_be_used(
    tmp_path: Path, name: str, file: str | None, options: dict[str, Any], error: str
) -> None:
    written(tmp_path, GATES, "gates.tsv")
    written(tmp_path, HEADKV, "kv.json")
    path = None if file is None else str(tmp_path / file)
    with pytest.raises(SignalError, match=error):
        imported_signals(name, path=path, **options)


def test_a_map_of_another_model_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, GATES, "gates.tsv")
    source = build_sources(frozenset({"head_imported"}), SignalContext(16, dict), {"head_imported": {"path": path}})
    observed = Observed((30, 3, 5), 16, lambda: (torch.zeros(0), torch.zeros(0)))
    with pytest.raises(SignalError, match=r"gates is a map of 2 layers x 2 KV heads, but the model has 30 x 3"):
        source["head_imported"].value(observed)
    known = SignalContext(16, dict, tiny())  # where the model is known, nothing has to run first
    with pytest.raises(SignalError, match="gates is a map of 2 layers x 2 KV heads, but tiny has 3 x 2"):
        build_sources(frozenset({"head_imported"}), known, {"head_imported": {"path": path}})
    fits = written(tmp_path, REDKNOT)
    source = build_sources(frozenset({"head_imported"}), known, {"head_imported": {"path": fits}})
    assert source["head_imported"].value(replace(observed, shape=(3, 2, 5))).tolist() == [[0, 1], [2, 0], [3, 0]]
