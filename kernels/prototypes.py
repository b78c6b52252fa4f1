"""Prototypes: a few groups of similar tokens stand for a page, each with mean key, mean value and log2 count.

A group of n tokens whose keys are alike weighs n times one of them, so its logit is q . mean key + log n; with as
many groups as tokens nothing is lost. Everything follows from the pages' Gram matrices [P, P] of centred keys: no
covariance [D, D] and no distance to a mean is ever built. Deterministic; all pages at once.

Relative error of the output and time a page (one thread), SmolLM2-135M, 90 streams of 2,048 tokens, all pages but the
first and the last 16 as prototypes (left out altogether: .268), P = 16, D = 64:

| C | bisect       | kmeans       | greedy (1.5 x variance) |
|---|--------------|--------------|-------------------------|
| 1 | .260   4 us  | the same     | the same                |
| 2 | .237  37 us  | .192  60 us  | .177  35 us             |
| 4 | .178  72 us  | .146  72 us  | .129  41 us             |
| 8 | .099 100 us  | .089  83 us  | .085  35 us             |

Two, four pages a span at the same C a page are worse: .210, .199 (kmeans, C = 1 a page) against .260, but .251, .229
with greedy. A second-order (Gaussian) correction of the count is worse than none: .42 to .73 at C = 1.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from kernels.guards import check_floats, check_int, check_like
from kernels.pages import PageFormat, views

BLOCK_TOKENS = 16384  # tokens grouped at once: small enough to stay in a core's cache
KMEANS_ROUNDS = 6
POWER_ROUNDS = 8
GREEDY_SPREAD = 1.5


def make_prototypes(
    k: Tensor, v: Tensor, groups: int, valid: Tensor | None = None, method: str = "greedy"
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits each page's tokens into groups of similar keys and takes their means.

    Methods:
        bisect: principal-direction divisive partitioning (Boley 1998, Data Mining and Knowledge Discovery 2:4): the
            group with the largest scatter is cut by the sign of its first principal component, C - 1 times.
        kmeans: Lloyd's algorithm, 6 rounds, from a farthest-first start (Gonzalez 1985, Theor. Comput. Sci. 38).
        greedy: the leader algorithm (Hartigan 1975, Clustering Algorithms, ch. 3) in token order with a rule of ours:
            a token joins the nearest group when its squared distance to the group's mean is at most 1.5 times
            the page's variance, opens a new one otherwise, and joins the nearest anyway once there are C. While groups
            are left for all remaining tokens each opens its own.

    Args:
        k: [M, P, D] keys of M pages, or of spans of several pages (`join_pages`). A NaN or infinity that counts may
            spoil any prototype of its page (which ones depends on the backend), and of no other page.
        v: [M, P, D] values.
        groups: C, 1 or more.
        valid: [M, P] bool, tokens to count; all by default. The others may hold anything.
        method: "bisect", "kmeans" or "greedy", the best on real keys.

    Returns:
        mean keys [M, C, D], mean values [M, C, D], log2 counts [M, C] (-inf and zero means for an empty
        group), float32.

    Raises:
        ValueError: shapes, types or devices that don't match, groups < 1, an unknown method.
    """
    if k.dim() != 3 or k.shape != v.shape or (valid is not None and valid.shape != k.shape[:2]):
        seen = None if valid is None else tuple(valid.shape)
        raise ValueError(
            f"prototypes of k {tuple(k.shape)}, v {tuple(v.shape)}, valid {seen}: must be [M, P, D], [M, P]"
        )
    check_floats("prototypes of", k=k, v=v)
    check_like("prototypes of", "k", k=k, v=v, **({} if valid is None else {"valid": valid}))
    if valid is not None and valid.dtype != torch.bool:
        raise ValueError(f"prototypes of valid {valid.dtype}: must be torch.bool")
    check_int("prototypes groups", groups, 1)
    if method not in METHODS:
        raise ValueError(f"prototypes method={method!r}: must be one of {', '.join(METHODS)}")
    block_pages = max(1, BLOCK_TOKENS // max(k.shape[1], 1))
    parts = []
    for start in range(0, max(len(k), 1), block_pages):
        some = slice(start, start + block_pages)
        parts.append(_make_prototypes(k[some], v[some], groups, None if valid is None else valid[some], method))
    mean_k, mean_v, log2_count = (torch.cat(x) for x in zip(*parts, strict=True))
    return mean_k, mean_v, log2_count


def join_pages(x: Tensor, span_pages: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Consecutive pages as spans, to be grouped together by `make_prototypes`.

    Args:
        x: [S, N, P, D] keys or values of N pages in order.
        span_pages: pages a span.
        valid: [S, N, P] bool, tokens to count; all by default.

    Returns:
        [S * spans, span_pages * P, D] with spans = ceil(N / span_pages), and which of its tokens count
        [S * spans, span_pages * P] bool; the last span's missing pages don't.
    """
    if x.dim() != 4 or span_pages < 1:
        raise ValueError(f"join_pages of {tuple(x.shape)}, span_pages={span_pages}: must be [S, N, P, D] and 1 or more")
    streams, pages, tokens, _ = x.shape
    if valid is None:
        valid = torch.ones(x.shape[:3], dtype=torch.bool, device=x.device)
    missing = -pages % span_pages
    joined = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing))
    counted = torch.nn.functional.pad(valid, (0, 0, 0, missing))
    rows = streams * ((pages + missing) // span_pages)
    return joined.reshape(rows, span_pages * tokens, -1), counted.reshape(rows, span_pages * tokens)


def encode_prototypes(fmt: PageFormat, k: Tensor, v: Tensor, log2_count: Tensor) -> Tensor:
    """Stores prototypes, or with C = 1 the background state of a stream.

    Args:
        fmt: a "proto" format with C groups.
        k: [M, C, D] mean keys.
        v: [M, C, D] mean values.
        log2_count: [M, C] log2 of the tokens each stands for; -inf for none.

    Returns:
        [M, page_bytes] uint8.

    Raises:
        ValueError: another format; shapes, types or devices that don't match.
    """
    want = (len(k), fmt.groups, fmt.head_dim)
    if fmt.name != "proto" or k.shape != want or v.shape != want or log2_count.shape != want[:2]:
        raise ValueError(
            f"prototypes k {tuple(k.shape)}, v {tuple(v.shape)}, log2_count {tuple(log2_count.shape)} for format "
            f"{fmt.name}: must be proto and [M, {fmt.groups}, {fmt.head_dim}], [M, {fmt.groups}]"
        )
    check_floats("prototypes", k=k, v=v, log2_count=log2_count)
    check_like("prototypes", "k", k=k, v=v, log2_count=log2_count)
    blobs = torch.zeros(k.shape[0], fmt.page_bytes, dtype=torch.uint8, device=k.device)
    out = views(fmt, blobs)
    out["k"].copy_(k)
    out["v"].copy_(v)
    out["log2_count"].copy_(log2_count)
    return blobs


def _make_prototypes(
    k: Tensor, v: Tensor, groups: int, valid: Tensor | None, method: str
) -> tuple[Tensor, Tensor, Tensor]:
    """As `make_prototypes`, all pages at once."""
    keys, values = k.float(), v.float()
    if valid is None:
        valid = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    else:
        keys, values = (torch.where(valid[..., None], x, 0.0) for x in (keys, values))
    group = torch.where(valid, 0, -1)
    if groups > 1 and k.shape[1]:
        centred = keys - keys.sum(1, keepdim=True) / valid.sum(1).clamp(min=1)[:, None, None]
        centred = centred * valid[..., None]
        group = METHODS[method](centred @ centred.transpose(1, 2), group, groups)
    member = _members(group, groups)
    count = member.sum(2)
    share = member / count.clamp(min=1)[..., None]
    return share @ keys, share @ values, count.log2()


def _members(group: Tensor, groups: int) -> Tensor:
    """[M, C, P] float32, 1 where a token belongs to a group; group [M, P], -1 for none."""
    return (group[:, None] == torch.arange(groups, device=group.device)[:, None]).float()


def _bisect(gram: Tensor, group: Tensor, groups: int) -> Tensor:
    """The group of each token [M, P]: cut after cut."""
    for new in range(1, groups):
        group = _cut(gram, group, new)
    return group


def _cut(gram: Tensor, group: Tensor, new: int) -> Tensor:
    """Cuts the group with the largest scatter of each page in two.

    gram: [M, P, P]; group: [M, P] int64, -1 for no group; new: the number the new part gets.
    """
    member = _members(group, new)
    count = member.sum(2).clamp(min=1)
    squares = (member * gram.diagonal(dim1=1, dim2=2)[:, None]).sum(2)
    scatter = squares - ((member @ gram) * member).sum(2) / count
    chosen = scatter.argmax(1)
    mask = member[torch.arange(len(gram), device=gram.device), chosen]
    share = mask / mask.sum(1, keepdim=True).clamp(min=1)
    row = gram @ share[..., None]
    inner = gram - row - row.transpose(1, 2) + share[:, None] @ row
    inner = inner * mask[:, None] * mask[..., None]
    farthest = inner.diagonal(dim1=1, dim2=2).argmax(1)
    direction = inner[torch.arange(len(gram), device=gram.device), farthest][..., None]
    for _ in range(POWER_ROUNDS):
        direction = torch.nn.functional.normalize(inner @ direction, dim=1)
    return torch.where((direction[..., 0] > 0) & (mask > 0), new, group)


def _kmeans(gram: Tensor, group: Tensor, groups: int) -> Tensor:
    """The group of each token [M, P]; a group that loses all its tokens keeps its last mean."""
    valid = group >= 0
    square = gram.diagonal(dim1=1, dim2=2)
    away = torch.where(valid, square, -1.0)
    share = gram.new_zeros(len(gram), groups, gram.shape[1])
    for new in range(groups):
        leader = away.argmax(1, keepdim=True)
        share[:, new].scatter_(1, leader, 1.0)
        row = gram.gather(1, leader[..., None].expand(-1, -1, gram.shape[2]))[:, 0]
        distance = square + square.gather(1, leader) - 2 * row
        # A leader is 0 from itself: rounding must not let it lead twice while another token is left.
        distance.scatter_(1, leader, 0.0)
        away = torch.where(valid, torch.minimum(away if new else distance, distance), -1.0)
    for _ in range(KMEANS_ROUNDS):
        inner = share @ gram
        distance = (inner * share).sum(2)[..., None] - 2 * inner
        group = torch.where(valid, distance.argmin(1), -1)
        member = _members(group, groups)
        count = member.sum(2, keepdim=True)
        share = torch.where(count > 0, member / count.clamp(min=1), share)
    return group


def _greedy(gram: Tensor, group: Tensor, groups: int) -> Tensor:
    """The group of each token [M, P], one token after the other."""
    valid = group >= 0
    pages, tokens = group.shape
    rows = torch.arange(pages, device=gram.device)
    left = valid.sum(1)
    most = GREEDY_SPREAD * gram.diagonal(dim1=1, dim2=2).sum(1) / left.clamp(min=1)
    member = gram.new_zeros(pages, groups, tokens)
    count, square = gram.new_zeros(pages, groups), gram.new_zeros(pages, groups)
    opened = torch.zeros_like(left)
    group = torch.full_like(group, -1)
    for j in range(tokens):
        inner, own = (member @ gram[:, :, j, None])[..., 0], gram[:, j, j]
        size = count.clamp(min=1)
        distance = square / size.square() - 2 * inner / size + own[:, None]
        nearest, which = torch.where(count > 0, distance, torch.inf).min(1)
        opens = (opened < groups) & ((nearest > most) | (opened + left <= groups))
        which = torch.where(opens, opened, which)
        one = valid[:, j].float()
        square[rows, which] += one * (2 * inner[rows, which] + own)
        count[rows, which] += one
        member[rows, which, j] = one
        group[:, j] = torch.where(valid[:, j], which, -1)
        opened += (opens & valid[:, j]).long()
        left -= valid[:, j].long()
    return group


METHODS = MappingProxyType({"bisect": _bisect, "kmeans": _kmeans, "greedy": _greedy})
