"""The published head maps, checked: `python -m testbed.heads published [DATA] [output=FILE] [seed=0]`.

Section 1.3 E of the notes on the field, figure by figure, from the files in `headmaps/` of the data folder
($TESTBED_DATA, or `shared/data` beside the repository): do the maps of DuoAttention agree with each other, with
themselves once ties are drawn anew, with those of RedKnot; what do the maps of RedKnot consist of. The files of HeadKV
are not among the data; put into `headmaps/headkv/` under their own names, their figures are checked too.

RedKnot's classes are compared as scores: local 0, retrieval .5, global 1; that encoding gives the published -.09.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from policies.plan import Head
from testbed.assets import data_dir
from testbed.commands import check_output
from testbed.heads.agreement import SHARES, Agreement, agreement, chance_overlap
from testbed.heads.formats import read
from testbed.heads.imported import FormatError, ImportedMap
from testbed.heads.words import Words, whole
from testbed.results.display import Sheet
from testbed.results.record import write_atomically
from testbed.results.table import PLAIN_WIDTH, sheet_table

FOLDER = "headmaps"

DUO_V2, DUO_V3 = "duoattention/Mistral-7B-Instruct-v0.2.tsv", "duoattention/Mistral-7B-Instruct-v0.3.tsv"
DUO_L3 = "duoattention/Llama-3-8B-Instruct-Gradient-1048k.tsv"
DUO_L31 = "duoattention/Meta-Llama-3.1-8B-Instruct.tsv"
RED_MISTRAL = "redknot/mistral-7B_optimal_g15_lf_ret.json"
RED_PARITY = "redknot/mistral-7B_parity_98local_w3000.json"
RED_LLAMA = "redknot/llama-70B_optimal_g15_lf_ret.json"
RED_QWEN = "redknot/qwen3-32B_optimal_g15_lf_ret.json"
KV_MISTRAL = "headkv/Mistral-7B-Instruct-v0.2_retrieval_heads.json"
KV_MISTRAL_R = "headkv/Mistral-7B-Instruct-v0.2_retrieval_reasoning_heads.json"
KV_LLAMA = "headkv/Meta-Llama-3-8B-Instruct_retrieval_heads.json"
KV_LLAMA_R = "headkv/Meta-Llama-3-8B-Instruct_retrieval_reasoning_heads.json"
KV_HEADS = 8  # of both models that HeadKV scored


@dataclass(frozen=True)
class Pair:
    """Two published maps and what was published of them; None where nothing was."""

    title: str
    a: str
    b: str
    spearman: float | None
    jaccard: tuple[float, ...] = ()


PAIRS = (
    Pair("DuoAttention: Mistral v0.2, v0.3", DUO_V2, DUO_V3, 0.75, (0.16, 0.30, 0.73)),
    Pair("DuoAttention: Llama-3-8B-1048k, Llama-3.1-8B", DUO_L3, DUO_L31, 0.67),
    Pair("DuoAttention Mistral v0.2, itself with ties drawn anew", DUO_V2, DUO_V2, 1.0, (0.21, 0.41, 0.97)),
    Pair("DuoAttention Llama-3.1-8B, itself with ties drawn anew", DUO_L31, DUO_L31, 1.0, (0.51, 0.95, 1.0)),
    Pair("RedKnot Mistral (v0.3), DuoAttention (v0.2)", RED_MISTRAL, DUO_V2, -0.09),
    Pair("RedKnot Mistral (v0.3), HeadKV reasoning (v0.2)", RED_MISTRAL, KV_MISTRAL_R, -0.00),
    Pair("HeadKV Mistral: retrieval, retrieval-reasoning", KV_MISTRAL, KV_MISTRAL_R, 0.89, (0.33, 0.66, 0.87)),
    Pair("HeadKV Llama-3: retrieval, retrieval-reasoning", KV_LLAMA, KV_LLAMA_R, 0.88),
    Pair("DuoAttention, HeadKV reasoning: Mistral v0.2", DUO_V2, KV_MISTRAL_R, 0.54, (0.14, 0.26, 0.56)),
    Pair("DuoAttention, HeadKV reasoning: Llama-3-8B", DUO_L3, KV_LLAMA_R, 0.54, (0.16, 0.25, 0.63)),
)


class PublishedError(ValueError):
    """The published maps are not where they should be."""


@dataclass(frozen=True)
class Figure:
    """A published number and ours.

    Attributes:
        name: what it is about.
        published: as published, two digits.
        ours: from the files; None where a file is not here.
        absent: that file, or "".
    """

    name: str
    published: float
    ours: float | None
    absent: str = ""

    @property
    def difference(self) -> float | None:
        """Ours less the published one."""
        return None if self.ours is None else self.ours - self.published


@dataclass(frozen=True)
class Published:
    """The folder of published maps.

    Attributes:
        folder: `headmaps` of the data.
        seed: of permutations and ties.
    """

    folder: Path
    seed: int = 0

    def map(self, name: str) -> ImportedMap:
        """The map in that file, a column per KV head."""
        return read(self.folder / name).per_kv_head(KV_HEADS)

    def has(self, name: str) -> bool:
        """Whether the file is here."""
        return (self.folder / name).is_file()

    def agreement(self, pair: Pair) -> Agreement | None:
        """What the pair has in common, or None where a file is not here."""
        if not (self.has(pair.a) and self.has(pair.b)):
            return None
        return agreement(self.map(pair.a).score, self.map(pair.b).score, SHARES, self.seed)

    @cached_property
    def agreements(self) -> Mapping[str, Agreement | None]:
        """Title of each pair -> what it has in common."""
        return {pair.title: self.agreement(pair) for pair in PAIRS}

    def figures(self) -> list[Figure]:
        """Every published number beside ours."""
        return [*self._of_chance(), *self._of_pairs(), *self._of_ties(), *self._of_classes()]

    def _of_chance(self) -> list[Figure]:
        means = [chance_overlap(256, round(share * 256))[0] for share in SHARES]
        return [
            Figure(f"chance: Jaccard of the top {share:.0%} of 256", value, mean)
            for share, value, mean in zip(SHARES, (0.08, 0.14, 0.33), means, strict=True)
        ]

    def _of_pairs(self) -> list[Figure]:
        out = []
        for pair in PAIRS:
            found = self.agreements[pair.title]
            absent = "" if found else next(name for name in (pair.a, pair.b) if not self.has(name))
            if pair.spearman is not None:
                ours = found.spearman.value if found else None
                out.append(Figure(f"{pair.title}: Spearman", pair.spearman, ours, absent))
            for at, value in enumerate(pair.jaccard):
                ours = found.overlaps[at].jaccard if found else None
                out.append(Figure(f"{pair.title}: Jaccard {SHARES[at]:.0%}", value, ours, absent))
        return out

    def _of_ties(self) -> list[Figure]:
        return [
            self._count(f"DuoAttention {model}: gates of exactly 1", file, value, lambda each: each.score == 1)
            for model, file, value in (("Mistral v0.2", DUO_V2, 110), ("Llama-3.1-8B", DUO_L31, 57))
        ]

    def _of_classes(self) -> list[Figure]:
        """What RedKnot's maps consist of; the Mistral map is one of layers, the parity map an arithmetic stride."""
        kinds = {"local": Head.LOCAL, "global": Head.GLOBAL, "retrieval": Head.SPECIAL}
        counts = {
            RED_LLAMA: {"local": 560, "global": 40, "retrieval": 40},
            RED_QWEN: {"local": 435, "global": 48, "retrieval": 29},
            RED_MISTRAL: {"local": 96, "global": 160},
            RED_PARITY: {"local": 251, "global": 5},
        }
        out = []
        for file, published in counts.items():
            for kind, count in published.items():
                out.append(
                    self._count(f"RedKnot {Path(file).stem}: {kind} heads", file, count, _is_class(int(kinds[kind])))
                )
        out.append(self._count("RedKnot Mistral: layers of one class only", RED_MISTRAL, 32, _uniform_layers))
        out.append(
            self._count("RedKnot Mistral parity: heads that an even stride picks too", RED_PARITY, 5, _on_stride)
        )
        return out

    def _count(self, name: str, file: str, value: int, where: Callable[[ImportedMap], torch.Tensor]) -> Figure:
        if not self.has(file):
            return Figure(name, value, None, file)
        return Figure(name, value, int(where(self.map(file)).sum()))


