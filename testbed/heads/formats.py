"""Head maps in other people's files: RedKnot JSON, DuoAttention TSV, HeadKV JSON, and back to the byte.

* RedKnot (rednote-machine-learning/RedKnot `head_class/`): a class per KV head (`local`, `global`, `retrieval`, `dense`
  and older names of `local`), the window and the sinks of the local ones.
* DuoAttention (mit-han-lab/duo-attention `attn_patterns/`, arXiv 2410.10819): a learned gate per KV head, 1 = needs the
  whole context; one row a layer, written by numpy.savetxt.
* HeadKV (FYYFU/HeadKV `Important_Head/head_score/`, arXiv 2410.19258, after Wu et al., arXiv 2404.15574): "layer-head"
  of every QUERY head -> list of scores, in any order; the score is their mean, that of a KV head the maximum of its
  group.

A file is told by what it holds, never by its name. Written again, it has Unix line ends and no byte order mark.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from policies.plan import Head
from testbed.heads.headmap import HeadMap, HeadMapError
from testbed.heads.imported import FormatError, ImportedMap, Layout
from testbed.results.record import RecordError, write_atomically

CLASSES = {
    "local": Head.LOCAL,
    "global": Head.GLOBAL,
    "retrieval": Head.SPECIAL,
    "dense": Head.DENSE,
    # Older names, as RedKnot's head_config.py still reads them.
    "local_full": Head.LOCAL,
    "limited": Head.LOCAL,
    "streaming": Head.LOCAL,
    "sink_dominant": Head.LOCAL,
}
CLASS_SCORE = {Head.LOCAL: 0.0, Head.SPECIAL: 0.5, Head.GLOBAL: 1.0, Head.DENSE: 1.0}
"""RedKnot's classes as scores: the more of the context a head keeps, the higher."""
CLASS_NAME = {Head.LOCAL: "local", Head.GLOBAL: "global", Head.SPECIAL: "retrieval", Head.DENSE: "dense"}
REDKNOT_WINDOW_TOKENS, REDKNOT_SINK_TOKENS = 512, 4  # its defaults
_INDENTS = (2, 4, None, 1)
_USUAL = Layout()


def read(path: str | Path) -> ImportedMap:
    """A RedKnot, DuoAttention or HeadKV file.

    Raises:
        FormatError: none of them, or broken; names the file.
    """
    path, name = Path(path), str(path)
    text = _text(path)
    if not text.lstrip().startswith(("{", "[")):
        return replace(parse_duoattention(text, name), name=path.stem)
    document = _json(text, name)
    layout = _layout(document, text, name)
    if isinstance(document, dict) and "kv_head_classification" in document:
        return replace(parse_redknot(document, name, layout), name=path.stem)
    if isinstance(document, dict) and document and all(re.fullmatch(r"[0-9]{1,9}-[0-9]{1,9}", key) for key in document):
        return replace(parse_headkv(document, name, layout), name=path.stem)
    raise FormatError(
        f"{path}: no head map: neither ours (measures), nor RedKnot JSON (kv_head_classification), nor HeadKV JSON "
        "(layer-head: scores), nor DuoAttention TSV"
    )


def load(word: str, kv_heads: int | None = None, default_measure: str = "retrieval_score") -> ImportedMap:
    """A map as it is named on a command line: `file`, `file:measure` or `file:-measure`.

    Args:
        word: a measure picks one of a head map of ours; with a minus its order is turned round, for measures that are
            high where a head needs little (`-head_local_ratio`).
        kv_heads: how many KV heads the query heads of a HeadKV file make; None leaves them query heads.
        default_measure: of our maps when none is named.

    Raises:
        FormatError: no such file or measure, broken, or a map of other KV heads.
    """
    name, _, measure = (word, "", "") if Path(word).exists() else word.rpartition(":")
    path = Path(name or word)
    data = _json(text, str(path)) if (text := _text(path)).lstrip().startswith("{") else None
    ours = isinstance(data, dict) and "measures" in data
    if measure and not ours:
        raise FormatError(f"{word}: only our own head maps have measures, {path} holds one score a head")
    imported = _of_ours(path, measure or default_measure) if ours else read(path)
    return imported if kv_heads is None else imported.per_kv_head(kv_heads)


def _of_ours(path: Path, measure: str) -> ImportedMap:
    """One measure of a head map of ours."""
    try:
        head_map = HeadMap.read(path)
        measured = head_map.measure(measure.removeprefix("-"))
    except HeadMapError as error:
        raise FormatError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from error
    score = measured.value.double() * (-1 if measure.startswith("-") else 1)
    name = f"{path.stem}:{measure}"
    return ImportedMap("testbed", name, score, head_map, query_heads=head_map.query_heads)


def write(imported: ImportedMap, path: str | Path) -> None:
    """Writes the file in one step.

    Raises:
        FormatError: the file system refused; nothing half-written stays.
    """
    try:
        write_atomically(Path(path), render(imported))
    except RecordError as error:
        raise FormatError(str(error)) from error


