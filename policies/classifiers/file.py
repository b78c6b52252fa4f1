"""Heads as a published or hand-made map classes them: RedKnot JSON, DuoAttention TSV, HeadKV JSON.

python -m testbed.run policy=redknot policy/classifier=file +signals.head_imported.path=map.json
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Head, PolicyError, Signals
from policies.checks import head_signal


@dataclass(frozen=True)
class File:
    """Classes as `head_imported` [L, Hk] has them; which file that is, the signal's `path` says."""

    @property
    def needs(self) -> frozenset[str]:
        """The imported classes."""
        return frozenset({"head_imported"})

    def classify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8 of `Head`.

        Raises:
            PolicyError: a number that is no class.
        """
        codes = head_signal(signals, "head_imported")
        known = torch.tensor([float(head) for head in Head], device=codes.device)
        strange = codes[~torch.isin(codes, known)]
        if len(strange):
            raise PolicyError(f"signal 'head_imported' holds {float(strange[0]):g}: must be one of {[*map(int, Head)]}")
        return codes.to(torch.int8)
