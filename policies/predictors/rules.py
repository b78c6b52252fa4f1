"""What holds for any text without looking at it: the beginning, the recent past and what is being answered matter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import PolicyError, Role, Signals
from policies.checks import page_signal, require_whole

RULE_SIGNALS = frozenset({"role", "tool_call", "locked"})


@dataclass(frozen=True)
class Rules:
    """1 for core pages and the system's instructions, else how recent the page is, from 0 (oldest) to 1 (newest).

    See `core_pages` for which are core.

    Attributes:
        sink_tokens: tokens at the start that count as sinks.
        last_tokens: tokens at the end that are core.
    """

    sink_tokens: int
    last_tokens: int

    def __post_init__(self) -> None:
        """Refuses negative numbers."""
        require_whole(self, "sink_tokens", 0)
        require_whole(self, "last_tokens", 0)

    @property
    def needs(self) -> frozenset[str]:
        """What pages are in the conversation, if they are in one; whether a tool is being called; what is locked."""
        return RULE_SIGNALS

    def score(self, signals: Signals) -> Tensor:
        """[L, Hk, N] float32 in [0, 1]."""
        core = core_pages(signals, self.sink_tokens, self.last_tokens)
        return torch.where(core, 1.0, rule_score(signals, self.sink_tokens)).expand(signals.shape)


def core_pages(signals: Signals, sink_tokens: int, last_tokens: int) -> Tensor:
    """[N] bool: pages that matter whatever they say.

    Those of `fixed_pages`; the user's last turn, which is being answered; and while a tool is being called, the
    description of the tools and the last result.
    """
    role, calling = (_one_for_all(signals, name) for name in ("role", "tool_call"))
    core = fixed_pages(signals, sink_tokens, last_tokens) | last_run(role == Role.USER)
    return core | ((calling > 0) & ((role == Role.TOOL) | last_run(role == Role.RESULT)))


def fixed_pages(signals: Signals, sink_tokens: int, last_tokens: int) -> Tensor:
    """[N] bool: sinks, the last tokens, and what the user locked."""
    first = torch.arange(signals.shape[2], device=signals.device) * signals.page_tokens
    near = (first < sink_tokens) | (first + signals.page_tokens > signals.length_tokens - last_tokens)
    return near | (_one_for_all(signals, "locked") > 0)


def rule_score(signals: Signals, sink_tokens: int) -> Tensor:
    """[N] float32 in [0, 1]: 1 for sinks, the system's instructions and the user's last turn, else by recency."""
    pages = signals.shape[2]
    index = torch.arange(pages, dtype=torch.float32, device=signals.device)
    role = _one_for_all(signals, "role")
    core = (index * signals.page_tokens < sink_tokens) | (role == Role.SYSTEM) | last_run(role == Role.USER)
    return torch.where(core, 1.0, index / max(pages - 1, 1))


def last_run(pages: Tensor) -> Tensor:
    """The last run of marked pages, whatever lies behind it: [N] bool -> [N] bool."""
    behind = pages.flip(0).int().cumsum(0).flip(0)  # marked pages from here on
    others = (~pages).flip(0).int().cumsum(0).flip(0)
    last = behind == 1
    # Of the run's pages as many others lie behind as behind its last page.
    return pages & (others == (others * (last & pages)).sum())


def _one_for_all(signals: Signals, name: str) -> Tensor:
    """A signal that is the same for every stream, [N]."""
    value = page_signal(signals, name, expand=False)
    if value.ndim != 1:
        raise PolicyError(f"signal {name!r} has shape {tuple(value.shape)}: must be [pages], the same for every stream")
    return value
