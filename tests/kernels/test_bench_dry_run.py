"""The benchmark runs end to end, tiny; its contenders compute attention; its record holds what was found."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.api import attend
from kernels.bench import __main__ as bench
from kernels.bench import cases, gpu
from kernels.bench.checks import distance, make_check
from kernels.bench.contenders import our_formats, padded_rivals, torch_rivals
from kernels.bench.record import Record, Row, Target, row_from, table
from kernels.bench.stages import STAGES, Stage
from kernels.bench.streams import Streams, make_paged, make_streams
from kernels.bench.timing import Contender, relative_error, take_turns, to_row
from kernels.state import Partial

interp = pytest.mark.interp
needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter: TRITON_INTERPRET=1"
)
LENGTHS = (192, 128, 128, 64)


def streams(lengths: tuple[int, ...] = LENGTHS) -> Streams:
    return make_streams(lengths, 3, 64, 1)


def test_truth_is_torchs_attention() -> None:
    one = streams((128, 128))
    k, v = (x.view(2, 128, 64).double() for x in (one.k, one.v))
    want = torch.nn.functional.scaled_dot_product_attention(one.q[:, :, 0].double(), k, v)
    assert torch.allclose(one.truth(), want.flatten(0, 1), atol=1e-12)


@pytest.mark.parametrize("lengths", [LENGTHS, (128,) * 4])
def test_every_contender_computes_attention(lengths: tuple[int, ...]) -> None:
    """A rival that computed something else would be a straw man."""
    one = streams(lengths)
    rivals = torch_rivals(one, 0) + (padded_rivals(one, 0) if len(set(lengths)) > 1 else [])
    assert len(rivals) >= 5
    for each in [*rivals, *our_formats(one, 0, (16, 32, 64), ("bf16", "int8"))]:
        for call in each.calls:
            assert relative_error(call(), one.truth()) < 2e-2, each.name


@pytest.mark.parametrize("scattered", [False, True])
def test_copies_are_alike_and_share_no_page(scattered: bool) -> None:
    one = streams()
    paged = make_paged(one, ("bf16", "proto"), 16, 1 << 19, share=0.4, scattered=scattered)
    assert len(paged.tables) >= 3
    seen: set[tuple[int, int]] = set()
    outs = []
    for t in paged.tables:
        for s, n in enumerate(t.count.tolist()):
            entries = set(zip(t.pool[s, :n].tolist(), t.slot[s, :n].tolist(), strict=True))
            assert not entries & seen
            seen |= entries
        outs.append(attend(one.q, t, paged.pools, paged.first, scale=0.125, backend="reference").out)
    assert all(torch.equal(outs[0], out) for out in outs)
    held = [sum(1 for p, _ in seen if p == i) for i in range(2)]
    sizes = [pool.fmt.page_bytes for pool in paged.pools]
    assert sum(n * size for n, size in zip(held, sizes, strict=True)) == paged.read_bytes * len(paged.tables)
    assert 0.2 < held[0] / sum(held) < 0.6


def test_a_check_matches_the_oracle_and_notices_a_fault() -> None:
    names = ("fp16", "int8", "int4", "proto")
    check = make_check(names, (0, 1, 17, 300), page_tokens=16, head_dim=64, seed=5)
    used = {int(p) for s, n in enumerate(check.table.count.tolist()) for p in check.table.pool[s, :n]}
    assert used == {0, 1, 2, 3}
    want = check.run("reference", torch.float32, want_mass=True)
    got = check.run("torch", torch.float32, want_mass=True)
    assert distance(got, want) < 1e-5
    assert distance(Partial(got.out * 1.02, got.lse), want) > 1e-2
    assert distance(Partial(got.out, got.lse + 1), want) > 1e-2
    assert distance(Partial(torch.full_like(got.out, math.nan), got.lse), want) == math.inf
    alone = torch.cat([check.only(s).run("torch", torch.float32).out for s in range(4)])
    assert torch.allclose(alone, got.out, atol=1e-6)


def test_contenders_take_turns_over_their_copies() -> None:
    order: list[str] = []
    pair = [Contender(name, [lambda at=f"{name}{c}": order.append(at) for c in range(2)], 0) for name in "ab"]
    times = take_turns(pair, 2, 60.0)
    first, second = ["a1", "a0", "a1", "b1", "b0", "b1"], ["a0", "a1", "a0", "b0", "b1", "b0"]
    assert order == ["a0", "a0", "b0", "b0", *first, *second]
    assert [len(t.each_ms) for t in times.values()] == [6, 6]


def test_a_contender_that_fails_is_out_with_its_reason() -> None:
    def broken() -> None:
        raise OSError("no such device")

    slow = Contender("slow", [lambda: time.sleep(0.002)], 1000)
    times = take_turns([Contender("broken", [broken], 1), slow], 1, 60.0)
    assert to_row("x", Contender("broken", [broken], 1), times["broken"], 1).note == "not run: OSError: no such device"
    row = to_row("x", slow, times["slow"], 1, read_gbps=1.0)
    assert row.ms is not None
    assert row.cpu_ms is not None
    assert row.cpu_ms < 2.0 <= row.ms
    assert row.of_read == pytest.approx(1000 / row.ms / 1e6)


def test_a_record_comes_back_whole(tmp_path: Path) -> None:
    found = Row("c", "me", 1, ms=2.0, read_bytes=4_000_000, targets=(Target("x SDPA", 1.9, "1", 1.8, True),))
    odd = Row("c", "odd", 2, targets=(Target("share", math.nan, "1", 0.05, False),))
    over, under = (Row("c", "x", 1, targets=(Target("share", x, "1", 0.05, False),)) for x in (0.06, 0.04))
    record = Record(tmp_path / "deep" / "r.json", {"dry_run": False}, [found, odd, over, under])
    record.write()
    body = json.loads(record.path.read_text())
    assert [row["gbps"] for row in body["rows"]] == [2.0, None, None, None]
    assert [row["targets"][0]["met"] for row in body["rows"]] == [True, False, False, True]
    assert row_from(body["rows"][0]) == found
    assert body["units"]["gbps"] == "GB/s"
    assert body["environment"]["packages"]["torch"]
    assert [p.name for p in record.path.parent.iterdir()] == ["r.json"]
    assert "1.9 (>= 1.8: met)" in table([found])
    assert "2 of 4 met" in record.report()


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "record.json"
    code = bench.main([*arguments, "--dry-run", "--out", str(path)])
    return code, json.loads(path.read_text())


def test_dry_run_of_all_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, body = run(tmp_path, "--threads", "1")
    assert code == 0
    assert body["complete"]
    assert [s["name"] for s in body["stages"]] == list(cases.CASES)
    rows = body["rows"]
    assert not [row for row in rows if "not run" in row["note"]]
    assert {row["case"].split()[0] for row in rows} == set(cases.CASES)
    bounds = {"bf16": 1e-2, "int8": 2e-2, "int4": 0.3, "sdpa": 1e-2, "transformers": 1e-2}
    judged = [row for row in rows if row["error"] is not None]
    assert len(judged) > 25
    for row in judged:
        assert row["error"] < max(b for name, b in bounds.items() if name in row["contender"]), row["contender"]
    assert "x SDPA" in capsys.readouterr().out


def test_two_threads_are_shown_beside_without_targets(tmp_path: Path) -> None:
    _, body = run(tmp_path, "--threads", "1,2", "--cases", "overhead")
    assert [row["threads"] for row in body["rows"]] == [1, 1, 1, 2, 2, 2]
    row = bench._judged(Row("c", "x", 2, targets=(Target("share", 0.5, "1", 0.1, False),)))
    assert row.targets == ()
    assert row.note == "share 0.5"


def test_an_interrupt_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: cases.Bench) -> Iterator[Row]:
        yield Row("half", "done", 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "CASES", {"overhead": cases.overhead, "half": interrupted})
    code, body = run(tmp_path, "--threads", "1")
    assert code == 130
    assert not body["complete"]
    assert [s["outcome"] for s in body["stages"]] == ["done", "interrupted"]
    assert {row["case"] for row in body["rows"]} == {"overhead"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cases", "uniform,nope"], "--cases nope: must be of uniform, "),
        (["--device", "cuda", "--cases", "uniform"], "must be of correct, "),
        (["--threads", "0"], "--threads 0: must be positive"),
        (["--threads", "one"], "--threads one: must be positive"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert said in capsys.readouterr().err


def test_a_stage_that_hangs_or_crashes_is_noted_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU a real stage crashes; with no time left it is cut off. Neither takes the record away."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so the stage would not crash")
    record = Record(tmp_path / "r.json", {"dry_run": False})
    hurried = {"graph": STAGES["graph"], "store": Stage(STAGES["store"].run, 0.0)}
    monkeypatch.setattr(gpu, "STAGES", hurried)
    assert gpu.run(record, list(hurried), dry_run=False) == 0
    crashed, cut = json.loads(record.path.read_text())["stages"]
    assert crashed["outcome"] == "failed with 1"
    assert "CUDA" in crashed["log"] or "NVIDIA" in crashed["log"]
    assert cut["outcome"].startswith("cut off")


@interp
@needs_interpreter
def test_dry_run_of_the_gpu_bundle(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    command = [sys.executable, "-m", "kernels.bench", "--device", "cuda", "--dry-run", "--out", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    body = json.loads(path.read_text())
    assert body["complete"]
    assert [(s["name"], s["outcome"]) for s in body["stages"]] == [(name, "done") for name in STAGES]
    rows = body["rows"]
    assert {row["case"].split()[0] for row in rows} == set(STAGES)
    missed = [(row["contender"], t) for row in rows for t in row["targets"] if not t["met"]]
    assert not missed
    assert sum(len(row["targets"]) for row in rows if row["case"] in ("correct", "graph")) == 11
    libraries = [row["contender"] for row in rows if "not run" in row["note"]]
    assert set(libraries) <= {"flash_attn with kvcache", "FlashInfer paged decode"}
