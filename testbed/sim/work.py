"""What one logged step costs on one machine, before any contention: a roofline of each part.

    linears   = max(weights / bandwidth, operations / peak)
    attention = max(L0 / contiguous + L1 / paged bandwidth, operations / peak + quantised values / dequantisation rate)
    overhead  = layers x (launches and host code) + once a step + once a plan

(fused kernels dequantise while they stream, so it is the larger of the two, as in the rooflines of the field).
Each cost remembers which hardware numbers it rests on, so that a prediction can say how much of it is assumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from testbed.decisions import DecisionLog, Header, LogError, Step
from testbed.sim.hardware import Hardware

DEVICE = ("L0", "L1")
PEAKS = {1: "bf16_flops", 2: "bf16_flops", 4: "fp32_flops"}  # by bytes a weight; 8-bit weights compute in bf16


@dataclass(frozen=True)
class Cost:
    """Time and the hardware numbers that decide it."""

    us: float
    keys: frozenset[str]


@dataclass(frozen=True)
class Transfer:
    """Bytes on one route between tiers."""

    source: str
    target: str
    bytes: int


@dataclass(frozen=True)
class Work:
    """One step on one machine.

    Attributes:
        costs: part -> cost, for the parts weights, attention, overhead.
        repack: rewriting pages inside the device (L0 to L1, or to another format).
        demand_bytes: tier -> bytes that this step's attention waits for.
        background: prefetches and demotions that may run beside it.
    """

    step: Step
    costs: dict[str, Cost]
    repack: Cost
    demand_bytes: dict[str, int] = field(default_factory=dict)
    background: tuple[Transfer, ...] = ()

    @property
    def compute_us(self) -> float:
        """Time of the compute stream, without waiting."""
        return sum(cost.us for cost in self.costs.values())


@dataclass(frozen=True)
class Sizes:
    """Bytes per weight and per number of a compute-dtype page: as logged, and as predicted for."""

    weight: int
    weight_logged: int
    page: int
    page_logged: int

    @property
    def peak(self) -> str:
        """Name of the peak rate for arithmetic beside these weights."""
        return PEAKS[self.weight]


def works(log: DecisionLog, hardware: Hardware, bytes_per_value: int | None = None) -> list[Work]:
    """The decode steps of a log as work of a machine.

    Args:
        log: what the policy decided.
        hardware: the machine.
        bytes_per_value: of weights and compute-dtype pages (2: bf16, 4: float32), if not as recorded.
    """
    weight, page = log.header.model.bytes_per_weight, log.header.compute_bytes_per_value
    sizes = Sizes(bytes_per_value or weight, weight, bytes_per_value or page, page)
    for key, size in (("bytes_per_value", bytes_per_value), ("compute_bytes_per_value", page)):
        if size not in (None, 2, 4):
            raise LogError(f"{key}={size}: the twin knows 2 (bf16) and 4 (float32)")
    return [_work(step, log.header, hardware, sizes) for step in log.decode]


def _work(step: Step, header: Header, hardware: Hardware, sizes: Sizes) -> Work:
    weights_bytes = header.model.weights_bytes * sizes.weight / sizes.weight_logged
    _check_capacity(step, weights_bytes, hardware)
    demand, background, repack_bytes = _moves(step, sizes.page / sizes.page_logged)
    for tier, size in step.read_bytes.items():
        if tier not in DEVICE and size:
            demand[tier] = demand.get(tier, 0) + size  # attention reads them across the link
    repack_keys = frozenset({"memory_bandwidth", "contiguous_efficiency"})
    # Each byte of a rewritten page is read once and written once.
    repack_us = 2 * repack_bytes / (hardware["memory_bandwidth"] * hardware["contiguous_efficiency"])
    return Work(
        step=step,
        costs={
            "weights": _linears(step, header, hardware, weights_bytes, sizes.peak),
            "attention": _attention(step, header, hardware, sizes),
            "overhead": _overhead(step, header, hardware),
        },
        repack=Cost(repack_us, repack_keys),
        demand_bytes=demand,
        background=tuple(background),
    )


def _check_capacity(step: Step, weights_bytes: float, hardware: Hardware) -> None:
    held = weights_bytes + sum(step.held_bytes.get(tier, 0) for tier in DEVICE)
    if held > hardware["memory_capacity"]:
        raise LogError(
            f"step {step.step}: weights and device tiers take {held / 1e9:.1f} GB, "
            f"{hardware.name} has {hardware['memory_capacity'] / 1e9:.1f} GB"
        )


def _moves(step: Step, ratio: float) -> tuple[dict[str, int], list[Transfer], int]:
    """Demand bytes by tier, background transfers, and bytes rewritten inside the device."""
    demand: dict[str, int] = {}
    background: list[Transfer] = []
    repack_bytes = 0
    for move in step.moves:
        size = round(move.bytes * ratio) if move.format == "compute" else move.bytes
        from_device, to_device = move.source in DEVICE, move.target in DEVICE
        if move.target == "DROPPED" or not size or (move.source == move.target and not to_device):
            continue  # nothing crosses a link; a page rewritten where it lies off the device costs the device none
        if from_device and to_device:
            repack_bytes += size
        elif to_device and move.demand:
            demand[move.source] = demand.get(move.source, 0) + size
        else:
            background.append(Transfer(move.source, move.target, size))
    return demand, background, repack_bytes


def _linears(step: Step, header: Header, hardware: Hardware, weights_bytes: float, peak: str) -> Cost:
    memory = weights_bytes / (hardware["memory_bandwidth"] * hardware["contiguous_efficiency"])
    compute = header.model.flops_per_token * step.tokens / (hardware[peak] * hardware["matmul_efficiency"])
    if memory >= compute:
        return Cost(memory, frozenset({"memory_bandwidth", "contiguous_efficiency"}))
    return Cost(compute, frozenset({peak, "matmul_efficiency"}))


def _attention(step: Step, header: Header, hardware: Hardware, sizes: Sizes) -> Cost:
    head_dim, group = header.model.head_dim, header.model.query_heads // header.model.kv_heads
    values = {name: 2 * head_dim * count for name, count in step.read_tokens.items()}
    hot_bytes, paged_bytes = (float(step.read_bytes.get(tier, 0)) for tier in DEVICE)
    # Another dtype changes only what is read in the compute dtype: all of L0, and L1's part of it.
    saved = values.get("compute", 0) * (sizes.page_logged - sizes.page)
    # The one nearer to zero: saved and L0's whole change have the same sign.
    hot_saved = sorted((0.0, saved, hot_bytes * (1 - sizes.page / sizes.page_logged)))[1]
    hot_bytes, paged_bytes = hot_bytes - hot_saved, paged_bytes - (saved - hot_saved)
    bandwidth = hardware["memory_bandwidth"]
    memory = hot_bytes / (bandwidth * hardware["contiguous_efficiency"])
    memory += paged_bytes / (bandwidth * hardware["paged_efficiency"])
    # One value meets each query row of its group once, a multiplication and an addition.
    flops = 2 * group * step.tokens * sum(values.values())
    arithmetic = flops / (hardware[sizes.peak] * hardware["matmul_efficiency"])
    quantised = {f"{name}_dequant": values[name] for name in ("int8", "int4") if values.get(name)}
    arithmetic += sum(count / hardware[key] for key, count in quantised.items())
    if memory >= arithmetic:
        read = [key for key, size in zip(("contiguous", "paged"), (hot_bytes, paged_bytes), strict=True) if size]
        return Cost(memory, frozenset({"memory_bandwidth", *(f"{key}_efficiency" for key in read)}))
    return Cost(arithmetic, frozenset({sizes.peak, "matmul_efficiency", *quantised}))


def _overhead(step: Step, header: Header, hardware: Hardware) -> Cost:
    terms = {
        "layer_overhead": header.model.layers * hardware["layer_overhead"],
        "step_overhead": hardware["step_overhead"],
        "plan_overhead": hardware["plan_overhead"] * step.planned,
    }
    return Cost(math.fsum(terms.values()), frozenset(key for key, us in terms.items() if us))
