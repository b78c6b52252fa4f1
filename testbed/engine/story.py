"""What a session has been through: text, roles, steps, times, pauses. Forked cheaply, saved and resumed as a whole."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from testbed.decisions import Move, Step
from testbed.engine.guard import Probe
from testbed.engine.idle import Idle
from testbed.engine.reclassify import HeadChange
from testbed.engine.trail import Trail

SCALARS = ("step", "digest", "facts", "since_plan", "has_roles", "chunk_tokens", "context_tokens", "classed_page")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one run of the model; in them those of planning and those that it waited for pages.

    Attributes:
        total_s: of the run; in a batch, of the whole batch.
        plan_s: signals, policy, moves, tables.
        stall_s: exposed wait for pages that were not there yet, in planning and in running.
    """

    total_s: float
    plan_s: float
    stall_s: float = 0.0


class Story:
    """The past of one session.

    Attributes:
        step: decode steps since the context was compressed.
        digest: hash of the plan in force.
        facts: what the log says of it, {} = to be counted.
        since_plan: decode steps since then.
        has_roles: the context came with roles.
        classed_page: page in which heads were classed last.
        chunk_tokens, context_tokens: how the context was prefilled, and how long it was.
        text, said_by: tokens [t] int64 and their roles [t] int8, run by run.
        steps, times, turn_times, idle: the decision log, times of decode steps and of turns, pauses that are over.
        changes: heads that changed their class.
        probes, guard_bytes: what the quality guard saw and did, and what its reference held last.
    """

    def __init__(self) -> None:
        self.step = self.since_plan = self.chunk_tokens = self.context_tokens = 0
        self.classed_page = 0
        self.digest = ""
        self.facts: dict[str, dict[str, int]] = {}
        self.has_roles = False
        self.text: Trail[Tensor] = Trail()
        self.said_by: Trail[Tensor] = Trail()
        self.steps: Trail[Step] = Trail()
        self.times: Trail[StepTime] = Trail()
        self.turn_times: Trail[StepTime] = Trail()
        self.idle: Trail[Idle] = Trail()
        self.changes: Trail[HeadChange] = Trail()
        self.probes: Trail[Probe] = Trail()
        self.guard_bytes = 0

    @property
    def tokens(self) -> Tensor:
        """[T] int64, everything run so far."""
        return torch.cat([torch.zeros(0, dtype=torch.long), *(part.cpu() for part in self.text)])

    @property
    def roles(self) -> Tensor:
        """[T] int8 of `Role` of every token, -1 = unknown."""
        return torch.cat([torch.zeros(0, dtype=torch.int8), *self.said_by])

    def fork(self) -> Story:
        """The same past, with a future of its own."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Trail):
                setattr(other, name, value.fork())
        return other

    def saved(self) -> dict[str, Any]:
        """Plain JSON values; times are of this process and stay."""
        return {name: getattr(self, name) for name in SCALARS} | {
            "steps": [asdict(step) for step in self.steps],
            "idle": [asdict(each) for each in self.idle],
            "changes": [asdict(each) for each in self.changes],
        }

    @staticmethod
    def resumed(saved: Mapping[str, Any], tokens: Tensor, roles: Tensor) -> Story:
        """From what `saved` gave, and the text."""
        story = Story()
        for name in SCALARS:
            setattr(story, name, saved[name])
        story.text, story.said_by = Trail([tokens]), Trail([roles])
        story.steps, story.idle = Trail(map(_step, saved["steps"])), Trail(Idle(**raw) for raw in saved["idle"])
        story.changes = Trail(HeadChange(**raw) for raw in saved["changes"])
        return story


def _step(raw: Mapping[str, Any]) -> Step:
    return Step(**{**raw, "moves": tuple(Move(**move) for move in raw["moves"])})
