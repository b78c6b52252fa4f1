"""What attention over chosen pages leaves out, at sample queries of a text under the full cache.

    context = capture(decoder, tokens, sample_blocks(len(tokens)))
    for layer in ...:
        left_out(context, layer, [Choice("query_bound", 0.1)], Pages())  # kept, skipped, mean of what is skipped

Pages are chosen as a policy would that plans before every step: by Quest's bound (arXiv 2406.10774) with the query of
the step before, by the moving average of attention mass up to the step before, or by the step's own mass ("next_mass",
which only an oracle knows). Sinks and the recent window are always kept and don't count as chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.prefill import chunk_attention
from kernels.scoring import query_bound
from testbed.models.base import Decoder, Geometry

LOG2_E = math.log2(math.e)
PREDICTORS = ("next_mass", "query_bound", "attention_ema")
DECAY = 0.9  # of the moving average, as conf/signal/attention_ema.yaml has it
WARM_QUERIES, SAMPLE_QUERIES = 32, 16  # of a block: for the moving average to begin with, and to be measured


class SkippingError(ValueError):
    """A model or a text for which this can't be measured."""


@dataclass(frozen=True)
class Pages:
    """Page size and what is always read exactly, in pages; the page being written counts as recent."""

    page_tokens: int = 16
    sink_pages: int = 1
    recent_pages: int = 4


@dataclass(frozen=True)
class Choice:
    """Which pages are read exactly: the share `keep` of all pages that `predictor` ranks first."""

    predictor: str
    keep: float

    def __post_init__(self) -> None:
        """Refuses what can't choose."""
        if self.predictor not in PREDICTORS:
            raise SkippingError(f"predictor={self.predictor!r}: must be one of {', '.join(PREDICTORS)}")
        if not 0.0 <= self.keep <= 1.0:
            raise SkippingError(f"keep={self.keep!r}: must be from 0 to 1")


