"""Comparisons of records made here, whose right answers are known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testbed.compare import compare, run
from testbed.results.comparison import CompareError
from testbed.results.record import FILE_NAME, Number, Record, save
from testbed.results.stats import wilson

MIB = 2**20


def put(
    folder: Path,
    policy: str,
    scores: list[float],
    fraction: float | None = None,
    seed: int = 0,
    full: list[float] | None = None,
    first: int = 0,
    **keys: Any,
) -> None:
    """One run; contexts of one sample each."""
    samples = tuple(
        {
            "id": f"s{first + at}",
            "context_id": f"c{first + at}",
            "score": score,
            "score_full": 1.0 if full is None else full[at],
            "kl": 0.1 * at,
            "ms_per_token": 10.0,
            "ms_per_token_full": 30.0,
        }
        for at, score in enumerate(scores)
    )
    keys_of_tiers = ("tier_hits", "tier_lookups", "stall_s", "step_s")
    for sample, values in zip(samples, keys.pop("more", ()), strict=False):
        sample.update(zip(keys_of_tiers, values, strict=True))
    held = 45 * MIB * (fraction or 1.0)
    config = {
        "policy": {"name": policy, **keys.pop("detail", {})},
        "budget": {"fraction": fraction},
        "model": {"name": keys.pop("model", "tiny")},
        "seed": seed,
    }
    if "cache" in keys:
        config["cache"] = keys.pop("cache")
    numbers = (
        Number("kv.total_bytes", held, "bytes", "measured"),
        Number("kv.total_saved", 1 - (fraction or 1.0), "fraction", "measured"),
        Number("sim.h200.ms_per_token", 0.25, "ms/token", "simulated"),
    )
    name = f"{policy}-{fraction}-{seed}-{len(list(folder.glob('*')))}"
    record = Record(
        **{
            "run_id": name,
            "config": config,
            "environment": {},
            "seed": seed,
            "samples": samples,
            "results": numbers,
            **keys,
        }
    )
    save(record, folder / name)


def test_rows_against_hand_counted_values(tmp_path: Path) -> None:
    put(tmp_path, "full", [1, 1, 1, 1])
    put(tmp_path, "snapkv", [1, 0, 1, 0], 0.25)
    put(tmp_path, "redknot", [1, 1, 1, 1], 0.25)
    result = compare([tmp_path])
    assert [row["policy"] for row in result.rows] == ["full", "redknot", "snapkv"]
    rows = {row["policy"]: row for row in result.rows}
    assert rows["snapkv"]["task.score"] == 0.5
    assert rows["snapkv"]["score.delta"] == -0.5
    assert rows["snapkv"]["quality.kept"] == 0.5
    assert (rows["redknot"]["quality.kept.low"], rows["redknot"]["quality.kept.high"]) == wilson(4, 4)
    assert rows["redknot"]["kv.total_bytes"] == 45 * MIB / 4
    assert (rows["redknot"]["task.score.low"], rows["redknot"]["task.score.high"]) == wilson(4, 4)
    assert rows["redknot"]["kl.mean"] == pytest.approx(0.15)
    assert rows["redknot"]["speedup"] == 3.0
    assert rows["full"]["budget"] == "–"
    assert not result.alarms


def test_measured_and_simulated_are_two_tables(tmp_path: Path) -> None:
    put(tmp_path, "full", [1, 1])
    measured, simulated = compare([tmp_path]).sheets
    assert "sim" not in " ".join(measured.columns)
    assert simulated.columns == ("policy", "sim.h200.ms_per_token")
    assert simulated.rows == [("full", "0.25 ms/token")]


def test_other_baseline_is_paired_by_seed_and_sample(tmp_path: Path) -> None:
    put(tmp_path, "a", [1, 1, 0, 0])
    put(tmp_path, "b", [0, 0, 0], first=1)  # without the first sample: only shared ones count
    result = {row["policy"]: row for row in compare([tmp_path], baseline="b").rows}
    assert result["a"]["score.delta"] == pytest.approx(1 / 3)
    assert result["b"]["score.delta"] == 0.0
    with pytest.raises(CompareError, match="--baseline c: not among the runs of .*; they are a, b"):
        compare([tmp_path], baseline="c")


def test_a_guard_is_named_and_in_the_way_of_no_baseline(tmp_path: Path) -> None:
    guarded: dict[str, Any] = {"activity": {"guard": {"probes": 1}}, "detail": {"guard": True}}
    put(tmp_path, "attention", [0, 0], 0.5)
    put(tmp_path, "snapkv", [1, 0], 0.75, **guarded)
    put(tmp_path, "snapkv", [0, 0], 0.25)
    put(tmp_path, "quest", [1, 1], 0.25, **guarded)
    put(tmp_path, "full", [1, 1], **guarded)
    names = ["full with a guard", "attention", "quest with a guard", "snapkv", "snapkv with a guard"]
    for baseline, deltas in (
        ("full", [0, -1, 0, -1, -0.5]),
        ("quest", [0, -1, 0, -1, -0.5]),
        ("snapkv", [1, 0, 1, 0, 0.5]),
        ("snapkv with a guard", [0.5, -0.5, 0.5, -0.5, 0]),
    ):
        rows = compare([tmp_path], baseline=baseline).rows
        assert [row["policy"] for row in rows] == names
        assert [row["score.delta"] for row in rows] == deltas


def test_seeds_are_pooled_and_other_keys_are_not(tmp_path: Path) -> None:
    put(tmp_path, "a", [1, 1], seed=0)
    put(tmp_path, "a", [0, 0], seed=1)
    put(tmp_path, "b", [1, 1], detail={"window": 256})
    put(tmp_path, "b", [0, 0], detail={"window": 512})
    rows = compare([tmp_path]).rows
    assert [(row["policy"], row["detail"], row["runs"], row["task.score"]) for row in rows] == [
        ("a", "", 2, 0.5),
        ("b", "policy.window=256", 1, 1.0),
        ("b", "policy.window=512", 1, 0.0),
    ]


def test_budget_is_the_runs_own_or_the_policys(tmp_path: Path) -> None:
    put(tmp_path, "a", [1, 1], 0.5, detail={"budget_fraction": 0.25})
    put(tmp_path, "b", [1, 1], detail={"budget_fraction": 0.25})
    put(tmp_path, "c", [1, 1], detail={"budget_fraction": None})
    assert [row["budget"] for row in compare([tmp_path]).rows] == ["50 %", "25 %", "–"]


def test_models_are_never_mixed(tmp_path: Path) -> None:
    put(tmp_path, "a", [1, 1], model="small")
    put(tmp_path, "a", [0, 0], model="large")
    result = compare([tmp_path])
    assert [(row["setting"], row["task.score"]) for row in result.rows] == [
        ("model.name=small", 1.0),
        ("model.name=large", 0.0),
    ]


def test_alarms(tmp_path: Path) -> None:
    put(tmp_path, "grows_worse", [1] * 8, 0.1)
    put(tmp_path, "grows_worse", [0] * 8, 0.5)
    put(tmp_path, "too_good", [1] * 12, 0.2, full=[1] * 6 + [0] * 6)
    put(tmp_path, "cannot", [0] * 4, 0.2, full=[0] * 4)
    found = "\n".join(compare([tmp_path]).alarms)
    assert "grows_worse @50 % is significantly worse than grows_worse @10 %" in found
    assert "too_good @20 %: sparse beats dense significantly" in found
    assert "cannot @20 %: a task the full cache cannot do" in found
    assert found.count("\n") == 2


def test_failed_runs_are_left_out_and_said(tmp_path: Path) -> None:
    put(tmp_path, "a", [1, 1])
    put(tmp_path, "b", [], status="failed", reason="no memory")
    put(tmp_path, "c", [1], status="partial", reason="interrupted")
    result = compare([tmp_path])
    assert [row["policy"] for row in result.rows] == ["a", "c"]
    assert [note.split(": ", 1)[1] for note in result.notes] == [
        "failed, left out (no memory)",
        "partial (interrupted)",
    ]
    only = tmp_path / "only"
    put(only, "b", [], status="failed", reason="no memory")
    with pytest.raises(CompareError, match="all 1 runs failed"):
        compare([only])


def test_nothing_there_and_broken_records_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CompareError, match="missing: no such file or folder"):
        compare([tmp_path / "missing"])
    with pytest.raises(CompareError, match=f"no {FILE_NAME} below {tmp_path}"):
        compare([tmp_path])
    put(tmp_path, "a", [1, 1])
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / FILE_NAME).write_text('{"schema": 0}')
    with pytest.raises(CompareError, match="old/record.json: schema 0, this version reads 1 and 2"):
        compare([tmp_path])


def test_unlistable_folder_is_an_error_not_an_omission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a", [1, 1])
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(CompareError, match="cannot read: Permission denied"):
        compare([tmp_path])


def test_command_writes_page_numbers_and_a_real_offline_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, "full", [1, 1, 1])
    put(tmp_path, "snapkv", [1, 0, 1], 0.1)
    put(tmp_path, "snapkv", [1, 1, 1], 0.5)
    run([str(tmp_path), "--output", str(tmp_path / "out")])
    text = capsys.readouterr()
    assert "snapkv" in text.out
    assert text.err == ""
    page = (tmp_path / "out" / "compare.html").read_text()
    assert page.count("<svg") == 2
    assert "http-equiv" not in page
    data = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [row["task.score"] for row in data["rows"]] == [1.0, pytest.approx(2 / 3), 1.0]
    assert len(list((tmp_path / "out" / "wandb").glob("offline-run-*/files/media/table/comparison*.json"))) == 1
    # A second comparison of the same folder finds the runs, not its own output.
    assert compare([tmp_path]).runs == 3


def test_error_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "testbed.compare", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == f"error: no {FILE_NAME} below {tmp_path}; a run writes one when it ends"
    assert done.stdout == ""


def test_sizes_of_the_tiers_are_compared_within_one_setting(tmp_path: Path) -> None:
    """And a record from before there were such keys is one with their defaults."""
    from dataclasses import fields

    from testbed.cache.layout import CacheConfig
    from testbed.results.comparison import TIER_DEFAULTS

    assert {f.name: f.default for f in fields(CacheConfig) if f.name in TIER_DEFAULTS} == TIER_DEFAULTS
    plain = {"page_tokens": 16, "l3_path": None}
    put(tmp_path, "elastic", [1, 1], cache=plain)
    put(tmp_path, "elastic", [1, 1], cache={**plain, **TIER_DEFAULTS}, seed=1)
    put(tmp_path, "elastic", [0, 1], cache={**plain, **TIER_DEFAULTS, "l1_bytes": "2GiB"})
    put(tmp_path, "elastic", [1, 1], cache={**plain, "page_tokens": 64})
    rows = compare([tmp_path]).rows
    assert [(row["setting"], row["detail"], row["runs"], row["task.score"]) for row in rows] == [
        ("cache.page_tokens=16", "cache.l1_bytes=2GiB", 1, 0.5),
        ("cache.page_tokens=16", "cache.l1_bytes=None", 2, 1.0),
        ("cache.page_tokens=64", "", 1, 1.0),
    ]


def test_hits_and_stalls_are_pooled_sums(tmp_path: Path) -> None:
    put(tmp_path, "full", [1, 1])
    assert "exposed stall" not in compare([tmp_path]).sheets[0].columns
    put(tmp_path, "elastic", [1, 1], more=[(9, 10, 0.1, 1.0), (30, 30, 0.2, 3.0)])
    result = compare([tmp_path])
    rows = {row["policy"]: row for row in result.rows}
    assert rows["elastic"]["tier.hit_rate"] == 39 / 40
    assert rows["elastic"]["tier.stall_share"] == pytest.approx(0.3 / 4.0)
    assert rows["full"]["tier.hit_rate"] is None
    assert result.sheets[0].columns[-2:] == ["hits in L1", "exposed stall"]
    cells = {row[0]: row for row in result.sheets[0].rows}
    assert cells["full"][-2:] == ("–", "–")
    assert cells["elastic"][-2].startswith("97.5 % [90.0 %, 100.0 %]")
