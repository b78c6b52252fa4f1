"""Every local head the window that its own attention asks for.

The window is measured (head_window95: tokens that hold 95 % of the head's attention) or imported with a RedKnot map
(head_window_tokens: its kv_head_max_distance). After RedKnot 51b1737, mla_head_profiler.py: 1.5 times the window, at
least 64 tokens, rounded up to whole pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Head, PolicyError, PoolLayout, Share, Signals
from policies.budgets.windows import check_classes, class_pools, class_share
from policies.checks import head_classes, head_signal, require_name, require_number, require_whole

WINDOWS = "head_window"


@dataclass(frozen=True)
class PerHead:
    """LOCAL heads keep the pages of their own window, SPECIAL ones so many chosen tokens, others everything.

    Attributes:
        window: signal [L, Hk], tokens; 0 = the whole context. Signals in tokens are named head_window...
        safety_factor: what it is multiplied by.
        least_tokens: no window is shorter.
        special_tokens: as of `PerClass`.
        local_update_steps, special_update_steps: as of `PerClass`.
        local_block_pages, global_block_pages, special_block_pages, dense_block_pages: as of `PerClass`.
    """

    window: str
    safety_factor: float
    least_tokens: int
    special_tokens: int
    local_update_steps: int
    special_update_steps: int
    local_block_pages: int
    global_block_pages: int
    special_block_pages: int
    dense_block_pages: int

    def __post_init__(self) -> None:
        """Refuses numbers out of range."""
        require_name(self, "window")
        if not self.window.startswith(WINDOWS):
            raise PolicyError(f"PerHead.window={self.window!r}: must be a signal in tokens, named {WINDOWS}...")
        require_number(self, "safety_factor", 0)
        for key in ("least_tokens", "special_tokens", "local_update_steps", "special_update_steps"):
            require_whole(self, key, 1)
        check_classes(self, "block_pages")

    @property
    def needs(self) -> frozenset[str]:
        """The window."""
        return frozenset({self.window})

    def share(self, signals: Signals, fmt: Tensor) -> Share:
        """Windows of LOCAL heads make pages ineligible; the quota of a SPECIAL head is as of `PerClass`."""
        asked = head_signal(signals, self.window).double()
        tokens = (asked * self.safety_factor).clamp(min=self.least_tokens)
        whole = (tokens / signals.page_tokens).ceil() * signals.page_tokens
        bound = (head_classes(signals) == Head.LOCAL) & (asked != 0)
        window = torch.where(bound, whole, torch.inf)
        steps = {Head.LOCAL: self.local_update_steps, Head.SPECIAL: self.special_update_steps}
        return class_share(signals, fmt, window, self.special_tokens, steps)

    def pools(self, signals: Signals) -> PoolLayout:
        """An arena a class."""
        return class_pools(signals, self)