def render(imported: ImportedMap) -> str:
    """The text of the file."""
    if imported.kind == "duoattention":
        return "".join("\t".join(f"{gate:.18e}" for gate in row) + "\n" for row in imported.document)
    return _dump(imported.document, imported.layout)


def parse_duoattention(text: str, name: str) -> ImportedMap:
    """One row of gates a layer, tabs between.

    Raises:
        FormatError: rows of different length, a single number, or something that is no number.
    """
    if not text.strip():
        raise FormatError(f"{name}: empty")
    rows: list[list[float]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            row = [float(gate) for gate in line.split()]
        except ValueError as error:
            raise FormatError(f"{name}: line {number} holds no row of gates: {error}") from error
        rows.append(row)
        if not row or len(row) != len(rows[0]):
            raise FormatError(f"{name}: line {number} has {len(row)} gates, line 1 has {len(rows[0])}")
    if len(rows) == len(rows[0]) == 1:
        raise FormatError(f"{name}: holds one number, no map of heads")
    return ImportedMap("duoattention", name, torch.tensor(rows, dtype=torch.float64), rows)


def parse_redknot(document: dict[str, Any], name: str, layout: Layout = _USUAL) -> ImportedMap:
    """Classes, windows and sinks, as RedKnot's head_config.py reads them.

    Raises:
        FormatError: a class nobody knows, tables of another shape, or numbers out of range.
    """
    layers, kv_heads = (_whole(document, key, name, 1) for key in ("num_layers", "num_kv_heads"))
    shape = (layers, kv_heads)
    names = _table(document["kv_head_classification"], "kv_head_classification", name, shape)
    for at, label in enumerate(names):
        if not isinstance(label, str) or label not in CLASSES:
            where = f"layer {at // kv_heads}, head {at % kv_heads}"
            raise FormatError(f"{name}: {where} is of class {label!r}; known: {', '.join(CLASSES)}")
    classes = torch.tensor([int(CLASSES[label]) for label in names], dtype=torch.int8).view(shape)
    dense = _whole(document, "dense_prefix_layers", name, 0) if "dense_prefix_layers" in document else 0
    classes[:dense] = int(Head.DENSE)
    score = torch.zeros(shape, dtype=torch.float64)
    for head, value in CLASS_SCORE.items():
        score[classes == head] = value
    window = _numbers(document, "kv_head_max_distance", name, shape, least=-1)
    if window is not None:
        window = torch.where(window > 0, window, torch.full_like(window, REDKNOT_WINDOW_TOKENS))
        window[classes != Head.LOCAL] = 0
    sink = _numbers(document, "kv_head_sink_size", name, shape, least=0)
    queries = _whole(document, "num_q_heads", name, 1) if "num_q_heads" in document else None
    return ImportedMap("redknot", name, score, document, layout, classes, window, sink, query_heads=queries)


def parse_headkv(document: dict[str, Any], name: str, layout: Layout = _USUAL) -> ImportedMap:
    """Mean score of every query head.

    Raises:
        FormatError: heads missing or named twice, or something that is no list of numbers.
    """
    score: dict[tuple[int, int], float] = {}
    for key, samples in document.items():
        layer, head = (int(part) for part in key.split("-"))
        if not isinstance(samples, list) or not samples or not all(map(_is_number, samples)):
            raise FormatError(f"{name}: {key} holds {str(samples)[:40]}, must be a list of numbers")
        if (layer, head) in score:
            raise FormatError(f"{name}: {key} names layer {layer}, head {head} a second time")
        try:
            score[layer, head] = math.fsum(samples) / len(samples)
        except OverflowError as error:
            raise FormatError(f"{name}: {key} holds numbers too large to add up") from error
    layers, heads = (1 + max(key[axis] for key in score) for axis in (0, 1))
    if len(score) != layers * heads:
        absent = next((x, y) for x in range(layers) for y in range(heads) if (x, y) not in score)
        raise FormatError(f"{name}: of {layers} layers x {heads} query heads, {absent[0]}-{absent[1]} is missing")
    table = torch.tensor([[score[x, y] for y in range(heads)] for x in range(layers)], dtype=torch.float64)
    return ImportedMap("headkv", name, table, document, layout, per_query=True, query_heads=heads)


def to_duoattention(imported: ImportedMap) -> ImportedMap:
    """Scores as gates, one a KV head; a map read from such a file as it is."""
    _refuse_query_heads(imported)
    rows = imported.document if imported.kind == "duoattention" else imported.score.tolist()
    return ImportedMap("duoattention", imported.name, imported.score, rows)


def to_headkv(imported: ImportedMap, query_heads: int | None = None) -> ImportedMap:
    """Scores of query heads, that of its KV head for each of a group; a map read from such a file as it is.

    Args:
        imported: the map.
        query_heads: Hq; None takes the map's.

    Raises:
        FormatError: nobody says how many query heads there are, the map says otherwise, or they make no whole groups.
    """
    if imported.query_heads is not None and query_heads not in (None, imported.query_heads):
        raise FormatError(f"query_heads={query_heads}: {imported.name} says that there are {imported.query_heads}")
    if imported.kind == "headkv":
        return parse_headkv(imported.document, imported.name, imported.layout)
    layers, kv_heads = imported.shape
    query_heads = query_heads or imported.query_heads
    if query_heads is None:
        raise FormatError(f"{imported.name} doesn't say how many query heads there are; add query_heads=...")
    if query_heads % kv_heads:
        raise FormatError(f"query_heads={query_heads}: must be a multiple of the {kv_heads} KV heads")
    table = imported.score.repeat_interleave(query_heads // kv_heads, dim=1).tolist()
    document = {f"{layer}-{head}": [table[layer][head]] for layer in range(layers) for head in range(query_heads)}
    return parse_headkv(document, imported.name, Layout(indent=4))


def to_redknot(
    imported: ImportedMap,
    global_share: float | None = None,
    window_tokens: int | None = None,
    sink_tokens: int | None = None,
) -> ImportedMap:
    """Classes with windows and sinks; a map read from such a file as it is.

    Args:
        imported: the map.
        global_share: see `ImportedMap.head_classes`.
        window_tokens: the window of local heads; None = RedKnot's default.
        sink_tokens: the first tokens that heads keep; likewise.

    Raises:
        FormatError: see `ImportedMap.head_classes`; windows or sinks for a map that states its own.
    """
    classes = imported.head_classes(global_share)
    if imported.kind == "redknot":
        for key, value in (("window_tokens", window_tokens), ("sink_tokens", sink_tokens)):
            if value is not None:
                raise FormatError(f"{imported.name} states windows and sinks, so {key}={value} can't be followed")
        return parse_redknot(imported.document, imported.name, imported.layout)
    window_tokens = REDKNOT_WINDOW_TOKENS if window_tokens is None else window_tokens
    sink_tokens = REDKNOT_SINK_TOKENS if sink_tokens is None else sink_tokens
    layers, kv_heads = imported.shape
    local = classes == Head.LOCAL
    document: dict[str, Any] = {
        "model": imported.name,
        "window": window_tokens,
        "sink_size": sink_tokens,
        "num_layers": layers,
        "num_kv_heads": kv_heads,
        **({"num_q_heads": imported.query_heads} if imported.query_heads else {}),
        "kv_head_classification": [[CLASS_NAME[Head(code)] for code in row] for row in classes.tolist()],
        "kv_head_max_distance": torch.where(local, window_tokens, -1).tolist(),
        "kv_head_sink_size": torch.full_like(classes, sink_tokens, dtype=torch.int64).tolist(),
    }
    return parse_redknot(document, imported.name)


def _refuse_query_heads(imported: ImportedMap) -> None:
    if imported.per_query:
        raise FormatError(f"{imported.name} scores query heads; say how many KV heads there are (kv_heads=...)")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not a text file") from error
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from error


def _json(text: str, name: str) -> Any:
    """JSON without NaN, infinities or a key given twice."""

    def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in pairs:
            if key in out:
                raise FormatError(f"{name}: {key!r} is given twice")
            out[key] = value
        return out

    def refuse(constant: str) -> float:
        raise FormatError(f"{name}: holds {constant}, no number")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name}: no JSON: {error}") from error


def _dump(document: Any, layout: Layout) -> str:
    return json.dumps(document, indent=layout.indent, ensure_ascii=layout.ascii) + layout.end


def _layout(document: Any, text: str, name: str) -> Layout:
    """The layout that gives this text again; the usual one if none of them does."""
    layouts = (Layout(*each) for each in product(_INDENTS, (True, False), ("", "\n")))
    try:
        return next((layout for layout in layouts if _dump(document, layout) == text), _USUAL)
    except RecursionError as error:
        raise FormatError(f"{name}: nested too deeply") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _whole(document: dict[str, Any], key: str, name: str, least: int) -> int:
    value = document.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise FormatError(f"{name}: {key}={value!r}: must be a whole number of at least {least}")
    return value


def _table(value: Any, key: str, name: str, shape: tuple[int, int]) -> list[Any]:
    """A list of lists of that shape, flat."""
    layers, kv_heads = shape
    rows = value if isinstance(value, list) else []
    if len(rows) != layers or not all(isinstance(row, list) and len(row) == kv_heads for row in rows):
        raise FormatError(f"{name}: {key} must hold {layers} lists of {kv_heads}, as num_layers and num_kv_heads say")
    return [each for row in cast("list[list[Any]]", rows) for each in row]


def _numbers(document: dict[str, Any], key: str, name: str, shape: tuple[int, int], least: int) -> Tensor | None:
    """[L, Hk] int64, or None where the file has no such table."""
    if document.get(key) is None:
        return None
    flat = _table(document[key], key, name, shape)
    for at, value in enumerate(flat):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
            where = f"layer {at // shape[1]}, head {at % shape[1]}"
            raise FormatError(f"{name}: {key} of {where} is {value!r}, must be a whole number of at least {least}")
    return torch.tensor(flat, dtype=torch.int64).view(shape)
