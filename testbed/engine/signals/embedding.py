"""`embedding`: how alike a page and the current turn are to the model itself: cosine of its own hidden states.

While none of the turn has been run, input embeddings are compared, which are known before; from then on the hidden
states of one layer, the turn's last token's (the state a question ends in) against the mean of each page. What all
pages have in common is taken away first: hidden states of one model point much the same way. Both means grow with
the text.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from testbed.engine.signals.base import Observed, PrefillChunk, SignalContext, SignalError, Source, StepView

AT_ONCE_TOKENS = 2048


class Embedding(Source):
    """Sums of input embeddings and of hidden states, one row a page."""

    wants_hidden = True

    def __init__(self, context: SignalContext, layer: int | None = None) -> None:
        if context.decoder is None:
            raise SignalError("signal embedding: needs a session's decoder")
        layers = context.decoder.geometry.layers
        if layer is not None and not (type(layer) is int and 0 <= layer < layers):
            raise SignalError(
                f"signals.embedding.layer={layer!r}: must be 0 to {layers - 1}, or null for the middle one"
            )
        self.layer = layers // 2 if layer is None else layer
        self.page_tokens, self._decoder = context.page_tokens, context.decoder
        width = context.decoder.width
        self._tokens = self._hidden_tokens = 0  # seen so far
        self._words = torch.zeros(0, width)  # [N, C] sums of input embeddings
        self._states = torch.zeros(0, width)  # [N, C] sums of hidden states; of runs of several tokens the last only
        self._counts = torch.zeros(2, 0)  # tokens in each sum
        self._turn: Tensor | None = None  # [2, C]: mean input embedding; hidden state, zeros until it is known

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """Adds the chunk's hidden states."""
        if chunk.layer == self.layer and chunk.hidden is not None:
            at = torch.arange(chunk.start, chunk.start + len(chunk.hidden)) // self.page_tokens
            self._states = self._added(self._states, 1, at, chunk.hidden.float().cpu())
            self._hidden_tokens = chunk.start + len(chunk.hidden)

    def watch_tokens(self, tokens: Tensor) -> None:
        """Adds their embeddings."""
        for part in tokens.split(AT_ONCE_TOKENS):
            at = torch.arange(self._tokens, self._tokens + len(part)) // self.page_tokens
            self._words = self._added(self._words, 0, at, self._decoder.embed(part).float().cpu())
            self._tokens += len(part)

    def watch_turn(self, tokens: Tensor) -> None:
        """Keeps what is asked."""
        mean = self._decoder.embed(tokens).float().cpu().mean(0)
        self._turn = torch.stack((mean, torch.zeros_like(mean)))

    def watch_step(self, view: StepView) -> None:
        """Adds the last token's hidden state; it is the turn's too until the answer begins."""
        if view.hidden is None:
            return
        state = view.hidden[self.layer].float().cpu()
        at = torch.tensor([(self._tokens - 1) // self.page_tokens])
        self._states = self._added(self._states, 1, at, state.unsqueeze(0))
        if self._turn is not None:
            self._turn = torch.stack((self._turn[0], state))

    def _added(self, sums: Tensor, row: int, at: Tensor, vectors: Tensor) -> Tensor:
        """Sums [N, C] with vectors [T, C] added to pages `at` [T]; counts them."""
        pages = int(at[-1]) + 1 if len(at) else 0
        sums = pad(sums, (0, 0, 0, max(0, pages - len(sums)))).index_add(0, at, vectors)
        counts = pad(self._counts, (0, max(0, pages - self._counts.shape[1])))
        self._counts = counts.index_add(1, at, torch.zeros(2, len(at)).index_fill_(0, torch.tensor([row]), 1.0))
        return sums

    def score(self, pages: int) -> Tensor:
        """[N] float32 in [-1, 1]; 0 while no turn is known, and for pages that nothing is known of."""
        out = torch.zeros(pages)
        if self._turn is None:
            return out
        known = int(self._turn[1].any())
        sums, counts = (self._states if known else self._words), self._counts[known]
        n = min(pages, len(sums))
        seen = counts[:n] > 0
        if not bool(seen.any()):
            return out
        means = sums[:n] / counts[:n].clamp(min=1).unsqueeze(1)
        common = means[seen].mean(0)
        out[:n] = torch.where(seen, cosine_similarity(means - common, self._turn[known] - common, dim=1), 0.0)
        return out

    def value(self, observed: Observed) -> Tensor:
        """[L, Hk, N], the same for all heads."""
        return self.score(observed.shape[2]).expand(observed.shape)

    def state(self) -> dict[str, Tensor | int | float]:
        """All but the model."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor | int)}

    def restore(self, state: dict[str, Tensor | int | float]) -> None:  # type: ignore[override]
        """As it was."""
        vars(self).update(state)
        self._turn = state.get("_turn")  # type: ignore[assignment]
