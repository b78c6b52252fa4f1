"""A session of the full cache: everything exact, nothing ever leaves it. What others are compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from testbed.engine.signals import SignalContext

if TYPE_CHECKING:
    from testbed.engine.session import Session


def full_session(of: Session, context: SignalContext, watch: frozenset[str] = frozenset()) -> Session:
    """A session of the full cache for the same model, which follows some signals; not started yet."""
    from testbed.compose import full_policy  # Hydra, only where it is needed
    from testbed.engine.session import Session

    config = replace(of.config, cache=of.config.cache.unlimited(), budget_fraction=None, signals=None, guard=None)
    return Session(of.decoder, full_policy(), config, context, watch=watch)
