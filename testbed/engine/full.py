"""A session of the full cache: everything exact, nothing ever leaves it. What others are compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from testbed.cache.layout import CacheConfig
from testbed.engine.signals import SignalContext

if TYPE_CHECKING:
    from testbed.engine.session import Session


def unlimited(config: CacheConfig) -> CacheConfig:
    """The same cache without limits: nothing leaves the device."""
    return replace(config, l1_bytes=None, l2_bytes=None, l3_bytes=None, l3_path=None)


def full_session(of: Session, context: SignalContext, watch: frozenset[str] = frozenset()) -> Session:
    """A session of the full cache for the same model, which follows some signals; not started yet."""
    from testbed.compose import full_policy  # Hydra, only where it is needed
    from testbed.engine.session import Session

    config = replace(of.config, cache=unlimited(of.config.cache), budget_fraction=None, signals=None, guard=None)
    return Session(of.decoder, full_policy(), config, context, watch=watch)
