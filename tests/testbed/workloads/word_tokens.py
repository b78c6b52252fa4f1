"""A tokenizer that is its own proof: one token a word, with the white space before it."""

from __future__ import annotations

import re

import numpy as np


class Words:
    def __init__(self) -> None:
        self.words: list[str] = []
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        out = []
        for word in re.findall(r"\s*\S+|\s+", text):
            if word not in self.ids:
                self.ids[word] = len(self.words)
                self.words.append(word)
            out.append(self.ids[word])
        return out

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.words[token] for token in tokens)


def prose(name: str, sentences: int = 400) -> str:
    """Sentences of 3 to 12 words, each word used once in all documents."""
    rng = np.random.default_rng(sum(name.encode()))
    return " ".join(
        " ".join(f"{name}{at}x{word}" for word in range(rng.integers(3, 13))) + "." for at in range(sentences)
    )


DOCUMENTS = {f"doc{at}.txt": prose(f"doc{at}") for at in range(12)}
