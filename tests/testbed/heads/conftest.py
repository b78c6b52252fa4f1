"""Lets these tests use the helpers of tests/testbed, and a model that speaks."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from tiny_run import save_model  # noqa: E402

from testbed.models import load  # noqa: E402
from testbed.models.hf import HfDecoder  # noqa: E402


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> HfDecoder:
    """A tiny model with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, positions=2048)
    return load(folder, name="speaking")


@pytest.fixture
def essays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text of a test only: the workloads' default would be an asset."""
    body = " ".join(f"Sentence {at} says nothing at all." for at in range(200))
    monkeypatch.setattr("testbed.assets.essays", lambda: {f"essay{at}.txt": body for at in range(12)})
