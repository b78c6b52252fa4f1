"""Hardware of the twin: every number with unit, source, date and kind (spec, measured, assumed).

One machine is one YAML in conf/hardware/. `build` is its Hydra target, `load` reads one by name or path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hydra.utils import get_method
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import conf

KINDS = ("spec", "measured", "assumed")

# unit -> (dimension, factor to the twin's own units: bytes, microseconds, operations, values)
UNITS = {
    "B": ("size", 1.0),
    "MB": ("size", 1e6),
    "GB": ("size", 1e9),
    "GB/s": ("bandwidth", 1e3),
    "TB/s": ("bandwidth", 1e6),
    "GFLOP/s": ("compute", 1e3),
    "TFLOP/s": ("compute", 1e6),
    "Gvalue/s": ("values", 1e3),
    "ns": ("time", 1e-3),
    "us": ("time", 1.0),
    "ms": ("time", 1e3),
    "fraction": ("fraction", 1.0),
}

# quantity -> (dimension, meaning)
QUANTITIES = {
    "memory_capacity": ("size", "device memory for weights, L0 and L1"),
    "memory_bandwidth": ("bandwidth", "peak read rate of L0 and L1"),
    "contiguous_efficiency": ("fraction", "part of it that reading weights and L0 reaches"),
    "paged_efficiency": ("fraction", "part of it that attention over L1 pages reaches"),
    "bf16_flops": ("compute", "peak rate at 2 bytes a value"),
    "fp32_flops": ("compute", "peak rate at 4 bytes a value"),
    "matmul_efficiency": ("fraction", "part of the peak rate that linears and attention reach"),
    "int8_dequant": ("values", "INT8 numbers made ready for arithmetic"),
    "int4_dequant": ("values", "INT4 numbers made ready for arithmetic"),
    "layer_overhead": ("time", "launches and host code of one layer that nothing hides"),
    "step_overhead": ("time", "the same, once a step (embedding, head, sampling)"),
    "plan_overhead": ("time", "one plan of the policy"),
    "host_read": ("bandwidth", "L2 to device"),
    "host_write": ("bandwidth", "device to L2"),
    "host_both": ("bandwidth", "both directions of the host link together"),
    "host_setup": ("time", "one message on the host link"),
    "disk_read": ("bandwidth", "L3 to host"),
    "disk_write": ("bandwidth", "host to L3"),
    "disk_setup": ("time", "one message on the disk"),
    "chunk": ("size", "piece in which a prefetch or demotion crosses two hops"),
}


class HardwareError(ValueError):
    """A hardware description that can't be used; names the key."""


@dataclass(frozen=True)
class Quantity:
    """One number and where it comes from.

    Attributes:
        date: when the source was read or the number measured, YYYY[-MM[-DD]].
    """

    value: float
    unit: str
    source: str
    date: str
    kind: str

    def __post_init__(self) -> None:
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise HardwareError(f"value={value!r}: must be a finite number")
        if self.unit not in UNITS:
            raise HardwareError(f"unit={self.unit!r}: must be one of {', '.join(UNITS)}")
        if value < 0 or (value == 0 and self.dimension != "time"):
            raise HardwareError(f"value={value!r} {self.unit}: must be above 0")
        if self.dimension == "fraction" and value > 1:
            raise HardwareError(f"value={value!r}: a fraction must be at most 1")
        if self.kind not in KINDS:
            raise HardwareError(f"kind={self.kind!r}: must be one of {', '.join(KINDS)}")
        if not isinstance(self.source, str) or not self.source.strip():
            raise HardwareError("source: must say where the number comes from")
        if not isinstance(self.date, str) or not re.fullmatch(r"\d{4}(-\d\d){0,2}", self.date):
            raise HardwareError(f"date={self.date!r}: must be YYYY, YYYY-MM or YYYY-MM-DD, quoted")

    @property
    def dimension(self) -> str:
        """What the unit measures."""
        return UNITS[self.unit][0]

    @property
    def base(self) -> float:
        """The value in bytes, microseconds, operations, values and their ratios."""
        return self.value * UNITS[self.unit][1]


@dataclass(frozen=True)
class Hardware:
    """One machine.

    Attributes:
        quantities: one `Quantity` for each name in `QUANTITIES`.
        overlap: transfers run beside compute; false where the same cores copy and compute.
    """

    name: str
    quantities: Mapping[str, Quantity]
    overlap: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise HardwareError(f"hardware name={self.name!r}: must be a text that is not empty")
        if not isinstance(self.overlap, bool):
            raise HardwareError(f"hardware {self.name}: overlap={self.overlap!r}: must be true or false")
        missing, unknown = set(QUANTITIES) - set(self.quantities), set(self.quantities) - set(QUANTITIES)
        if missing or unknown:
            raise HardwareError(
                f"hardware {self.name}: missing {sorted(missing)}, unknown {sorted(unknown)}; "
                f"a machine has {', '.join(QUANTITIES)}"
            )
        for key, quantity in self.quantities.items():
            wanted = QUANTITIES[key][0]
            if quantity.dimension != wanted:
                allowed = [unit for unit, (dimension, _) in UNITS.items() if dimension == wanted]
                raise HardwareError(
                    f"hardware {self.name}: {key}: unit={quantity.unit!r}: must be one of {', '.join(allowed)}"
                )

    def __getitem__(self, key: str) -> float:
        """The number in the twin's own units (bytes, microseconds)."""
        return self.quantities[key].base

    @property
    def assumed(self) -> frozenset[str]:
        """Names of the numbers that nobody measured or specified."""
        return frozenset(key for key, quantity in self.quantities.items() if quantity.kind == "assumed")


def build(name: str, overlap: bool = True, **quantities: Any) -> Hardware:
    """Hydra's target for a machine: every other key is a mapping with the fields of `Quantity`.

    Raises:
        HardwareError: names the machine, the key and what is wrong.
    """
    return Hardware(name, {key: quantity(key, raw, name) for key, raw in quantities.items()}, overlap)


def quantity(key: str, raw: Any, name: str) -> Quantity:
    """One `Quantity` from its mapping; errors name the machine and the key."""
    wanted = {item.name for item in fields(Quantity)}
    if not isinstance(raw, Mapping) or set(raw) != wanted:
        raise HardwareError(
            f"hardware {name}: {key}={raw!r}: must be a mapping with exactly {', '.join(sorted(wanted))}"
        )
    try:
        return Quantity(**{str(item): value for item, value in raw.items()})
    except HardwareError as error:
        raise HardwareError(f"hardware {name}: {key}: {error}") from error


def load(name: str) -> Hardware:
    """The machine of conf/hardware/<name>.yaml, or of a YAML file's path.

    Raises:
        HardwareError: no such machine (those known are listed), or its file is no YAML or invalid.
    """
    folder = Path(next(iter(conf.__path__))) / "hardware"
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        known = sorted(found.stem for found in folder.glob("*.yaml"))
        raise HardwareError(f"hardware={name!r}: not found; known: {', '.join(known)}, or the path of a YAML")
    try:
        raw = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise HardwareError(f"{path}: can't be read ({error})") from error
    if not isinstance(raw, dict) or "_target_" not in raw:
        raise HardwareError(f"{path}: must be a mapping with _target_: testbed.sim.hardware.build")
    arguments = {str(key): value for key, value in raw.items()}
    # Called here and not through Hydra's instantiate, which would bury our error in its own.
    machine = get_method(arguments.pop("_target_"))(**arguments)
    if not isinstance(machine, Hardware):
        raise HardwareError(f"{path}: _target_ builds {type(machine).__name__}, no Hardware")
    return machine
