"""Command lines of plain words and `key=value`, where no Hydra config stands behind them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def whole(least: int) -> Callable[[str], int]:
    """Reads whole numbers of at least `least` that fit into 64 bits."""

    def read(text: str) -> int:
        value = int(text) if re.fullmatch(r"[+-]?[0-9]{1,19}", text) else None
        if value is None or not least <= value < 2**63:
            raise ValueError(f"must be a whole number of at least {least}")
        return value

    return read


@dataclass(frozen=True)
class Words:
    """What a command was given.

    Attributes:
        plain: words without `=`, in order.
        values: key -> value.
    """

    plain: tuple[str, ...]
    values: Mapping[str, Any]

    @staticmethod
    def of(args: Sequence[str], kinds: Mapping[str, Callable[[str], Any]], error: type[ValueError]) -> Words:
        """Sorts the words.

        Args:
            args: of the command line.
            kinds: known key -> how its value is read.
            error: what to raise.

        Raises:
            error: an unknown key, one given twice, or a value that can't be read.
        """
        plain: list[str] = []
        values: dict[str, Any] = {}
        for word in args:
            key, sign, text = word.partition("=")
            if not sign:
                plain.append(word)
            elif key not in kinds:
                raise error(f"unknown key {key!r}. There are: {', '.join(kinds)}")
            elif key in values:
                raise error(f"{key} is given twice")
            else:
                try:
                    values[key] = kinds[key](text)
                except ValueError as reason:
                    raise error(f"{key}={text}: {reason}") from reason
        return Words(tuple(plain), values)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or the default."""
        return self.values.get(key, default)
