"""Heads by how far back their attention reaches: the window that covers 95 % of its mass.

After RedKnot 51b1737, mla_head_profiler.py, whose published code never fills the histogram it reads, so that every
head comes out global; here the window is measured (signal head_window95). Meant for `policy/budget=per_head`, which
gives each local head that window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Head, Signals
from policies.checks import head_signal, require_name, require_number, require_whole


@dataclass(frozen=True)
class Coverage:
    """DENSE in the first layers; else GLOBAL if the head's window is a large part of the longest text, else LOCAL.

    Attributes:
        window: signal [L, Hk], tokens that hold the head's attention.
        longest_tokens: the longest context the windows were measured on; a window can't be seen to be longer.
        global_share: least share of it that makes a head GLOBAL, in [0, 1].
        dense_layers: first layers whose heads keep everything.
    """

    window: str
    longest_tokens: int
    global_share: float
    dense_layers: int

    def __post_init__(self) -> None:
        """Refuses numbers out of range."""
        require_name(self, "window")
        require_whole(self, "longest_tokens", 1)
        require_number(self, "global_share", 0, 1)
        require_whole(self, "dense_layers", 0)

    @property
    def needs(self) -> frozenset[str]:
        """The window."""
        return frozenset({self.window})

    def classify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8 of `Head`."""
        window = head_signal(signals, self.window)
        is_global = window >= self.global_share * self.longest_tokens
        classes = torch.where(is_global, int(Head.GLOBAL), int(Head.LOCAL)).to(torch.int8)
        classes[: self.dense_layers] = int(Head.DENSE)
        return classes