def _is_class(code: int) -> Callable[[ImportedMap], torch.Tensor]:
    return lambda each: each.head_classes() == code


def _uniform_layers(each: ImportedMap) -> torch.Tensor:
    """[L] bool: all heads of the layer are of one class."""
    classes = each.head_classes()
    return (classes == classes[:, :1]).all(-1)


def _on_stride(each: ImportedMap) -> torch.Tensor:
    """[L, Hk] bool: global heads that dividing all heads into as many equal parts would pick."""
    chosen = each.head_classes() == Head.GLOBAL
    heads, count = chosen.numel(), int(chosen.sum())
    picks = torch.zeros(heads, dtype=torch.bool)
    picks[[round(at * heads / count) for at in range(count)]] = True
    return chosen & picks.view(chosen.shape)


def headmaps(data: str | None = None) -> Path:
    """The folder of published maps.

    Args:
        data: the data folder; None = `assets.data_dir`.

    Raises:
        PublishedError: there is none.
    """
    root = data_dir() if data is None else Path(data).expanduser()
    if root is None or not (root / FOLDER).is_dir():
        where = "" if root is None else f" in {root / FOLDER}"
        raise PublishedError(f"no published head maps{where}; name the data folder (TESTBED_DATA)")
    return root / FOLDER


def sheet(figures: list[Figure]) -> Sheet:
    """Those that the files at hand give, as a table."""
    rows = [
        (each.name, *map(_number, (each.published, each.ours, each.difference)))
        for each in figures
        if each.ours is not None and each.difference is not None
    ]
    return Sheet("Published figures of head maps", ("figure", "published", "ours", "difference"), rows)


