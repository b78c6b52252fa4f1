"""Models: any Hugging Face causal decoder, its attention handed to whoever runs it."""

from testbed.models.base import Attend, Decoder, Geometry, Logits, ModelError
from testbed.models.hf import load, wrap

__all__ = ["Attend", "Decoder", "Geometry", "Logits", "ModelError", "load", "wrap"]
