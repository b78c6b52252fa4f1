"""The arithmetic of plans: how the bytes of the device are shared, who keeps them, where the others go.

It runs before a decode step on [L, Hk, N] tensors, two million pages at 128 k tokens, so masks are counted and
combined as bytes, and nothing is sorted to choose the best of it: a threshold is selected and the pages are compared
with it (`best`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policies.plan import Format, PageBytes, PolicyError, Share, Signals, Tier
from policies.ranks import ascending, order_keys


@dataclass(frozen=True)
class Room:
    """What is given out: bytes [...] float64 of each row, to pages fmt [..., N] int8 of `Format`."""

    page_bytes: PageBytes
    fmt: Tensor
    bytes: Tensor


def count(mask: Tensor) -> Tensor:
    """How many of each row: mask [..., N] bool -> [...] int64."""
    return mask.view(torch.int8).sum(-1, dtype=torch.int32).long()


def codes_in(fmt: Tensor) -> list[Format]:
    """The formats from the lowest to the highest code there is; few, as most caches use one or two."""
    if not fmt.numel():
        return []
    low, high = (int(code) for code in fmt.aminmax())
    return [Format(code) for code in range(low, high + 1)]


def stream_bytes(page_bytes: PageBytes, fmt: Tensor, pages: Tensor) -> Tensor:
    """Bytes of the pages of each row: fmt [..., N] int8, pages [..., N] bool -> [...] float64."""
    codes = codes_in(fmt)
    if len(codes) == 1:
        return count(pages).double() * page_bytes.by_code(codes[0])
    total = torch.zeros(pages.shape[:-1], dtype=torch.float64, device=pages.device)
    for code in codes:
        total += count(pages & (fmt == code)) * page_bytes.by_code(code)
    return total


def whole_pages(room_bytes: Tensor, page_bytes: Tensor | int) -> Tensor:
    """How many pages fit: the largest n with n * page_bytes <= room_bytes, [...] int64, at least 0."""
    each = torch.as_tensor(page_bytes, dtype=torch.float64, device=room_bytes.device)
    most = torch.iinfo(torch.int32).max
    pages = (room_bytes / each).nan_to_num(nan=most).clamp(0, most).floor()
    # The quotient is rounded; the product of whole numbers is not.
    pages = pages - (pages * each > room_bytes).double()
    pages = pages + ((pages + 1) * each <= room_bytes).double()
    return pages.clamp(0, most).long()


def best(value: Tensor, candidate: Tensor, pages: Tensor) -> Tensor:
    """The best candidates of each row, the older of two equals first.

    value: [M, N] float32, finite. candidate: [M, N] bool. pages: [M] int64, how many.

    Returns:
        [M, N] bool.
    """
    if bool((pages >= count(candidate)).all()):
        return candidate
    length = value.shape[-1]
    # +inf for candidates, -inf for others: several times faster than where or masked_fill.
    sign = candidate.float().sub_(0.5).mul_(torch.inf)
    place = (length - pages).clamp(0, length - 1)
    one = int(place[0]) if bool((place == place[0]).all()) else None
    threshold = ascending(torch.minimum(value, sign, out=sign), one).gather(-1, place.unsqueeze(-1))
    chosen = (value >= threshold).logical_and_(candidate)
    tied = (count(chosen) > pages).nonzero().squeeze(1)
    if len(tied):
        chosen[tied] = _untied(value[tied], threshold[tied], chosen[tied], pages[tied])
    return chosen


def _untied(value: Tensor, threshold: Tensor, chosen: Tensor, pages: Tensor) -> Tensor:
    """`best` where more pages reach the threshold than may stay: of those just at it the oldest do."""
    above = chosen & (value > threshold)
    equal = chosen & ~above
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= (pages - count(above)).unsqueeze(-1)))


def fill(room: Room, candidate: Tensor, rank: Callable[[], Tensor]) -> Tensor:
    """The highest-ranked candidates of each stream whose summed bytes fit its room, the older of two equals first.

    candidate: [L, Hk, N] bool. rank: gives [L, Hk, N] float32; called only if a stream can't keep all candidates.

    Returns:
        [L, Hk, N] bool.
    """
    full = stream_bytes(room.page_bytes, room.fmt, candidate) > room.bytes  # most streams keep all they have
    if not bool(full.any()):
        return candidate
    rows = full.flatten().nonzero().squeeze(1)
    ranks, fmt, wanted = (x.flatten(0, -2) for x in (rank(), room.fmt, candidate))
    if len(rows) == len(wanted):
        return _fill_full(Room(room.page_bytes, fmt, room.bytes.flatten()), wanted, ranks).view(candidate.shape)
    some = Room(room.page_bytes, fmt[rows], room.bytes.flatten()[rows])
    kept = wanted.clone()
    kept[rows] = _fill_full(some, wanted[rows], ranks[rows])
    return kept.view(candidate.shape)


def _fill_full(room: Room, candidate: Tensor, rank: Tensor) -> Tensor:
    """`fill` for streams [M, N] that can't keep all candidates."""
    low, high = room.fmt.amin(-1), room.fmt.amax(-1)
    even = low == high
    if bool(even.all()):
        return best(rank, candidate, whole_pages(room.bytes, room.page_bytes.of(low)))
    if not bool(even.any()):
        return _fill_uneven(room, candidate, rank)
    kept = torch.empty_like(candidate)
    for rows, one_format in ((even, True), (~even, False)):
        some = Room(room.page_bytes, room.fmt[rows], room.bytes[rows])
        if one_format:
            pages = whole_pages(some.bytes, room.page_bytes.of(low[rows]))
            kept[rows] = best(rank[rows], candidate[rows], pages)
        else:
            kept[rows] = _fill_uneven(some, candidate[rows], rank[rows])
    return kept


