"""Do head maps agree? `python -m testbed.heads compare A B [...] [kv_heads=8] [seed=0] [output=FILE]`.

A map is a RedKnot, DuoAttention or HeadKV file, or one measure of a head map of ours: `map.json:retrieval_score`, with
a minus where high means local (`map.json:-head_local_ratio`), `map.json:retrieval_score@code` for one on other text.
Higher always means that the head needs more of the context; RedKnot's classes count local 0, retrieval .5, global 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TextIO

from rich.console import Console

from testbed.commands import check_output
from testbed.heads.agreement import LEVEL, SHARES, Agreement, AgreementError, Overlap, agreement
from testbed.heads.formats import load
from testbed.heads.headmap import HeadMap
from testbed.heads.imported import FormatError, ImportedMap
from testbed.heads.kept import kept
from testbed.heads.words import Words, whole
from testbed.results.display import Sheet
from testbed.results.record import write_atomically
from testbed.results.table import PLAIN_WIDTH, sheet_table

PERMUTATIONS_PER_PAIR = 40  # the smallest p must lie below the level shared by all pairs
LEAST_PERMUTATIONS = 1999


@dataclass(frozen=True)
class Compared:
    """Maps and what each two of them have in common.

    Attributes:
        maps: in the order they were named, all of one shape.
        pairs: (i, j), i <= j -> agreement; (i, i) is the map against itself with its ties drawn anew.
        notes: what must be said beside.
    """

    maps: tuple[ImportedMap, ...]
    pairs: Mapping[tuple[int, int], Agreement]
    notes: tuple[str, ...]

    @property
    def comparisons(self) -> int:
        """Pairs of different maps."""
        return len(self.maps) * (len(self.maps) - 1) // 2

    def between(self, i: int, j: int) -> Agreement:
        """Of two maps in any order."""
        return self.pairs[min(i, j), max(i, j)]


def compare(words: Sequence[str], kv_heads: int | None = None, seed: int = 0) -> Compared:
    """Reads maps and compares each with each.

    Args:
        words: see the module.
        kv_heads: KV heads of maps that score query heads; None takes those of the other maps.
        seed: of permutations and ties.

    Raises:
        FormatError: a file that is no map, or a measure that it has not.
        AgreementError: fewer than two maps, or maps of another shape.
    """
    if len(words) < 2:
        raise AgreementError("compare needs two maps at least: python -m testbed.heads compare A B")
    maps = _aligned([labelled(load(word)) for word in words], kv_heads)
    pairs = list(combinations(range(len(maps)), 2))
    permutations = max(LEAST_PERMUTATIONS, PERMUTATIONS_PER_PAIR * len(pairs))
    found: dict[tuple[int, int], Agreement] = {}
    for i, j in (*((at, at) for at in range(len(maps))), *pairs):
        found[i, j] = agreement(maps[i].score, maps[j].score, SHARES, seed, 1 if i == j else permutations)
    return Compared(tuple(maps), found, tuple(_notes(maps, found)))


def labelled(imported: ImportedMap) -> ImportedMap:
    """The map with what its verdicts say: a measure whose classifier was tried and did not beat chance carries that."""
    head_map = imported.document
    if not isinstance(head_map, HeadMap):
        return imported
    measure = imported.name.partition(":")[2].removeprefix("-").partition("@")[0]
    caveats = [
        f"classifier {name} on it is not better than random: {verdict.get('why', 'no reason kept')}"
        for name, verdict in {**kept(head_map.fingerprint), **head_map.verdicts}.items()
        if not verdict.get("beats_random", True) and measure in _read_by(name, verdict)
    ]
    return replace(imported, caveat="; ".join(caveats))


def _read_by(classifier: str, verdict: Mapping[str, Any]) -> list[str]:
    """Measures that the judged classifier reads, from the identity kept with the verdict."""
    identity = str(verdict.get("identity", f"({classifier})"))
    return identity.rpartition("(")[2].rstrip(")").split(", ")


def _aligned(maps: Sequence[ImportedMap], kv_heads: int | None) -> list[ImportedMap]:
    """Maps with a column per KV head; all per query head where nothing else is known."""
    known = {each.shape[1] for each in maps if not each.per_query}
    if kv_heads is None and len(known) == 1:
        kv_heads = known.pop()
    if kv_heads is not None:
        maps = [each.per_kv_head(kv_heads) for each in maps]
    shapes = {each.shape for each in maps}
    if len(shapes) > 1:
        said = "; ".join(f"{each.name}: {each.shape[0]} layers x {each.shape[1]} heads" for each in maps)
        raise AgreementError(f"maps of different models can't be compared: {said}")
    return list(maps)


def _notes(maps: Sequence[ImportedMap], pairs: Mapping[tuple[int, int], Agreement]) -> list[str]:
    notes = [f"{each.name}: {each.caveat}" for each in maps if each.caveat]
    for at, each in enumerate(maps):
        tied = [f"{one.ties[0]} at the top {one.share:.0%}" for one in pairs[at, at].overlaps if one.ties[0]]
        if tied:
            notes.append(f"{each.name}: heads of the value at the cut, lots decide between them: {', '.join(tied)}")
    prints = {each.document.fingerprint for each in maps if isinstance(each.document, HeadMap)}
    if len(prints) > 1:
        notes.append("these are maps of different weights: what differs may be the model")
    if any(each.per_query for each in maps):
        notes.append("compared per query head; kv_heads=N compares KV heads (the maximum of each group)")
    return notes


def sheets(compared: Compared) -> list[Sheet]:
    """A matrix of rank correlations and one of overlaps for each share."""
    names = _short_names(compared.maps)
    columns = ["", *(f"[{at + 1}]" for at in range(len(names)))]
    first = [f"[{at + 1}] {name}" for at, name in enumerate(names)]
    everyone = range(len(names))
    rows = [(first[i], *("1" if i == j else _correlation(compared, i, j) for j in everyone)) for i in everyone]
    out = [Sheet("Spearman, all heads (of layers; inside layers), * beyond chance", columns, rows)]
    for at, share in enumerate(SHARES):
        chance = compared.pairs[0, 0].overlaps[at]
        title = (
            f"Jaccard of the top {share:.0%} ({chance.heads} heads), low to high as ties fall; "
            f"chance {two_digits(chance.chance)}, up to {two_digits(chance.chance_high)}; diagonal: ties drawn anew"
        )
        rows = [(first[i], *(_overlap(compared.between(i, j).overlaps[at]) for j in everyone)) for i in everyone]
        out.append(Sheet(title, columns, rows))
    return out


def lines(compared: Compared) -> list[str]:
    """One sentence for each pair."""
    names = _short_names(compared.maps)
    count = compared.comparisons
    return [
        f"{names[i]} and {names[j]}: {compared.between(i, j).verdict(count)} "
        f"(Spearman {two_digits(compared.between(i, j).spearman.value)})"
        for i, j in combinations(range(len(names)), 2)
    ]


def _correlation(compared: Compared, i: int, j: int) -> str:
    level = LEVEL / max(compared.comparisons, 1)
    found = compared.between(i, j)
    marked = [f"{two_digits(each.value)}{'*' if each.p <= level else ''}" for each in
              (found.spearman, found.between, found.within)]  # fmt: skip
    return f"{marked[0]} ({marked[1]}; {marked[2]})"


def _overlap(overlap: Overlap) -> str:
    spread = "" if overlap.low == overlap.high else f" ({two_digits(overlap.low)} to {two_digits(overlap.high)})"
    return f"{two_digits(overlap.jaccard)}{spread}"


def two_digits(value: float) -> str:
    """Two digits and no leading zero, as correlations are written."""
    text = f"{value:.2f}".replace("-0.00", "0.00")
    return text.replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.0f}"


def _short_names(maps: Sequence[ImportedMap]) -> list[str]:
    return [f"{each.name} (not better than random)" if each.caveat else each.name for each in maps]


def plain(compared: Compared) -> dict[str, Any]:
    """The same as JSON values."""
    names = [each.name for each in compared.maps]
    rows = []
    for (i, j), found in compared.pairs.items():
        row: dict[str, Any] = {"a": names[i], "b": names[j], "heads": found.heads}
        if i != j:
            for key in ("spearman", "between", "within"):
                row[key] = vars(getattr(found, key))
            row["verdict"] = found.verdict(compared.comparisons)
        row["overlaps"] = [vars(overlap) for overlap in found.overlaps]
        rows.append(row)
    return {"maps": names, "pairs": rows, "notes": list(compared.notes)}


def show(compared: Compared, file: TextIO) -> None:
    """Prints matrices, words and notes."""
    console = Console(file=file, width=None if file.isatty() else PLAIN_WIDTH, highlight=False)
    for sheet in sheets(compared):
        console.print(sheet_table(sheet))
    for line in lines(compared):
        console.print(line, markup=False)
    for line in compared.notes:
        console.print(f"note: {line}", style="yellow", markup=False)


def main(args: list[str]) -> None:
    """The command."""
    words = Words.of(args, {"kv_heads": whole(1), "seed": whole(0), "output": str}, FormatError)
    output = check_output("output", words.get("output"))
    compared = compare(words.plain, words.get("kv_heads"), words.get("seed", 0))
    show(compared, sys.stdout)
    if output is not None:
        write_atomically(output, json.dumps(plain(compared), indent=1) + "\n")
        print(f"numbers: {output}")
