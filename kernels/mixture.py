"""Attention that mixes parts: pages of any format, linear states, anything that gives a `Partial`, and what is skipped.

All parts share one softmax denominator, so every key weighs as in plain attention over the union. Prototypes and
background states are table entries already; what comes from elsewhere is `extra`.

    part = attend_mixture(q, table, pools, first, [linear_attention.attend(q, state, fmap)], scale=D**-0.5)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import kernels.api as api
from kernels.schedule import Schedule
from kernels.state import Partial, merge
from kernels.table import PageTable, Pool


def attend_mixture(
    q: Tensor,
    table: PageTable,
    pools: Sequence[Pool],
    first_position: Tensor,
    extra: Sequence[Partial] = (),
    *,
    scale: float,
    window_tokens: int | Tensor = 0,
    sink_tokens: int = 0,
    slopes: Tensor | None = None,
    want_mass: bool = False,
    background_pools: Collection[int] = (),
    schedule: Schedule = api.DEFAULT_SCHEDULE,
    backend: str | None = None,
) -> Partial:
    """As `kernels.api.attend`, over the table's entries and `extra` together.

    Windows, sinks and slopes are the table's alone; `extra` was computed under its own. What no part holds is skipped.

    Args:
        q: [S, G, T, D].
        table: the pages of each stream.
        pools: what table.pool counts.
        first_position: [S] int32.
        extra: E partials of the same queries over other keys, out [S, G, T, D] and base-2 lse [S, G, T].
        scale: factor of the logits.
        window_tokens: newest keys of the table each row sees; 0 for no limit.
        sink_tokens: first positions that every window leaves visible.
        slopes: [S, G] float32, ALiBi.
        want_mass: whether to return mass [S, N + E]: of each entry, then of each extra part, mean over the G*T rows; a
            stream's sum is 1 (0 where it sees nothing). With `extra` and several rows each row then is a stream of its
            own, which reads the pages G*T times: rows' shares differ, and a mean over rows can't be rescaled.
        background_pools: pools whose entries stand for many pages, so that their page number may repeat.
        schedule: how the call on the table is cut and computed.
        backend: of the call on the table.

    Returns:
        `Partial`; out 0 and lse -inf for a row that sees nothing, NaN for a row that is NaN in any part.

    Raises:
        ValueError: as there; an extra part of another shape; with TESTBED_DEBUG=1 also a page that counts twice.
    """
    for i, part in enumerate(extra):
        if part.out.shape != q.shape or part.lse.shape != q.shape[:3]:
            raise ValueError(
                f"extra[{i}] of out {tuple(part.out.shape)}, lse {tuple(part.lse.shape)}: must be {tuple(q.shape)}, "
                f"{tuple(q.shape[:3])} like q"
            )
    if api.DEBUG:
        check_once(table, background_pools)
    options = api.Options(scale, window_tokens, sink_tokens, slopes, want_mass, schedule)
    alone = want_mass and extra and q.shape[1] * q.shape[2] > 1
    if alone:
        pages = _attend_rows(q, table, pools, first_position, options, backend)
    else:
        pages = api.attend_with(options, q, table, pools, first_position, backend)
    whole = merge([pages, *extra])
    if pages.mass is None:
        return whole
    shares = [_share(part, whole) for part in (pages, *extra)]
    rows = pages.mass.view(*q.shape[:3], -1) if alone else pages.mass[:, None, None].expand(*q.shape[:3], -1)
    own = (rows * shares[0][..., None]).mean((1, 2))
    others = [share.mean((1, 2))[:, None] for share in shares[1:]]
    return replace(whole, mass=torch.cat([own, *others], 1))


def check_once(table: PageTable, background_pools: Collection[int] = ()) -> None:
    """Refuses a table that lists a page of a stream twice, which would count it twice; costs a sort of the table.

    Raises:
        ValueError: naming the stream and the page.
    """
    column = torch.arange(table.page.shape[1], device=table.page.device)
    listed = table.listed()
    for pool in background_pools:
        listed &= table.pool != pool
    page = torch.where(listed, table.page.long(), -1 - column).sort(1).values
    twice = page[:, 1:] == page[:, :-1]
    if bool(twice.any()):
        s, n = (int(x) for x in twice.nonzero()[0])
        raise ValueError(f"table.page={int(page[s, n])} of stream {s} is listed twice: a page must count once")


def _attend_rows(
    q: Tensor,
    table: PageTable,
    pools: Sequence[Pool],
    first_position: Tensor,
    options: api.Options,
    backend: str | None,
) -> Partial:
    """As `kernels.api.attend_with`, with mass [S * G * T, N] of each row."""
    streams, group, tokens, head_dim = q.shape
    each = group * tokens
    columns = (table.pool, table.slot, table.page, table.count)
    own = PageTable(*(x.repeat_interleave(each, 0) for x in columns))
    later = torch.arange(tokens, dtype=torch.int32, device=q.device)
    position = (first_position[:, None, None] + later).expand(streams, group, tokens).reshape(-1)
    window, slopes = options.window_tokens, options.slopes
    options = replace(
        options,
        window_tokens=window.repeat_interleave(each) if isinstance(window, Tensor) else window,
        slopes=None if slopes is None else slopes[..., None].expand(-1, -1, tokens).reshape(-1, 1),
    )
    part = api.attend_with(options, q.reshape(-1, 1, 1, head_dim), own, pools, position, backend)
    return Partial(part.out.view(q.shape), part.lse.view(q.shape[:3]), part.mass)


def _share(part: Partial, whole: Partial) -> Tensor:
    """[S, G, T] of the softmax mass of the whole; 0 where nothing is visible."""
    return torch.exp2(part.lse - torch.where(whole.lse.isinf(), 0.0, whole.lse))
