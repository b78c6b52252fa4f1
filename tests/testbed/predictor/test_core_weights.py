"""Files of trained weights: what is no such file is one line that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from testbed.predictor.network import Network, NetworkShape
from testbed.predictor.weights import About, WeightsError, read_weights, write_weights

SHAPE = NetworkShape(2, 1, 1, 2, 4, units=3, rank=2)


def spoilt(path: Path, about: object = None, **tensors: Tensor) -> Path:
    """Weights with another text about them, or with other tensors."""
    whole = {name: tensor.contiguous() for name, tensor in Network(SHAPE).state_dict().items()}
    fields: dict[str, Any] = {"schema": 1, "model": "m", "fingerprint": "f", "data": "d", "seed": 0}
    known = {**fields, "names": ["a", "b"], "shape": vars(SHAPE)}
    if isinstance(about, dict):
        about = {**known, **about}
    save_file({**whole, **tensors}, path, {"about": json.dumps(known if about is None else about)})
    return path


def test_they_come_back_in_any_precision(tmp_path: Path) -> None:
    network = Network(SHAPE)
    write_weights(tmp_path / "w", network, About("m", "f", ("a", "b"), SHAPE, "d", 0))
    for path in (tmp_path / "w", spoilt(tmp_path / "double", mean=torch.ones(2, dtype=torch.float64))):
        found, about = read_weights(path)
        assert about.names == ("a", "b")
        assert {tensor.dtype for tensor in found.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("about", [5, [], None, "x", {"names": "ab"}, {"names": [1, 2]}, {"names": 5}, {"shape": 5},
                                   {"shape": {}}, {"seeds": 1}])  # fmt: skip
def test_what_they_say_of_themselves_is_checked(about: object, tmp_path: Path) -> None:
    path = spoilt(tmp_path / "w", "null" if about is None else about)
    with pytest.raises(WeightsError, match=r"not trained weights \(.+\); train them again") as caught:
        read_weights(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"mean": torch.zeros(2, dtype=torch.int64)}, r"mean: of torch.int64, must be floating point"),
        ({"mean": torch.zeros(2, dtype=torch.complex64)}, r"mean: of torch.complex64, must be floating point"),
        ({"spread": torch.tensor([1.0, 0.0])}, "spread holds a number that is not above 0"),
        ({"spread": torch.tensor([1.0, -1.0])}, "spread holds a number that is not above 0"),
        ({"mean": torch.tensor([1.0, torch.inf])}, "mean holds numbers that are not finite"),
        ({"mean": torch.zeros(3)}, "not trained weights"),
        ({"other": torch.zeros(3)}, "not trained weights"),
    ],
)
def test_their_numbers_are_checked(tensors: dict[str, Tensor], says: str, tmp_path: Path) -> None:
    path = spoilt(tmp_path / "w", **tensors)
    with pytest.raises(WeightsError, match=says) as caught:
        read_weights(path)
    assert str(caught.value).startswith(f"{path}: ")
