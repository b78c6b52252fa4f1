"""The prediction: replay decision logs on a machine and say what a token costs, why, and on what it rests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simpy import Environment

from testbed.decisions import DecisionLog, LogError
from testbed.sim.hardware import Hardware
from testbed.sim.node import Node, Row, StepTime
from testbed.sim.work import works

PARTS = ("weights", "attention", "moves_exposed", "overhead")


@dataclass(frozen=True)
class Prediction:
    """What the twin says of some logs on one machine.

    Attributes:
        ms_per_token: simulated time of all decode steps / their number.
        breakdown: part -> ms per token; the parts of `PARTS` add up to ms_per_token.
        assumed_share: part of the simulated time that rests on at least one assumed number, 0 to 1.
        moved_bytes: link -> bytes carried.
        rows: the timeline, logs one after the other.
    """

    hardware: str
    policy: str
    steps: int
    ms_per_token: float
    breakdown: dict[str, float]
    assumed_share: float
    moved_bytes: dict[str, int]
    rows: tuple[Row, ...]

    def summary(self) -> str:
        """One line for a report."""
        parts = ", ".join(f"{name} {self.breakdown[name]:.2f}" for name in PARTS)
        return (
            f"{self.policy} on {self.hardware}: {self.ms_per_token:.2f} ms/token ({parts}); "
            f"{self.assumed_share:.0%} of it rests on assumed numbers"
        )


def predict(
    logs: DecisionLog | Sequence[DecisionLog],
    hardware: Hardware,
    *,
    bytes_per_value: int | None = None,
    coalesce: bool = True,
) -> Prediction:
    """Predicts the decode time per token.

    Args:
        logs: one log, or those of several samples of one policy, each replayed on an idle machine.
        hardware: the machine.
        bytes_per_value: of weights and compute-dtype pages, if not as recorded (2: bf16, 4: float32).
        coalesce: one event per step where that is exact; False simulates each layer.

    Raises:
        LogError: no decode step, logs of different policies, or what they hold doesn't fit the machine.
    """
    group = [logs] if isinstance(logs, DecisionLog) else list(logs)
    policies = sorted({log.header.policy for log in group})
    if len(policies) > 1:
        raise LogError(f"logs of several policies can't make one prediction: {', '.join(policies)}")
    nodes, offset_us, rows = [], 0.0, []
    for log in group:
        node = _replay(log, hardware, bytes_per_value, coalesce)
        rows += [
            Row(row.track, row.name, row.start_us + offset_us, row.us, row.step, row.bytes)
            for row in sorted(node.rows, key=lambda row: row.start_us)
        ]
        offset_us += node.env.now
        nodes.append(node)
    times = [time for node in nodes for time in node.times]
    if not times:
        raise LogError("no decode step in the decision log, so there is no time per token to predict")
    return _summarise(policies[0], hardware, times, nodes, tuple(rows))


def _replay(log: DecisionLog, hardware: Hardware, bytes_per_value: int | None, coalesce: bool) -> Node:
    env = Environment()
    node = Node(env, hardware, log.header.model.layers, coalesce)
    # Until the process ends, not until the queue is empty: overtaken wake-ups of links may lie behind it.
    env.run(env.process(node.replay(works(log, hardware, bytes_per_value))))
    return node


def _summarise(
    policy: str, hardware: Hardware, times: list[StepTime], nodes: list[Node], rows: tuple[Row, ...]
) -> Prediction:
    steps = len(times)
    total_us: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    assumed_us = 0.0
    for time in times:
        for part, cost in time.work.costs.items():
            total_us[part] += cost.us
            assumed_us += cost.us * bool(cost.keys & hardware.assumed)
        total_us["moves_exposed"] += time.exposed_us
        assumed_us += time.exposed_us * bool(time.move_keys & hardware.assumed)
    whole_us = sum(total_us.values())
    return Prediction(
        hardware=hardware.name,
        policy=policy,
        steps=steps,
        ms_per_token=whole_us / steps / 1e3,
        breakdown={part: us / steps / 1e3 for part, us in total_us.items()},
        assumed_share=assumed_us / whole_us if whole_us else 0.0,
        moved_bytes={name: sum(node.links()[name].moved_bytes for node in nodes) for name in nodes[0].links()},
        rows=rows,
    )
