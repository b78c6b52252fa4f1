"""Writes a safetensors file whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Replaces the file in one step.

    Args:
        path: of the file; its folder is made.
        tensors: by name.
        about: texts kept beside them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({name: x.contiguous() for name, x in tensors.items()}, partial, dict(about))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
