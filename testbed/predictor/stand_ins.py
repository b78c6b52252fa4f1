"""What stands for pages that are not read: nothing, a background state, prototypes; measured in one pass a text.

    full = log_probs(decoder, context, tokens)
    some = log_probs(decoder, context, tokens, Choice("query_bound", 0.05), StandIn("prototypes", 4), full.masses)

The tokens after a prefilled context run in one pass, each with pages of its own choice before every layer, so that the
errors of earlier layers and tokens are in what the later ones see, as in decoding. It is an experiment's code, for the
comparison of many variants on two cores: nothing is paged or moved. Sinks, the last pages of the context and the new
tokens are always read. Command: `python -m testbed.predictor background what=stand_ins`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.pages import page_format
from kernels.prototypes import make_prototypes
from kernels.scoring import query_bound
from testbed.cache.offsets import BackgroundOffsets
from testbed.engine.divergence import kl_nats
from testbed.models.base import Decoder
from testbed.predictor.skipping import DECAY, LOG2_E, PREDICTORS, Choice, Context, Pages, SkippingError, check_geometry

KINDS = ("nothing", "background", "prototypes")


@dataclass(frozen=True)
class StandIn:
    """What represents pages that are not chosen.

    Attributes:
        kind: nothing, background (one state a stream, of the mean of them) or prototypes (of each page).
        groups: prototypes a page.
        offsets: of a background state; None = the plain mean.
    """

    kind: str = "nothing"
    groups: int = 1
    offsets: BackgroundOffsets | None = None

    def __post_init__(self) -> None:
        """Refuses unknown kinds."""
        if self.kind not in KINDS:
            raise SkippingError(f"stand-in {self.kind!r}: must be one of {', '.join(KINDS)}")

    def share_of_full(self, keep: float, pages: int, page_tokens: int, head_dim: int) -> float:
        """Bytes of chosen pages and what stands for the others, as a share of all pages in bf16."""
        page = page_format("bf16", page_tokens, head_dim).page_bytes
        chosen = math.ceil(keep * pages)
        one = page_format("proto", page_tokens, head_dim, groups=self.groups).page_bytes
        stands = {"nothing": 0, "background": one, "prototypes": (pages - chosen) * one}[self.kind]
        return (chosen * page + stands) / (pages * page)


@dataclass(frozen=True)
class Told:
    """Log-probabilities [M, V] after each token; of the full cache also each layer's page masses [Hk, M, N]."""

    log_probs: Tensor
    masses: list[Tensor] = field(default_factory=list)


