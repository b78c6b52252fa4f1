"""`retrieval`: BM25 of each page's text against the current turn (Robertson and Zaragoza 2009), term weights by bm25s.

Incremental: a page is counted once, when its text and its neighbours' are complete; at a turn only the pages at the
end, which may still grow, are counted anew. Scores are those of an index made from scratch.
"""

from __future__ import annotations

import torch
from bm25s.scoring import _select_idf_scorer, _select_tfc_scorer  # the library's weights without its fixed index
from torch import Tensor

from testbed.engine.signals.base import Observed, SignalContext, SignalError, Source

METHOD, K1, B = "lucene", 1.5, 0.75  # bm25s's own defaults


class Retrieval(Source):
    """Pages are documents, token ids are words. A page is scored with its neighbours' tokens on both sides.

    The neighbours matter because a passage that a question names seldom ends where a page does.
    """

    def __init__(self, context: SignalContext, neighbour_tokens: int = 8) -> None:
        if type(neighbour_tokens) is not int or neighbour_tokens < 0:
            raise SignalError(
                f"signals.retrieval.neighbour_tokens={neighbour_tokens!r}: must be a whole number of at least 0"
            )
        self.page_tokens, self.neighbour_tokens = context.page_tokens, neighbour_tokens
        self._text: list[Tensor] = []  # joined when a turn asks
        self._index = torch.zeros(3, 0, dtype=torch.long)  # (token, page, how often) of the pages that are complete
        self._lengths = torch.zeros(0, dtype=torch.long)  # tokens of each of those pages, neighbours included
        self._score: Tensor | None = None

    def watch_tokens(self, tokens: Tensor) -> None:
        """Collects the text."""
        self._text = [*self._text, tokens.cpu()]

    def watch_turn(self, tokens: Tensor) -> None:
        """Scores every page once a turn is known."""
        text = torch.cat([torch.zeros(0, dtype=torch.long), *self._text])
        self._text = [text]
        done = len(self._lengths)
        complete = max(0, (len(text) - self.neighbour_tokens) // self.page_tokens)
        if complete > done:
            index, lengths = self._counted(text, done, complete)
            self._index, self._lengths = torch.cat((self._index, index), 1), torch.cat((self._lengths, lengths))
        index, lengths = self._counted(text, len(self._lengths), -(-len(text) // self.page_tokens))
        self._score = _bm25(torch.cat((self._index, index), 1), torch.cat((self._lengths, lengths)), tokens.cpu())

    def _counted(self, text: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Pages [begin, end): their (token, page, how often) [3, X] in the order of pages, and their lengths [n]."""
        if end <= begin:
            return torch.zeros(3, 0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
        width = self.page_tokens + 2 * self.neighbour_tokens
        pages = torch.arange(begin, end)
        at = (pages * self.page_tokens - self.neighbour_tokens).unsqueeze(1) + torch.arange(width)
        inside = (at >= 0) & (at < len(text))
        words = torch.stack((pages.unsqueeze(1).expand_as(at)[inside], text[at[inside]]))
        each, times = words.unique(dim=1, return_counts=True)
        return torch.stack((each[1], each[0], times)), inside.sum(1)

    def value(self, observed: Observed) -> Tensor:
        """[L, Hk, N], the same for all heads; 0 while no turn is known."""
        layers, kv_heads, pages = observed.shape
        score = torch.zeros(pages)
        if self._score is not None:
            n = min(pages, len(self._score))
            score[:n] = self._score[:n]
        return score.expand(layers, kv_heads, pages)


def _bm25(index: Tensor, lengths: Tensor, turn: Tensor) -> Tensor | None:
    """The scores [N] float32 of pages that hold (token, page, how often) [3, X]; None where no word of the turn is."""
    index = index[:, torch.isin(index[0], turn)]
    pages = len(lengths)
    if not index.shape[1]:
        return None
    words, word, found_in = index[0].unique(return_inverse=True, return_counts=True)
    idf = torch.tensor([_select_idf_scorer(METHOD)(int(count), N=pages) for count in found_in], dtype=torch.float64)
    tokens, mean = lengths.double(), float(lengths.double().mean())
    weight = _select_tfc_scorer(METHOD)(index[2].double(), tokens[index[1]], mean, K1, B)
    return torch.zeros(pages, dtype=torch.float64).index_add_(0, index[1], weight * idf[word]).float()
