"""Peak memory of one prefill, in a process of its own: `python peak_memory.py CONTEXT_TOKENS CHUNK_TOKENS`.

Prints JSON. `baseline` is what the interpreter and the imported libraries hold before any weight is read; all other
bytes are above it. `peak` is the highest resident size of the whole process, loading included, `prefill_peak` that
of the prefill alone (Linux starts the count again when asked). What must be held is computed from shapes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from engine_case import context

from kernels.api import choose_backend
from testbed import assets
from testbed.engine.prefill import prefill
from testbed.models import load
from testbed.models.base import Geometry


def status_bytes(key: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def activation_bytes(model: object, geometry: Geometry, chunk: int, context_tokens: int, itemsize: int = 4) -> int:
    """What a chunk holds at once in its widest layer part, float32: [T, .] of attention or of the MLP.

    Attention: hidden, normed, queries/keys/values and the rotated ones, the outputs over the past, over the chunk and
    joined, and the layer's keys and values in compute dtype. MLP: hidden, normed, gate and up, their product.
    """
    config = model.config  # type: ignore[attr-defined]
    width, inner, size = config.hidden_size, config.intermediate_size, geometry.head_dim
    query, pairs = geometry.query_heads * size, geometry.kv_heads * size
    attention = chunk * (2 * width + query + 2 * pairs + query + pairs + 3 * query) + 2 * pairs * context_tokens
    mlp = chunk * (2 * width + 3 * inner)
    return max(attention, mlp) * itemsize


def warm_up() -> None:
    """A tiny model through the same calls, so that the libraries' lazy imports and buffers are in the baseline."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 1}
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128, head_dim=64)).save_pretrained(folder)
        prefill(load(folder), list(range(100)), torch.bfloat16)


def main(context_tokens: int, chunk_tokens: int) -> None:
    """One load, one prefill."""
    choose_backend(None)
    path = assets.model_path("smollm2")
    warm_up()
    baseline = status_bytes("VmRSS")
    decoder = load(path)
    load_peak, loaded = status_bytes("VmHWM") - baseline, status_bytes("VmRSS") - baseline
    tokens = context(decoder, context_tokens)
    Path("/proc/self/clear_refs").write_text("5")
    dense = prefill(decoder, tokens, torch.bfloat16, chunk_tokens=chunk_tokens)
    prefill_peak = status_bytes("VmHWM") - baseline
    held = {
        "weights": decoder.weights_bytes,
        "kv": sum(x.nbytes for x in (*dense.keys, *dense.values)),
        "activations": activation_bytes(decoder.model, decoder.geometry, chunk_tokens, context_tokens),
    }
    peaks = {"baseline": baseline, "load_peak": load_peak, "loaded": loaded, "prefill_peak": prefill_peak}
    print(json.dumps({**peaks, "peak": max(load_peak, prefill_peak), **held}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
