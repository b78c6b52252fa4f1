"""A full cache beside a session: the same tokens, everything exact, nothing ever leaves it.

It serves whoever must know the truth: the oracle (the attention that a coming run would pay under the full cache) and
the quality guard (the next-token distribution). It costs a second cache and its own runs of the model, which are
timed apart from the session's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from testbed.cache.layout import CacheConfig
from testbed.engine.signals import SignalContext

if TYPE_CHECKING:
    from testbed.engine.session import Session

NEWEST = "last_mass"  # the signal that holds what the last run attended to


def unlimited(config: CacheConfig) -> CacheConfig:
    """The same cache without limits: nothing leaves the device."""
    return replace(config, l1_bytes=None, l2_bytes=None, l3_bytes=None, l3_path=None)


def full_session(of: Session, context: SignalContext, watch: frozenset[str] = frozenset()) -> Session:
    """A session of the full cache for the same model, which follows some signals; not started yet."""
    from testbed.compose import full_policy  # Hydra, only where it is needed
    from testbed.engine.session import Session

    config = replace(of.config, cache=unlimited(of.config.cache), budget_fraction=None, signals=None, guard=None)
    return Session(of.decoder, full_policy(), config, context, watch=watch)


class Truth:
    """A full cache that runs every token before the session does.

    Args:
        session: of the full cache, following `NEWEST`.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    def mass(self, ids: Tensor) -> Tensor:
        """Runs the coming tokens [T]: the share each page gets of their attention, [L, Hk, N] float32."""
        if len(ids) == 1:
            self.session.step(ids)
        else:
            self.session.extend(ids.tolist())
        return self.session.signal(NEWEST)

    def fork(self) -> Truth:
        """An independent copy."""
        return Truth(self.session.fork(own_pools=True))