@dataclass(frozen=True)
class Context:
    """A text under the full cache.

    Attributes:
        keys, values: [L, Hk, T, D] bfloat16.
        queries: [L, Hk, G, M, D] float16 at `positions` [M], times scale and log2 e.
        positions: [M], whole blocks of WARM_QUERIES + SAMPLE_QUERIES consecutive ones.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    positions: Tensor


@dataclass(frozen=True)
class LeftOut:
    """R sample queries of S streams: what is kept, what is skipped, and the mean of what is skipped.

    Attributes:
        kept_out, skipped_out: [S, R, D].
        kept_lse, skipped_lse: [S, R], base 2.
        mean_lse: [S, R], the mean key's logit plus log2 of the tokens skipped.
        mean_value: [S, R, D].
        query: [S, R, D], times scale and log2 e.
    """

    kept_out: Tensor
    kept_lse: Tensor
    skipped_out: Tensor
    skipped_lse: Tensor
    mean_lse: Tensor
    mean_value: Tensor
    query: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> LeftOut:
        """Each tensor changed by a function."""
        return LeftOut(**{name: change(x) for name, x in vars(self).items()})

    @staticmethod
    def joined(parts: Sequence[LeftOut], dim: int = 1) -> LeftOut:
        """Rows (dim 1) or streams (dim 0) of several, one after the other."""
        return LeftOut(**{name: torch.cat([vars(part)[name] for part in parts], dim) for name in vars(parts[0])})

    def mixed(self, out: Tensor, lse: Tensor) -> Tensor:
        """[S, R, D]: attention over what is kept and a state of output [S, R, D] and lse [S, R]."""
        share = torch.sigmoid((lse - self.kept_lse) / LOG2_E)[..., None]
        return self.kept_out + share * (out - self.kept_out)

    @property
    def truth(self) -> Tensor:
        """[S, R, D]: attention over everything."""
        return self.mixed(self.skipped_out, self.skipped_lse)

    def error(self, out: Tensor | None, lse: Tensor | None) -> Tensor:
        """[S, R]: |mixed - truth| / |truth|; None = nothing stands for what is skipped."""
        got = self.kept_out if out is None or lse is None else self.mixed(out, lse)
        truth = self.truth
        return (got - truth).norm(dim=2) / truth.norm(dim=2).clamp(min=torch.finfo(truth.dtype).tiny)


def check_geometry(geometry: Geometry) -> None:
    """Raises SkippingError for a model whose attention has windows or slopes."""
    if any(geometry.window_tokens) or geometry.slopes is not None:
        raise SkippingError("this model's attention has windows or position slopes; what it skips is not measured")


def sample_blocks(length_tokens: int, blocks: int) -> Tensor:
    """Positions [M] of the blocks of queries: the last ends with the text, the others at even distances before.

    Raises:
        SkippingError: the text is too short.
    """
    block = WARM_QUERIES + SAMPLE_QUERIES
    apart = length_tokens // (2 * blocks)
    if apart < block:
        raise SkippingError(
            f"{length_tokens} tokens: too few for {blocks} blocks of {block} queries in their second half"
        )
    ends = [length_tokens - apart * back for back in range(blocks - 1, -1, -1)]
    return torch.cat([torch.arange(end - block, end) for end in ends])


@torch.no_grad()
def capture(decoder: Decoder, tokens: Sequence[int], positions: Tensor, chunk_tokens: int = 512) -> Context:
    """Runs a text of T tokens once and keeps all keys and values and the queries at some positions."""
    geometry = decoder.geometry
    check_geometry(geometry)
    shape = (geometry.layers, geometry.kv_heads, len(tokens), geometry.head_dim)
    keys, values = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape, dtype=torch.bfloat16)
    queries = torch.empty(geometry.layers, geometry.query_heads, len(positions), geometry.head_dim, dtype=torch.float16)
    ids = torch.tensor(list(tokens))
    start = 0

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        end = start + k.shape[2]
        keys[layer][:, start:end], values[layer][:, start:end] = k[0].cpu(), v[0].cpu()
        here = (positions >= start) & (positions < end)
        factor = geometry.scale[layer] * LOG2_E
        queries[layer][:, here] = (q[0][:, (positions[here] - start).to(q.device)].float() * factor).cpu().half()
        past_k, past_v = (x[layer][:, :end].to(q.device, q.dtype) for x in (keys, values))
        out, _ = chunk_attention(q[0], past_k, past_v, scale=geometry.scale[layer])
        return out.unsqueeze(0).to(q.dtype)

    for start in range(0, len(ids), chunk_tokens):
        part = ids[start : start + chunk_tokens].unsqueeze(0).to(decoder.device)
        at = torch.arange(start, start + part.shape[1], device=decoder.device).unsqueeze(0)
        decoder.forward(part, at, attend, logits="none")
    return Context(keys, values, queries.unflatten(1, (geometry.kv_heads, geometry.group)), positions)


@torch.no_grad()
def left_out(context: Context, layer: int, choices: Sequence[Choice], pages: Pages) -> list[list[LeftOut]]:
    """Of one layer, by choice and block of queries; rows are queries times G heads."""
    block = WARM_QUERIES + SAMPLE_QUERIES
    out: list[list[LeftOut]] = [[] for _ in choices]
    for begin in range(0, len(context.positions), block):
        views = _Block.of(context, layer, slice(begin, begin + block), pages)
        for at, choice in enumerate(choices):
            out[at].append(views.rows(choice))
    return out


@dataclass(frozen=True)
class _Block:
    """A block of queries of one layer before its pages.

    q [Hk, G, m, D], keys and values [Hk, N * P, D], logits [Hk, G, m, N * P] with -inf where a query sees nothing,
    mass [Hk, m, N], candidates [16, N] of the last 16 queries.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    logits: Tensor
    mass: Tensor
    candidates: Tensor
    last_pages: Tensor
    pages: Pages

    @staticmethod
    def of(context: Context, layer: int, rows: slice, pages: Pages) -> _Block:
        positions, p = context.positions[rows], pages.page_tokens
        count = -(-(int(positions[-1]) + 1) // p)
        k, v = (x[layer][:, : count * p].float() for x in (context.keys, context.values))
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, count * p - x.shape[1])) for x in (k, v))
        q = context.queries[layer][:, :, rows].float()
        logits = torch.einsum("hgmd,htd->hgmt", q, k)
        logits = logits.masked_fill(torch.arange(count * p) > positions[:, None], -math.inf)
        mass = torch.softmax(logits / LOG2_E, -1).unflatten(-1, (count, p)).sum(-1).mean(1)
        last = positions[WARM_QUERIES:] // p
        page = torch.arange(count)
        candidates = (page >= pages.sink_pages) & (page <= (last - pages.recent_pages)[:, None])
        return _Block(q, k, v, logits, mass, candidates, last, pages)

    def score(self, predictor: str) -> Tensor:
        """[Hk, 16, N] of the sampled queries."""
        if predictor == "next_mass":
            return self.mass[:, WARM_QUERIES:]
        if predictor == "query_bound":
            paged = self.k.unflatten(1, (-1, self.pages.page_tokens))
            before = self.q[:, :, WARM_QUERIES - 1 : -1]
            bounds = [query_bound(each, paged.amin(2), paged.amax(2)) for each in before.unsqueeze(3).unbind(2)]
            return torch.stack(bounds, 1)
        average, out = self.mass[:, : WARM_QUERIES // 2].mean(1), []
        for at in range(WARM_QUERIES // 2, self.mass.shape[1]):
            if at >= WARM_QUERIES:
                out.append(average)
            average = DECAY * average + (1.0 - DECAY) * self.mass[:, at]
        return torch.stack(out, 1)

    def rows(self, choice: Choice) -> LeftOut:
        """Rows of the sampled queries."""
        p = self.pages.page_tokens
        score = self.score(choice.predictor).masked_fill(~self.candidates, -math.inf)
        rank = score.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        quota = ((self.last_pages + 1) * choice.keep).ceil()
        skipped = self.candidates & (rank >= quota[:, None])
        share = skipped.float()
        tokens = share.sum(-1, keepdim=True) * p
        mean_k, mean_v = (share @ x.unflatten(1, (-1, p)).sum(2) / tokens.clamp(min=1) for x in (self.k, self.v))
        of_tokens = skipped.repeat_interleave(p, -1)[:, None]
        q, logits = self.q[:, :, WARM_QUERIES:], self.logits[:, :, WARM_QUERIES:]
        skipped_out, skipped_lse = attended(logits.masked_fill(~of_tokens, -math.inf), self.v)
        kept_out, kept_lse = attended(logits.masked_fill(of_tokens, -math.inf), self.v)
        mean_lse = torch.einsum("hgmd,hmd->hgm", q, mean_k) + tokens[..., 0].log2()[:, None]
        mean_v = mean_v[:, None].expand_as(q)
        parts = (kept_out, kept_lse, skipped_out, skipped_lse, mean_lse, mean_v, q)
        return LeftOut(*(x.flatten(1, 2) for x in parts))


def attended(logits: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Out [Hk, G, m, D] and base-2 lse [Hk, G, m] of logits [Hk, G, m, T], -inf = not seen; 0 and -inf for nothing."""
    top = logits.amax(-1, keepdim=True)
    weight = torch.exp2(logits - torch.where(top.isinf(), 0.0, top))
    total = weight.sum(-1, keepdim=True)
    out = torch.einsum("hgmt,htd->hgmd", weight, v) / total.clamp(min=torch.finfo(total.dtype).tiny)
    return out, (top + total.log2())[..., 0]
