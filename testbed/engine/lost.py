"""Pages that the archive lost: computed anew from their tokens, dropped with a warning, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from testbed.cache.flights import LostPages
from testbed.cache.pool import CacheError
from testbed.engine.prefill import DenseKV

if TYPE_CHECKING:
    from testbed.engine.session import Session

Answer = TypeVar("Answer")
MOST_RECOVERIES = 3  # of one run; the pages of the first are on the device at the second


def mended(session: Session, act: Callable[[], Answer]) -> Answer:
    """What `act` answers, run again once pages it found lost are recovered.

    Raises:
        CacheError: cache.on_lost=error, or pages are lost again and again.
    """
    for _ in range(MOST_RECOVERIES):
        try:
            return act()
        except LostPages as lost:
            recover(session, lost)
    return act()


def recover(session: Session, lost: LostPages) -> None:
    """Does what cache.on_lost says; the step can then be run again.

    Recomputed pages of the context have the bits they had, since the context is prefilled in the same chunks; those of
    later turns are computed with full attention, whatever the policy attended when they were written.

    Raises:
        CacheError: cache.on_lost=error.
    """
    config, cache, at = session.config.cache, session.cache, lost.at
    session.forget_facts()
    if config.on_lost == "error":
        ways = "cache.on_lost=recompute computes them anew, cache.on_lost=drop goes on without"
        raise CacheError(f"{len(at)} pages lost ({lost}); {ways}")
    if config.on_lost == "drop":
        cache.drop_pages(at)
        return
    end = min((int(at[:, 1].max()) + 1) * config.page_tokens, cache.length_tokens)
    cache.restore_pages(at, *pages_of(session.prefill_again(end), at, config.page_tokens))


def pages_of(dense: DenseKV, at: Tensor, page_tokens: int) -> tuple[Tensor, Tensor]:
    """K and V [M, P, D] of pages at [M, 2] (stream, page) of a prefilled context; the last page is padded with 0."""
    kv_heads = dense.keys[0].shape[0]
    sides = []
    for side in (dense.keys, dense.values):
        out = side[0].new_zeros(len(at), page_tokens, side[0].shape[2])
        for row, (stream, page) in enumerate(at.tolist()):
            layer, head = divmod(stream, kv_heads)
            part = side[layer][head, page * page_tokens : (page + 1) * page_tokens]
            out[row, : len(part)] = part
        sides.append(out)
    k, v = sides
    return k, v
