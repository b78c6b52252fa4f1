"""Attention over paged streams in float64, with plain loops: the definition of right for every backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.pages import decode, views
from kernels.state import Partial
from kernels.table import PageTable, Pool

if TYPE_CHECKING:
    from kernels.api import Options


def attend(
    q: Tensor,
    table: PageTable,
    pools: Sequence[Pool],
    first_position: Tensor,
    options: Options,
) -> Partial:
    """As `kernels.api.attend`, one row at a time; results are float64 (mass too)."""
    streams, group, tokens, _ = q.shape
    windows = torch.as_tensor(options.window_tokens).expand(streams).tolist()
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full((streams, group, tokens), -math.inf, dtype=torch.float64)
    mass = torch.zeros(table.pool.shape, dtype=torch.float64)
    for s in range(streams):
        entries = [_entry(table, pools, s, n) for n in range(int(table.count[s]))]
        if not entries:
            continue
        owner = torch.tensor([n for n, (k, *_) in enumerate(entries) for _ in range(len(k))])
        keys, values, position, bias, always = (torch.cat(part) for part in zip(*entries, strict=True))
        for g in range(group):
            for t in range(tokens):
                own = int(first_position[s]) + t
                near = (position > own - windows[s]) | (position < options.sink_tokens) | (windows[s] == 0)
                visible = always | (position <= own) & near
                visible &= bias > -math.inf
                if not bool(visible.any()):
                    continue
                logit = (keys[visible] @ q[s, g, t].double()) * options.scale
                if options.slopes is not None:
                    logit = logit + float(options.slopes[s, g]) * position[visible]
                logit = logit / math.log(2) + bias[visible]
                row_lse = torch.logsumexp(logit * math.log(2), 0) / math.log(2)
                if row_lse == math.inf:
                    row_lse = torch.full_like(row_lse, math.nan)
                weight = torch.exp2(logit - row_lse)
                out[s, g, t] = weight @ values[visible]
                lse[s, g, t] = row_lse
                mass[s].index_add_(0, owner[visible], weight / (group * tokens))
    return Partial(out, lse, mass if options.want_mass else None)


def _entry(table: PageTable, pools: Sequence[Pool], s: int, n: int) -> tuple[Tensor, ...]:
    """Keys and values [rows, D], position, base-2 bias and whether always visible [rows] of one table entry."""
    pool = pools[int(table.pool[s, n])]
    slot, page = int(table.slot[s, n]), int(table.page[s, n])
    blob = pool.slabs[slot // pool.slab_pages][slot % pool.slab_pages][None]
    keys, values = (x[0].double() for x in decode(pool.fmt, blob))
    tokens = pool.fmt.page_tokens
    if pool.fmt.name == "proto":
        bias = views(pool.fmt, blob)["log2_count"][0].double()
        position = torch.full_like(bias, page * tokens + (tokens - 1) / 2)
        return keys, values, position, bias, torch.ones(len(bias), dtype=torch.bool)
    position = page * tokens + torch.arange(tokens, dtype=torch.float64)
    return keys, values, position, torch.zeros_like(position), torch.zeros(tokens, dtype=torch.bool)
