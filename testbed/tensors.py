"""Writes a safetensors file whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from testbed.files import replacing


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Replaces the file in one step; until then memory holds all of it a second time.

    Args:
        path: of the file; its folder is made.
        tensors: by name.
        about: texts kept beside them.

    Raises:
        OSError: see `replacing`.
    """
    with replacing(path) as partial:
        partial.write_bytes(save({name: x.contiguous() for name, x in tensors.items()}, dict(about)))
