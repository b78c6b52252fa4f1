"""The same bytes for every stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Share, Signals, fixed_bytes


@dataclass(frozen=True)
class Uniform:
    """Quota = (device budget - sinks, recent window and metadata) / streams; no limit without a budget."""

    @property
    def needs(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    def share(self, signals: Signals, fmt: Tensor) -> Share:
        """Equal quotas, every page eligible."""
        layers, kv_heads, _ = signals.shape
        quota = torch.full((layers, kv_heads), torch.inf, dtype=torch.float64, device=signals.device)
        if signals.device_budget_bytes is not None:
            free = (signals.device_budget_bytes - fixed_bytes(signals).sum()).clamp(min=0)
            quota = (free / (layers * kv_heads)).expand(layers, kv_heads)
        return Share(quota, torch.ones(signals.shape, dtype=torch.bool, device=signals.device))
