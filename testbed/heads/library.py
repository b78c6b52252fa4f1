"""The measures of a model's heads, made when first asked for and kept in $TESTBED_CACHE/headmaps.

Measures come in groups, because one pass over a text shows several of them. conf/measure/<group>.yaml names the
function that makes a group, its measures and the calibration settings they depend on: a new group is one function and
one YAML. Every group is a file of its own, so what was finished before Ctrl-C stays.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_method
from omegaconf import OmegaConf
from torch import Tensor

from testbed.assets import cache_dir, data_dir
from testbed.code import code_of
from testbed.heads.calibration import CalibrationConfig, CalibrationError, Tick
from testbed.heads.headmap import SCHEMA, HeadMap, HeadMapError, Measured
from testbed.models.base import Decoder

Progress = Callable[[str, float], None]
CODE = ("testbed.heads", "testbed.workloads", "testbed.predictor", "testbed.engine.prefill")
"""Packages whose code texts and measures come from: what they mean is part of a kept group's name."""
VIEWS = ("value", "mean", "low", "high")


@dataclass(frozen=True)
class Group:
    """One file of conf/measure.

    Attributes:
        name: of the file.
        target: path of the function `(decoder, config, tick) -> dict[str, Measured]`.
        measures: what it gives at least.
        settings: keys of `CalibrationConfig` that its measures depend on.
        data: folder in the data folder that its texts are read from, where it is; "" = none.
    """

    name: str
    target: str
    measures: tuple[str, ...]
    settings: tuple[str, ...]
    data: str = ""

    def measure(self, decoder: Decoder, config: CalibrationConfig, tick: Tick) -> dict[str, Measured]:
        """Runs the function."""
        return get_method(self.target)(decoder, config, tick)

    def chosen(self, config: CalibrationConfig) -> dict[str, Any]:
        """The settings that matter, and what there is of the data: names and sizes of its files.

        Raises:
            CalibrationError: the YAML names one that there is not.
        """
        known = asdict(config)
        unknown = sorted(set(self.settings) - set(known))
        if unknown:
            raise CalibrationError(
                f"conf/measure/{self.name}.yaml: settings has {unknown[0]!r}; there are {sorted(known)}"
            )
        chosen = {key: known[key] for key in self.settings}
        return chosen | {self.data: _listed(self.data)} if self.data else chosen


def _listed(folder: str) -> str:
    root = data_dir()
    if root is None:
        return "not there"
    files = sorted(path for path in (root / folder).rglob("*") if path.is_file())
    if not files:
        return "not there"
    listed = "".join(f"{path.relative_to(root)} {path.stat().st_size}\n" for path in files)
    return f"{len(files)} files, {hashlib.blake2b(listed.encode(), digest_size=4).hexdigest()}"


def groups() -> dict[str, Group]:
    """All groups by name, sorted."""
    folder = resources.files("conf") / "measure"
    found = {}
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".yaml"):
            name = entry.name.removesuffix(".yaml")
            data: Any = OmegaConf.to_container(OmegaConf.create(entry.read_text()))
            found[name] = Group(
                name, data["_target_"], tuple(data["measures"]), tuple(data["settings"]), data.get("data", "")
            )
    return found


def group_path(decoder: Decoder, config: CalibrationConfig, group: Group) -> Path:
    """Where the measures of a group are kept: for that model, those settings and the code of texts and measures."""
    code = code_of(group.target.rpartition(".")[0], *CODE)
    chosen = json.dumps((SCHEMA, group.target, group.chosen(config), code), sort_keys=True)
    digest = hashlib.blake2b(chosen.encode(), digest_size=4).hexdigest()
    folder = cache_dir() / "headmaps" / decoder.fingerprint
    return folder / f"{group.name}-{digest}.json"


def measure_group(
    decoder: Decoder, config: CalibrationConfig, group: Group, progress: Progress = lambda what, part: None
) -> HeadMap:
    """The measures of one group: read if they were made before, else made and kept.

    Raises:
        HeadMapError: the kept file is broken, or a new one can't be kept.
        CalibrationError: the heads can't be measured as asked.
    """
    path = group_path(decoder, config, group)
    if not path.exists():
        what = f"measuring heads: {group.name}"
        measures = group.measure(decoder, config, lambda part: progress(what, part))
        missing = sorted(set(group.measures) - set(measures))
        if missing:
            raise HeadMapError(f"conf/measure/{group.name}.yaml: {group.target} gave no {', '.join(missing)}")
        settings = {**group.chosen(config), "python": platform.python_version(), "torch": torch.__version__}
        HeadMap.of(decoder, measures, settings).write(path)
    try:
        head_map = HeadMap.read(path)
        head_map.check_model(decoder)
        for name in group.measures:
            head_map.measure(name)
    except HeadMapError as error:
        raise HeadMapError(f"{error}; delete {path} to have it made again") from error
    return head_map


class Measures(Mapping[str, Tensor]):
    """Measure -> [L, Hk] float32. A group is made when one of its measures is first looked up.

    "name:mean", ":low" and ":high" are other views of a measure than its value.
    """

    def __init__(self, decoder: Decoder, config: CalibrationConfig, progress: Progress) -> None:
        self._decoder, self._config, self._progress = decoder, config, progress
        self._group_of = {name: group for group in groups().values() for name in group.measures}
        self._maps: dict[str, HeadMap] = {}

    def __getitem__(self, key: str) -> Tensor:
        """The measure.

        Raises:
            KeyError: no group gives it.
        """
        name, _, view = key.partition(":")
        if name not in self._group_of or (view or "value") not in VIEWS:
            raise KeyError(key)
        group = self._group_of[name]
        if group.name not in self._maps:
            self._maps[group.name] = measure_group(self._decoder, self._config, group, self._progress)
        return getattr(self._maps[group.name].measure(name), view or "value")

    def __contains__(self, key: object) -> bool:
        """Whether some group gives it; measures nothing."""
        name, _, view = str(key).partition(":")
        return name in self._group_of and (view or "value") in VIEWS

    def __iter__(self) -> Iterator[str]:
        """Names of all measures; measures nothing."""
        return iter(self._group_of)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._group_of)


def head_measures(
    decoder: Decoder, config: CalibrationConfig, progress: Progress = lambda what, part: None
) -> Mapping[str, Tensor]:
    """The measures of every head of the model, [L, Hk] each, made when asked for; see `Measures`."""
    return Measures(decoder, config, progress)
