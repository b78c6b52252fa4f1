"""Bytes by what kind a head is: the budget of RedKnot as it is described."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Head, PoolLayout, Share, Signals
from policies.checks import head_classes, require_whole


@dataclass(frozen=True)
class PerClass:
    """A window for local heads, everything for global ones, the best pages for special ones. Sinks are hot anyway.

    Attributes:
        local_tokens: LOCAL heads keep the pages that touch their last so many tokens; the others are dropped.
        global_tokens: the same for GLOBAL heads; null = the whole context.
        special_tokens: SPECIAL heads keep so many tokens on the device beside the hot ones, which the predictor
            chooses; what happens to the others is the eviction's business. DENSE heads keep everything.
        local_block_pages, global_block_pages, special_block_pages, dense_block_pages: pages by which the pools of a
            class grow on the device: few where a window bounds what is kept, more where the context does.
    """

    local_tokens: int
    global_tokens: int | None
    special_tokens: int
    local_block_pages: int
    global_block_pages: int
    special_block_pages: int
    dense_block_pages: int

    def __post_init__(self) -> None:
        """Refuses windows without a token."""
        require_whole(self, "local_tokens", 1)
        require_whole(self, "global_tokens", 1, optional=True)
        require_whole(self, "special_tokens", 1)
        for head in Head:
            require_whole(self, f"{head.name.lower()}_block_pages", 1)

    @property
    def needs(self) -> frozenset[str]:
        """No signal beside the classes."""
        return frozenset()

    def share(self, signals: Signals, fmt: Tensor) -> Share:
        """Windows make pages ineligible; the quota of a SPECIAL head is its tokens at the dearest format it uses."""
        classes = head_classes(signals)
        age = signals.age_tokens()
        eligible = torch.ones(signals.shape, dtype=torch.bool, device=signals.device)
        for head, window in ((Head.LOCAL, self.local_tokens), (Head.GLOBAL, self.global_tokens)):
            if window is not None:
                eligible &= (classes != head).unsqueeze(-1) | (age < window)
        pages = -(-self.special_tokens // signals.page_tokens)
        dearest = signals.page_bytes.of(torch.stack((fmt.amin(-1), fmt.amax(-1)))).amax(0)
        special_bytes = dearest.double() * pages
        return Share(torch.where(classes == Head.SPECIAL, special_bytes, torch.inf), eligible)

    def pools(self, signals: Signals) -> PoolLayout:
        """An arena a class: its streams keep alike, so their pages come and go together."""
        blocks = tuple(getattr(self, f"{head.name.lower()}_block_pages") for head in Head)
        return PoolLayout(head_classes(signals), blocks)
