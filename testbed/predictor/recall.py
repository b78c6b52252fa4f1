"""How much of what the next step attends to lies in the pages with the highest scores.

Recall at 10 % of the pages: the share of the mass on candidate pages (those that are not hot) that falls on the tenth
of them that the score puts first. Pages with equal scores are drawn by chance, and the expectation over the draws is
counted, so that a score that says nothing has the recall of a random one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from testbed.predictor.drive import kept_pages

SHARES = (0.05, 0.10, 0.25)


class RecallError(ValueError):
    """Scores that can't be judged."""


@dataclass(frozen=True)
class Caught:
    """What the chosen pages hold.

    Attributes:
        mass: [R, K] what the chosen pages of each row hold, for each of K shares.
        total: [R] what all candidates hold.
    """

    mass: Tensor
    total: Tensor

    @property
    def recall(self) -> Tensor:
        """[R, K] in [0, 1]; NaN for rows whose candidates hold nothing."""
        return self.mass / self.total.unsqueeze(-1)


def caught(score: Tensor, mass: Tensor, candidate: Tensor, shares: tuple[float, ...] = SHARES) -> Caught:
    """Judges scores of any number of rows.

    Args:
        score: [R, N] higher is better.
        mass: [R, N] at least 0; what pages are worth.
        candidate: [R, N] or [N] bool.
        shares: of the candidate pages that are chosen.

    Raises:
        RecallError: NaN among the candidates' scores.
    """
    candidate = candidate.expand(score.shape)
    if bool(torch.isnan(score[candidate]).any()):
        raise RecallError(f"score: {int(torch.isnan(score[candidate]).sum())} of its candidate pages are NaN")
    score = score.double().masked_fill(~candidate, -torch.inf)
    worth = mass.double().masked_fill(~candidate, 0.0)
    ordered = score.sort(-1, descending=True).values
    counts = candidate.sum(-1)
    chosen = []
    for share in shares:
        kept = torch.tensor([kept_pages(share, count) for count in counts.tolist()])
        least = ordered.gather(-1, (kept - 1).clamp(min=0).unsqueeze(-1))
        above = (score > least) & candidate
        tied = (score == least) & candidate
        left = (kept - above.sum(-1)) / tied.sum(-1).clamp(min=1)
        chosen.append((worth * above).sum(-1) + left * (worth * tied).sum(-1))
    return Caught(torch.stack(chosen, -1), worth.sum(-1))
