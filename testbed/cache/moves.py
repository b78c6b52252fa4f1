"""Pages that change tier or format, in groups that one copy or one conversion can take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from kernels.pages import PageFormat
from policies.base import Format, Mode, Tier
from testbed.decisions import Move


def groups(at: Tensor, tier: Tensor, fmt: Tensor) -> Iterator[tuple[Tier, Format, Tensor]]:
    """Splits page addresses at [M, 2] (stream, page) by what tier and fmt [S, N] say of them."""
    if not len(at):
        return
    key = tier[at[:, 0], at[:, 1]].long() * len(Format) + fmt[at[:, 0], at[:, 1]]
    for value in key.unique().tolist():
        yield Tier(value // len(Format)), Format(value % len(Format)), at[key == value]


def count(
    source: Mapping[str, Tensor], target: Mapping[str, Tensor], formats: Mapping[Format, PageFormat]
) -> list[Move]:
    """What changes place or format between two states of [S, N] tensors, summed over streams."""
    key = (source["tier"].long() * 8 + target["tier"]) * 8 + target["format"]
    key = key * 2 + ((target["mode"] == Mode.EXACT) & (target["tier"] == Tier.L1))
    changed = (source["tier"] != target["tier"]) | (source["format"] != target["format"])
    values, counts = key[changed].unique(return_counts=True)
    out = []
    for value, pages in zip(values.tolist(), counts.tolist(), strict=True):
        rest, demand = divmod(value, 2)
        rest, code = divmod(rest, 8)
        old, new = (Tier(index) for index in divmod(rest, 8))
        each = 0 if new == Tier.DROPPED else formats[Format(code)].page_bytes
        fetched = bool(demand) and old > Tier.L1
        out.append(Move(old.name, new.name, each * pages, pages, Format(code).name.lower(), fetched))
    return out
