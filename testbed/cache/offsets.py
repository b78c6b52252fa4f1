"""What a head's background state is moved by: learned once a model, on the attention that skipping pages leaves out.

A background state has the mean key and the mean value of the pages it stands for, and the log of their tokens as an
addend of its logit. The mean key's logit is below the log-sum-exp of the keys (Jensen), and the tokens that get
most attention have other values than the mean. Both gaps are much alike from text to text, so each head gets one addend
of the logit, one factor and one addend of the value. Method ours; learned by `python -m testbed.predictor background`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from testbed.tensors import write_tensors

SCHEMA = "1"
FOLDER = Path(__file__).parent.parent / "predictor" / "weights"


class OffsetsError(ValueError):
    """Offsets that can't be read, or that are another model's."""


@dataclass(frozen=True)
class BackgroundOffsets:
    """One set for every stream.

    Attributes:
        log2: [S] added to the base-2 logit.
        scale: [S] the mean value is multiplied by.
        value: [S, D] added to the value then.
    """

    log2: Tensor
    scale: Tensor
    value: Tensor

    def __post_init__(self) -> None:
        """Refuses shapes that don't match and numbers that are none."""
        streams = len(self.value)
        if self.value.dim() != 2 or self.log2.shape != (streams,) or self.scale.shape != (streams,):
            shapes = ", ".join(str(tuple(x.shape)) for x in (self.log2, self.scale, self.value))
            raise OffsetsError(f"background offsets {shapes}: must be [S], [S], [S, D]")
        if not all(bool(x.isfinite().all()) for x in (self.log2, self.scale, self.value)):
            raise OffsetsError("background offsets: hold NaN or infinity")

    def moved(self, value: Tensor, log2_count: Tensor) -> tuple[Tensor, Tensor]:
        """Value [S, ..., D] and log2 count [S, ...] of states, with the offsets; letters in between are rows."""
        rows = log2_count.dim() - 1
        scale, addend = (x.view(-1, *(1,) * rows, x.shape[-1] if x.dim() == 2 else 1) for x in (self.scale, self.value))
        return value * scale + addend, log2_count + self.log2.view(-1, *(1,) * rows)

    def of(self, streams: Tensor) -> BackgroundOffsets:
        """Those of streams [M], a mask or indices."""
        return BackgroundOffsets(self.log2[streams], self.scale[streams], self.value[streams])

    def to(self, device: torch.device | str) -> BackgroundOffsets:
        """The same on a device."""
        return BackgroundOffsets(*(x.to(device) for x in (self.log2, self.scale, self.value)))

    def write(self, path: Path, fingerprint: str, about: dict[str, str]) -> None:
        """As a safetensors file; the fingerprint is of the model, `about` says what they were learned on."""
        tensors = {"log2": self.log2, "scale": self.scale, "value": self.value}
        write_tensors(path, tensors, about | {"schema": SCHEMA, "fingerprint": fingerprint})

    @staticmethod
    def read(path: Path, fingerprint: str, streams: int, head_dim: int) -> BackgroundOffsets:
        """Offsets of a model of S streams with heads of D.

        Raises:
            OffsetsError: no such file, damaged, of another version, model or shape.
        """
        try:
            with safe_open(str(path), "pt") as file:
                about = file.metadata() or {}
                found = {name: file.get_tensor(name) for name in ("log2", "scale", "value")}
        except (OSError, SafetensorError) as error:
            raise OffsetsError(f"{path}: can't be read as background offsets: {error}") from error
        if about.get("schema") != SCHEMA:
            raise OffsetsError(f"{path}: background offsets of version {about.get('schema')}, must be {SCHEMA}")
        if about.get("fingerprint") != fingerprint:
            seen = about.get("fingerprint")
            raise OffsetsError(f"{path}: background offsets of model {seen}, this is model {fingerprint}")
        if found["value"].shape != (streams, head_dim):
            shape = tuple(found["value"].shape)
            raise OffsetsError(f"{path}: background offsets of {shape}, must be {(streams, head_dim)}")
        return BackgroundOffsets(**found)


def packaged(model: str, streams: int, head_dim: int, folder: Path = FOLDER) -> BackgroundOffsets | None:
    """The offsets that come with the testbed for a model ("name fingerprint"), None where there are none."""
    fingerprint = model.rpartition(" ")[2]
    path = folder / f"background-{fingerprint}.safetensors"
    return BackgroundOffsets.read(path, fingerprint, streams, head_dim) if path.is_file() else None
