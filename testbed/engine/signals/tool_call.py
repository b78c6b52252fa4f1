"""`tool_call`: whether the text being generated is inside a call of a tool; the same for all streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from policies.base import Role
from testbed.engine.signals.base import Observed, SignalContext, SignalError, Source, State
from testbed.engine.signals.role import UNKNOWN
from testbed.models.base import ModelError

GENERATED = (int(Role.GENERATED), UNKNOWN)


def _texts(values: object) -> bool:
    """Whether it is a list of texts, none of them empty; one text is a sequence too, but of letters."""
    return isinstance(values, list | tuple) and all(isinstance(each, str) and each for each in values)


class ToolCall(Source):
    """1 everywhere from an opening marker in generated text to the closing marker that goes with it, else 0.

    Markers are looked for in the text of the newest tokens, and as token ids, since special tokens have no text. A
    turn ends a call that nobody closed. A model without a tokenizer calls no tools.
    """

    def __init__(self, context: SignalContext, opening: Sequence[str] = (), closing: Sequence[str] = ()) -> None:
        if not (_texts(opening) and _texts(closing)) or len(opening) != len(closing):
            raise SignalError(
                f"signals.tool_call: opening={opening!r}, closing={closing!r}: must be lists of texts, one closing "
                "marker for each opening marker"
            )
        if context.decoder is None:
            raise SignalError("signal tool_call: needs a session's decoder")
        self._decoder, self._markers = context.decoder, (tuple(opening), tuple(closing))
        self._longest = max((len(each.encode()) for each in (*opening, *closing)), default=0)
        self._ids = self._encoded((*opening, *closing))
        self._inside = 0  # 1 + index of the marker that opened the call
        self._turn_left = 0  # tokens of the turn that are still to come
        self._said_by = torch.zeros(0, dtype=torch.int8)
        self._tail = torch.zeros(0, dtype=torch.long)  # generated since the last marker, as much as a marker may take
        self._begun = 0  # whether the context has been seen

    def _encoded(self, markers: Sequence[str]) -> dict[str, list[int]]:
        """Token ids of each marker; none where the model came without a tokenizer and so without words."""
        try:
            return {marker: self._decoder.encode(marker) for marker in markers}
        except ModelError:
            return {}

    def watch_turn(self, tokens: Tensor) -> None:
        """Whoever speaks now, it is not the model."""
        self._inside, self._turn_left = 0, len(tokens)
        self._tail = self._tail[:0]

    def watch_roles(self, roles: Tensor) -> None:
        """Kept for the tokens that follow."""
        self._said_by = roles.cpu()

    def watch_tokens(self, tokens: Tensor) -> None:
        """Looks for markers in what the model said."""
        given = min(self._turn_left, len(tokens)) if self._begun else len(tokens)
        self._turn_left, self._begun = max(0, self._turn_left - len(tokens)), 1
        said_by = self._said_by.tolist() if len(self._said_by) == len(tokens) else [UNKNOWN] * len(tokens)
        for token, role in list(zip(tokens.tolist(), said_by, strict=True))[given:]:
            if role in GENERATED and self._ids:
                self._look(token)

    def _look(self, token: int) -> None:
        self._tail = torch.cat((self._tail, torch.tensor([token])))[-self._longest :]
        opening, closing = self._markers
        wanted = enumerate(opening) if not self._inside else [(-1, closing[self._inside - 1])]
        for index, marker in wanted:
            if self._ends_with(marker):
                self._inside, self._tail = index + 1, self._tail[:0]
                return

    def _ends_with(self, marker: str) -> bool:
        tail = self._tail.tolist()
        ids = self._ids[marker]
        return tail[-len(ids) :] == ids or marker in self._decoder.decode(tail)

    def value(self, observed: Observed) -> Tensor:
        """[N] float32."""
        return torch.full((observed.shape[2],), float(self._inside > 0))

    def state(self) -> dict[str, State]:
        """All but model and markers."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor | int)}

    def restore(self, state: Mapping[str, State]) -> None:
        """As it was."""
        vars(self).update(state)
