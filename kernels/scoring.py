"""Page scores without reading pages, and the choice of the best pages of each stream.

Quest (Tang et al. 2024, arXiv 2406.10774): sum_d max(q_d min_d, q_d max_d) over a page's channel-wise key bounds is
the most any of its keys can score. Mean keys and the mass pages drew at earlier steps are the cheaper guesses.

Scores are per stream: with G query heads a stream and T queries at once the best of the G * T rows counts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.api import DEBUG, QUERY_DTYPES, choose_backend
from kernels.guards import check_floats
from kernels.table import PageTable


def page_bounds(k: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Channel-wise bounds of each page's keys.

    Args:
        k: [M, P, D] float; rows that are not valid may hold anything. NaN moves no bound.
        valid: [M, P] bool; all by default.

    Returns:
        lowest, highest: [M, D] of k's dtype; 0 for a page with no valid token, +inf and -inf for a channel that
        is all NaN.

    Raises:
        ValueError: shapes or types that don't match.
    """
    if k.dim() != 3 or (valid is not None and (valid.shape != k.shape[:2] or valid.dtype != torch.bool)):
        seen = None if valid is None else (valid.dtype, tuple(valid.shape))
        raise ValueError(f"page_bounds k {tuple(k.shape)}, valid {seen}: must be [M, P, D], bool [M, P]")
    check_floats("page_bounds", k=k)
    counts = ~k.isnan() if valid is None else valid[..., None] & ~k.isnan()
    lowest = torch.where(counts, k, torch.inf).amin(1)
    highest = torch.where(counts, k, -torch.inf).amax(1)
    if valid is None:
        return lowest, highest
    some = valid.any(1, keepdim=True)
    return torch.where(some, lowest, 0), torch.where(some, highest, 0)


def query_bound(
    q: Tensor,
    lowest: Tensor,
    highest: Tensor,
    count: Tensor | None = None,
    backend: str | None = None,
    each_row: bool = False,
) -> Tensor:
    """The most any of a stream's query rows can score on any key of each page (Quest, section 3.2; unscaled).

    With q split by sign, sum_d max(q_d min_d, q_d max_d) = q+ . max + q- . min: two matrix products, in float32.
    A row whose sum is NaN (NaN in the query, infinite bounds) takes no part, so a page that holds no token yet
    (+inf, -inf) scores -inf.

    Args:
        q: [S, G, T, D] fp32, bf16 or fp16.
        lowest: [S, N, D] fp32, bf16 or fp16, a page's least value by channel.
        highest: [S, N, D] like lowest, a page's greatest value by channel.
        count: [S] int32, pages each stream has, 0 to N; pages beyond are not read and score -inf. N by default.
        backend: as in `kernels.api.attend`.
        each_row: every row's own score, not the best row's; "triton" launches one kernel a row.

    Returns:
        [S, N] float32, the maximum over the G * T rows; -inf where no row is left. With `each_row` [S, G * T, N], -inf
        where a row takes no part.

    Raises:
        ValueError: types, devices or shapes that don't match, a count outside 0 to N (on a device only in debug mode).
    """
    _check_pages("query_bound", q, count, lowest=lowest, highest=highest)
    return _page_scores(q, highest, lowest, count, backend, each_row)


def mean_key_score(q: Tensor, mean_k: Tensor, count: Tensor | None = None, backend: str | None = None) -> Tensor:
    """The best score of a stream's query rows on each page's mean key (unscaled).

    Args:
        q: [S, G, T, D] fp32, bf16 or fp16.
        mean_k: [S, N, D] fp32, bf16 or fp16.
        count: as in `query_bound`.
        backend: as in `kernels.api.attend`.

    Returns:
        [S, N] float32, as `query_bound`: NaN rows take no part, -inf where none is left and beyond count.

    Raises:
        ValueError: as `query_bound`.
    """
    _check_pages("mean_key_score", q, count, mean_k=mean_k)
    return _page_scores(q, mean_k, None, count, backend)


def _page_scores(
    q: Tensor,
    highest: Tensor,
    lowest: Tensor | None,
    count: Tensor | None,
    backend: str | None,
    each_row: bool = False,
) -> Tensor:
    """The best row's q . highest, of q's positive channels alone where there is a `lowest` for the negative ones."""
    name = choose_backend(backend, q.device.type)
    if name == "cpu" and q.device.type == "cpu":
        from kernels.cpu.store import page_scores

        return page_scores(q, highest, lowest, count, each_row)
    if name == "triton":
        from kernels.gpu.score import page_scores as launch

        _check_range("count", count, highest.shape[1])
        if each_row:
            rows = q.flatten(1, 2).unsqueeze(2).split(1, 1)
            return torch.stack([launch(row, highest, lowest, count) for row in rows], 1)
        return launch(q, highest, lowest, count)
    dtype = torch.float64 if name == "reference" else torch.float32
    rows, keys = q.to(dtype).flatten(1, 2), highest.to(dtype)
    if lowest is not None:
        rows = torch.cat([rows.clamp(min=0), rows.clamp(max=0)], 2)
        keys = torch.cat([keys, lowest.to(dtype)], 2)
    scores = rows @ keys.transpose(1, 2)
    if each_row:
        counts = None if count is None else count.repeat_interleave(rows.shape[1])
        return _best_row(scores.flatten(0, 1).unsqueeze(1), counts).unflatten(0, rows.shape[:2])
    return _best_row(scores, count)


