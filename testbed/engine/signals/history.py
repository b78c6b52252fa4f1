"""What a sequence's attention has done so far, for the learned predictor: masses, queries, and the text itself."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.scoring import page_bounds
from testbed.engine.signals.attention import WindowMass
from testbed.engine.signals.base import Observed, PrefillChunk, SignalContext, Source, StepView, fit_pages

DECAYS = (0.5, 0.8, 0.95)
QUERY_DECAY, RECENT_QUERIES = 0.8, 8


class History(Source):
    """Moving averages of page masses and of queries; the key bounds of the context until the cache has them.

    Pages that were not attended to at a step drew no mass as far as anyone saw.
    """

    def __init__(self, context: SignalContext, queries: bool = True) -> None:
        self._wants_queries = queries  # and bounds, which are good for nothing without
        self.page_tokens = context.page_tokens
        self._start = WindowMass(context)
        self._averages: Tensor | None = None  # [len(DECAYS), L, Hk, n]
        self._last: Tensor | None = None  # [L, Hk, n]
        self._queries: list[Tensor] = []  # per layer [2, Hk, G, D]: the newest, the mean of recent ones
        self._bounds: list[Tensor] = []  # per layer [2, Hk, n, D]: minimum and maximum key of the context's pages
        self._text: list[Tensor] = []  # joined when asked
        self._next = torch.zeros(0, dtype=torch.long)

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """Keeps masses and queries of the context's end, and its bounds."""
        self._start.watch_prefill(chunk)
        if not self._wants_queries or chunk.start + chunk.q.shape[1] < chunk.total:
            return
        recent = chunk.q[:, -RECENT_QUERIES:].unflatten(0, (chunk.geometry.kv_heads, -1)).float().cpu()
        self._queries = [*self._queries[: chunk.layer], torch.stack((recent[:, :, -1], recent.mean(2)))]
        full = chunk.k[:, : chunk.total // self.page_tokens * self.page_tokens].float().cpu()
        pages = full.unflatten(1, (-1, self.page_tokens))
        bounds = torch.stack(page_bounds(pages.flatten(0, 1))).unflatten(1, (len(full), -1))
        self._bounds = [*self._bounds[: chunk.layer], bounds]

    def watch_tokens(self, tokens: Tensor) -> None:
        """The text grows."""
        self._text = [*self._text, tokens.cpu()]

    def watch_next(self, tokens: Tensor) -> None:
        """What is about to be run."""
        self._next = tokens.cpu()

    def watch_step(self, view: StepView) -> None:
        """Moves the averages by the run's tokens at once."""
        assert view.mass is not None
        mass = view.mass.float().cpu()
        old = self.averages(tuple(mass.shape))  # type: ignore[arg-type]
        kept = torch.tensor([decay**view.tokens for decay in DECAYS]).view(-1, 1, 1, 1)
        self._averages, self._last = kept * old + (1.0 - kept) * mass, mass
        if not self._wants_queries:
            return
        assert view.queries is not None
        queries = []
        for layer, each in enumerate(view.queries):
            recent = each[:, :, -RECENT_QUERIES:].float().cpu()
            share = QUERY_DECAY ** recent.shape[2] if self._queries else 0.0
            mean = (1.0 - share) * recent.mean(2)
            queries.append(torch.stack((recent[:, :, -1], mean + (share * self._queries[layer][1] if share else 0.0))))
        self._queries, self._bounds = queries, []

    def averages(self, shape: tuple[int, int, int]) -> Tensor:
        """[len(DECAYS), L, Hk, N] mass a query, by `DECAYS`; before the first step that of the context's end."""
        if self._averages is None:
            return self.window(shape).expand(len(DECAYS), *shape)
        return pad(self._averages, (0, shape[2] - self._averages.shape[3]))

    def last(self, shape: tuple[int, int, int]) -> Tensor:
        """[L, Hk, N] mass at the last run; before the first that of the context's end."""
        return self.window(shape) if self._last is None else fit_pages(self._last, shape)

    def window(self, shape: tuple[int, int, int]) -> Tensor:
        """[L, Hk, N] mass a query of the context's end."""
        mass = self._start._mass
        return fit_pages(None if mass is None else mass.cpu() / self._start.window_tokens, shape)

    def queries(self) -> Tensor | None:
        """[2, S, G, D]: the newest and the mean of recent ones; None before there are any."""
        return torch.cat(self._queries, 1) if self._queries else None

    def bounds(self, observed: Observed) -> tuple[Tensor, Tensor]:
        """Minimum and maximum key of each page, [S, n, D] each, where the cache has them; n may be less than N."""
        low, high = torch.cat(self._bounds, 1) if self._bounds else observed.key_bounds()
        return low[:, : observed.shape[2]], high[:, : observed.shape[2]]

    def text(self) -> Tensor:
        """[T] int64, everything run so far."""
        self._text = [torch.cat([torch.zeros(0, dtype=torch.long), *self._text])]
        return self._text[0]

    def coming(self) -> Tensor:
        """[t] int64, what is about to be run; empty before anything is."""
        return self._next
