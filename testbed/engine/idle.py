"""Between turns: which pages leave the device while a session lies idle, and what that freed and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policies.base import Mode, Plan, Signals, Tier
from testbed.decisions import Move

AWAY: tuple[str, ...] = (Tier.L2.name, Tier.L3.name)


@dataclass(frozen=True)
class Idle:
    """One pause of a session.

    Attributes:
        step: decode steps taken before it.
        parked_pages, parked_bytes: what left the device, by tier it went to: {"L2": ..., "L3": ...}.
        freed_bytes: device bytes held before, less those held once all copies are done.
        park_s: seconds of the plan and its synchronous part; copies may go on while idle.
        idle_s: seconds until the next plan; None while the session is idle.
        woken_pages, woken_bytes: what that plan brought back to the device.
        wake_s: seconds of that plan.
    """

    step: int
    parked_pages: dict[str, int]
    parked_bytes: dict[str, int]
    freed_bytes: int
    park_s: float
    idle_s: float | None = None
    woken_pages: int = 0
    woken_bytes: int = 0
    wake_s: float = 0.0

    @staticmethod
    def begun(step: int, moves: Sequence[Move], freed_bytes: int, park_s: float) -> Idle:
        """A pause that begins with these moves."""
        pages, sizes = dict.fromkeys(AWAY, 0), dict.fromkeys(AWAY, 0)
        for move in moves:
            if move.source not in AWAY and move.target in AWAY:
                pages[move.target] += move.pages
                sizes[move.target] += move.bytes
        return Idle(step, pages, sizes, freed_bytes, park_s)

    def over(self, moves: Sequence[Move], idle_s: float, wake_s: float) -> Idle:
        """The same, ended by a plan with these moves."""
        back = [move for move in moves if move.source in AWAY and move.target == Tier.L1.name]
        pages, sizes = sum(move.pages for move in back), sum(move.bytes for move in back)
        return replace(self, idle_s=idle_s, woken_pages=pages, woken_bytes=sizes, wake_s=wake_s)


def parked(signals: Signals, tier: Tier, score: Tensor) -> Plan:
    """The plan in force with all that can leave the device gone to `tier`, then L3; what fits in neither stays.

    Args:
        signals: of this moment.
        tier: L2 or L3.
        score: [L, Hk, N] float32; of equal tiers the nearer one is for pages with the higher score.
    """
    held, hot = signals.held, signals.hot.expand(signals.shape)
    left = held.alive & ~hot & (held.tier <= Tier.L1)
    cost = signals.page_bytes.of(held.format)
    order = score.flatten().argsort(descending=True, stable=True)
    target = held.tier.clone()
    limits = {Tier.L2: signals.host_budget_bytes, Tier.L3: signals.archive_budget_bytes}
    for place in [each for each in (Tier.L2, Tier.L3) if each >= tier]:
        chosen, limit = left, limits[place]
        if limit is not None:
            room = limit - int(cost[held.alive & (held.tier == place)].sum())
            wanted = left.flatten()[order]
            fits = (torch.where(wanted, cost.flatten()[order], 0).cumsum(0) <= room) & wanted
            chosen = torch.zeros_like(left).flatten().scatter(0, order, fits).view(left.shape)
        target[chosen] = int(place)
        left = left & ~chosen
    mode = held.mode.masked_fill((target > Tier.L1) & (held.mode == Mode.EXACT), int(Mode.SKIP))
    return Plan(mode, held.format, target)