def _best_row(score: Tensor, count: Tensor | None) -> Tensor:
    """[S, R, N] -> [S, N] float32 by the rules of `query_bound`."""
    _check_range("count", count, score.shape[2])
    best = torch.where(score.isnan(), -math.inf, score).amax(1).float()
    if count is None:
        return best
    return torch.where(_inside(best, count), best, -math.inf)


def _inside(score: Tensor, count: Tensor) -> Tensor:
    return torch.arange(score.shape[1], device=score.device) < count[:, None]


def update_mass(ema: Tensor, mass: Tensor, decay: float) -> None:
    """Moves the average of the mass pages draw, in place: ema = decay * ema + (1 - decay) * mass.

    Args:
        ema: [S, N] float32. A page's first mass should be stored, not averaged, so that it does not start near 0.
        mass: [S, N] float32, of the step (`Partial.mass`). NaN stays NaN from then on.
        decay: weight of the past, 0 to below 1.

    Raises:
        ValueError: types, devices or shapes that don't match, decay out of range.
    """
    if ema.dim() != 2 or ema.dtype != torch.float32:
        raise ValueError(f"update_mass ema {ema.dtype} {tuple(ema.shape)}: must be torch.float32 [S, N]")
    if mass.shape != ema.shape or mass.dtype != torch.float32 or mass.device != ema.device:
        raise ValueError(
            f"update_mass mass {mass.dtype} {tuple(mass.shape)} on {mass.device}: must be torch.float32 "
            f"{tuple(ema.shape)} on {ema.device} like ema"
        )
    if not 0.0 <= decay < 1.0:
        raise ValueError(f"update_mass decay={decay}: must be 0 to below 1")
    ema.lerp_(mass, 1.0 - decay)


