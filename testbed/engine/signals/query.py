"""`query_bound`: most that a page's keys could score with the newest queries (Quest, arXiv 2406.10774, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.scoring import query_bound
from testbed.engine.signals.base import Observed, PrefillChunk, SignalContext, SignalError, Source, StepView


class QueryBound(Source):
    """Bounds against the queries of the last steps.

    A plan precedes the step it is for, so that pages can be fetched before they are asked for; the queries are
    therefore those of the step before (Quest itself uses the running step's).
    """

    wants_queries = True
    wants_bounds = True

    def __init__(self, context: SignalContext, recent_queries: int = 8) -> None:
        if recent_queries < 1:
            raise SignalError(f"signal.query_bound.recent_queries={recent_queries}: must be at least 1")
        self.recent_queries = recent_queries
        self._queries: list[Tensor] = []

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """Keeps the context's last queries."""
        if chunk.start + chunk.q.shape[1] == chunk.total:
            kv_heads = chunk.geometry.kv_heads
            last = chunk.q[:, -self.recent_queries :].unflatten(0, (kv_heads, -1))
            self._queries = [*self._queries[: chunk.layer], last.clone()]

    def watch_step(self, view: StepView) -> None:
        """Keeps the newest queries of each layer."""
        assert view.queries is not None
        keep = self.recent_queries if view.queries[0].shape[2] > 1 else 1
        self._queries = [q[:, :, -keep:].clone() for q in view.queries]

    def value(self, observed: Observed) -> Tensor:
        """[L, Hk, N] float32; 0 for pages without keys yet."""
        if not self._queries:
            return torch.zeros(observed.shape)
        low, high = observed.key_bounds()
        q = torch.cat(list(self._queries))
        bound = query_bound(q, low, high)
        bound = bound.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).view(observed.shape[0], observed.shape[1], -1)
        return torch.nn.functional.pad(bound, (0, observed.shape[2] - bound.shape[2]))
