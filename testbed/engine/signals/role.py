"""`role`: what the tokens of a page are in the conversation (`policies.base.Role`), the same for all streams."""

from __future__ import annotations

import torch
from torch import Tensor

from policies.base import Role
from testbed.engine.signals.base import Observed, SignalContext, Source

UNKNOWN = -1  # of pages that nobody gave a role


class RoleSource(Source):
    """The role that most tokens of a page have, among equals the one that comes last in the page.

    A session whose context came without roles says `UNKNOWN` of every page, so that nothing is decided by roles there.
    """

    def __init__(self, context: SignalContext) -> None:
        self.page_tokens = context.page_tokens
        self._pages = torch.zeros(0, dtype=torch.int8)  # of full pages
        self._rest = torch.zeros(0, dtype=torch.int8)  # token by token, of the page begun

    def watch_roles(self, roles: Tensor) -> None:
        """Sees the role of each of the next tokens, [T] int8."""
        tokens = torch.cat((self._rest, roles.to("cpu", torch.int8)))
        full = len(tokens) // self.page_tokens * self.page_tokens
        self._pages = torch.cat((self._pages, page_roles(tokens[:full], self.page_tokens)))
        self._rest = tokens[full:]

    def value(self, observed: Observed) -> Tensor:
        """[N] int8 of `Role`; `UNKNOWN` for pages without tokens yet."""
        known = torch.cat((self._pages, page_roles(self._rest, self.page_tokens)))[: observed.shape[2]]
        return torch.nn.functional.pad(known, (0, observed.shape[2] - len(known)), value=UNKNOWN)


def page_roles(roles: Tensor, page_tokens: int) -> Tensor:
    """Roles of tokens [T] int8 -> of pages [N] int8: the majority, ties to the later; the last page may be short."""
    pages = -(-len(roles) // page_tokens)
    kinds = torch.arange(UNKNOWN, len(Role))
    padded = torch.nn.functional.pad(roles, (0, pages * page_tokens - len(roles)), value=UNKNOWN - 1)
    is_kind = padded.view(pages, page_tokens, 1) == kinds
    last = (is_kind * torch.arange(1, page_tokens + 1).view(-1, 1)).amax(1) if pages else is_kind.sum(1)
    best = (is_kind.sum(1) * (page_tokens + 1) + last).argmax(1)
    return kinds[best].to(torch.int8)
