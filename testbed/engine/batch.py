"""Several sessions that decode together: each plans for itself, all run through the model at once.

    pools = shared_pools(decoder, config)
    sessions = [Session(..., pools=pools), Session(..., pools=pools)]
    batch = Batch(sessions)
    logits = batch.step([17, 4])          # [B, V]

Every row is what the sequence would get alone, bit for bit in float32 on the native backend: no operation mixes rows,
and where a model's own operations do (`Decoder.batches`), its rows run one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from policies.base import Role
from testbed.cache.batch import CacheBatch
from testbed.cache.flights import LostPages
from testbed.cache.layout import CacheConfig
from testbed.cache.pool import CacheError
from testbed.cache.pools import Pools, Shape
from testbed.engine.lost import MOST_RECOVERIES, recover
from testbed.engine.prefill import check_length
from testbed.engine.signals import StepView
from testbed.models.base import Decoder, Logits

if TYPE_CHECKING:
    from testbed.engine.session import Session


def model_id(decoder: Decoder) -> str:
    """What page files and saved sessions know a model by."""
    return f"{decoder.name} {decoder.fingerprint}"


def shared_pools(decoder: Decoder, config: CacheConfig) -> Pools:
    """Pools for sessions that are to run in one batch."""
    geometry = decoder.geometry
    shape = Shape(geometry.layers, geometry.kv_heads, geometry.head_dim, model_id(decoder))
    return Pools(shape, config, decoder.device)


class Batch:
    """Started sessions that take their decode steps together. One session alone goes the same way.

    Args:
        sessions: of one decoder, over the same pools; they may differ in length, policy, budget and signals.

    Raises:
        CacheError: none, one that is there twice, another decoder, other pools.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._sessions = list(sessions)
        self._caches = self._checked()

    @property
    def sessions(self) -> tuple[Session, ...]:
        """In the order of rows."""
        return tuple(self._sessions)

    def join(self, session: Session) -> None:
        """Adds a row at the end, between steps."""
        self._sessions.append(session)
        try:
            self._caches = self._checked()
        except CacheError:
            self._sessions.pop()
            raise

    def leave(self, session: Session) -> None:
        """Takes a row out, between steps; the session may go on alone."""
        self._sessions.remove(session)
        if self._sessions:
            self._caches = self._checked()

    def _checked(self) -> CacheBatch:
        if not self._sessions:
            raise CacheError("a batch of no sessions: give at least one")
        if any(session.decoder is not self._sessions[0].decoder for session in self._sessions):
            raise CacheError("the sessions of a batch must run the same model")
        return CacheBatch([session.cache for session in self._sessions])

    @torch.inference_mode()
    def step(self, tokens: Sequence[int] | Tensor, roles: Sequence[int] | None = None) -> Tensor:
        """One decode step of every session: logits [B, V].

        Args:
            tokens: [B], one a session.
            roles: `Role` of each token, GENERATED if not said.

        Raises:
            CacheError: another number of tokens; pages lost with cache.on_lost=error.
            ContextError: a sequence is at the model's limit; no session has moved then.
        """
        sessions, started = self._sessions, time.perf_counter()
        device = sessions[0].decoder.device if sessions else torch.device("cpu")
        ids = torch.as_tensor(tokens, dtype=torch.long, device=device).view(-1)
        if len(ids) != len(sessions) or not sessions:
            raise CacheError(f"{len(ids)} tokens for a batch of {len(sessions)} sessions: one each, and at least one")
        for session in sessions:
            check_length(session.decoder, session.cache.length_tokens + 1)
        stalled = [session.stall_s for session in sessions]
        started += sum(session.look_ahead(token.view(1)) for session, token in zip(sessions, ids, strict=True))
        plans = [session.plan_step() for session in sessions]
        logits = run_together(sessions, ids.unsqueeze(1), "last", roles or [Role.GENERATED] * len(ids), self._caches)
        assert logits is not None
        if device.type == "cuda":
            torch.cuda.synchronize()
        total = time.perf_counter() - started
        for session, before, (due, moves) in zip(sessions, stalled, plans, strict=True):
            session.end_step(total, session.stall_s - before, due, moves)
        said = roles or [Role.GENERATED] * len(ids)
        rows = [session.guarded(ids[row].view(1), said[row], logits[row, -1]) for row, session in enumerate(sessions)]
        if any(session.cache is not cache for session, cache in zip(sessions, self._caches.caches, strict=True)):
            self._caches = self._checked()
        return torch.stack(rows)


