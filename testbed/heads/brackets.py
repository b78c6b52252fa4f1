"""Brackets and quotes of Python source, matched by tokens.

A scanner of its own, not `tokenize`: the text ends anywhere, and places must be tokens of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

OPENING = {"(": ")", "[": "]", "{": "}"}
QUOTES = "'\""
APART_TOKENS = 6  # nearer pairs are found by every head that looks near


def matched(pieces: Sequence[str], apart_tokens: int = APART_TOKENS) -> list[tuple[int, int]]:
    """Pairs of tokens, the first with the opening bracket or quote, the second with its closing one.

    A token counts only if it holds exactly one bracket (of a pair of quotes: one quote). Brackets in strings and
    comments are text; triple quotes are left out. Of a token that closes both, the later pair counts.

    Args:
        pieces: the text of every token.
        apart_tokens: least distance of the two.

    Returns:
        (opening, closing), ascending by the closing one, each closing token once.
    """
    owners = _owners(pieces)
    brackets = [sum(piece.count(mark) for mark in "()[]{}") for piece in pieces]
    quotes = [sum(piece.count(mark) for mark in QUOTES) for piece in pieces]
    found: dict[int, int] = {}
    for opening, closing, marks in _pairs("".join(pieces), owners, brackets, quotes):
        if marks[opening] == marks[closing] == 1 and closing - opening >= apart_tokens:
            found[closing] = opening
    return [(found[closing], closing) for closing in sorted(found)]


def _owners(pieces: Sequence[str]) -> list[int]:
    """The token of every character."""
    return [token for token, piece in enumerate(pieces) for _ in piece]


def _pairs(
    text: str, owners: Sequence[int], brackets: Sequence[int], quotes: Sequence[int]
) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Tokens of all matching pairs, and how many marks of that kind each token has; stops where Python ends."""
    open_brackets: list[tuple[str, int]] = []  # what would close it, and its token
    at = 0
    while at < len(text):
        mark = text[at]
        if mark == "#":
            at = _find(text, "\n", at)
        elif mark in QUOTES:
            end = _string_end(text, at)
            if end - at > 1 and text[at : at + 3] != 3 * mark and end <= len(text):
                yield owners[at], owners[end - 1], quotes
            at = end - 1
        elif mark in OPENING:
            open_brackets.append((OPENING[mark], owners[at]))
        elif mark in OPENING.values():
            if not open_brackets or open_brackets[-1][0] != mark:
                return
            yield open_brackets.pop()[1], owners[at], brackets
        at += 1


def _find(text: str, mark: str, at: int) -> int:
    found = text.find(mark, at)
    return len(text) if found < 0 else found


def _string_end(text: str, at: int) -> int:
    """One past the string literal that begins at `at`; beyond the text where it does not end."""
    quote = 3 * text[at] if text[at : at + 3] == 3 * text[at] else text[at]
    at += len(quote)
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text.startswith(quote, at):
            return at + len(quote)
        at += 1
    return len(text) + 1