class Prepared:
    """A context of T tokens (whole pages) with what its pages are ranked and represented by, made once.

    `context` holds the queries of its last block, from which the moving averages begin.
    """

    def __init__(self, context: Context, scale: Sequence[float], pages: Pages) -> None:
        self.keys, self.values = context.keys.float(), context.values.float()
        self.pages, self.scale = pages, scale
        layers, heads, tokens, dim = self.keys.shape
        p = pages.page_tokens
        if tokens % p:
            raise SkippingError(f"context of {tokens} tokens: must be whole pages of {p}")
        self.count = tokens // p
        paged = self.keys.unflatten(2, (self.count, p))
        self.low, self.high = paged.amin(3), paged.amax(3)
        self.key_sums, self.value_sums = paged.sum(3), self.values.unflatten(2, (self.count, p)).sum(3)
        self.last_query = context.queries[:, :, :, -1:].float()
        self.average = torch.empty(layers, heads, self.count)
        for layer in range(layers):
            logits = torch.einsum("hgmd,htd->hgmt", context.queries[layer].float(), self.keys[layer])
            logits = logits.masked_fill(torch.arange(tokens) > context.positions[:, None], -math.inf)
            mass = torch.softmax(logits / LOG2_E, -1).unflatten(-1, (self.count, p)).sum(-1)
            self.average[layer] = mass.mean((1, 2))
        page = torch.arange(self.count)
        self.candidates = (page >= pages.sink_pages) & (page < self.count - pages.recent_pages)
        self._prototypes: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def prototypes(self, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """Mean keys and values [L, Hk, N, C, D], log2 counts [L, Hk, N, C]."""
        if groups not in self._prototypes:
            k, v = (x.reshape(-1, self.pages.page_tokens, x.shape[-1]) for x in (self.keys, self.values))
            made = make_prototypes(k, v, groups)
            shape = (*self.keys.shape[:2], self.count, groups)
            k, v, n = (x.view(*shape, *x.shape[2:]) for x in made)
            self._prototypes[groups] = k, v, n
        return self._prototypes[groups]


@torch.inference_mode()
def log_probs(
    decoder: Decoder,
    context: Prepared,
    tokens: Sequence[int],
    choice: Choice | None = None,
    stand_in: StandIn | None = None,
    masses: Sequence[Tensor] = (),
) -> Told:
    """Runs M tokens after a context; without a choice under the full cache.

    Args:
        decoder: the model.
        context: prefilled.
        tokens: that follow it.
        choice: which pages each token reads; "next_mass" needs `masses`.
        stand_in: for the others; nothing by default.
        masses: of the full cache, as `Told.masses` has them.
    """
    check_geometry(decoder.geometry)
    first = context.keys.shape[2]
    attend = _Attend(context, len(tokens), choice, stand_in or StandIn(), masses)
    positions = torch.arange(first, first + len(tokens)).unsqueeze(0)
    logits = decoder.forward(torch.tensor(list(tokens)).unsqueeze(0), positions, attend, logits="all")
    assert logits is not None
    return Told(logits[0].float().log_softmax(-1), attend.masses)


class _Attend:
    """The `Attend` of `log_probs`; letters as there, and m tokens of a part."""

    def __init__(
        self, context: Prepared, tokens: int, choice: Choice | None, stand_in: StandIn, truth: Sequence[Tensor]
    ) -> None:
        self.context, self.choice, self.stand_in, self.truth = context, choice, stand_in, truth
        self.causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        self.masses: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one layer."""
        context = self.context
        heads = k.shape[1]
        rows = q[0].unflatten(0, (heads, -1)).float() * (context.scale[layer] * LOG2_E)
        new_k, new_v = k[0].float(), v[0].float()
        past = torch.einsum("hgmd,htd->hgmt", rows, context.keys[layer]).unflatten(-1, (context.count, -1))
        new = torch.einsum("hgmd,htd->hgmt", rows, new_k).masked_fill(~self.causal, -math.inf)
        before = torch.cat((context.last_query[layer], rows[:, :, :-1]), 2)
        average, out = context.average[layer], []
        # The average of a step depends on the attention of the step before: one token at a time.
        one_by_one = self.choice is not None and self.choice.predictor == "attention_ema"
        for at in torch.arange(rows.shape[2]).split(1 if one_by_one else rows.shape[2]):
            seen = rows[:, :, at], before[:, :, at], past[:, :, at], new[:, :, at]
            part, mass = self._part(layer, *seen, new_v, average, at)
            average = DECAY * average + (1.0 - DECAY) * mass[:, -1]
            out.append(part)
            if self.choice is None:
                self.masses.append(mass)
        return torch.cat(out, 2).flatten(0, 1).unsqueeze(0).to(q.dtype)

    def _part(
        self,
        layer: int,
        q: Tensor,
        before: Tensor,
        past: Tensor,
        new: Tensor,
        new_v: Tensor,
        average: Tensor,
        at: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Out [Hk, G, m, D] and the mass [Hk, m, N] that each page gets, by its tokens or its prototypes."""
        context = self.context
        read = self._read(layer, before, average, at)
        exact = past.masked_fill(~read[:, None, :, :, None], -math.inf)
        parts, values = [exact.flatten(-2), new], [context.values[layer], new_v]
        if self.choice is not None and self.stand_in.kind == "prototypes":
            k, v, log2_count = (x[layer] for x in context.prototypes(self.stand_in.groups))
            logits = torch.einsum("hgmd,hncd->hgmnc", q, k) + log2_count[:, None, None]
            parts.append(logits.masked_fill(read[:, None, :, :, None], -math.inf).flatten(-2))
            values.append(v.flatten(1, 2))
        state = None
        if self.choice is not None and self.stand_in.kind == "background":
            logit, state = self._background(layer, q, ~read)
            parts.append(logit[..., None])
        weight = torch.softmax(torch.cat(parts, -1) / LOG2_E, -1).split([x.shape[-1] for x in parts], -1)
        out = sum(torch.einsum("hgmt,htd->hgmd", w, x) for w, x in zip(weight, values, strict=False))
        assert isinstance(out, Tensor)
        if state is not None:
            out = out + weight[-1] * state[:, None]
        mass = weight[0].unflatten(-1, (context.count, -1)).sum(-1)
        if len(values) == 3:
            mass = mass + weight[2].unflatten(-1, (context.count, -1)).sum(-1)
        return out, mass.mean(1)

    def _read(self, layer: int, before: Tensor, average: Tensor, at: Tensor) -> Tensor:
        """[Hk, m, N] bool: pages that are read exactly."""
        context = self.context
        if self.choice is None:
            return torch.ones(len(before), len(at), context.count, dtype=torch.bool)
        if self.choice.predictor == "next_mass":
            score = self.truth[layer][:, at]
        elif self.choice.predictor == "query_bound":
            low, high = context.low[layer], context.high[layer]
            score = torch.stack([query_bound(q, low, high) for q in before.split(1, 2)], 1)
        else:
            score = average[:, None]
        best = (
            score.masked_fill(~context.candidates, -math.inf).topk(math.ceil(self.choice.keep * context.count)).indices
        )
        return torch.zeros(score.shape, dtype=torch.bool).scatter_(-1, best, True) | ~context.candidates

    def _background(self, layer: int, q: Tensor, skipped: Tensor) -> tuple[Tensor, Tensor]:
        """Logit [Hk, G, m] and value [Hk, m, D] of the state that stands for the pages skipped [Hk, m, N]."""
        context, share = self.context, skipped.float()
        tokens = share.sum(-1, keepdim=True) * context.pages.page_tokens
        key, value = (share @ x[layer] / tokens.clamp(min=1) for x in (context.key_sums, context.value_sums))
        log2_count = tokens[..., 0].log2()
        if self.stand_in.offsets is not None:
            heads = len(key)
            mine = self.stand_in.offsets.of(torch.arange(layer * heads, (layer + 1) * heads))
            value, log2_count = mine.moved(value, log2_count)
        return torch.einsum("hgmd,hmd->hgm", q, key) + log2_count[:, None], value


def divergence(told: Told, full: Told) -> Tensor:
    """[M] KL(full || told) in nats."""
    return kl_nats(full.log_probs, told.log_probs)


def variants(offsets: BackgroundOffsets | None) -> list[tuple[Choice, StandIn]]:
    """What is compared: stand-ins at several shares, and background states with the bytes of prototypes."""
    background = [StandIn("background"), *([StandIn("background", 1, offsets)] if offsets is not None else [])]
    every = [StandIn(), *background, *(StandIn("prototypes", groups) for groups in (1, 2, 4))]
    out = [(Choice(predictor, keep), each) for predictor in PREDICTORS for keep in (0.05, 0.1, 0.25) for each in every]
    # 5 and 10 % of the pages and prototypes for the rest cost as much as 12 and 17 % (C = 1) or 31 % (C = 4).
    equal = [Choice(predictor, keep) for predictor in PREDICTORS for keep in (0.125, 0.17, 0.31)]
    return out + [(choice, each) for choice in equal for each in background]


def compared(
    decoder: Decoder, context: Prepared, tokens: Sequence[int], offsets: BackgroundOffsets | None
) -> list[dict[str, object]]:
    """One row a variant: what it is, its bytes as a share of the full cache's, mean KL and top-1 agreement."""
    full = log_probs(decoder, context, tokens)
    head_dim = decoder.geometry.head_dim
    rows: list[dict[str, object]] = []
    for choice, stand_in in variants(offsets):
        told = log_probs(decoder, context, tokens, choice, stand_in, full.masses)
        agrees = told.log_probs.argmax(-1) == full.log_probs.argmax(-1)
        rows.append(
            {
                "predictor": choice.predictor,
                "keep": choice.keep,
                "stand_in": "learned background" if stand_in.offsets is not None else stand_in.kind,
                "groups": stand_in.groups,
                "bytes": stand_in.share_of_full(choice.keep, context.count, context.pages.page_tokens, head_dim),
                "kl": float(divergence(told, full).mean()),
                "top1": float(agrees.float().mean()),
            }
        )
    return rows


def stand_in_table(rows: Sequence[dict[str, object]]) -> str:
    """Mean KL over documents by choice and stand-in, for people."""
    kl: dict[tuple[object, ...], list[float]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("predictor", "keep", "stand_in", "groups"))
        kl.setdefault(key, []).append(float(str(row["kl"])))
    lines = ["predictor       pages   stand-in            C   KL, nats"]
    for (predictor, keep, kind, groups), values in kl.items():
        lines.append(f"{predictor:16}{keep!s:8}{kind:20}{groups!s:4}{sum(values) / len(values):.4f}")
    return "\n".join(lines)
