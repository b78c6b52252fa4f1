"""Page scoring from key bounds: an upper bound of a page's logits without reading the page.

Quest (Tang et al. 2024, arXiv 2406.10774): sum_d max(q_d min_d, q_d max_d) over a page's channel-wise bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor


def page_bounds(k: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Channel-wise bounds of each page's keys.

    Args:
        k: [M, P, D] float; rows that are not valid may hold anything.
        valid: [M, P] bool; all by default.

    Returns:
        lowest, highest: [M, D] of k's dtype; 0 for a page with no valid token.
    """
    if valid is None:
        return k.amin(1), k.amax(1)
    inside = valid[..., None]
    lowest = torch.where(inside, k, torch.inf).amin(1)
    highest = torch.where(inside, k, -torch.inf).amax(1)
    some = valid.any(1, keepdim=True)
    return torch.where(some, lowest, 0), torch.where(some, highest, 0)


def query_bound(q: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
    """The most any of a stream's query rows can score on any key of each page (Quest, section 3.2; unscaled).

    With q split by sign, sum_d max(q_d min_d, q_d max_d) = q+ . max + q- . min: two matrix products.

    Args:
        q: [S, G, T, D] float.
        lowest: [S, N, D] float, a page's least value by channel.
        highest: [S, N, D] float, a page's greatest value by channel.

    Returns:
        [S, N] float32, the maximum over the G * T rows.
    """
    if q.dim() != 4 or lowest.shape != highest.shape or lowest.shape[::2] != q.shape[::3]:
        raise ValueError(
            f"query_bound q {tuple(q.shape)}, lowest {tuple(lowest.shape)}, highest {tuple(highest.shape)}: "
            "must be [S, G, T, D], [S, N, D], [S, N, D]"
        )
    rows = q.float().flatten(1, 2)
    signed = torch.cat([rows.clamp(min=0), rows.clamp(max=0)], 2)
    bounds = torch.cat([highest.float(), lowest.float()], 2)
    return (signed @ bounds.transpose(1, 2)).amax(1)
