"""What holds for any text without looking at it: the beginning and the recent past matter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import PolicyError, Role, Signals
from policies.checks import page_signal, require_whole


@dataclass(frozen=True)
class Rules:
    """1 for pages with sink tokens, else how recent the page is, from 0 (oldest) to 1 (newest).

    In a conversation, whose pages have a `role`, pages of the system's instructions and of the user's last turn are 1
    too: whatever is generated answers to them.

    Attributes:
        sink_tokens: tokens at the start that count as sinks.
    """

    sink_tokens: int

    def __post_init__(self) -> None:
        """Refuses a negative number of sinks."""
        require_whole(self, "sink_tokens", 0)

    @property
    def needs(self) -> frozenset[str]:
        """What pages are in the conversation, if they are in one."""
        return frozenset({"role"})

    def score(self, signals: Signals) -> Tensor:
        """[L, Hk, N] float32 in [0, 1]."""
        return rule_score(signals, self.sink_tokens).expand(signals.shape)


def rule_score(signals: Signals, sink_tokens: int) -> Tensor:
    """[N] float32 in [0, 1]: the rules say the same for every stream."""
    pages = signals.shape[2]
    index = torch.arange(pages, dtype=torch.float32, device=signals.device)
    role = page_signal(signals, "role", expand=False)
    if role.ndim != 1:
        raise PolicyError(f"signal 'role' has shape {tuple(role.shape)}: must be [pages], the same for every stream")
    core = (index * signals.page_tokens < sink_tokens) | (role == Role.SYSTEM) | _last_turn(role == Role.USER)
    return torch.where(core, 1.0, index / max(pages - 1, 1))


def _last_turn(user: Tensor) -> Tensor:
    """The last run of pages that are the user's: [N] bool -> [N] bool."""
    behind = user.flip(0).int().cumsum(0).flip(0)  # pages of the user from here on
    others = (~user).flip(0).int().cumsum(0).flip(0)
    last = behind == 1
    # Of the run's pages as many others lie behind as behind its last page.
    return user & (others == (others * (last & user)).sum())
