"""`show`: a head map on the screen, and evidence that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from testbed.heads.evidence import evidence
from testbed.heads.headmap import HeadMap, HeadMapError, Measured
from testbed.heads.show import main


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdicts kept on this machine."""
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path / "cache"))


def head_map(model: str = "toy") -> HeadMap:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.rand(3, 2, 1, generator=generator) for _ in range(4)]
    measures = {
        "head_entropy": Measured.of(texts, "text", "bits", [8, 8, 9, 9]),
        "head_entropy@code": Measured.of(texts[:2], "code", "bits"),
    }
    return HeadMap(model, "f00d", 3, 2, 4, measures, {}).with_evidence({**evidence(measures), "left_out": {"x": "why"}})


def test_a_map_is_shown_with_its_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "map.json"
    head_map("[/bold] [red]").write(path)
    main([str(path)])
    said = " ".join(capsys.readouterr().out.split())
    for part in ("[/bold] [red] (f00d): 3 layers x 2 KV heads", "text / code", "left out: x: why", "no verdicts"):
        assert part in said
    with pytest.raises(HeadMapError, match="show takes one head map, and was given 2 words"):
        main([str(path), str(path)])


@pytest.mark.parametrize(
    "spoilt",
    [
        {"stability": [1]},
        {"stability": {"head_entropy": 5}},
        {"stability": {"head_entropy": {"texts": "a"}}},
        {"stability": {"head_entropy": {"seeds": 5}}},
        {"stability": {"head_entropy": {"lengths": {"8 9": {}}}}},
        {"carry_over": {"head_entropy": 5}},
        {"carry_over": {"head_entropy": {}}},
        {"shares": ["x"]},
        {"chance": {}},
        {"left_out": [1]},
    ],
)
def test_evidence_that_is_none_is_one_clear_error(
    spoilt: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "map.json"
    head_map().write(path)
    data = json.loads(path.read_text())
    data["evidence"] |= spoilt
    path.write_text(json.dumps(data))
    with pytest.raises(HeadMapError, match=r"evidence that can't be shown \(\w+Error: .+\)") as caught:
        main([str(path)])
    assert str(caught.value).startswith(f"{path}: ")
    assert not capsys.readouterr().out