def _fill_uneven(room: Room, candidate: Tensor, rank: Tensor) -> Tensor:
    """`_fill_full` where the pages of a stream differ in size: one sort, then prefix sums."""
    length = rank.shape[-1]
    backwards = torch.arange(length - 1, -1, -1, device=rank.device)
    keys = order_keys(rank, backwards)  # the last of them is the best page, the oldest of equals
    ordered = ascending(keys.clone())
    order = (length - 1) - (ordered & 0xFFFFFFFF)
    cost = room.page_bytes.of(room.fmt).double() * candidate
    spent = cost.gather(-1, order).flip(-1).cumsum(-1)
    fits = (spent <= room.bytes.unsqueeze(-1)).sum(-1)  # pages of the order, candidates or not, that fit together
    lowest = ordered.gather(-1, (length - fits).clamp(max=length - 1).unsqueeze(-1))
    return candidate & (keys >= lowest) & (fits > 0).unsqueeze(-1)


def cascade(signals: Signals, fmt: Tensor, victims: Tensor, first: Tier, rank: Callable[[], Tensor]) -> Tensor:
    """Where the pages go that the device has no room for: down the tiers, over all streams together.

    The best-ranked victims stay in the higher tier until its budget is spent, those left take the next, the rest is
    DROPPED. `first` L2 fills L2, then L3; L3 fills L3, then L2; DROPPED neither. Of equal ranks the first stream's
    stay, then the older page.

    Returns:
        [L, Hk, N] int8 of `Tier` for victims, 0 elsewhere.
    """
    budgets = {Tier.L2: signals.host_budget_bytes, Tier.L3: signals.archive_budget_bytes}
    places = {Tier.L2: (Tier.L2, Tier.L3), Tier.L3: (Tier.L3, Tier.L2)}.get(first, ())
    tier = torch.zeros(victims.shape, dtype=torch.int8, device=victims.device)
    left = victims
    for place in places:
        budget = budgets[place]
        stays = left if budget is None else _fill_tier(signals.page_bytes, fmt, left, budget, rank)
        tier += stays.view(torch.int8) * int(place)
        left = left & ~stays
        if budget is None:
            break
    return tier + left.view(torch.int8) * int(Tier.DROPPED)


def _fill_tier(
    page_bytes: PageBytes, fmt: Tensor, victims: Tensor, budget_bytes: int, rank: Callable[[], Tensor]
) -> Tensor:
    """The best-ranked victims of all streams that fit a tier together: [L, Hk, N] bool."""
    if budget_bytes <= 0:
        return torch.zeros_like(victims)
    budget = torch.full((1, 1), float(budget_bytes), dtype=torch.float64, device=victims.device)
    if float(stream_bytes(page_bytes, fmt, victims).sum()) <= budget_bytes:
        return victims
    room = Room(page_bytes, fmt.reshape(1, 1, -1), budget)
    flat = fill(room, victims.reshape(1, 1, -1), lambda: rank().reshape(1, 1, -1))
    return flat.view(victims.shape)


def fixed_bytes(signals: Signals) -> Tensor:
    """[L, Hk] float64: device bytes of a stream that no policy can change (hot pages, metadata)."""
    layers, kv_heads, pages = signals.shape
    hot = int(signals.hot.sum()) * signals.page_bytes.compute + pages * signals.page_bytes.metadata
    return torch.full((layers, kv_heads), float(hot), dtype=torch.float64, device=signals.device)


def fit(signals: Signals, share: Share, useful_bytes: Tensor) -> Share:
    """Caps the quotas so that all streams together stay inside the device budget.

    useful_bytes [L, Hk] float64: what a stream could spend at most; without it a stream that may take everything but
    has little to keep would claim as much as one that has a lot.

    One cap for all streams (water-filling): small streams keep what they asked for, large ones are cut to the same
    level, so a per-class split keeps its shape as long as the bytes allow.
    """
    if signals.device_budget_bytes is None:
        return share
    fixed = fixed_bytes(signals)
    free = signals.device_budget_bytes - float(fixed.sum())
    if free < 0:
        raise PolicyError(
            f"the device budget of {signals.device_budget_bytes} bytes can't hold sinks, recent window and metadata: "
            f"they take {int(fixed.sum())} bytes; raise budget.fraction or lower cache.sink_tokens, cache.hot_tokens"
        )
    quota = torch.minimum(share.quota_bytes, useful_bytes)
    want = quota.flatten()
    ordered = want.clamp(max=free).sort().values
    count = torch.arange(len(ordered), 0, -1, device=want.device)
    before = ordered.cumsum(0) - ordered
    level = ((free - before) / count).clamp(min=0)
    # The cap is the level at the first stream whose wish exceeds it; if none does, all wishes fit, an infinite one as
    # all that is free.
    over = ordered > level
    cap = level[int(over.int().argmax())] if bool(over.any()) else free
    return replace(share, quota_bytes=quota.clamp(max=float(cap)))
