"""What each page contributes to the logit of the next token, by integrated gradients (arXiv 1703.01365).

Every (layer, KV head, page) has a gate g on its attention weights. With e the exponentials of the scores,

    out = sum_j g_j e_j v_j / sum_j g_j e_j

so that gates of 1 are the model, and gates of 0 are what a policy does that skips the page: the softmax runs over what
is left. Hot pages, which no policy skips, keep g = 1. The path goes from all candidates skipped (g = 0) to all attended
(g = 1) in a straight line; a page's contribution is the integral of the logit's derivative by its gate. The sum over
all pages is the difference of the two logits (completeness), however the line is integrated if finely enough: here
Gauss-Legendre, all points as rows of one batch. Only the forward of the one token is differentiated; keys and values
of the past are constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from testbed.heads.differentiable import Differentiable
from testbed.predictor.drive import Moment


class ContributionError(ValueError):
    """Contributions that can't be computed."""


@dataclass(frozen=True)
class Contributions:
    """Of one step.

    Attributes:
        value: [L, Hk, N] float32, logit units; 0 for hot pages.
        logit: of the target with every page attended.
        without: of the target with hot pages only.
    """

    value: Tensor
    logit: float
    without: float

    @property
    def gap(self) -> float:
        """How far the sum is from the difference it should be, as a share of the sum of absolute contributions."""
        scale = max(float(self.value.abs().sum()), abs(self.logit - self.without))
        return abs(float(self.value.sum()) - (self.logit - self.without)) / scale if scale > 0.0 else 0.0


@dataclass(frozen=True)
class Step:
    """The step that is looked at.

    Attributes:
        token: that runs.
        target: the token whose logit counts.
        keys, values: [L, Hk, T, D] of the tokens before, any dtype.
        hot: [N] bool, pages of T + 1 tokens whose gates stay 1; at least that of the running token.
        page_tokens: P.
    """

    token: int
    target: int
    keys: Tensor
    values: Tensor
    hot: Tensor
    page_tokens: int

    def __post_init__(self) -> None:
        """The running token's page can't be skipped."""
        pages = -(-(self.keys.shape[2] + 1) // self.page_tokens)
        if self.hot.shape != (pages,) or not bool(self.hot[-1]):
            raise ContributionError(f"hot: must be [{pages}] and hold the last page, got {self.hot.tolist()}")


def step_of(moment: Moment) -> Step:
    """The step that is about to be run under the full cache, judged by the token that follows in the document.

    Raises:
        ContributionError: keys and values were not remembered.
    """
    memory, tokens, at = moment.memory, moment.document.tokens, moment.at
    if memory is None:
        raise ContributionError("contributions need the full cache's keys and values: drive(..., remember=True)")
    keys, values = (side[:, :, :at] for side in (memory.keys, memory.values))
    return Step(tokens[at], tokens[at + 1], keys, values, moment.signals.hot, moment.signals.page_tokens)


@torch.inference_mode(False)
def contributions(model: Differentiable, step: Step, points: int = 8) -> Contributions:
    """Integrated gradients of one step.

    Args:
        model: with gradients.
        step: what is run.
        points: of the integration along the line.

    Raises:
        ContributionError: no point.
    """
    if points < 1:
        raise ContributionError(f"points={points}: must be at least 1")
    at, weights = np.polynomial.legendre.leggauss(points)
    line = torch.tensor([*((at + 1) / 2), 1.0, 0.0], dtype=torch.float32)
    shares = torch.tensor(weights / 2, dtype=torch.float32)
    shape = (model.geometry.layers, model.geometry.kv_heads, len(step.hot))
    start = torch.where(step.hot, 1.0, line.view(-1, 1, 1, 1)).expand(-1, *shape)
    with torch.enable_grad():
        gates = start.clone().requires_grad_()
        logit = gated_logits(model, step, gates)
        # The two ends are for completeness and have no share in the integral.
        (slope,) = torch.autograd.grad(logit[:points].sum(), gates)
    value = (slope[:points] * shares.view(-1, 1, 1, 1)).sum(0).masked_fill(step.hot, 0.0)
    return Contributions(value, float(logit[-2].detach()), float(logit[-1].detach()))


def gated_logits(model: Differentiable, step: Step, gates: Tensor) -> Tensor:
    """The target's logit [M] under gates [M, L, Hk, N]; differentiable by the gates."""
    rows, past = len(gates), step.keys.shape[2]
    tokens = torch.full((rows, 1), step.token, device=model.device)
    positions = torch.full((rows, 1), past, device=model.device)
    attention = _Gated(model, step, gates)
    return model.logits(tokens, positions, attention, torch.zeros(1, dtype=torch.long))[:, 0, step.target]


class _Gated:
    """Attention of one new token over its past under gates; an `Attend`."""

    def __init__(self, model: Differentiable, step: Step, gates: Tensor) -> None:
        self.geometry, self.gates, self.page_tokens = model.geometry, gates, step.page_tokens
        self.keys, self.values = (side.clone() for side in (step.keys, step.values))  # no inference tensors

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Output of q [M, Hq, 1, D], k and v [M, Hk, 1, D]: [M, Hq, 1, D]."""
        geometry, rows = self.geometry, len(q)
        grouped = q[:, :, 0].unflatten(1, (geometry.kv_heads, geometry.group))
        past = torch.einsum("mhgd,htd->mhgt", grouped, self.keys[layer].to(q.dtype))
        own = (grouped * k).sum(-1, keepdim=True)
        score = torch.cat((past, own), -1) * geometry.scale[layer] + self._bias(layer, past.shape[-1])
        pages = self.gates.shape[-1]
        padded = torch.nn.functional.pad(score, (0, pages * self.page_tokens - score.shape[-1]), value=-torch.inf)
        weight = (padded - padded.amax(-1, keepdim=True).detach()).exp().unflatten(-1, (pages, self.page_tokens))
        weight = (weight * self.gates[:, layer, :, None, :, None]).flatten(-2)[..., : score.shape[-1]]
        share = weight / weight.sum(-1, keepdim=True)
        out = torch.einsum("mhgt,htd->mhgd", share[..., :-1], self.values[layer].to(q.dtype))
        return (out + share[..., -1:] * v).reshape(rows, -1, 1, q.shape[-1])

    def _bias(self, layer: int, past: int) -> Tensor:
        """[Hk or 1, G or 1, T + 1] added to scores: ALiBi, and -inf outside of the layer's window."""
        geometry = self.geometry
        away = torch.arange(past, -1, -1)
        window = geometry.window_tokens[layer]
        bias = torch.zeros(past + 1).masked_fill(away >= window if window else away < 0, -torch.inf)
        if geometry.slopes is None:
            return bias.view(1, 1, -1)
        slopes: Sequence[int] = (geometry.kv_heads, geometry.group, 1)
        return bias - geometry.slopes.view(*slopes) * away
