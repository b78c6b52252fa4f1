"""What may run beside a session: a full cache a step ahead, for the oracle, and the quality guard's reference.

Each costs a second cache and its own runs of the model, which are timed apart from the session's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from testbed.cache.pool import CacheError
from testbed.cache.saved import SavedError
from testbed.engine.full import full_session
from testbed.engine.guard import Guard, GuardConfig
from testbed.engine.prefill import DenseKV
from testbed.engine.signals import SignalContext

if TYPE_CHECKING:
    from testbed.engine.session import Session

NEWEST = "last_mass"  # the signal that holds what the last run attended to


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


class Beside:
    """The companions of one session; most have none.

    Args:
        truth: runs each token before the session does.
        guard: compares now and then.
    """

    def __init__(self, truth: Truth | None, guard: Guard | None) -> None:
        self._truth, self._guard = truth, guard

    @staticmethod
    def of(session: Session, context: SignalContext, shares_pools: bool) -> Beside:
        """What the session's signals and its configuration ask for.

        Raises:
            CacheError: a guard for a session that shares pools.
            GuardError: a reference that is no better than the session.
        """
        wants_truth = any(source.wants_truth for source in session.sources.values())
        config = session.config.guard
        guarded = config is not None and config.active
        if guarded and shares_pools:
            raise CacheError("a guarded session may go on with another cache, so it can't share pools: leave guard out")
        truth = Truth(full_session(session, context, frozenset({NEWEST}))) if wants_truth else None
        return Beside(truth, Guard(session, config, context) if guarded and config is not None else None)

    def start(self, session: Session, dense: DenseKV, roles: Sequence[int] | None) -> None:
        """Companions take the same context."""
        if self._truth is not None:
            self._truth.session.start(dense)
        if self._guard is not None:
            self._guard.start(session, dense, roles)

    def foresee(self, session: Session, ids: Tensor) -> float:
        """Before the plan for tokens [T]: the truth of that run, for signals that want it; seconds it took."""
        if self._truth is None:
            return 0.0
        started = time.perf_counter()
        mass = self._truth.mass(ids)
        for source in session.sources.values():
            if source.wants_truth:
                source.watch_truth(mass)
        return time.perf_counter() - started

    def lock(self, begin: int, end: int) -> None:
        """What the user locks is locked for a reference too, as soon as it has seen it."""
        if self._guard is not None:
            for source in self._guard.reference.sources.values():
                source.watch_lock(begin, end)

    def note(self, ids: Tensor, role: int, logits: Tensor | None) -> None:
        """A turn [T], as far as the session ran it, and its logits [T, V] if all were asked for."""
        if self._guard is not None and len(ids):
            self._guard.note(ids, role, logits, turn=True)

    def guarded(self, session: Session, ids: Tensor, role: int, logits: Tensor) -> Tensor:
        """After a decode step: its logits [V], or better ones where a probe found them too bad."""
        guard = self._guard
        if guard is None:
            return logits
        guard.note(ids, role, logits.unsqueeze(0), turn=False)
        if not guard.due:
            return logits
        better = guard.probe(session)
        session.story.probes, session.story.guard_bytes = guard.probes.fork(), guard.bytes
        if session.cache is guard.reference.cache:
            self._guard = None
        return logits if better is None else better

    def fork(self) -> Beside:
        """Independent copies."""
        return Beside(
            None if self._truth is None else self._truth.fork(), None if self._guard is None else self._guard.fork()
        )

    def check_saved(self, path: str | Path, guard: GuardConfig | None) -> None:
        """Raises SavedError if there are companions, which no file holds, or a guard gave the session their cache."""
        if self._truth is not None:
            raise SavedError(f"{path}: a session that follows the full cache (signal next_mass) can't be saved")
        check_unguarded(path, guard)

    def close(self) -> None:
        """Frees their caches."""
        if self._truth is not None:
            self._truth.session.close()
        if self._guard is not None:
            self._guard.reference.close()


def check_unguarded(path: str | Path, guard: GuardConfig | None) -> None:
    """Raises SavedError if there is a guard, whose reference no file holds."""
    if guard is not None and guard.active:
        raise SavedError(f"{path}: a guarded session can't be saved or resumed; it needs its reference")
