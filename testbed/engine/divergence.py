"""How far one next-token distribution is from another."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_nats(full: Tensor, other: Tensor) -> Tensor:
    """KL(full || other) of log-probabilities [..., V]: [...] nats; rounding may leave it a little below 0.

    A token that both rule out (-inf) adds nothing; one that only `other` rules out makes it infinite.
    """
    each = torch.where(full == -torch.inf, 0.0, full.exp() * (full - other))
    return torch.where((other == -torch.inf) & (full > -torch.inf), torch.inf, each).sum(-1)  # though exp be 0
