"""Texts that heads are measured on, task by task; none of them belongs to the test split.

Tasks: `text` (essays), `needle` (essays with numbers that are asked for), `induction` (random tokens, twice), `code`
(the standard library's source), `dialogue` (agents' sessions with roles), `other_language` (French prose).
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path

import numpy as np

from policies.base import Role
from testbed import assets
from testbed.heads.brackets import matched
from testbed.heads.calibration import CalibrationConfig, CalibrationError
from testbed.models.base import Decoder
from testbed.predictor.agents import sessions
from testbed.workloads.base import Sample
from testbed.workloads.conversation import Conversation
from testbed.workloads.needle import Needle
from testbed.workloads.text import Continuation

INDUCTION_SEED, CODE_SEED, DIALOGUE_SEED, PREFIX_SEED = 11, 12, 13, 14  # so that kinds of text do not share their draws
MODULE_BYTES = (16_000, 60_000)
ROWS_OF_A_ROLE = 512  # generated tokens looked at in a text at most, evenly spread

Span = tuple[int, int]
"""Tokens [begin, end)."""


@dataclass(frozen=True)
class Asking:
    """Rows of attention that a score looks at, and where their mass counts.

    Attributes:
        rows: positions, ascending; for copied answers the token before each answer token.
        spans: for each of them, the spans of tokens its mass is counted on.
    """

    rows: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]

    def __post_init__(self) -> None:
        """At least one row, ascending, each with its spans."""
        if not self.rows or len(self.rows) != len(self.spans) or list(self.rows) != sorted(self.rows):
            raise CalibrationError(f"{len(self.rows)} rows with {len(self.spans)} spans: one each, rows ascending")


@dataclass(frozen=True)
class CalibrationText:
    """One text.

    Attributes:
        task: which kind.
        tokens: of the whole text, questions and right answers included.
        roles: `policies.base.Role` of every token, or None.
        asks: measure -> the rows it looks at.
        context_tokens: tokens before the first question.
    """

    task: str
    tokens: list[int]
    roles: list[int] | None = None
    asks: Mapping[str, Asking] = field(default_factory=dict)
    context_tokens: int = 0


def texts(task: str, decoder: Decoder, length_tokens: int, samples: int, seed: int) -> list[CalibrationText]:
    """Texts of one task, the same ones for the same seed.

    Args:
        task: one of `TASKS`.
        decoder: whose tokenizer is used.
        length_tokens: of each text, questions and answers not counted.
        samples: how many.
        seed: of places, keys and numbers.

    Raises:
        CalibrationError: an unknown task, or nothing of that kind here.
    """
    if task not in TASKS:
        raise CalibrationError(f"task={task!r}: must be one of {', '.join(TASKS)}")
    return TASKS[task](decoder, length_tokens, samples, seed)


def plain(decoder: Decoder, length_tokens: int, samples: int, seed: int) -> list[CalibrationText]:
    """Stretches of essays."""
    work = Continuation(lengths=(length_tokens,), samples_per_length=samples, split="calibration")
    return [
        CalibrationText("text", sample.context_tokens, context_tokens=length_tokens)
        for sample in work.samples(decoder.encode, decoder.decode, seed)
    ]


def prefixed(decoder: Decoder, config: CalibrationConfig) -> Iterator[tuple[str, list[str]]]:
    """Essays' texts, each with unrelated prefixes, also essays."""
    work = Continuation((config.shift_tokens,), samples_per_length=config.text_samples, split="calibration")
    front = Continuation(
        (config.prefix_tokens,), samples_per_length=config.text_samples * config.prefixes, split="calibration"
    )
    places = [
        list(each.samples(decoder.encode, decoder.decode, seed))
        for each, seed in ((work, config.seed), (front, PREFIX_SEED + config.seed))
    ]
    for at, text in enumerate(places[0]):
        mine = places[1][at * config.prefixes : (at + 1) * config.prefixes]
        yield decoder.decode(text.context_tokens), [decoder.decode(prefix.context_tokens) for prefix in mine]


