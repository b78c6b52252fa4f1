"""Bytes by what kind a head is: the budget of RedKnot as it is described."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Head, PoolLayout, Share, Signals
from policies.budgets.windows import check_classes, class_pools, class_share
from policies.checks import head_classes, require_whole


@dataclass(frozen=True)
class PerClass:
    """A window for local heads, everything for global ones, the best pages for special ones. Sinks are hot anyway.

    Attributes:
        local_tokens: LOCAL heads keep the pages that touch their last so many tokens; the others are dropped.
        global_tokens: the same for GLOBAL heads; null = the whole context.
        special_tokens: SPECIAL heads keep so many tokens on the device beside the hot ones, which the predictor
            chooses; what happens to the others is the eviction's business. DENSE heads keep everything.
        local_update_steps, global_update_steps, special_update_steps: tokens after which a class's window slides, or
            its quota is enforced anew; until then what comes is kept beside it. 1 = at each plan.
        local_block_pages, global_block_pages, special_block_pages, dense_block_pages: pages by which the pools of a
            class grow on the device: few where a window bounds what is kept, more where the context does.
    """

    local_tokens: int
    global_tokens: int | None
    special_tokens: int
    local_update_steps: int
    global_update_steps: int
    special_update_steps: int
    local_block_pages: int
    global_block_pages: int
    special_block_pages: int
    dense_block_pages: int

    def __post_init__(self) -> None:
        """Refuses windows without a token."""
        require_whole(self, "local_tokens", 1)
        require_whole(self, "global_tokens", 1, optional=True)
        require_whole(self, "special_tokens", 1)
        for key in ("local_update_steps", "global_update_steps", "special_update_steps"):
            require_whole(self, key, 1)
        check_classes(self, "block_pages")

    @property
    def needs(self) -> frozenset[str]:
        """No signal beside the classes."""
        return frozenset()

    def share(self, signals: Signals, fmt: Tensor) -> Share:
        """Windows make pages ineligible; the quota of a SPECIAL head is its tokens at the dearest format it uses."""
        windows = {Head.LOCAL: self.local_tokens, Head.GLOBAL: self.global_tokens}
        by_class = torch.tensor(
            [float(windows.get(head) or math.inf) for head in Head], dtype=torch.float64, device=signals.device
        )
        steps = {
            Head.LOCAL: self.local_update_steps,
            Head.GLOBAL: self.global_update_steps,
            Head.SPECIAL: self.special_update_steps,
        }
        return class_share(signals, fmt, by_class[head_classes(signals).long()], self.special_tokens, steps)

    def pools(self, signals: Signals) -> PoolLayout:
        """An arena a class: its streams keep alike, so their pages come and go together."""
        return class_pools(signals, self)
