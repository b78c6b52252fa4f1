"""Signals from attention itself: how much mass pages drew, over the prefill, its end, and the last steps."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.prefill import page_mass
from testbed.engine.signals.base import Observed, PrefillChunk, SignalContext, SignalError, Source, StepView, fit_pages


class _PrefillMass(Source):
    """Sum of page masses over some of the prefill's queries, mean over the query group."""

    def __init__(self, context: SignalContext) -> None:
        self.page_tokens = context.page_tokens
        self._mass: Tensor | None = None

    def _add(self, chunk: PrefillChunk, first_query: int) -> None:
        geometry = chunk.geometry
        pages = -(-chunk.total // self.page_tokens)
        if self._mass is None:
            self._mass = torch.zeros(geometry.layers, geometry.kv_heads, pages, device=chunk.q.device)
        mean, _ = page_mass(
            chunk.q[:, first_query:],
            chunk.lse[:, first_query:],
            chunk.k,
            self.page_tokens,
            scale=geometry.scale[chunk.layer],
            window_tokens=geometry.window_tokens[chunk.layer],
            slopes=geometry.slopes,
        )
        self._mass[chunk.layer, :, : mean.shape[1]] += mean

    def value(self, observed: Observed) -> Tensor:
        """[L, Hk, N], zeros for pages written since."""
        return fit_pages(self._mass, observed.shape)


class WindowMass(_PrefillMass):
    """`window_mass`: mass that the last `window_tokens` queries of the context put on pages (SnapKV, 2404.14469)."""

    def __init__(self, context: SignalContext, window_tokens: int = 64) -> None:
        super().__init__(context)
        if window_tokens < 1:
            raise SignalError(f"signal.window_mass.window_tokens={window_tokens}: must be at least 1")
        self.window_tokens = window_tokens

    def value(self, observed: Observed) -> Tensor:
        """[L, Hk, N]; -1 for pages written since, of which the window knows nothing."""
        out = fit_pages(self._mass, observed.shape).clone()
        if self._mass is not None:
            out[..., self._mass.shape[2] :] = -1.0
        return out

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """Adds the queries inside the window."""
        first = max(0, chunk.total - self.window_tokens) - chunk.start
        if first < chunk.q.shape[1]:
            self._add(chunk, max(0, first))


class AttentionMass(_PrefillMass):
    """`attention_mass`: mass that all queries so far put on pages (H2O, 2306.14048); costs a second QK pass."""

    wants_mass = True

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """Adds the whole chunk."""
        self._add(chunk, 0)

    def watch_step(self, view: StepView) -> None:
        """Adds a step's queries."""
        assert view.mass is not None
        self._mass = fit_pages(self._mass, tuple(view.mass.shape)) + view.mass * view.tokens  # type: ignore[arg-type]


class AttentionEMA(Source):
    """`attention_ema`: moving average of the mass pages draw a step, newest step weighted 1 - decay."""

    wants_mass = True

    def __init__(self, context: SignalContext, decay: float = 0.9) -> None:
        if not 0.0 <= decay < 1.0:
            raise SignalError(f"signal.attention_ema.decay={decay}: must be in [0, 1)")
        self.decay = decay
        self._start = WindowMass(context)
        self._ema: Tensor | None = None

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """Starts from the mean of the context's last queries."""
        self._start.watch_prefill(chunk)

    def watch_step(self, view: StepView) -> None:
        """One step of the average."""
        assert view.mass is not None
        shape: tuple[int, int, int] = tuple(view.mass.shape)  # type: ignore[assignment]
        self._ema = self.decay * self._now(shape) + (1.0 - self.decay) * view.mass

    def _now(self, shape: tuple[int, int, int]) -> Tensor:
        if self._ema is not None:
            return fit_pages(self._ema, shape)
        return fit_pages(self._start._mass, shape) / self._start.window_tokens

    def value(self, observed: Observed) -> Tensor:
        """[L, Hk, N]."""
        return self._now(observed.shape)


class LastMass(Source):
    """`last_mass`: mass pages drew at the last step (TOVA, 2401.06104); before the first, the context's last query."""

    wants_mass = True

    def __init__(self, context: SignalContext) -> None:
        self._start = WindowMass(context, window_tokens=1)
        self._mass: Tensor | None = None

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """Keeps the last query's."""
        self._start.watch_prefill(chunk)

    def watch_step(self, view: StepView) -> None:
        """Replaces it."""
        self._mass = view.mass

    def value(self, observed: Observed) -> Tensor:
        """[L, Hk, N]."""
        return fit_pages(self._mass if self._mass is not None else self._start._mass, observed.shape)


class LastAccess(Source):
    """`last_access`: the step at which a page last drew more than its even share of attention; -1 = never."""

    wants_mass = True

    def __init__(self, context: SignalContext) -> None:
        self._step: Tensor | None = None

    def watch_step(self, view: StepView) -> None:
        """Stamps pages above the even share."""
        assert view.mass is not None
        shape: tuple[int, int, int] = tuple(view.mass.shape)  # type: ignore[assignment]
        even = 1.0 / view.mass.shape[2]
        before = self._fit(shape)
        self._step = torch.where(view.mass > even, float(view.step), before)

    def _fit(self, shape: tuple[int, int, int]) -> Tensor:
        return fit_pages(None if self._step is None else self._step + 1.0, shape) - 1.0

    def value(self, observed: Observed) -> Tensor:
        """[L, Hk, N]."""
        return self._fit(observed.shape)
