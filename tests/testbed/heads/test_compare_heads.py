"""`compare` and `published`: what is printed about head maps, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from testbed.commands import CommandError
from testbed.compose import compose_policy
from testbed.engine.signals import Observed, SignalContext, build_sources
from testbed.heads.agreement import AgreementError, agreement
from testbed.heads.compare import compare, labelled, lines, main, sheets, two_digits
from testbed.heads.formats import FormatError, ImportedMap, load, to_duoattention, to_headkv, write
from testbed.heads.headmap import HeadMap, Measured
from testbed.heads.published import (
    DUO_V2,
    KV_MISTRAL,
    KV_MISTRAL_R,
    PAIRS,
    RED_PARITY,
    Published,
    PublishedError,
    headmaps,
    missing,
    remarks,
    sheet,
)
from testbed.heads.published import main as published_main

LAYERS, KV_HEADS, QUERY_HEADS = 6, 4, 8


def scores(seed: int, shape: tuple[int, int] = (LAYERS, KV_HEADS)) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain_map(folder: Path, name: str, score: Tensor) -> str:
    write(to_duoattention(ImportedMap("testbed", name, score, None)), folder / f"{name}.tsv")
    return str(folder / f"{name}.tsv")


def our_map(folder: Path, verdicts: dict[str, dict[str, Any]], fingerprint: str = "none") -> str:
    measures = {
        "retrieval_score": Measured.of([scores(0)[..., None]], "needle", "share"),
        "head_local_ratio": Measured.of([-scores(0)[..., None]], "text", "share"),
        "retrieval_score@code": Measured.of([scores(1)[..., None]], "code", "share"),
    }
    path = folder / f"ours-{fingerprint}.json"
    HeadMap("toy", fingerprint, LAYERS, KV_HEADS, QUERY_HEADS, measures, {}, verdicts=verdicts).write(path)
    return str(path)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdicts kept on this machine."""
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path / "cache"))


def test_the_command_says_who_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, alike, other = (plain_map(tmp_path, name, each) for name, each in
                         (("one", scores(0)), ("alike", scores(0) ** 2), ("other", scores(9))))  # fmt: skip
    main([one, alike, other, f"output={tmp_path / 'out.json'}"])
    said = " ".join(capsys.readouterr().out.split())
    assert "one and alike: agree beyond chance about layers and the heads of a layer (Spearman 1)" in said
    assert "one and other: no agreement beyond chance" in said
    assert "Jaccard of the top 15% (4 heads)" in said
    data = json.loads((tmp_path / "out.json").read_text())
    pair = next(row for row in data["pairs"] if (row["a"], row["b"]) == ("one", "other"))
    assert pair["spearman"]["value"] == agreement(scores(0), scores(9), permutations=1).spearman.value


def test_the_diagonal_is_the_map_with_its_ties_drawn_anew(tmp_path: Path) -> None:
    tied = (scores(3) > 0.4).double()
    compared = compare([plain_map(tmp_path, "tied", tied), plain_map(tmp_path, "strict", scores(3))])
    correlations, fifteen, *_ = sheets(compared)
    assert [row[at + 1] for at, row in enumerate(correlations.rows)] == ["1", "1"]
    assert " to " in fifteen.rows[0][1]
    assert fifteen.rows[1][2] == "1"
    top = int(tied.sum())
    assert any(note.startswith("tied: ") and f"{top} at the top 15%" in note for note in compared.notes)
    assert not any(note.startswith("strict: ") for note in compared.notes)


def test_measures_of_our_maps_are_picked_and_turned_round(tmp_path: Path) -> None:
    path = our_map(tmp_path, {})
    same = compare([path, f"{path}:-head_local_ratio"])
    assert same.between(1, 0).spearman.value == pytest.approx(1)
    turned = compare([path, f"{path}:head_local_ratio"])
    assert turned.between(0, 1).spearman.value == pytest.approx(-1)
    assert "contradict each other about layers and the heads of a layer" in lines(turned)[0]
    code = compare([path, f"{path}:retrieval_score@code"])
    expected = agreement(scores(0), scores(1), permutations=1).spearman.value
    assert code.between(0, 1).spearman.value == pytest.approx(expected)