def run_together(
    sessions: Sequence[Session],
    ids: Tensor,
    logits: Logits,
    roles: Sequence[int],
    caches: CacheBatch | None = None,
) -> Tensor | None:
    """Runs tokens ids [B, T] whose plans are applied; the sessions then have seen them. Logits [B, T or 1, V].

    Args:
        sessions: B of them.
        ids: next tokens of each.
        logits: as in `Decoder.forward`.
        roles: `Role` of each session's tokens.
        caches: the sessions' caches, if they were joined before.
    """
    decoder, tokens = sessions[0].decoder, ids.shape[1]
    if len(sessions) > 1 and not decoder.batches:
        rows = [
            run_together([session], ids[row : row + 1], logits, [roles[row]]) for row, session in enumerate(sessions)
        ]
        kept = [row for row in rows if row is not None]
        return torch.cat(kept) if kept else None
    caches = caches or CacheBatch([session.cache for session in sessions])
    first = torch.tensor([session.cache.length_tokens for session in sessions], device=ids.device)
    positions = first.unsqueeze(1) + torch.arange(tokens, device=ids.device)
    recoveries = 0
    while True:
        caches.begin(tokens)
        attention = _Attention(sessions, caches)
        try:
            watch = attention.look if attention.wants_hidden else None
            out = decoder.forward(ids, positions, attention, logits, watch)
            break
        except LostPages as lost:
            recoveries += 1
            if recoveries > MOST_RECOVERIES:
                raise
            _recover(sessions, caches, lost)
    caches.end(tokens)
    for row, (session, view) in enumerate(zip(sessions, attention.views(tokens), strict=True)):
        session.watch_run(ids[row], roles[row], view)
    return out


class _Attention:
    """What the decoder calls a layer, for all rows; collects what signals want to see."""

    def __init__(self, sessions: Sequence[Session], caches: CacheBatch) -> None:
        self.sessions, self.caches = sessions, caches
        geometry = sessions[0].decoder.geometry
        self.geometry = geometry
        self.slopes = None if geometry.slopes is None else geometry.slopes.view(geometry.kv_heads, -1)
        self.wants_mass = any(session.wants_mass for session in sessions)
        self.wants_queries = any(session.wants_queries for session in sessions)
        self.wants_hidden = any(session.wants_hidden for session in sessions)
        self.queries: list[Tensor] = []
        self.masses: list[Tensor] = []
        self.hidden: list[Tensor] = []

    def look(self, layer: int, hidden: Tensor) -> None:
        """The `Watch` of the decoder's contract."""
        self.hidden.append(hidden[:, -1].float())

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The `Attend` of the decoder's contract."""
        geometry = self.geometry
        self.caches.append(layer, k, v)
        grouped = q.unflatten(1, (geometry.kv_heads, geometry.group)).flatten(0, 1)
        part = self.caches.attend(
            layer, grouped, geometry.scale[layer], geometry.window_tokens[layer], self.slopes, self.wants_mass
        )
        if self.wants_queries:
            self.queries.append(grouped)
        if part.mass is not None:
            self.masses.append(part.mass)
        return part.out.view(q.shape).to(q.dtype)

    def views(self, tokens: int) -> list[StepView]:
        """What each session's signals are shown of the run."""
        heads = self.geometry.kv_heads
        masses = self.caches.masses(torch.cat(self.masses)) if self.masses else [None] * len(self.sessions)
        out = []
        for row, session in enumerate(self.sessions):
            mine = slice(row * heads, (row + 1) * heads)
            queries = [q[mine] for q in self.queries] if session.wants_queries else None
            mass = masses[row] if session.wants_mass else None
            hidden = torch.stack([each[row] for each in self.hidden]) if session.wants_hidden else None
            out.append(StepView(queries, mass, tokens, session.steps, hidden))
        return out


def _recover(sessions: Sequence[Session], caches: CacheBatch, lost: LostPages) -> None:
    """Mends every session of the batch that lost pages, in all layers at once."""
    for session, at in zip(sessions, caches.all_lost(lost), strict=True):
        if len(at):
            recover(session, LostPages(at, str(lost)))
