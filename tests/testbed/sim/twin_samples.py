"""Logs and machines whose right answer is known, for the twin's tests."""

from __future__ import annotations

from testbed.decisions import DecisionLog, Header, ModelShape, Move, Step
from testbed.sim.hardware import QUANTITIES, Hardware, Quantity

LLAMA_8B = ModelShape("Llama-3.1-8B", 32, 32, 8, 128, 16_060_000_000, 16_060_000_000)
TINY = ModelShape("tiny", 4, 4, 2, 8, 4_000_000, 4_000_000)
UNIT = {
    "size": "B",
    "bandwidth": "GB/s",
    "compute": "GFLOP/s",
    "values": "Gvalue/s",
    "time": "us",
    "fraction": "fraction",
}
# 1 GB/s = 1000 bytes a microsecond, so that a test can count in its head.
PLAIN = {
    "memory_capacity": 1e15,
    "memory_bandwidth": 1.0,
    "contiguous_efficiency": 1.0,
    "paged_efficiency": 1.0,
    "bf16_flops": 1e9,
    "fp32_flops": 1e9,
    "matmul_efficiency": 1.0,
    "int8_dequant": 1e9,
    "int4_dequant": 1e9,
    "layer_overhead": 0.0,
    "step_overhead": 0.0,
    "plan_overhead": 0.0,
    "host_read": 1.0,
    "host_write": 1.0,
    "host_both": 2.0,
    "host_setup": 0.0,
    "disk_read": 1.0,
    "disk_write": 1.0,
    "disk_setup": 0.0,
    "chunk": 1e15,
}


def quantity(key: str, value: float, kind: str = "spec") -> Quantity:
    return Quantity(value, UNIT[QUANTITIES[key][0]], "a test", "2026-11", kind)


def machine(*, overlap: bool = True, assumed: tuple[str, ...] = (), **changed: float) -> Hardware:
    """A machine of round numbers: 1 GB/s everywhere, no overhead, unless changed."""
    values = {**PLAIN, **changed}
    kinds = {key: "assumed" if key in assumed else "spec" for key in values}
    return Hardware("plain", {key: quantity(key, value, kinds[key]) for key, value in values.items()}, overlap)


def decode(number: int, *moves: Move, **changed: object) -> Step:
    """A decode step of TINY: 4,000 us of weights on `machine()`."""
    fields: dict[str, object] = {"step": number, "phase": "decode", "tokens": 1, "length_tokens": 100 + number}
    return Step(**{**fields, "moves": moves, **changed})  # pyright: ignore[reportArgumentType]


def log(*steps: Step, model: ModelShape = TINY, value_bytes: int = 2, policy: str = "test") -> DecisionLog:
    per_token = 2 * model.layers * model.kv_heads * model.head_dim * value_bytes
    return DecisionLog(Header(model, 16, policy, per_token, value_bytes), steps)
