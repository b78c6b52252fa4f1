"""Records: what is refused, round trip, and that a save leaves the old file or the new one, never half of one."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import warm
from hypothesis import given
from hypothesis import strategies as st

from testbed.results.record import FILE_NAME, Number, Record, RecordError, load, save

finite = st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def make(**keys: Any) -> Record:
    return Record(**{"run_id": "run-1", "config": {"policy": "full"}, "environment": {}, "seed": 0, **keys})


@given(
    config=st.dictionaries(st.text(max_size=6), plain, max_size=4),
    value=st.none() | finite,
    ends=st.tuples(finite, finite),
    seed=st.integers(),
)
def test_round_trip_through_json(
    config: dict[str, Any], value: float | None, ends: tuple[float, float], seed: int
) -> None:
    number = Number("my.metric", value, "s", "simulated", (min(ends), max(ends)), 3)
    before = make(config=config, seed=seed, results=(number,), samples=({"id": "a"},), alarms=("x",))
    assert Record.from_dict(json.loads(json.dumps(before.to_dict()))) == before


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    before = make(status="partial", reason="interrupted", results=(Number("kl.mean", 0.1, "nats", "measured"),))
    path = save(before, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / FILE_NAME
    assert load(path) == load(path.parent) == before
    assert before["kl.mean"].value == 0.1
    assert before.get("task.score") is None
    with pytest.raises(KeyError, match="no result 'task.score'"):
        before["task.score"]
    assert os.listdir(path.parent) == [FILE_NAME]


def test_hash_is_sha256_of_the_canonical_configuration() -> None:
    text = '{"a": 1, "b": [2, null]}'
    assert make(config={"b": [2, None], "a": 1}).config_hash == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "1", True, [1]])
def test_values_that_are_no_finite_numbers_are_refused(value: Any) -> None:
    with pytest.raises(RecordError, match="'x': value="):
        Number("x", value, "s", "measured")
    with pytest.raises(RecordError, match="'x': ci"):
        Number("x", 1.0, "s", "measured", (0.0, value))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"name": " "}, "name"),
        ({"unit": ""}, "unit=''"),
        ({"name": "kl.mean"}, "unit='s': must be 'nats'"),
        ({"kind": "guessed"}, "kind='guessed': must be one of measured, simulated, quoted"),
        ({"ci": (2.0, 1.0)}, "low must not exceed high"),
        ({"ci": (1.0,)}, "ci="),
        ({"n": -1}, "n=-1"),
        ({"n": 1.5}, "n=1.5"),
    ],
)
def test_bad_numbers_are_refused_by_name(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(RecordError, match=words):
        Number(**{"name": "x", "value": 1.0, "unit": "s", "kind": "measured", **keys})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"run_id": ""}, "run_id=''"),
        ({"status": "done"}, "status='done'"),
        ({"status": "failed"}, "reason=''"),
        ({"reason": "but why"}, "reason='but why'"),
        ({"seed": 1.0}, "seed=1.0"),
        ({"schema": 1}, "schema=1: this version reads 2"),
        ({"schema": 3}, "schema=3"),
        ({"tiers": []}, "tiers="),
        ({"config": []}, "config="),
        ({"config": {"x": float("nan")}}, "config: holds a value that JSON cannot"),
        ({"config": {"x": object()}}, "config: holds a value that JSON cannot"),
        ({"config_hash": "abc"}, "config_hash='abc'"),
        ({"results": [Number("x", 1, "s", "measured"), Number("x", 2, "s", "measured")]}, "x given more than once"),
        ({"results": [{"name": "x"}]}, "must be a Number"),
        ({"samples": [{"score": 1.0}]}, "samples: every entry must be a mapping with an id"),
    ],
)
def test_bad_records_are_refused_by_name(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(RecordError, match=words):
        make(**keys)


def test_nan_deep_in_a_sample_is_refused_and_leaves_the_old_record(tmp_path: Path) -> None:
    path = save(make(), tmp_path)
    with pytest.raises(RecordError, match="JSON cannot"):
        save(make(samples=({"id": "a", "kl": float("nan")},)), tmp_path)
    assert load(path) == make()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a run record"),
        ("{", "not a run record"),
        ("[1]", "no schema key"),
        ("{}", "no schema key"),
        ('{"schema": 99}', "schema 99, this version reads 1 and 2"),
        ('{"schema": 1, "run_id": "x"}', "missing keys .*'config'"),
    ],
)
def test_files_that_are_no_records(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(RecordError, match=f"{FILE_NAME}.*{words}"):
        load(tmp_path)


def test_missing_file_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=f"{tmp_path}.*cannot read"):
        load(tmp_path)


def test_a_changed_configuration_is_noticed(tmp_path: Path) -> None:
    path = save(make(), tmp_path)
    path.write_text(path.read_text().replace('"full"', '"snapkv"'))
    with pytest.raises(RecordError, match="config_hash"):
        load(path)


def test_full_disk_leaves_the_old_record(tmp_path: Path) -> None:
    """A file-size limit in a child stands for the full disk: the kernel refuses the write half-way."""
    save(make(), tmp_path)
    script = (
        "import resource, signal, sys\n"
        "from testbed.results.record import Record, RecordError, save\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "big = Record(run_id='big', config={'x': 'y' * 100_000}, environment={}, seed=0)\n"
        "try:\n    save(big, sys.argv[1])\n"
        "except RecordError as error:\n    print(error)\n"
    )
    done = warm.run(["-c", script, str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / FILE_NAME}: cannot write: " in done.stdout
    assert os.listdir(tmp_path) == [FILE_NAME]
    assert load(tmp_path) == make()


def test_a_file_in_the_way_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write"):
        save(make(), tmp_path / "file" / "folder")


def test_failing_rename_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("testbed.files.os.replace", refuse)
    with pytest.raises(RecordError, match="No space left on device"):
        save(make(), tmp_path)
    assert os.listdir(tmp_path) == []


def test_killed_while_saving_leaves_a_whole_record(tmp_path: Path) -> None:
    """A child saves two records of different size in turn and is killed: what is left always loads."""
    script = (
        "import sys\nfrom testbed.results.record import Record, save\n"
        "sizes = [10, 2_000_000]\n"
        "records = [Record(run_id=f'r{n}', config={'x': 'y' * n}, environment={}, seed=0) for n in sizes]\n"
        "print('go', flush=True)\n"
        "while True:\n    for r in records:\n        save(r, sys.argv[1])\n"
    )
    for delay in (0.02, 0.05, 0.11):
        child = warm.start(["-c", script, str(tmp_path)])
        child.stdout.readline()
        until = time.monotonic() + 30
        while not (tmp_path / FILE_NAME).exists() and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert load(tmp_path).run_id in ("r10", "r2000000")


def test_records_of_schema_1_still_load(tmp_path: Path) -> None:
    """One of these, published once, was written before there was a section on tiers."""
    old = make().to_dict() | {"schema": 1}
    del old["tiers"]
    (tmp_path / FILE_NAME).write_text(json.dumps(old))
    assert load(tmp_path) == make()
    experiments = Path(__file__).parents[3] / "experiments"
    published = [*experiments.glob("needle_grid/*.json"), experiments / "tiers" / "elastic.json"]
    published.append(Path(__file__).with_name("record_schema_1.json"))
    schemas = set()
    for path in published:
        before = json.loads(path.read_text())
        schemas.add(before["schema"])
        added = {"schema": 2, "tiers": {}} if before["schema"] == 1 else {}
        assert json.loads(json.dumps(load(path).to_dict())) == before | added
    assert schemas == {1, 2}
    with pytest.raises(RecordError, match="missing keys .*'tiers'"):
        Record.from_dict(old | {"schema": 2})
