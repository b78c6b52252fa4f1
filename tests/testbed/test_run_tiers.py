"""The main command with tiers: what its record says against the decision logs, and every bad size and archive."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from tiny_run import Place, errors, left_behind, save_model, save_text

from testbed.cache.archive import ArchiveAbout, PageFile
from testbed.commands import MENDABLE, describe
from testbed.compare import compare
from testbed.compose import register
from testbed.decisions import DecisionLog
from testbed.results.names import UNITS
from testbed.results.record import Record, load
from testbed.run import run
from testbed.setup import setup

KIB = 2**10
# Two layers of two heads of 16: a page in bf16 takes 1 KiB, and 900 tokens take 228 of them.
ELASTIC = ["policy=elastic", "policy.cold_start_tokens=0", "budget.fraction=null", "workload.max_new_tokens=20"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("tiny")
    save_model(root / "model", positions=2048)
    save_text(root / "text")
    return Place(root)


def configured(overrides: Sequence[str]) -> DictConfig:
    register()
    with initialize_config_module("conf", version_base="1.3"):
        return compose("config", overrides=list(overrides))


def ran(place: Place, folder: Path, *more: str) -> Record:
    folder.mkdir(exist_ok=True)
    run(configured(place.changed(*ELASTIC, "workload.lengths=[900]", *more)), folder)
    return load(folder)


def refusal(call: Callable[[], object]) -> str:
    """What the command would print of the error."""
    with pytest.raises(MENDABLE) as caught:
        call()
    line = describe(caught.value)
    assert "\n" not in line
    assert len(line) < 500
    return line


def value(record: Record, name: str) -> float:
    found = record[name].value
    assert found is not None
    return found


def moved_pages(folder: Path, link: str) -> int:
    """Pages over a link by the decision logs, after the context was compressed."""
    source, _, target = link.partition(">")
    logs = [DecisionLog.read(path) for path in sorted((folder / "decisions").glob("*.jsonl"))]
    moves = [move for log in logs for step in log.steps if step.phase != "compress" for move in step.moves]
    return sum(move.pages for move in moves if (move.source, move.target) == (source, target))


def test_record_agrees_with_the_logs(place: Place, tmp_path: Path) -> None:
    record = ran(place, tmp_path, "cache.l1_bytes=160KiB", "policy/prefetch=next_step")
    tiers = record.tiers
    assert tiers["capacity_bytes"] == {"L1": 160 * KIB, "L2": None, "L3": None}
    assert tiers["at_end"]["L2/compute"]["pages"] > 0
    for link in ("L1>L2", "L2>L1"):
        assert tiers["links"][link]["pages"] == moved_pages(tmp_path, link) > 0
    attended = tiers["lookups"]
    assert attended["attended"] == attended["hit"] + attended["waited"] > 0
    assert value(record, "tier.hit_rate") == pytest.approx(attended["hit"] / attended["attended"])
    assert sum(tiers["stall_s"].values()) == pytest.approx(sum(s["stall_s"] for s in record.samples), abs=1e-9)
    assert 0.0 <= value(record, "tier.stall_share") < 1.0
    for number in record.results:
        if number.name.startswith("tier."):
            assert (number.kind, number.unit) == ("measured", UNITS[number.name])
    assert value(record, "tier.l0_bytes") + value(record, "tier.l1_bytes") <= 160 * KIB
    device = sum(place["bytes"] for name, place in tiers["at_end"].items() if name.startswith(("L0", "L1")))
    assert device <= 0.8 * 160 * KIB
    held = tiers["held_at_end_bytes"]
    assert sum(held.values()) == pytest.approx(value(record, "kv.total_bytes"))
    assert held["L0"] + held["L1"] == pytest.approx(value(record, "kv.device_bytes"))
    for tier, count in held.items():
        assert count >= sum(place["bytes"] for name, place in tiers["at_end"].items() if name.startswith(tier))
    assert "dropped" not in tiers["at_end"]
    page = (tmp_path / "report.html").read_text()
    assert "Moves between tiers" in page


def test_every_prefetch_ends_useful_or_useless(place: Place, tmp_path: Path) -> None:
    record = ran(place, tmp_path, "budget.fraction=1.0")
    prefetch = record.tiers["prefetch"]
    assert prefetch["issued"] == prefetch["useful"] + prefetch["useless"] > 0
    assert value(record, "tier.prefetch_useful") == pytest.approx(prefetch["useful"] / prefetch["issued"])
    assert 0 <= prefetch["harmful"] <= prefetch["useless"]
    assert 0 <= prefetch["late"] <= prefetch["useful"] > 0


def test_overlap_and_tier_sizes_change_no_decision(place: Place, tmp_path: Path) -> None:
    """What moves are hidden behind, and where they are in flight, is no business of the policy's."""
    small = ["cache.l1_bytes=160KiB"]
    variants = {
        "a": small,
        "b": [*small, "cache.overlap=false"],
        "c": [*small, "cache.l2_bytes=40KiB", f"cache.l3_path={tmp_path}"],
        "d": [*small, "cache.l2_bytes=40KiB", f"cache.l3_path={tmp_path}", "cache.overlap=false"],
    }
    records = {name: ran(place, tmp_path / name, *more) for name, more in variants.items()}
    digest = {name: record.activity["same_decisions_digest"] for name, record in records.items()}
    assert digest["a"] == digest["b"]
    assert digest["c"] == digest["d"]
    assert len({str([sample["answer"] for sample in record.samples]) for record in records.values()}) == 1
    assert len({str([sample["kl"] for sample in record.samples]) for record in records.values()}) == 1
    assert records["c"].tiers["at_end"]["L3/compute"]["pages"] > 0
    assert records["c"].tiers["links"].get("L3>L1", {}).get("pages", 0) == moved_pages(tmp_path / "c", "L3>L1")
    result = compare([tmp_path])
    assert len({row["setting"] for row in result.rows}) == 1
    assert len(result.rows) == 4


