"""Portable attention over paged streams, for any device torch runs on.

Correct first: it selects by index, so on a GPU it waits for the device, and such a step can't be captured.
Pages are gathered and decoded a bounded block at a time; blocks are joined by their log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    streams, group, tokens, head_dim = q.shape
    out = torch.zeros(q.shape, device=q.device)
    lse = torch.full(q.shape[:3], -math.inf, device=q.device)
    mass = torch.zeros(table.pool.shape, device=q.device) if options.want_mass else None
    if not pools or not table.pool.shape[1]:
        return Partial(out, lse, mass)
    windows = options.window_tokens
    width = max(pool.fmt.rows for pool in pools)
    block_pages = max(1, BLOCK_TOKENS // width)
    stream_bytes = block_pages * width * (2 * head_dim + 2 * group * tokens) * 4
    block_streams = max(1, BLOCK_BYTES // stream_bytes)
    for s in range(0, streams, block_streams):
        part = slice(s, s + block_streams)
        some = PageTable(table.pool[part], table.slot[part], table.page[part], table.count[part])
        own = replace(
            options,
            slopes=None if options.slopes is None else options.slopes[part],
            window_tokens=windows if isinstance(windows, int) else windows[part],
        )
        result, parts = [Partial(out[part], lse[part])], []
        for n in range(0, table.pool.shape[1], block_pages):
            columns = slice(n, n + block_pages)
            block = _Block(some, pools, columns, width)
            result.append(block.attend(q[part].float(), first_position[part], own))
            parts.append((columns, result[-1]))
        total = merge(result)
        out[part], lse[part] = total.out, total.lse
        if mass is not None:
            for columns, partial in parts:
                share = torch.exp2(partial.lse - total.lse).nan_to_num(0.0)  # -inf minus -inf: sees nothing
                assert partial.mass is not None
                weighted = (partial.mass * share[..., None]).flatten(1, 2).mean(1)
                mass[part, columns] = weighted
    return Partial(out, lse, mass)


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
        if slopes is not None:
            # Counted from the row's own position, so that logits stay small; the constant goes into the lse.
            distance = (self.position[:, None] - own[..., None]).float()
            logit = logit + slopes[:, :, None, None] * distance[:, None] / math.log(2)
        logit = torch.where(visible, logit, -math.inf)
        top = logit.amax(3, keepdim=True)
        weight = torch.exp2(logit - torch.where(top.isinf(), 0.0, top))
        total = weight.sum(3, keepdim=True)
        weight = weight / total.clamp(min=torch.finfo(total.dtype).tiny)
        out = (weight.flatten(1, 2) @ values).view(q.shape)
        mass = weight.view(streams, group, tokens, self.entries, -1).sum(4)
        lse = (top + total.log2())[..., 0]
        if slopes is not None:
            lse = (lse.double() + slopes[..., None].double() * own[:, None] / math.log(2)).float()
        return Partial(out, lse, mass)
