"""`retrieval`: BM25 of each page's text against the current turn (Robertson and Zaragoza 2009), by bm25s."""

from __future__ import annotations

import bm25s
import torch
from torch import Tensor

from testbed.engine.signals.base import Observed, SignalContext, Source


class Retrieval(Source):
    """Pages are documents, token ids are words. A page is scored with its neighbours' tokens on both sides.

    The neighbours matter because a passage that a question names seldom ends where a page does.
    """

    def __init__(self, context: SignalContext, neighbour_tokens: int = 8) -> None:
        self.page_tokens, self.neighbour_tokens = context.page_tokens, neighbour_tokens
        self._tokens = torch.zeros(0, dtype=torch.long)
        self._score: Tensor | None = None

    def watch_tokens(self, tokens: Tensor) -> None:
        """Collects the text."""
        self._tokens = torch.cat((self._tokens, tokens.cpu()))

    def watch_turn(self, tokens: Tensor) -> None:
        """Scores every page once a turn is known."""
        words = [str(token) for token in self._tokens.tolist()]
        starts = range(0, len(words), self.page_tokens)
        pages = [
            words[max(0, s - self.neighbour_tokens) : s + self.page_tokens + self.neighbour_tokens] for s in starts
        ]
        turn = [word for word in dict.fromkeys(str(token) for token in tokens.tolist())]
        known = set(words)
        turn = [word for word in turn if word in known]
        if not pages or not turn:
            self._score = None
            return
        index = bm25s.BM25(backend="numpy")
        index.index(pages, show_progress=False)
        self._score = torch.from_numpy(index.get_scores(turn)).float()

    def value(self, observed: Observed) -> Tensor:
        """[L, Hk, N], the same for all heads; 0 while no turn is known."""
        layers, kv_heads, pages = observed.shape
        score = torch.zeros(pages)
        if self._score is not None:
            n = min(pages, len(self._score))
            score[:n] = self._score[:n]
        return score.expand(layers, kv_heads, pages)
