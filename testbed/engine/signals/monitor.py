"""Heads while they decode: running estimates of where their attention falls, against windows of the text so far.

`head_far_now`: share of the attention on pages at least `window_tokens` old. `head_edge_now`: share on the oldest
quarter of that window: all that can be seen of a head whose older pages are gone and which looks for them.
`head_drift`: a fast average of the far share less a slow one: what changes now. The first page, where sinks lie, counts
nowhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from testbed.engine.signals.attention import WindowMass
from testbed.engine.signals.base import Observed, PrefillChunk, SignalContext, SignalError, Source, StepView

SLOW = 10  # times as slow as the fast average
EDGE_SHARE = 0.25


class HeadMonitor(Source):
    """Running means over steps of one of the three, begun with the context's last queries.

    Args:
        context: gives the page size.
        watch: "far", "edge" or "drift".
        window_tokens: what is far.
        decay: of the (fast) average a step; the slow one moves a tenth as much.
    """

    wants_mass = True

    def __init__(self, context: SignalContext, watch: str, window_tokens: int = 512, decay: float = 0.9) -> None:
        if watch not in ("far", "edge", "drift"):
            raise SignalError(f"signal.watch={watch!r}: must be far, edge or drift")
        if isinstance(window_tokens, bool) or not isinstance(window_tokens, int) or window_tokens < 1:
            raise SignalError(f"signal.window_tokens={window_tokens!r}: must be a whole number of at least 1")
        if not 0.0 <= decay < 1.0:
            raise SignalError(f"signal.decay={decay}: must be in [0, 1)")
        self.watch = watch
        self.page_tokens, self.window_tokens, self.decay = context.page_tokens, window_tokens, decay
        self.length_tokens = 0
        self._start = WindowMass(context)
        self._fast: Tensor | None = None
        self._slow: Tensor | None = None

    def watch_tokens(self, tokens: Tensor) -> None:
        """Counts them."""
        self.length_tokens += len(tokens)

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """The context's last queries."""
        self._start.watch_prefill(chunk)

    def watch_step(self, view: StepView) -> None:
        """One step of the averages."""
        assert view.mass is not None
        fast, slow = self._averages()
        now = self._share(view.mass, self.length_tokens)
        keep = self.decay**view.tokens
        self._fast = now if fast is None else keep * fast + (1 - keep) * now
        keep = (1 - (1 - self.decay) / SLOW) ** view.tokens
        self._slow = now if slow is None else keep * slow + (1 - keep) * now

    def _averages(self) -> tuple[Tensor | None, Tensor | None]:
        if self._fast is None and self._start._mass is not None:
            mass = self._start._mass
            begun = self._share(mass / mass.sum(-1, keepdim=True).clamp(min=1e-12), self.length_tokens)
            return begun, begun
        return self._fast, self._slow

    def _share(self, mass: Tensor, length_tokens: int) -> Tensor:
        """Of mass [L, Hk, N] what is far, or at the edge: [L, Hk]."""
        first = torch.arange(mass.shape[2], device=mass.device) * self.page_tokens
        age = length_tokens - first - self.page_tokens  # of the page's last token
        counts = age >= self.window_tokens
        if self.watch == "edge":
            counts = (age >= (1 - EDGE_SHARE) * self.window_tokens) & ~counts
        counts[0] = False
        return mass[..., counts].sum(-1)

    def value(self, observed: Observed) -> Tensor:
        """[L, Hk] float32, in [0, 1], or in [-1, 1] for the drift; 0 before anything was seen."""
        fast, slow = self._averages()
        if fast is None or slow is None:
            return torch.zeros(observed.shape[:2])
        return fast - slow if self.watch == "drift" else fast
