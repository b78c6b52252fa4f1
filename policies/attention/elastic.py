"""Elastic attention: exact where it matters, cheaper elsewhere, the cheaper the higher the load.

`elastic` follows the system that was described to us as KernelFlume; the paper of that name is about
disaggregation and has no such modes (field notes, section 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Head, Mode, PolicyError, Signals
from policies.checks import head_classes, require_number
from policies.filling import best, count, stream_bytes, whole_pages


@dataclass(frozen=True)
class Elastic:
    """Modes by score and load.

    load = bytes of all alive pages in the format they are held in / device budget; 0 without a budget.

    | load | core pages | other pages |
    |---|---|---|
    | up to cluster_load | exact | exact if resident, else as in the next row |
    | up to background_load | exact | prototypes while bytes last, best first, then background |
    | up to skip_load | exact | the same, for a share of them that falls to 0; then background |
    | above | exact | background, the lowest skip_fraction of them skipped |

    A core page that is not resident is the first to get prototypes. LOCAL heads read what is resident, exactly.

    Attributes:
        core_fraction: share of a stream's alive pages that are core, best score first, in (0, 1].
        cluster_load: load above which resident pages that are not core are no longer read exactly.
        background_load: load above which fewer and fewer pages get prototypes.
        skip_load: load above which none does and the lowest are skipped.
        skip_fraction: share of the pages that are not core, lowest score first, that are then skipped.
        prototype_share: part of each stream's quota kept free for prototypes, in [0, 1).
    """

    core_fraction: float
    cluster_load: float
    background_load: float
    skip_load: float
    skip_fraction: float
    prototype_share: float

    def __post_init__(self) -> None:
        """Refuses shares outside their range and loads out of order."""
        require_number(self, "core_fraction", 0, 1)
        require_number(self, "skip_fraction", 0, 1)
        require_number(self, "prototype_share", 0, 1, below=True)
        for key in ("cluster_load", "background_load", "skip_load"):
            require_number(self, key, 0)
        if self.core_fraction == 0:
            raise PolicyError("Elastic.core_fraction=0: must be above 0, something has to be exact")
        if not self.cluster_load <= self.background_load < self.skip_load:
            raise PolicyError(
                f"Elastic: cluster_load={self.cluster_load}, background_load={self.background_load}, "
                f"skip_load={self.skip_load}: must rise, cluster_load <= background_load < skip_load"
            )

    @property
    def needs(self) -> frozenset[str]:
        """No signal beside the score."""
        return frozenset()

    def load(self, signals: Signals) -> Tensor:
        """Scalar float64: bytes wanted / device budget, 0 without one."""
        if signals.device_budget_bytes is None:
            return torch.zeros((), dtype=torch.float64, device=signals.device)
        wanted = stream_bytes(signals.page_bytes, signals.held.format, signals.held.alive)
        return wanted.sum() / max(signals.device_budget_bytes, 1)

    def modes(self, signals: Signals, score: Tensor, resident: Tensor, spare_bytes: Tensor) -> Tensor:
        """[L, Hk, N] int8 of `Mode`."""
        load = self.load(signals)
        alive = signals.held.alive
        local = (head_classes(signals) == Head.LOCAL).unsqueeze(-1)
        plain = resident.to(torch.int8) * int(Mode.EXACT)
        if bool(load <= self.cluster_load) and not bool((alive & ~resident & ~local).any()):
            return plain
        ranked = ~local.squeeze(-1)
        plain[ranked] = self._by_rank(signals, score[ranked], resident[ranked], spare_bytes[ranked], ranked, load)
        return plain

    def _by_rank(
        self, signals: Signals, score: Tensor, resident: Tensor, spare_bytes: Tensor, chosen: Tensor, load: Tensor
    ) -> Tensor:
        """[M, N] int8 of `Mode` for the M streams `chosen` [L, Hk], whose rows the other arguments hold."""
        alive = signals.held.alive[chosen]
        core_pages = (count(alive) * self.core_fraction).ceil().long()
        exact = resident & best(score, alive, core_pages) if bool(load > self.cluster_load) else resident

        rest = alive & ~exact & ~signals.hot
        # The state that stands for the background is paid for first; without it nothing can be background.
        room = spare_bytes - signals.page_bytes.background
        others = count(rest)
        ramp = ((self.skip_load - load) / (self.skip_load - self.background_load)).clamp(0.0, 1.0)
        affordable = whole_pages(room, signals.page_bytes.prototype)
        cluster = best(score, rest, torch.minimum(affordable, (others * ramp).floor().long()))
        skipped = torch.zeros_like(rest)
        if bool(load > self.skip_load):
            skipped = rest & ~best(score, rest, others - (others * self.skip_fraction).floor().long())
        background = rest & ~cluster & ~skipped & (room >= 0).unsqueeze(-1)

        mode = exact.to(torch.int8) * int(Mode.EXACT)
        # No page is in two of them, so the codes add up.
        mode += cluster.view(torch.int8) * int(Mode.CLUSTER)
        return mode + background.view(torch.int8) * int(Mode.BACKGROUND)
