"""Verdicts about head maps in files: those that come with the testbed, this machine's, and those in a map."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from testbed import files
from testbed.assets import cache_dir
from testbed.heads.headmap import HeadMap, HeadMapError, read_verdict
from testbed.results.record import write_atomically


def kept_path(fingerprint: str) -> Path:
    """Where verdicts about a model are kept on this machine."""
    return cache_dir() / "headmaps" / f"verdicts-{fingerprint}.json"


def kept(fingerprint: str) -> dict[str, dict[str, Any]]:
    """Classifier -> verdict, of this machine over those that come with the testbed; empty for an unknown model.

    Raises:
        HeadMapError: a file that is no such thing; names it.
    """
    found: dict[str, dict[str, Any]] = {}
    shipped = resources.files("testbed.heads") / "verdicts" / f"{fingerprint}.json"
    for path in (shipped, kept_path(fingerprint)):
        if not path.is_file():
            continue
        found |= _read(path)
    return found


def _read(path: Any) -> dict[str, dict[str, Any]]:
    """The verdicts in a file."""
    try:
        return {name: read_verdict(name, verdict) for name, verdict in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise HeadMapError(f"{path}: not verdicts ({error}); delete the file") from error


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One process at a time reads and replaces a head map or the verdicts that are kept."""
    path = cache_dir() / "headmaps" / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.locked(path):
        yield


def keep(fingerprint: str, judged: Mapping[str, Mapping[str, Any]]) -> Path:
    """Adds verdicts to those kept on this machine, whoever else does so."""
    path = kept_path(fingerprint)
    with locked():
        plain = {**(_read(path) if path.is_file() else {}), **judged}
        write_atomically(path, json.dumps(plain, indent=1, allow_nan=False) + "\n")
    return path


def add(path: Path, fingerprint: str, judged: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds verdicts to a head map as it is by now, whoever else wrote it since.

    Raises:
        HeadMapError: it is of other weights by now, or can't be read or written.
    """
    with locked():
        head_map = HeadMap.read(path)
        if head_map.fingerprint != fingerprint:
            raise HeadMapError(f"{path}: was replaced by a map of other weights ({head_map.fingerprint})")
        for name, verdict in judged.items():
            head_map = head_map.with_verdict(name, verdict)
        head_map.write(path)


def lines(judged: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """One line a classifier: kept verdicts, or `testbed.heads.verdict.Judged.plain`."""
    for name, verdict in judged.items():
        says = "beats random" if verdict["beats_random"] else "not better than random"
        yield f"{name}: {says}: {verdict['why']}"
