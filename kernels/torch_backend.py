"""Portable attention over paged streams, for any device torch runs on.

Correct first: it selects by index, so on a GPU it waits for the device, and such a step can't be captured.
Pages are gathered and decoded a bounded block at a time; blocks are joined by their log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.pages import decode, views
from kernels.state import Partial, merge
from kernels.table import PageTable, Pool

if TYPE_CHECKING:
    from kernels.api import Options

# Sized by one stream, not by the call, so that a stream's result does not depend on the others.
BLOCK_TOKENS = 4096
BLOCK_BYTES = 64 << 20


def attend(
    q: Tensor,
    table: PageTable,
    pools: Sequence[Pool],
    first_position: Tensor,
    options: Options,
) -> Partial:
    """As `kernels.api.attend`."""
    out = torch.zeros(q.shape, device=q.device)
    lse = torch.full(q.shape[:3], -math.inf, device=q.device)
    mass = torch.zeros(table.pool.shape, device=q.device) if options.want_mass else None
    if not pools or not q.numel():
        return Partial(out, lse, mass)
    slopes, window = options.slopes, options.window_tokens
    for entries, part in _alike(q, table.count, max(pool.fmt.rows for pool in pools)):
        pool, slot, page = (_widen(x[part], entries) for x in (table.pool, table.slot, table.page))
        some = PageTable(pool, slot, page, table.count[part])
        own = replace(
            options,
            slopes=None if slopes is None else slopes[part],
            window_tokens=window[part] if isinstance(window, Tensor) else window,
        )
        result = _attend_alike(q[part].float(), some, pools, first_position[part], own)
        out[part], lse[part] = result.out.float(), result.lse.float()
        if mass is not None and result.mass is not None:
            mass[part, :entries] = result.mass[:, : mass.shape[1]]
    return Partial(out, lse, mass)


def _alike(q: Tensor, count: Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
    """Groups of streams, as (entries, indices), that are worked on together, padded to so many entries.

    The number depends on the stream alone, since sums over other lengths are rounded otherwise; and short streams
    don't pay for long ones.
    """
    _, group, tokens, head_dim = q.shape
    block = max(1, BLOCK_TOKENS // rows)
    most = max(1, BLOCK_BYTES // (block * rows * (2 * head_dim + 2 * group * tokens) * 4))
    padded = [1 << (n - 1).bit_length() if n <= block else -(-n // block) * block for n in count.tolist()]
    for entries in sorted({n for n, held in zip(padded, count.tolist(), strict=True) if held}):
        at = torch.tensor([s for s, n in enumerate(padded) if n == entries and count[s] > 0], device=q.device)
        for some in at.split(most):
            yield entries, some


def _widen(x: Tensor, entries: int) -> Tensor:
    """Columns [S, N] of a table cut or padded to [S, entries]; what is added lies beyond every count."""
    return torch.nn.functional.pad(x[:, :entries], (0, max(0, entries - x.shape[1])))


def _attend_alike(q: Tensor, table: PageTable, pools: Sequence[Pool], first: Tensor, options: Options) -> Partial:
    """Streams of one width, by blocks of entries."""
    rows = max(pool.fmt.rows for pool in pools)
    step = max(1, BLOCK_TOKENS // rows)
    parts = []
    for n in range(0, table.pool.shape[1], step):
        block = _Block(table, pools, slice(n, n + step), rows)
        parts.append(block.attend(q, first, options))
    total = merge(parts)
    if not options.want_mass:
        return total
    masses = []
    for part in parts:
        share = torch.where(part.lse == -math.inf, 0.0, torch.exp2(part.lse - total.lse)).float()
        assert part.mass is not None
        masses.append((part.mass * share[..., None]).flatten(1, 2).mean(1))
    return replace(total, mass=torch.cat(masses, 1))


class _Block:
    """A block of table columns of some streams, gathered and decoded; `width` rows an entry."""

    def __init__(self, table: PageTable, pools: Sequence[Pool], columns: slice, width: int) -> None:
        pool, slot = table.pool[:, columns], table.slot[:, columns]
        streams, entries = pool.shape
        device = pool.device
        head_dim, page_tokens = pools[0].fmt.head_dim, pools[0].fmt.page_tokens
        index = torch.arange(columns.start, columns.start + entries, device=device)
        pool = torch.where(index < table.count[:, None], pool, -1).flatten()
        slot = slot.flatten().long()
        self.k = torch.zeros(streams * entries, width, head_dim, device=device)
        self.v = torch.zeros_like(self.k)
        bias = torch.full((streams * entries, width), -math.inf, device=device)
        always = torch.zeros(streams * entries, 1, dtype=torch.bool, device=device)
        position = (table.page[:, columns].flatten().long() * page_tokens).double()[:, None].repeat(1, width)
        for i, source in enumerate(pools):
            rows = source.fmt.rows
            for j, slab in enumerate(source.slabs):
                low = j * source.slab_pages
                at = ((pool == i) & (slot >= low) & (slot < low + source.slab_pages)).nonzero()[:, 0]
                if not len(at):
                    continue
                blobs = slab[slot[at] - low]
                keys, values = decode(source.fmt, blobs)
                self.k[at, :rows], self.v[at, :rows] = keys, values
                if source.fmt.name == "proto":
                    bias[at, :rows] = views(source.fmt, blobs)["log2_count"]
                    always[at] = True
                    position[at] += (page_tokens - 1) / 2
                else:
                    bias[at, :rows] = 0.0
                    position[at, :rows] += torch.arange(rows, device=device)
        self.entries = entries
        self.position, self.bias, self.always = (
            x.expand(-1, width).reshape(streams, entries * width) for x in (position, bias, always)
        )
        self.k, self.v = (x.view(streams, entries * width, head_dim) for x in (self.k, self.v))

    def attend(self, q: Tensor, first_position: Tensor, options: Options) -> Partial:
        """Attention over the block; mass is [S, G, T, entries], per row, of the block only."""
        streams, group, tokens, _ = q.shape
        slopes = options.slopes
        own = first_position[:, None].long() + torch.arange(tokens, device=q.device)
        position = self.position[:, None]
        visible = position <= own[..., None]
        window = options.window_tokens
        if isinstance(window, Tensor):
            window = window[:, None, None]
            visible &= (position > own[..., None] - window) | (position < options.sink_tokens) | (window == 0)
        elif window:
            visible &= (position > own[..., None] - window) | (position < options.sink_tokens)
        visible = ((visible | self.always[:, None]) & (self.bias[:, None] > -math.inf))[:, None]
        # Unwritten slots may hold NaN, and 0 * NaN is NaN: what nobody sees is zeroed first.
        seen = visible.any(2)[:, 0, :, None]
        keys, values = torch.where(seen, self.k, 0.0), torch.where(seen, self.v, 0.0)
        logit = (q.flatten(1, 2) @ keys.transpose(1, 2)).view(streams, group, tokens, -1)
        logit = logit * (options.scale / math.log(2)) + self.bias[:, None, None]
        newest = None
        if slopes is not None:
            # Counted from the newest visible key, so that logits stay small; the constant goes into the lse.
            newest = torch.where(visible[:, 0], position, -math.inf).amax(2, keepdim=True)
            newest = torch.where(newest.isinf(), 0.0, newest)
            distance = (position - newest).float()
            logit = logit + slopes[:, :, None, None] * distance[:, None] / math.log(2)
        logit = torch.where(visible, logit, -math.inf)
        top = logit.amax(3, keepdim=True)
        weight = torch.exp2(logit - torch.where(top == -math.inf, 0.0, top))  # +inf - +inf is the NaN wanted
        total = weight.sum(3, keepdim=True)
        weight = weight / total.clamp(min=torch.finfo(total.dtype).tiny)
        out = (weight.flatten(1, 2) @ values).view(q.shape)
        mass = weight.view(streams, group, tokens, self.entries, -1).sum(4)
        lse = (top + total.log2())[..., 0]
        if slopes is not None and newest is not None:
            # In float64, since blocks are joined by it and a position may be in the millions.
            lse = lse.double() + slopes[..., None].double() * newest[:, None, :, 0] / math.log(2)
        return Partial(out, lse, mass)