def needles(decoder: Decoder, length_tokens: int, samples: int, seed: int) -> list[CalibrationText]:
    """Essays with a needle at each depth, then every question with its right answer."""
    work = Needle(
        (length_tokens,), samples_per_cell=samples, needles_per_context=len(Needle.depths), split="calibration"
    )
    drawn = work.samples(decoder.encode, decoder.decode, seed)
    return [copying(decoder, list(group)) for _, group in groupby(drawn, key=lambda sample: sample.context_id)]


def copying(decoder: Decoder, samples: Sequence[Sample]) -> CalibrationText:
    """The questions about one context, asked and answered one after the other.

    Raises:
        CalibrationError: the tokenizer writes the number differently in needle and answer, so nothing is copied.
    """
    tokens = list(samples[0].context_tokens)
    rows: list[int] = []
    spans: list[tuple[Span, ...]] = []
    for sample in samples:
        answer = decoder.encode(sample.answer)
        begin = int(sample.meta["needle_position"])
        needle = tokens[begin : begin + int(sample.meta["needle_tokens"])]
        offsets = [at for at in range(len(needle) - len(answer) + 1) if needle[at : at + len(answer)] == answer]
        if not offsets or sample.continuation_tokens[-len(answer) :] != answer:
            raise CalibrationError(
                f"the tokenizer of {decoder.name} splits {sample.answer!r} differently in needle and answer; choose "
                "another wording (workload.needle, workload.question)"
            )
        tokens += [*sample.question_tokens, *sample.continuation_tokens]
        rows += range(len(tokens) - len(answer) - 1, len(tokens) - 1)
        source = begin + offsets[-1]
        spans += [((source, source + len(answer)),)] * len(answer)
    asking = {"retrieval_score": Asking(tuple(rows), tuple(spans))}
    return CalibrationText("needle", tokens, None, asking, len(samples[0].context_tokens))