def missing(figures: list[Figure]) -> list[str]:
    """A line for each file that is not here, with the figures it would give."""
    names = dict.fromkeys(each.absent for each in figures if each.absent)
    return [
        f"not reproducible here, there is no {name}: "
        + "; ".join(f"{each.name} {_number(each.published)}" for each in figures if each.absent == name)
        for name in names
    ]


def remarks(published: Published) -> list[str]:
    """What the figures mean, and what was not published."""
    out = [
        f"{pair.title}: {found.verdict()}"
        for pair in PAIRS
        if pair.a != pair.b and (found := published.agreements[pair.title]) is not None
    ]
    out.append("RedKnot's classes as scores: local 0, retrieval .5, global 1")
    if published.has(RED_MISTRAL) and published.has(DUO_V3):
        found = agreement(published.map(RED_MISTRAL).score, published.map(DUO_V3).score, SHARES, published.seed)
        out.append(
            "RedKnot's Mistral map is for v0.3, so DuoAttention's map of v0.3 is the fair partner: "
            f"Spearman {found.spearman.value:.2f}; every layer is of one class, so it says nothing of a layer's heads"
        )
    if published.has(RED_QWEN):
        said = published.map(RED_QWEN).document["summary"]
        out.append(
            f"RedKnot's Qwen3 map contradicts its own summary, which counts {said['global']} global and "
            f"{said['local']} local heads"
        )
    return out


def plain(published: Published) -> dict[str, Any]:
    """The same as JSON values."""
    figures = [{**vars(each), "difference": each.difference} for each in published.figures()]
    return {"figures": figures, "remarks": remarks(published)}


def main(args: list[str]) -> None:
    """The command."""
    words = Words.of(args, {"output": str, "seed": whole(0)}, FormatError)
    if len(words.plain) > 1:
        raise PublishedError(f"published takes one data folder at most and was given {len(words.plain)}")
    output = check_output("output", words.get("output"))
    published = Published(headmaps(*words.plain), words.get("seed", 0))
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    figures = published.figures()
    console.print(sheet_table(sheet(figures)))
    for line in (*remarks(published), *missing(figures)):
        console.print(line, markup=False)
    if output is not None:
        write_atomically(output, json.dumps(plain(published), indent=1) + "\n")
        print(f"numbers: {output}")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"