def test_a_map_that_did_not_beat_random_is_labelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"beats_random": False, "why": "looks local until asked", "identity": "a.B(head_local_ratio, head_far)"}
    passed = {"beats_random": True, "why": "", "identity": "a.C(retrieval_score)"}
    path = our_map(tmp_path, {"described": failed, "retrieval": passed})
    main([f"{path}:-head_local_ratio", f"{path}:retrieval_score"])
    said = " ".join(capsys.readouterr().out.split())
    assert "ours-none:-head_local_ratio (not better than random) and ours-none:retrieval_score: agree" in said
    assert "classifier described on it is not better than random: looks local until asked" in said
    assert labelled(load(f"{path}:head_local_ratio")).caveat
    assert not labelled(load(f"{path}:retrieval_score@code")).caveat


def test_maps_of_query_heads_join_those_of_kv_heads(tmp_path: Path) -> None:
    by_query = scores(5, (LAYERS, QUERY_HEADS))
    path = tmp_path / "kv.json"
    write(to_headkv(ImportedMap("testbed", "kv", by_query, None, query_heads=QUERY_HEADS)), path)
    grouped = by_query.view(LAYERS, KV_HEADS, 2).amax(-1)
    compared = compare([plain_map(tmp_path, "gates", grouped), str(path)])
    assert compared.between(0, 1).spearman.value == pytest.approx(1)
    among = compare([str(path), str(path)])
    assert among.maps[0].shape == (LAYERS, QUERY_HEADS)
    assert any("per query head" in note for note in among.notes)
    assert compare([str(path), str(path)], kv_heads=2).maps[0].shape == (LAYERS, 2)


def test_maps_of_other_weights_are_told(tmp_path: Path) -> None:
    compared = compare([our_map(tmp_path, {}, "aaa"), our_map(tmp_path, {}, "bbb")])
    assert any("different weights" in note for note in compared.notes)


def test_what_compare_refuses(tmp_path: Path) -> None:
    path, other = our_map(tmp_path, {}), plain_map(tmp_path, "gates", scores(0, (LAYERS, 3)))
    with pytest.raises(AgreementError, match=r"different models .*: 6 layers x 4 heads; gates: 6 layers x 3 heads"):
        main([path, other])
    with pytest.raises(AgreementError, match="two maps at least"):
        main([path])
    with pytest.raises(FormatError, match="no measure 'head_gate'"):
        main([path, f"{path}:head_gate"])
    for words, said in (
        ("sed=1", "unknown key 'sed'"),
        ("seed=-1", "seed=-1: must be a whole number of at least 0"),
        (f"seed={10**30}", "seed=10+: must be a whole number of at least 0"),
        ("seed=x", "seed=x: must be a whole number of at least 0"),
        ("kv_heads=0", "kv_heads=0: must be a whole number of at least 1"),
        ("kv_heads=77", "ours-none:retrieval_score: 4 KV heads a layer, must be 77"),
    ):
        with pytest.raises(FormatError, match=said):
            main([path, path, words])
    with pytest.raises(FormatError, match="seed=-1: must be a whole number of at least 0"):
        published_main(["seed=-1"])


