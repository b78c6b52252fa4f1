"""`locked`: spans of the text that the user wants kept whatever else matters; the same for all streams."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from testbed.engine.signals.base import Observed, SignalContext, SignalError, Source


class Locked(Source):
    """1 for pages with a locked token, else 0. Spans come from the key `spans` and from `Session.lock`."""

    def __init__(self, context: SignalContext, spans: Sequence[Sequence[int]] = ()) -> None:
        self.page_tokens = context.page_tokens
        for span in spans:
            whole = isinstance(span, Sequence) and len(span) == 2 and all(type(at) is int for at in span)
            if not whole or not 0 <= span[0] < span[1]:
                raise SignalError(
                    f"signals.locked.spans: {span!r} must be two token positions [begin, end), begin < end"
                )
        self._spans = torch.tensor([list(span) for span in spans], dtype=torch.long).view(-1, 2)

    def watch_lock(self, begin: int, end: int) -> None:
        """One more span."""
        self._spans = torch.cat((self._spans, torch.tensor([[begin, end]])))

    def value(self, observed: Observed) -> Tensor:
        """[N] float32."""
        first = torch.arange(observed.shape[2]) * self.page_tokens
        begin, end = self._spans[:, :1], self._spans[:, 1:]
        return ((first < end) & (first + self.page_tokens > begin)).any(0).float()