def induction(decoder: Decoder, length_tokens: int, samples: int, seed: int) -> list[CalibrationText]:
    """A block of random tokens, no token twice, and again: whoever sees A looks for what came after A before.

    After the induction heads of Olsson et al. 2022 (arXiv 2209.11895).
    """
    out = []
    for sample in range(samples):
        rng = np.random.default_rng([seed, INDUCTION_SEED, sample])
        known = (int(token) for token in rng.permutation(decoder.geometry.vocab) if token not in decoder.eos_ids)
        block = list(islice((token for token in known if decoder.decode([token])), max(2, length_tokens // 2)))
        repeats = max(2, length_tokens // len(block))
        rows = tuple(range(len(block), repeats * len(block)))
        # The position after each earlier occurrence of the row's token.
        spans = tuple(tuple((at + 1, at + 2) for at in range(row % len(block), row, len(block))) for row in rows)
        tokens = block * repeats
        out.append(CalibrationText("induction", tokens, None, {"head_induction": Asking(rows, spans)}, len(tokens)))
    return out


def code(decoder: Decoder, length_tokens: int, samples: int, seed: int) -> list[CalibrationText]:
    """Modules of the standard library from some class or function on; a closing bracket asks for its opening one.

    The modules are those of which the core-token predictor is not judged (`testbed.predictor.corpus`).

    Raises:
        CalibrationError: too few modules that long.
    """
    modules = [path for at, path in enumerate(standard_modules()) if at % 4 != 3]
    rng = np.random.default_rng([seed, CODE_SEED])
    out = []
    for at in rng.permutation(len(modules)):
        source = modules[at].read_text(encoding="utf-8")
        starts = [found.start() + 1 for found in re.finditer(r"\n(?:class|def) ", source)]
        tokens = decoder.encode(source[starts[int(rng.integers(len(starts) // 2 + 1))] :] if starts else source)
        tokens = tokens[:length_tokens]
        pairs = matched([decoder.decode([token]) for token in tokens])
        if len(tokens) == length_tokens and pairs:
            rows, spans = zip(*((close, ((begin, begin + 1),)) for begin, close in pairs), strict=True)
            out.append(CalibrationText("code", tokens, None, {"head_bracket": Asking(rows, spans)}, length_tokens))
        if len(out) == samples:
            return out
    raise CalibrationError(
        f"code: {samples} modules with {length_tokens} tokens and brackets asked for, the library has {len(out)}"
    )


def standard_modules() -> list[Path]:
    """Source files of the standard library of middling length."""
    low, high = MODULE_BYTES
    found = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    return [path for path in found if low <= path.stat().st_size <= high]


def dialogue(decoder: Decoder, length_tokens: int, samples: int, seed: int) -> list[CalibrationText]:
    """Sessions with an agent: what was said by whom; where there are too few, made-up conversations fill up.

    What was generated asks for the last result of a tool, and for what system and user said. Sessions come from
    traces/lmcache_agent in the data folder: those that do not judge the core-token predictor, with results first.
    """
    found = []
    for session in sessions(None, decoder.encode):
        tokens = [token for piece in session.pieces for token in piece.tokens][:length_tokens]
        roles = [int(piece.role) for piece in session.pieces for _ in piece.tokens][:length_tokens]
        text = spoken(tokens, roles)
        if not session.judges and len(tokens) == length_tokens and text.asks:
            found.append(text)
    order = np.random.default_rng([seed, DIALOGUE_SEED]).permutation(len(found))
    found = sorted((found[at] for at in order), key=lambda text: -len(text.asks))[:samples]
    missing = samples - len(found)
    if missing:
        work = Conversation((length_tokens,), samples_per_length=missing, split="calibration")
        drawn = work.samples(decoder.encode, decoder.decode, seed)
        found += [told(list(group)[-1]) for _, group in groupby(drawn, key=lambda sample: sample.context_id)]
    return found


def told(sample: Sample) -> CalibrationText:
    """A conversation up to its last answer."""
    parts = [
        (sample.context_tokens, sample.roles or []),
        *((turn.tokens, [turn.role] * len(turn.tokens)) for turn in sample.history),
        (sample.question_tokens, [int(Role.USER)] * len(sample.question_tokens)),
        (sample.continuation_tokens, [int(Role.GENERATED)] * len(sample.continuation_tokens)),
    ]
    tokens = [token for part, _ in parts for token in part]
    return spoken(tokens, [role for _, roles in parts for role in roles])


def spoken(tokens: list[int], roles: list[int]) -> CalibrationText:
    """A text with roles, and what its generated tokens ask for."""
    runs: list[tuple[int, Span]] = []
    for role, group in groupby(range(len(roles)), key=lambda at: roles[at]):
        stretch = list(group)
        runs.append((role, (stretch[0], stretch[-1] + 1)))
    said: list[tuple[int, tuple[Span, ...]]] = []
    result: list[tuple[int, tuple[Span, ...]]] = []
    orders: tuple[Span, ...] = ()
    last: Span | None = None
    for role, span in runs:
        if role in (Role.SYSTEM, Role.USER):
            orders = (*orders, span)
        elif role == Role.RESULT:
            last = span
        elif role == Role.GENERATED:
            said += [(row, orders) for row in range(*span) if orders]
            result += [(row, (last,)) for row in range(*span) if last is not None]
    asks = {}
    for name, found in (("head_tool_result", result), ("head_role_following", said)):
        if found:
            rows, spans = zip(*found[:: -(-len(found) // ROWS_OF_A_ROLE)], strict=True)
            asks[name] = Asking(rows, spans)
    return CalibrationText("dialogue", tokens, roles, asks, len(tokens))


def other_language(decoder: Decoder, length_tokens: int, samples: int, seed: int) -> list[CalibrationText]:
    """Stretches of French prose."""
    work = Continuation((length_tokens,), samples_per_length=samples, split="calibration", text=assets.foreign_texts())
    return [
        CalibrationText("other_language", sample.context_tokens, context_tokens=length_tokens)
        for sample in work.samples(decoder.encode, decoder.decode, seed)
    ]


TASKS: Mapping[str, Callable[[Decoder, int, int, int], list[CalibrationText]]] = {
    "text": plain,
    "needle": needles,
    "induction": induction,
    "code": code,
    "dialogue": dialogue,
    "other_language": other_language,
}
