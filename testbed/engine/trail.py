"""What a session has seen and done, in order: grows at the end, and forks without copying what came before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class _Past(Generic[Item]):
    """Items that nobody adds to any more, shared by all forks that have them in common."""

    items: tuple[Item, ...]
    before: _Past[Item] | None
    count: int


class Trail(Generic[Item]):
    """A list that is only appended to; a fork costs what was appended since the last one."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._past: _Past[Item] | None = None
        self._own = list(items)

    def append(self, item: Item) -> None:
        """Adds one item at the end."""
        self._own.append(item)

    def fork(self) -> Trail[Item]:
        """A trail that goes on from here by itself."""
        if self._own:
            self._past = _Past(tuple(self._own), self._past, len(self))
            self._own = []
        other: Trail[Item] = Trail()
        other._past = self._past
        return other

    def __len__(self) -> int:
        return len(self._own) + (0 if self._past is None else self._past.count)

    def __iter__(self) -> Iterator[Item]:
        pieces, past = [], self._past
        while past is not None:
            pieces.append(past.items)
            past = past.before
        for piece in reversed(pieces):
            yield from piece
        yield from self._own
