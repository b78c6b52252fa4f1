"""The learned core-token predictor: for each group of layers a perceptron of 64 units over the features of a page.

    score = relu(W x + b_head + V_out V_in c) . w + s_head . x        over x, the features of one page of one stream

W and w belong to a group of layers; b_head and s_head to one KV head, so that one perceptron serves heads of all kinds;
c, the hidden state and the embedding of the coming token, enters through a product of two thin matrices, once a step
and never once a page. Scores are estimates of log mass up to a constant of the stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

UNITS, RANK = 64, 16


@dataclass(frozen=True)
class NetworkShape:
    """What the sizes of all tensors follow from.

    Attributes:
        layers, kv_heads: L, Hk.
        groups: of layers, as equal as they can be.
        features: F.
        context: C', the size of a group's context.
        units: of the hidden layer.
        rank: of the product that the context goes through.
    """

    layers: int
    kv_heads: int
    groups: int
    features: int
    context: int
    units: int = UNITS
    rank: int = RANK

    def __post_init__(self) -> None:
        """Refuses what no network could be built from."""
        for key, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"predictor.{key}={value!r}: must be a whole number of at least 1")
        if self.groups > self.layers:
            raise ValueError(f"predictor.groups={self.groups}: must be at most layers={self.layers}")

    def group_of_layers(self) -> Tensor:
        """[L] int64, ascending."""
        return layer_groups(self.layers, self.groups)

    def flops(self, pages: int) -> int:
        """Of scoring all streams of one step; a multiplication and an addition are two."""
        page = 2 * self.features * self.units + 2 * self.units + 2 * self.features
        step = self.groups * 2 * self.rank * (self.context + self.units)
        return self.layers * self.kv_heads * pages * page + step


def layer_groups(layers: int, groups: int) -> Tensor:
    """[L] int64: the group of each layer, ascending."""
    return torch.arange(layers) * groups // layers


class Network(nn.Module):
    """The perceptrons of all groups; parameters in float32.

    Attributes:
        mean, spread: [F] of the features, by which they are standardised.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, shape: NetworkShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self._groups = shape.group_of_layers()
        chance = torch.Generator().manual_seed(seed)

        def drawn(*size: int, width: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(*size, generator=chance) * width)

        heads, groups = shape.layers * shape.kv_heads, shape.groups
        self.register_buffer("mean", torch.zeros(shape.features))
        self.register_buffer("spread", torch.ones(shape.features))
        self.first = drawn(groups, shape.features, shape.units, width=shape.features**-0.5)
        self.head_bias = nn.Parameter(torch.zeros(heads, shape.units))
        self.context_in = drawn(groups, shape.context, shape.rank, width=shape.context**-0.5)
        self.context_out = nn.Parameter(torch.zeros(groups, shape.rank, shape.units))
        self.second = drawn(groups, shape.units, width=0.1)
        self.head_skip = nn.Parameter(torch.zeros(heads, shape.features))

    def addend(self, context: Tensor, group: int) -> Tensor:
        """What the context of a step adds to the hidden layer: [..., C'] -> [..., units]."""
        return context @ self.context_in[group] @ self.context_out[group]

    def rows(self, features: Tensor, context: Tensor, head: Tensor, group: int) -> Tensor:
        """Scores [R, N] of rows of one group: features [R, N, F], context [R, C'], head [R] = layer * Hk + KV head."""
        x = (features - self.mean) / self.spread
        bias = self.head_bias[head] + self.addend(context, group)
        hidden = torch.relu(x @ self.first[group] + bias.unsqueeze(1))
        return hidden @ self.second[group] + (x @ self.head_skip[head].unsqueeze(-1)).squeeze(-1)

    @torch.no_grad()
    def score(self, features: Tensor, context: Tensor) -> Tensor:
        """Scores of every page of one sequence.

        Args:
            features: [L, Hk, N, F] float32.
            context: [groups, C'] float32.

        Returns:
            [L, Hk, N] float32, higher matters more.
        """
        layers, kv_heads, pages, width = features.shape
        out = torch.empty(layers * kv_heads, pages)
        flat = features.reshape(layers * kv_heads, pages, width)
        for group in range(self.shape.groups):
            inside = (self._groups == group).nonzero().squeeze(1)
            rows = slice(int(inside[0]) * kv_heads, (int(inside[-1]) + 1) * kv_heads)
            # The standardisation goes into the weights, and the bias of a row into one product over all its pages.
            first = self.first[group] / self.spread.unsqueeze(1)
            skip = self.head_skip[rows] / self.spread
            bias = self.head_bias[rows] + self.addend(context[group], group) - self.mean @ first
            hidden = torch.baddbmm(bias.unsqueeze(1), flat[rows], first.expand(len(bias), -1, -1)).relu_()
            straight = torch.bmm(flat[rows], skip.unsqueeze(-1)).squeeze(-1) - (skip @ self.mean).unsqueeze(1)
            out[rows] = (hidden.view(-1, self.shape.units) @ self.second[group]).view(-1, pages) + straight
        return out.view(layers, kv_heads, pages)
