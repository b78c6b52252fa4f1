"""SnapKV: pages that the prompt's last queries looked at (Li et al. 2024, arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from policies.base import PolicyError, Signals
from policies.checks import page_signal, require_whole


@dataclass(frozen=True)
class SnapKV:
    """Score = `window_mass`, smoothed over neighbouring pages.

    `window_mass` is the softmax mass that the queries of the prefill's last window put on the page, at least 0. A page
    written after the prefill has none: the executor gives it -1, and like the paper, which compresses the prompt only,
    this keeps it before all others.

    Attributes:
        kernel_pages: pages averaged, odd; 1 = no smoothing.
    """

    kernel_pages: int

    def __post_init__(self) -> None:
        """Refuses an even or empty kernel."""
        require_whole(self, "kernel_pages", 1)
        if self.kernel_pages % 2 == 0:
            raise PolicyError(f"SnapKV.kernel_pages={self.kernel_pages}: must be odd, so that it has a middle")

    @property
    def needs(self) -> frozenset[str]:
        """The window's mass."""
        return frozenset({"window_mass"})

    def score(self, signals: Signals) -> Tensor:
        """[L, Hk, N] float32, pages after the prompt above all of its pages."""
        mass = page_signal(signals, "window_mass")
        half = self.kernel_pages // 2
        pooled = avg_pool1d(mass.clamp(min=0.0), self.kernel_pages, stride=1, padding=half, count_include_pad=False)
        return torch.where(mass < 0, pooled.amax(-1, keepdim=True) + 1.0, pooled)
