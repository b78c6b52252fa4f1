"""Sessions of agents as pieces of text with roles and phases, from the traces of LMCache's agents.

github.com/LMCache/lmcache-agent-trace (Apache-2.0): `miniswe_*` are software engineers whose commands stand between
```bash and ``` and whose `input` grows by the commands' results (without the model's own words, which are put back
here); `taubench_*` are two models in conversation, customer and agent, whose calls are lines of JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from policies.base import Role
from testbed.assets import data_dir
from testbed.workloads.base import Encode

PHASES = ("instruction", "retrieval", "tool_call", "answer")
FOLDER = Path("traces") / "lmcache_agent"
JUDGES_ONE_IN = 2
_CALL = re.compile(r"(```bash\n.*?(?:```|\Z))", re.DOTALL)
_TOOLS = "<instructions>"  # where the prompt begins to say what can be called, and how


@dataclass(frozen=True)
class Piece:
    """Tokens of one role and phase."""

    tokens: list[int]
    role: Role
    phase: str


@dataclass(frozen=True)
class AgentSession:
    """One session.

    Attributes:
        name: of its file.
        judges: whether it belongs to the documents that judge and never train.
        pieces: in order.
    """

    name: str
    judges: bool
    pieces: list[Piece]


def sessions(data: Path | None, encode: Encode) -> list[AgentSession]:
    """All sessions under data/traces/lmcache_agent, by name; none where there is no such folder.

    Args:
        data: folder of outside data; None = `assets.data_dir`.
        encode: text to token ids.
    """
    root = data or data_dir()
    if root is None:
        return []
    out = []
    for kind, reader in (("miniswe", _miniswe), ("taubench", _taubench)):
        for at, path in enumerate(sorted((root / FOLDER).glob(f"{kind}_*.jsonl"))):
            said = [(text, role, phase) for text, role, phase in reader(_turns(path)) if text]
            pieces = [Piece(encode(text), role, phase) for text, role, phase in said]
            out.append(AgentSession(path.stem, at % JUDGES_ONE_IN == JUDGES_ONE_IN - 1, pieces))
    return out


@dataclass(frozen=True)
class _Turn:
    given: str
    said: str


def _turns(path: Path) -> list[_Turn]:
    """In the order of time, which the file does not keep."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    lines.sort(key=lambda line: line["timestamp"])
    return [_Turn(str(line["input"]), str(line["output"])) for line in lines]


Said = Iterator[tuple[str, Role, str]]


def _miniswe(turns: Sequence[_Turn]) -> Said:
    """Task, instructions, then thought and command, and the command's result, turn by turn."""
    task, mark, tools = turns[0].given.partition(_TOOLS)
    yield task, Role.USER, "instruction"
    yield mark + tools, Role.TOOL, "instruction"
    for turn, later in zip(turns, (*turns[1:], None), strict=True):
        yield "\n\n", Role.GENERATED, "answer"
        for at, text in enumerate(_CALL.split(turn.said)):
            yield text, Role.GENERATED, "tool_call" if at % 2 else "answer"
        if later is None or not later.given.startswith(turn.given):
            return
        yield later.given[len(turn.given) :], Role.RESULT, "instruction"


def _taubench(turns: Sequence[_Turn]) -> Said:
    """Customer and agent in turn; the customer's own model is told from the agent's by the greeting it is given."""
    greeting = turns[0].given
    yield f"Assistant: {greeting}", Role.SYSTEM, "instruction"
    for turn in turns:
        if not turn.said.strip():
            continue
        if turn.given.startswith(greeting):
            yield f"\n\nUser: {turn.said}", Role.USER, "instruction"
        else:
            yield "\n\nAssistant: ", Role.GENERATED, "answer"
            is_call = turn.said.lstrip().startswith('{"name"')
            yield turn.said, Role.GENERATED, "tool_call" if is_call else "answer"