def test_nothing_of_the_tiers_where_all_is_on_the_device(place: Place, tmp_path: Path) -> None:
    run(configured(place.overrides), tmp_path)
    record = load(tmp_path)
    assert record.tiers == {}
    assert not any(number.name.startswith("tier.") for number in record.results)


def test_the_command_shows_tiers_and_warnings_once(place: Place, tmp_path: Path) -> None:
    """L2 and L3 have no room: pages are dropped, which is said once, at the end, on the table."""
    sizes = ["cache.l1_bytes=160KiB", "cache.l2_bytes=24KiB", "cache.l3_bytes=0"]
    done = place.run(tmp_path / "out", *ELASTIC, "workload.lengths=[900]", *sizes)
    assert done.returncode == 0, done.stderr
    for part in ("Tiers, mean over samples", "hits: ", "exposed stall: ", "waiting for pages", "24.00 KiB"):
        assert part in done.stdout
    assert not any(" full: " in line for line in errors(done))
    record = load(tmp_path / "out")
    said = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    assert len(said) == len(record.tiers["events"]) <= 3
    held = record.tiers["mean_held_bytes"]
    assert held["L2"] <= 24 * KIB
    assert held["L3"] == 0
    # Nothing comes back: all that was ever dropped is what is missing at the end.
    dropped = record.tiers["at_end"]["dropped"]["pages"] * len(record.samples)
    assert dropped == pytest.approx(record.activity["pages_moved"]["dropped"])
    assert dropped > 0
    assert any(line.replace("│", " ").split()[:1] == ["dropped"] for line in done.stdout.splitlines())


def test_full_cache_beside_it_has_no_limit(place: Place, tmp_path: Path) -> None:
    record = ran(place, tmp_path, "cache.l1_bytes=160KiB")
    assert value(record, "kv.device_bytes_full") > 228 * KIB
    assert value(record, "kv.device_bytes") <= 160 * KIB


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("cache.l1_bytes=0", "cache.l1_bytes=0: must be a number of bytes"),
        ("cache.l1_bytes=-5", "cache.l1_bytes=-5: must be a number of bytes"),
        ("cache.l1_bytes=12 apples", "cache.l1_bytes='12 apples': must be a number of bytes such as 1073741824"),
        ("cache.l2_bytes=nan", "cache.l2_bytes=nan: must be a number of bytes"),
        ("cache.l2_bytes=true", "cache.l2_bytes=True: must be a number of bytes"),
        ("cache.l2_bytes=101%", "cache.l2_bytes='101%': must be a number of bytes"),
        ("cache.l3_bytes=0.5", "cache.l3_bytes=0.5: must be a number of bytes"),
        ("cache.l3_path=7", "cache.l3_path=7: must be a folder, a file or null"),
        ("cache.swap_threshold=0", "cache.swap_threshold=0: must be above 0 and at most 1"),
        ("cache.swap_threshold=80%", "cache.swap_threshold='80%': must be above 0 and at most 1"),
        ("cache.overlap=maybe", "cache.overlap='maybe': must be one of true, false"),
        ("cache.l3_io=aio", "cache.l3_io='aio': must be one of auto, uring, threads, mmap"),
        ("cache.l3_direct=never", "cache.l3_direct='never': must be one of auto, true, false"),
        ("cache.l3_failures=0", "cache.l3_failures=0: must be a whole number of at least 1"),
        ("cache.on_lost=hide", "cache.on_lost='hide': must be one of recompute, drop, error"),
        ("cache.l1_byte=1", "unknown key 'cache.l1_byte'. Did you mean l1_bytes?"),
    ],
)
def test_refused_before_a_model_is_loaded(place: Place, override: str, said: str) -> None:
    assert said in refusal(lambda: setup(configured(place.changed(override))))


