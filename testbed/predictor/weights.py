"""Trained weights: one safetensors file for each model, float16, with what they were made from and for.

Packaged ones lie in testbed/predictor/weights/, those trained here in $TESTBED_CACHE/predictors, which come first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from testbed.assets import cache_dir
from testbed.models.base import Decoder
from testbed.predictor.network import Network, NetworkShape
from testbed.tensors import write_tensors

SCHEMA = 1
EXACT = ("mean", "spread")  # stay float32: they are few and everything is scaled by them


class WeightsError(ValueError):
    """Weights that are not there, can't be read or belong to something else."""


@dataclass(frozen=True)
class About:
    """What trained weights say of themselves.

    Attributes:
        model, fingerprint: of the decoder.
        names: of the features, in order.
        shape: of the network.
        data: hash of all that the recordings depend on.
        seed: of training.
        versions: of what trained them.
        settings: of training.
        measured: what training measured on the documents held out; plain numbers.
    """

    model: str
    fingerprint: str
    names: tuple[str, ...]
    shape: NetworkShape
    data: str
    seed: int
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)


def file_name(decoder: Decoder, names: Sequence[str]) -> str:
    """Of the weights of a model, whatever it is called here, for features of those names, in order."""
    features = hashlib.blake2b(" ".join(names).encode(), digest_size=3).hexdigest()
    return f"core-{decoder.fingerprint}-{len(names)}-{features}.safetensors"


def trained_path(decoder: Decoder, names: Sequence[str]) -> Path:
    """Where training puts them."""
    return cache_dir() / "predictors" / file_name(decoder, names)


def find_weights(decoder: Decoder, names: Sequence[str]) -> Path:
    """Of the model, for features of those names: those trained here, else those packaged.

    Raises:
        WeightsError: neither.
    """
    packaged = resources.files("testbed.predictor") / "weights" / file_name(decoder, names)
    for path in (trained_path(decoder, names), Path(str(packaged))):
        if path.is_file():
            return path
    raise WeightsError(
        f"no trained weights of model {decoder.name} (fingerprint {decoder.fingerprint}); train them by "
        "`python -m testbed.predictor train model=...`, or choose policy/predictor=judges, which needs none"
    )


def write_weights(path: Path, network: Network, about: About) -> None:
    """To a file, whole or not at all."""
    tensors = {
        name: tensor.detach().to(torch.float32 if name in EXACT else torch.float16)
        for name, tensor in network.state_dict().items()
    }
    write_tensors(path, tensors, {"about": json.dumps({"schema": SCHEMA, **asdict(about)}, sort_keys=True)})


def read_weights(path: Path) -> tuple[Network, About]:
    """From a file.

    Raises:
        WeightsError: not there, not weights of this version, or tensors that do not fit together.
    """
    if not path.is_file():
        raise WeightsError(f"{path}: no such file of trained weights")
    try:
        with safe_open(path, "pt") as file:
            about = _about((file.metadata() or {})["about"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, no dict
        _check_numbers(tensors)
        network = Network(about.shape)
        network.load_state_dict(tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        first, _, _ = str(error).partition("\n")
        why = first if isinstance(error, WeightsError) else f"not trained weights ({first})"
        raise WeightsError(f"{path}: {why}; train them again") from error
    return network.requires_grad_(False).eval(), about


def _about(text: str) -> About:
    """What weights say of themselves."""
    raw = json.loads(text)
    if not isinstance(raw, dict):
        raise TypeError(f"about={text[:40]}: must be a mapping")
    if raw.pop("schema") != SCHEMA:
        raise WeightsError("weights of another version")
    names = raw.pop("names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"names={str(names)[:40]}: must be a list of names")
    return About(**{**raw, "names": tuple(names), "shape": NetworkShape(**raw["shape"])})


def _check_numbers(tensors: Mapping[str, Tensor]) -> None:
    """Refuses tensors that no score can be made from."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name}: of {tensor.dtype}, must be floating point")
        if not bool(torch.isfinite(tensor.float()).all()):
            raise WeightsError(f"{name} holds numbers that are not finite")
    if bool((tensors["spread"] <= 0).any()):
        raise WeightsError("spread holds a number that is not above 0")


def load_weights(decoder: Decoder, names: Sequence[str], path: Path | None = None) -> Network:
    """The network of a model, checked against it.

    Args:
        decoder: the model.
        names: of the features that it will be given.
        path: of the file; None = the model's own.

    Raises:
        WeightsError: see `find_weights` and `read_weights`; weights of another model or of other features.
    """
    path = find_weights(decoder, names) if path is None else path
    network, about = read_weights(path)
    if about.fingerprint != decoder.fingerprint:
        raise WeightsError(
            f"{path}: trained on model {about.model} ({about.fingerprint}), here it is {decoder.name} "
            f"({decoder.fingerprint}); train them by `python -m testbed.predictor train model=...`"
        )
    if about.names != tuple(names):
        other = sorted(set(about.names) ^ set(names)) or ["their order"]
        raise WeightsError(f"{path}: trained on other features ({', '.join(other)}); train them again")
    geometry, shape = decoder.geometry, about.shape
    wanted = (geometry.layers, geometry.kv_heads, len(names), 2 * decoder.width)
    made_for = (shape.layers, shape.kv_heads, shape.features, shape.context)
    if made_for != wanted:
        raise WeightsError(f"{path}: made for layers, KV heads, features, context {made_for}; the model has {wanted}")
    return network