def top_pages(score: Tensor, count: Tensor, k: Tensor, width: int, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """The k best pages of each stream, k and the number of pages ragged; no sort of all pages.

    Ties go to the lower column; NaN ranks lowest, below -inf; -0 equals 0.

    Args:
        score: [S, N] float32; columns beyond count are not read.
        count: [S] int32, pages each stream has, 0 to N.
        k: [S] int32, pages wanted, 0 to width; more than count gives count.
        width: columns of the result.
        backend: as in `kernels.api.attend`.

    Returns:
        columns: [S, width] int32, ascending, -1 beyond `number`.
        number: [S] int32, min(k, count).

    Raises:
        ValueError: types, devices or shapes that don't match; count or k out of range (on a device only in debug
            mode, since looking waits for it; there k is cut to width).
    """
    _check_top(score, count, k, width)
    name = choose_backend(backend, score.device.type)
    if name == "cpu" and score.device.type == "cpu":
        from kernels.cpu.store import top_pages as native

        return native(score, count, k, width)
    _check_range("count", count, score.shape[1])
    _check_range("k", k, width)
    if name == "reference":
        return _top_pages_reference(score, count, k, width)
    if name == "triton":
        from kernels.gpu.score import top_pages as launch

        return launch(score, count, k, width)
    return _top_pages_torch(score, count, k, width)


def _top_pages_torch(score: Tensor, count: Tensor, k: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """By torch.topk of (score, column) packed into one integer, so that no two are equal."""
    streams, total = score.shape
    number = torch.minimum(k.clamp(max=width), count)
    bits = (score + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ordered = torch.where(score.isnan(), torch.iinfo(torch.int32).min, ordered)
    column = torch.arange(total, device=score.device)
    packed = ordered * 2**31 + (2**31 - 1 - column)
    packed = torch.where(column < count[:, None], packed, torch.iinfo(torch.int64).min)
    best = packed.topk(min(width, total), dim=1).indices
    best = torch.where(torch.arange(best.shape[1], device=score.device) < number[:, None], best, total)
    best = best.sort(dim=1).values
    columns = torch.full((streams, width), -1, dtype=torch.int32, device=score.device)
    columns[:, : best.shape[1]] = torch.where(best < total, best, -1).int()
    return columns, number


def _top_pages_reference(score: Tensor, count: Tensor, k: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The definition, in plain Python."""
    rows, numbers = [], []
    for values, n, wanted in zip(score.tolist(), count.tolist(), k.tolist(), strict=True):
        numbers_first = [(1, 0.0) if math.isnan(x) else (0, -x) for x in values[:n]]
        chosen = sorted(sorted(range(n), key=numbers_first.__getitem__)[:wanted])  # sorting keeps ties in order
        rows.append(chosen + [-1] * (width - len(chosen)))
        numbers.append(len(chosen))
    make = {"dtype": torch.int32, "device": score.device}
    return torch.tensor(rows, **make).view(len(rows), width), torch.tensor(numbers, **make)


def narrow(table: PageTable, columns: Tensor, number: Tensor, backend: str | None = None) -> PageTable:
    """The table of the chosen entries only.

    Args:
        table: [S, N] entries a stream; column n is what score n was of.
        columns: [S, W] int32, each 0 to N - 1, -1 beyond number (`top_pages`).
        number: [S] int32, 0 to W.
        backend: as in `kernels.api.attend`.

    Returns:
        A table [S, W] of new tensors; count is `number`, entries beyond hold entry 0 and are never read.

    Raises:
        ValueError: types, devices or shapes that don't match; on the host also a column outside the table.
    """
    streams, total = table.pool.shape
    if columns.dtype != torch.int32 or columns.dim() != 2 or columns.shape[0] != streams:
        raise ValueError(f"narrow columns {columns.dtype} {tuple(columns.shape)}: must be torch.int32 [{streams}, W]")
    if number.dtype != torch.int32 or number.shape != (streams,):
        raise ValueError(f"narrow number {number.dtype} {tuple(number.shape)}: must be torch.int32 [{streams}]")
    device = table.pool.device
    _same_device("narrow", device, columns=columns, number=number)
    if choose_backend(backend, device.type) == "cpu" and device.type == "cpu":
        from kernels.cpu.store import narrow as native

        return native(table, columns, number)
    _check_range("number", number, columns.shape[1])
    if not total:
        pool, slot, page = (x.new_zeros(columns.shape) for x in (table.pool, table.slot, table.page))
        return PageTable(pool, slot, page, number)
    if device.type == "cpu" or DEBUG:
        inside = torch.where(_inside(columns, number), columns, 0)
        if bool(((inside < 0) | (inside >= total)).any()):
            raise ValueError(f"narrow columns {int(inside.min())} to {int(inside.max())}: must be 0 to {total - 1}")
    index = torch.where(_inside(columns, number), columns, 0).long()
    pool, slot, page = (x.gather(1, index) for x in (table.pool, table.slot, table.page))
    return PageTable(pool, slot, page, number)


def _check_pages(what: str, q: Tensor, count: Tensor | None, **arrays: Tensor) -> None:
    """Refuses queries and per-page vectors that no backend could score."""
    if q.dim() != 4 or q.dtype not in QUERY_DTYPES or not q.shape[1] * q.shape[2]:
        raise ValueError(f"{what} q {q.dtype} {tuple(q.shape)}: must be fp32, bf16 or fp16 [S, G, T, D], G and T > 0")
    first = next(iter(arrays.values()))
    for name, array in arrays.items():
        if array.dim() != 3 or array.shape[::2] != q.shape[::3] or array.shape != first.shape:
            raise ValueError(
                f"{what} {name} {tuple(array.shape)}: must be [S, N, D] with S={q.shape[0]}, D={q.shape[3]} like q"
                f"{'' if array is first else f', and {tuple(first.shape)} like {next(iter(arrays))}'}"
            )
        if array.dtype not in QUERY_DTYPES or array.dtype != first.dtype:
            allowed = ", ".join(map(str, QUERY_DTYPES))
            raise ValueError(f"{what} {name} {array.dtype}: must be one of {allowed}, the same for all")
    _same_device(what, q.device, **arrays)
    if count is None:
        return
    if count.dtype != torch.int32 or count.shape != q.shape[:1]:
        raise ValueError(f"{what} count {count.dtype} {tuple(count.shape)}: must be torch.int32 [{q.shape[0]}]")
    _same_device(what, q.device, count=count)


def _check_top(score: Tensor, count: Tensor, k: Tensor, width: int) -> None:
    """Refuses types and shapes that can't be."""
    if score.dim() != 2 or score.dtype != torch.float32:
        raise ValueError(f"top_pages score {score.dtype} {tuple(score.shape)}: must be torch.float32 [S, N]")
    for name, value in (("count", count), ("k", k)):
        if value.dtype != torch.int32 or value.shape != score.shape[:1]:
            raise ValueError(f"top_pages {name} {value.dtype} {tuple(value.shape)}: must be torch.int32 [{len(score)}]")
    _same_device("top_pages", score.device, count=count, k=k)
    if width < 0:
        raise ValueError(f"top_pages width={width}: must be 0 or more")


def _check_range(name: str, value: Tensor | None, most: int) -> None:
    """Refuses numbers outside 0 to most; looking would make a device wait."""
    if value is not None and value.numel() and (value.device.type == "cpu" or DEBUG):
        low, high = (int(x) for x in value.aminmax())
        if low < 0 or high > most:
            raise ValueError(f"{name} {low} to {high}: must be 0 to {most}")


def _same_device(what: str, device: torch.device, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{what} {name} on {tensor.device}: must be on {device}")