def archive_error(place: Place, path: Path, *more: str) -> str:
    return refusal(lambda: setup(configured(place.changed(f"cache.l3_path={path}", *more))))


def about(place: Place, model: str) -> ArchiveAbout:
    return ArchiveAbout(model, 2, 2, 16, 16, {"bf16": 2048})


def test_archives_that_are_none(place: Place, tmp_path: Path) -> None:
    """All of it before the model is loaded, and nothing is left behind or changed."""
    text, locked = tmp_path / "notes.txt", tmp_path / "locked.kv"
    text.write_text("no pages here")
    PageFile.open(locked, about(place, "m")).close()
    old = tmp_path / "old.kv"
    old.write_bytes(locked.read_bytes().replace(b"testbed pages 2\n", b"testbed pages 1\n", 1))
    before = sorted(tmp_path.iterdir())
    for path, said in (
        (text, "is not a page file"),
        (text / "pages", "there is no folder"),
        (tmp_path / "nowhere" / "pages.kv", "there is no folder"),
        (Path("/dev/null"), "cache.l3_path=/dev/null"),
        (old, "is a page file of version 1, this testbed has version 2"),
    ):
        line = archive_error(place, path)
        assert said in line
        assert f"cache.l3_path={path}" in line
    with locked.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        line = archive_error(place, locked)
        assert f"cache.l3_path={locked}" in line
        assert "another run" in line
    assert sorted(tmp_path.iterdir()) == before
    assert text.read_text() == "no pages here"
    setup(configured(place.changed(f"cache.l3_path={locked}")))


def test_archive_folder_without_permission(place: Place, tmp_path: Path) -> None:
    closed = Path("/proc/self/fdinfo") if os.getuid() == 0 else tmp_path / "closed"
    if os.getuid():
        closed.mkdir(mode=0o500)
    line = archive_error(place, closed)
    assert f"cache.l3_path={closed}" in line
    assert "name a writable folder" in line


@pytest.fixture
def no_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    def costly(*arguments: object) -> None:
        raise AssertionError("the error came after expensive work")

    monkeypatch.setattr("testbed.experiment.prefill", costly)


def failing(place: Place, tmp_path: Path, *more: str) -> str:
    """The line of a run that must fail without a trace in its folder and before any prefill."""
    line = refusal(lambda: run(configured(place.changed(*ELASTIC, "workload.lengths=[900]", *more)), tmp_path / "out"))
    assert left_behind(tmp_path / "out") == []
    return line


@pytest.mark.usefixtures("no_prefill")
def test_page_file_of_another_model(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "other.kv"
    PageFile.open(path, about(place, "another model")).close()
    before = path.read_bytes()
    line = failing(place, tmp_path, f"cache.l3_path={path}")
    assert f"cache.l3_path={path}: holds pages of another model or cache: " in line
    assert path.read_bytes() == before


@pytest.mark.usefixtures("no_prefill")
def test_device_that_can_not_hold_the_window(place: Place, tmp_path: Path) -> None:
    line = failing(place, tmp_path, "cache.l1_bytes=50KiB")
    assert "cache.l1_bytes='50KiB': 51200 bytes can't hold sinks, recent window and metadata of 9" in line
    assert "cache.swap_threshold=0.8" in line


def test_the_least_that_would_do_does(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("testbed.experiment.prefill", None)
        line = failing(place, tmp_path, "cache.l1_bytes=50KiB")
    least = int(line.partition("at least ")[2].partition(",")[0])
    assert f"at least {least}" in failing(place, tmp_path, f"cache.l1_bytes={least - 1}")
    record = ran(place, tmp_path / "run", f"cache.l1_bytes={least}")
    assert record.status == "complete"
    assert value(record, "kv.device_bytes") <= least
