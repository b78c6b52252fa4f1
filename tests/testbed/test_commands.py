"""What commands check before their work: outputs, threads, keys; and the one line that errors become."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from testbed.cache.layout import CacheConfig
from testbed.cache.pool import CacheError
from testbed.commands import CommandError, check_keys, check_output, check_some, describe, set_threads


@pytest.mark.parametrize(
    ("name", "folder", "said"),
    [
        ("folder", False, "Is a directory"),
        ("pipe", False, "not a regular file"),
        ("loop", False, "not a regular file"),
        ("file/below.json", False, "is no folder that can be written to"),
        ("file", True, "is no folder that can be written to"),
        ("file/below", True, "is no folder that can be written to"),
        ("pipe", True, "is no folder that can be written to"),
    ],
)
def test_outputs_that_cannot_be_written_are_refused_by_name(tmp_path: Path, name: str, folder: bool, said: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CommandError, match=f"record={tmp_path / name}: .*{said}"):
        check_output("record", str(tmp_path / name), folder)


def test_outputs_that_can_be_written_are_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    for name in ("file", "link", "new/and/deeper.json"):
        assert check_output("record", str(tmp_path / name)) == tmp_path / name
    for name in (".", "new/folder"):
        assert check_output("offsets", str(tmp_path / name), folder=True) == tmp_path / name
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_output("record", "~/file") == tmp_path / "file"
    assert check_output("record", None) is None
    assert not (tmp_path / "new").exists()
    for value in (5, "", True, ["a"]):
        with pytest.raises(CommandError, match="must be the path of a file, or null"):
            check_output("record", value)


@pytest.mark.parametrize("threads", [0, -1, "abc", 1.7, True, [1], 10**9])
def test_threads_that_are_none_are_refused_by_name(threads: object) -> None:
    with pytest.raises(ValueError, match="threads="):
        set_threads(threads)


def test_threads_are_set() -> None:
    before = torch.get_num_threads()
    set_threads(None)
    assert torch.get_num_threads() == before
    set_threads(1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


@pytest.mark.parametrize("node", [None, 5, [1], "text", {"a": 1}, {"a": 1, "b": 2, "c": 3}])
def test_nodes_of_other_keys_are_refused_by_name(node: object) -> None:
    cfg = OmegaConf.create({"corpus": node})
    with pytest.raises(CommandError, match="corpus=.*: must hold the keys a, b and no others"):
        check_keys("corpus", cfg.corpus, ("a", "b"))
    assert check_keys("corpus", OmegaConf.create({"b": [2], "a": 1}), ("a", "b")) == {"a": 1, "b": [2]}


def test_lists_that_may_be_empty() -> None:
    cfg = OmegaConf.create({"none": [], "some": [1, 2], "text": "ab", "one": 5, "null": None})
    assert (check_some("none", cfg.none), check_some("some", cfg.some)) == ((), (1, 2))
    for key in ("text", "one", "null"):
        with pytest.raises(ValueError, match=f"{key}=.*: must be a list"):
            check_some(key, cfg[key])


def test_our_own_errors_are_told_without_their_class() -> None:
    with pytest.raises(CacheError) as caught:
        CacheConfig(page_tokens=7)
    assert describe(caught.value).startswith("cache.page_tokens=7")
    assert describe(RuntimeError("out of luck")) == "RuntimeError: out of luck"
