"""What is known of each page beside its bytes: score, last access, role, position, checksum.

Kept in host memory, [S, N] for what differs by stream and [N] for what is the sequence's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from policies.base import Format, Mode, Tier

if TYPE_CHECKING:
    from testbed.cache.paged import PagedCache

NEVER = -1
HOST_BYTES_PER_PAGE = 4 + 4 + 4  # score, last access, number of the flight


class Metadata:
    """Score and last access of the pages of one sequence.

    Attributes:
        score: [S, N] float32, the predictor's at the last plan ("core score").
        last_access: [S, N] int32, number of the last plan under which the page was attended token by token; -1 = none.
        plans: plans applied so far, the clock of `last_access`.
    """

    def __init__(self, streams: int) -> None:
        self.score = torch.zeros(streams, 0)
        self.last_access = torch.full((streams, 0), NEVER, dtype=torch.int32)
        self.plans = 0

    @property
    def host_bytes(self) -> int:
        """Bytes of the tables, the numbers of flights included."""
        return self.score.numel() * HOST_BYTES_PER_PAGE

    def grow(self, pages: int) -> None:
        """Adds columns for new pages."""
        self.score = torch.nn.functional.pad(self.score, (0, pages))
        self.last_access = torch.nn.functional.pad(self.last_access, (0, pages), value=NEVER)

    def note_scores(self, score: Tensor | None) -> None:
        """The scores [L, Hk, N] of a plan that is about to be in force; None leaves those of before."""
        if score is not None:
            self.score = score.reshape(self.score.shape).to("cpu", torch.float32).clone()

    def note_access(self, mode: Tensor) -> None:
        """A plan is in force: modes [S, N]."""
        self.last_access.masked_fill_(mode == Mode.EXACT, self.plans)
        self.plans += 1

    def clone(self) -> Metadata:
        """An independent copy."""
        other = Metadata(len(self.score))
        other.score, other.last_access, other.plans = self.score.clone(), self.last_access.clone(), self.plans
        return other


def page_table(cache: PagedCache, layer: int, head: int) -> list[dict[str, int | float | str | None]]:
    """All that is known of the pages of one stream, one row a page, for looking at."""
    stream = layer * cache.kv_heads + head
    rows: list[dict[str, int | float | str | None]] = []
    for page in range(cache.pages):
        tier, code = Tier(int(cache.state["tier"][stream, page])), Format(int(cache.state["format"][stream, page]))
        alive = tier != Tier.DROPPED
        checksum = None
        if tier == Tier.L3 and not cache.flights.pending[stream, page]:
            checksum = int(cache.pools.archive(code).checksums(cache.state["slot"][stream, page : page + 1].long())[0])
        rows.append(
            {
                "page": page,
                "first_position": page * cache.config.page_tokens,
                "tier": tier.name,
                "format": code.name.lower() if alive else None,
                "mode": Mode(int(cache.state["mode"][stream, page])).name.lower(),
                "slot": int(cache.state["slot"][stream, page]) if alive else None,
                "in_flight": bool(cache.flights.pending[stream, page]),
                "core_score": float(cache.metadata.score[stream, page]),
                "last_access": int(cache.metadata.last_access[stream, page]),
                "checksum": checksum,
            }
        )
    return rows
