"""W&B beside the record: a real offline run, and failures that cost one line and a note, never a result."""

from __future__ import annotations

import logging
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from testbed.results.record import Number, Record, load, save
from testbed.results.tracker import Tracker, TrackerError, read_payload


def make(**keys: Any) -> Record:
    results = (Number("task.score", 0.5, "fraction", "measured", (0.4, 0.6), 5), Number("x", None, "s", "simulated"))
    samples = ({"id": "a", "score": 1.0}, {"id": "b", "score": None, "meta": {"depth": 0.1}})
    base = {"run_id": "run-7", "config": {"seed": 1}, "environment": {}, "seed": 1, "results": results}
    return Record(**{**base, "samples": samples, **keys})


def read_offline(folder: Path) -> list[Any]:
    """All entries of the one offline run: protocol buffers in LevelDB's log format (blocks of 32 KiB)."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, at, parts, entries = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # no room for a header: the block is padded
            at += 2**15 - at % 2**15
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            entries.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return entries


def test_offline_run_holds_config_metrics_tables_and_the_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = make()
    path = save(record, tmp_path)
    assert Tracker().publish(record, path) == record
    assert not caplog.records
    assert load(path) == record
    entries = read_offline(tmp_path)
    (run,) = [entry.run for entry in entries if entry.HasField("run")]
    assert (run.display_name, run.project) == ("run-7", "testbed")
    assert record.config_hash in str(run.config)
    history = {item.key or item.nested_key[0] for e in entries if e.HasField("history") for item in e.history.item}
    assert {"task.score", "results", "samples"} <= history
    assert "x" not in history  # a result without a value is no metric
    artifacts = [entry.request.log_artifact.artifact for entry in entries if entry.request.HasField("log_artifact")]
    artifacts += [entry.artifact for entry in entries if entry.HasField("artifact")]
    assert "record.json" in str(artifacts)
    tables = list(tmp_path.glob("wandb/offline-run-*/files/media/table/*.json"))
    assert len(tables) == 2


def test_unreachable_server_is_one_line_and_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the discard port: refused at once
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    record = make()
    path = save(record, tmp_path)
    with caplog.at_level(logging.WARNING):
        noted = Tracker(mode="online", timeout_s=5.0).publish(record, path)
    assert len(caplog.records) == 1
    assert len(noted.notes) == 1
    assert noted.notes[0].startswith("W&B (online) failed: ")
    assert load(path) == noted
    assert noted.results == record.results


def test_no_key_asks_no_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no netrc, no settings
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    noted = Tracker(mode="online", timeout_s=30.0).publish(make(), save(make(), tmp_path))
    assert len(noted.notes) == 1
    assert "API key" in noted.notes[0] or "api_key" in noted.notes[0]


def test_broken_wandb_folder(tmp_path: Path) -> None:
    path = save(make(), tmp_path)
    (tmp_path / "wandb").write_text("in the way")
    noted = Tracker(timeout_s=30.0).publish(make(), path)
    assert len(noted.notes) == 1
    assert load(path).results == make().results


def hang(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Puts a `wandb` that misbehaves before the real one on the child's path."""
    (folder / "fake").mkdir()
    (folder / "fake" / "wandb.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(folder / "fake"))


def test_a_hang_ends_with_everything_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang(
        tmp_path,
        monkeypatch,
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n",
    )
    path = save(make(), tmp_path)
    started = time.monotonic()
    noted = Tracker(timeout_s=4.0).publish(make(), path)
    assert time.monotonic() - started < 60
    assert noted.notes == ("W&B (offline) failed: no answer within 4 s",)
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    assert not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.parametrize(
    ("body", "words"),
    [("raise RuntimeError('boom')", "RuntimeError: boom"), ("import os; os._exit(3)", "exit code 3")],
)
def test_a_crash_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str) -> None:
    hang(tmp_path, monkeypatch, body)
    noted = Tracker().publish(make(), save(make(), tmp_path))
    assert noted.notes == (f"W&B (offline) failed: {words}",)


def test_note_that_cannot_be_saved_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang(tmp_path, monkeypatch, "raise RuntimeError('boom')")
    record = make()
    path = save(record, tmp_path / "run")
    before = path.read_bytes()
    monkeypatch.setattr("testbed.files.os.replace", lambda a, b: (_ for _ in ()).throw(OSError(28, "full")))
    assert Tracker().publish(record, path) == record
    assert path.read_bytes() == before


def test_disabled_starts_nothing(tmp_path: Path) -> None:
    record = make()
    path = save(record, tmp_path)
    assert Tracker(mode="disabled").publish(record, path) is record
    assert os.listdir(tmp_path) == ["record.json"]


def test_tables_have_every_column_once(tmp_path: Path) -> None:
    payload = read_payload(save(make(), tmp_path))
    columns, rows = payload.tables["samples"]
    assert columns == ["id", "score", "meta"]
    assert rows == [["a", 1.0, None], ["b", None, "{'depth': 0.1}"]]
    assert payload.metrics == {"task.score": 0.5}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"mode": "on"}, "wandb.mode='on': must be one of offline, online, disabled"),
        ({"project": ""}, "wandb.project=''"),
        ({"timeout_s": 0}, "wandb.timeout_s=0"),
        ({"timeout_s": float("nan")}, "wandb.timeout_s=nan"),
    ],
)
def test_bad_settings_are_refused_by_name(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(TrackerError, match=words):
        Tracker(**keys)
