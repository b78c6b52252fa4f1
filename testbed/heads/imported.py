"""A head map from a file, ours or another's, as scores and classes that can be compared and used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from policies.plan import Head

Kind = Literal["redknot", "duoattention", "headkv", "testbed"]
DUO_THRESHOLD = 0.5  # a gate from here up is a full-attention head
GATES = (-0.01, 1.01)  # they lie from 0 to 1; the published ones go a thousandth below


class FormatError(ValueError):
    """A head map in a file that can't be read, converted or used for a model."""


@dataclass(frozen=True)
class Layout:
    """How a JSON text was written, so that it can be written so again."""

    indent: int | None = 2
    ascii: bool = True
    end: str = ""


@dataclass(frozen=True)
class ImportedMap:
    """A head map from a file, ours or another's.

    Attributes:
        kind: of the file.
        name: for tables and errors.
        score: [L, Hk] float64, finite; the higher, the more of the context a head needs. [L, Hq] while `per_query`.
        document: what the file says, for writing it again.
        layout: how it is written.
        classes: [L, Hk] int8 of `Head`, where the file states classes.
        window_tokens: [L, Hk] int64, the window of each head, 0 = the whole context; where the file states windows.
        sink_tokens: [L, Hk] int64, the first tokens that each head keeps; where the file states them.
        per_query: the columns are query heads; `per_kv_head` makes KV heads of them.
        query_heads: Hq, or None where the file doesn't say.
        caveat: what must be said wherever the map is shown, or "".
    """

    kind: Kind
    name: str
    score: Tensor
    document: Any
    layout: Layout = Layout()
    classes: Tensor | None = None
    window_tokens: Tensor | None = None
    sink_tokens: Tensor | None = None
    per_query: bool = False
    query_heads: int | None = None
    caveat: str = ""

    def __post_init__(self) -> None:
        """Checks shapes and numbers."""
        if self.score.dim() != 2 or not self.score.numel():
            raise FormatError(f"{self.name}: scores of shape {tuple(self.score.shape)}, must be [layers, heads]")
        if not bool(torch.isfinite(self.score).all()):
            layer, head = (int(x) for x in (~torch.isfinite(self.score)).nonzero()[0])
            raise FormatError(f"{self.name}: layer {layer}, head {head} is {float(self.score[layer, head])}, no number")

    @property
    def shape(self) -> tuple[int, int]:
        """(L, Hk), or (L, Hq) while the columns are query heads."""
        return int(self.score.shape[0]), int(self.score.shape[1])

    def per_kv_head(self, kv_heads: int) -> ImportedMap:
        """The map with a column per KV head, the maximum of each query group.

        Raises:
            FormatError: the query heads don't make whole groups, or the map has other KV heads.
        """
        layers, columns = self.shape
        if not self.per_query:
            if columns != kv_heads:
                raise FormatError(f"{self.name}: {columns} KV heads a layer, must be {kv_heads}")
            return self
        if kv_heads < 1 or columns % kv_heads:
            raise FormatError(f"{self.name}: {columns} query heads don't make {kv_heads} equal groups of KV heads")
        return replace(self, score=self.score.view(layers, kv_heads, -1).amax(-1), per_query=False)

    def check_shape(self, layers: int, kv_heads: int, model: str) -> None:
        """Raises FormatError unless the map is for so many layers and KV heads."""
        if self.shape != (layers, kv_heads):
            raise FormatError(
                f"{self.name} is a map of {self.shape[0]} layers x {self.shape[1]} KV heads, but {model} has "
                f"{layers} x {kv_heads}"
            )

    def windows(self) -> Tensor:
        """[L, Hk] int64, the window of each head in tokens, 0 = the whole context.

        Raises:
            FormatError: the file states none.
        """
        if self.window_tokens is None:
            raise FormatError(f"{self.name} states no windows; only RedKnot files do (kv_head_max_distance)")
        return self.window_tokens

    def head_classes(self, global_share: float | None = None) -> Tensor:
        """[L, Hk] int8 of `Head`: the file's own classes, or LOCAL and GLOBAL cut out of its scores.

        Args:
            global_share: share of the heads, highest score first (of equals the first), that become GLOBAL; None takes
                the file's own rule: its classes, or a gate of at least .5 for DuoAttention (244 of Mistral-7B-v0.2's
                256 heads; its authors run half of the heads with the whole context, which is 0.5 here).

        Raises:
            FormatError: the file has classes and a share is given, or neither; no share and gates beyond 0 to 1.
        """
        if self.per_query:
            raise FormatError(f"{self.name} scores query heads; say how many KV heads there are (kv_heads=...)")
        if self.classes is not None:
            if global_share is not None:
                raise FormatError(f"{self.name} states classes, so global_share={global_share} can't be followed")
            return self.classes
        if global_share is None:
            if self.kind != "duoattention":
                raise FormatError(f"{self.name} has scores but no classes: global_share must say how many are global")
            low, high = float(self.score.min()), float(self.score.max())
            if low < GATES[0] or high > GATES[1]:
                raise FormatError(
                    f"{self.name}: numbers from {low:g} to {high:g} are no gates, which lie from 0 to 1: global_share "
                    "must say how many heads are global"
                )
            return torch.where(self.score >= DUO_THRESHOLD, int(Head.GLOBAL), int(Head.LOCAL)).to(torch.int8)
        number = isinstance(global_share, int | float) and not isinstance(global_share, bool)
        if not number or not 0 <= global_share <= 1:
            raise FormatError(f"global_share={global_share!r}: must be a number from 0 to 1")
        order = self.score.flatten().argsort(descending=True, stable=True)
        classes = torch.full((order.numel(),), int(Head.LOCAL), dtype=torch.int8)
        classes[order[: round(global_share * order.numel())]] = int(Head.GLOBAL)
        return classes.view(self.shape)