@pytest.mark.parametrize("command", [main, published_main])
def test_an_output_that_cannot_be_is_told_first(
    command: Callable[[list[str]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for output in (tmp_path, Path(our_map(tmp_path, {})) / "out.json"):
        with pytest.raises(CommandError, match=f"output={output}: "):
            command([f"output={output}"])
    assert not capsys.readouterr().out


def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([plain_map(tmp_path, name, scores(seed)) for seed, name in enumerate(("[bold]", "[", "a[red]"))])
    said = capsys.readouterr().out
    for name in ("[1] [bold]", "[2] [ ", "[3] a[red]"):
        assert name in said


@pytest.mark.parametrize(
    ("value", "text"), [(0.123, ".12"), (-0.094, "-.09"), (-0.001, ".00"), (1.0, "1"), (-1.0, "-1"), (0.996, "1")]
)
def test_correlations_have_two_digits(value: float, text: str) -> None:
    assert two_digits(value) == text


def test_an_imported_map_classes_the_heads_of_a_policy(tmp_path: Path) -> None:
    path = plain_map(tmp_path, "gates", torch.tensor([[0.9, 0.1], [0.2, 0.5]], dtype=torch.float64))
    policy = compose_policy("redknot", ["policy/classifier=file"])
    overrides = {"head_imported": {"path": path}}
    sources = build_sources(policy.classifier.needs, SignalContext(16, dict), overrides)
    observed = Observed((2, 2, 3), 16, lambda: (torch.zeros(0), torch.zeros(0)))
    assert sources["head_imported"].value(observed).tolist() == [[1, 0], [0, 1]]


def data() -> Published:
    try:
        return Published(headmaps())
    except PublishedError:
        pytest.skip("the published head maps are not here (TESTBED_DATA)")


def test_published_figures_are_those_of_the_files() -> None:
    figures = data().figures()
    here = [each for each in figures if each.ours is not None]
    assert len(here) >= 30
    for each in here:
        # Published with two digits; 200 draws of the ties leave .01 more between two readers.
        slack = 0.0051 if "Spearman" in each.name or "chance" in each.name else 0.016
        assert each.difference == pytest.approx(0, abs=slack if isinstance(each.published, float) else 0), each.name
    assert all(each.absent.startswith("headkv/") for each in figures if each.ours is None)
    assert sum("not reproducible here" in line for line in missing(figures)) in (0, 1, 2, 3, 4)


def test_published_remarks_say_what_the_files_mean() -> None:
    said = "\n".join(remarks(data()))
    assert "RedKnot Mistral (v0.3), DuoAttention (v0.2): no agreement beyond chance" in said
    assert "local 0, retrieval .5, global 1" in said
    assert "contradicts its own summary, which counts 384 global and 128 local heads" in said


def made_up(folder: Path) -> Path:
    """Maps under the published names, with HeadKV's among them."""
    root = folder / "headmaps"
    for name, seed in ((KV_MISTRAL, 1), (KV_MISTRAL_R, 2)):
        by_query = scores(seed, (4, 16))
        write(to_headkv(ImportedMap("testbed", name, by_query, None, query_heads=16)), root / name)
    write(to_duoattention(ImportedMap("testbed", "duo", scores(3, (4, 8)), None)), root / DUO_V2)
    return folder


def test_figures_whose_file_is_here_are_computed_and_the_others_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up(tmp_path)
    published = Published(headmaps(str(tmp_path)))
    by_name = {each.name: each for each in published.figures()}
    plain, reasoning = (scores(seed, (4, 16)).view(4, 8, 2).amax(-1) for seed in (1, 2))
    expected = agreement(plain, reasoning, permutations=1)
    pair = next(pair.title for pair in PAIRS if (pair.a, pair.b) == (KV_MISTRAL, KV_MISTRAL_R))
    assert by_name[f"{pair}: Spearman"].ours == pytest.approx(expected.spearman.value)
    absent = [each for each in by_name.values() if each.ours is None]
    assert {"DuoAttention: Llama-3-8B-1048k, Llama-3.1-8B: Spearman"} < {each.name for each in absent}
    assert len(sheet(list(by_name.values())).rows) == len(by_name) - len(absent)
    assert any(RED_PARITY in line for line in missing(list(by_name.values())))
    published_main([str(tmp_path), f"output={tmp_path / 'out.json'}"])
    assert "not reproducible here" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert sum(row["ours"] is None for row in rows) == len(absent)
    assert replace(absent[0], ours=1.0).difference == 1.0 - absent[0].published


def test_published_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(PublishedError, match=r"no published head maps in .*nowhere/headmaps.*TESTBED_DATA"):
        published_main([str(tmp_path / "nowhere")])
    with pytest.raises(PublishedError, match="one data folder at most"):
        published_main(["a", "b"])
