"""Refusals that several files share: one ValueError that names the argument, its value and what is allowed."""

from __future__ import annotations

import math

from torch import Tensor

INT32_MOST = 2**31 - 1


def check_int(key: str, value: object, least: int, most: int = INT32_MOST, meaning: str = "") -> None:
    """Refuses what is no int of least to most; a bool is none, nor is 4.0."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{key}={value!r}: must be {least}{meaning} or more, an int of at most {most}")


def check_real(key: str, value: object) -> None:
    """Refuses what is no finite float or int."""
    if isinstance(value, bool) or not isinstance(value, (float, int)) or not math.isfinite(value):
        raise ValueError(f"{key}={value!r}: must be a finite number")


def check_floats(what: str, **tensors: Tensor) -> None:
    """Refuses tensors of integers, bools or complex numbers."""
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{what} {name} {tensor.dtype}: must be a float type")


def check_like(what: str, first: str, **tensors: Tensor) -> None:
    """Refuses tensors that aren't on the device of the one named first."""
    device = tensors[first].device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{what} {name} on {tensor.device}: must be on {first}'s device, {device}")
