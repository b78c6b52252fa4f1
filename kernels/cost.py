"""The elastic scheduler: which variant of the attention kernel runs a call, from what its pages are.

A step may hold many exact, quantised or approximate pages, one long stream or many short ones, one query row or a
hundred. What is fastest then (arithmetic, threads, how work is cut, one launch or one a kind) is predicted by a cost
model that is linear in a few counts, one set of coefficients a kernel, fitted to times measured on the machine:

    time_us = c . features(load, variant)          python -m kernels.fit      measures, fits, tells the regret

Choices differ in time, never in meaning; `safe_variants` differ in no bit of the result either.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.api import BACKENDS, Options, PageTable, Pool, Schedule, attend_with
from kernels.guards import check_int, check_real
from kernels.state import Partial, merge

KINDS: tuple[str, ...] = ("float", "int8", "int4", "proto")
ROW_BLOCK = 6  # rows the native kernel takes in one pass over a page
DEFAULTS = Path(__file__).with_name("costs.json")
FEATURES = ("launch", "wake", "items", *(f"{kind}_{what}" for kind in KINDS for what in ("read", "multiply")))


@dataclass(frozen=True)
class Load:
    """What one attend call has to do.

    Attributes:
        streams, rows, head_dim, page_tokens: S, G * T, D, P.
        half: whether queries are bf16 or fp16.
        pages: kind -> entries of all streams; "float" are fp32, bf16 and fp16 pages.
        page_bytes: kind -> bytes of one such page.
        longest_pages: entries of the longest stream.
    """

    streams: int
    rows: int
    head_dim: int
    page_tokens: int
    half: bool
    pages: Mapping[str, int]
    page_bytes: Mapping[str, int]
    longest_pages: int

    @staticmethod
    def of(q: Tensor, table: PageTable, pools: Sequence[Pool]) -> Load:
        """Counts a call; waits for the device, so it belongs to planning, not to the step."""
        kind_of = torch.tensor([_kind(pool) for pool in pools] or [0], device=table.pool.device)
        inside = table.listed()
        kinds = kind_of[torch.where(inside, table.pool, 0).long()]
        counts = torch.bincount(kinds[inside], minlength=len(KINDS)).tolist()
        page_bytes = {KINDS[_kind(pool)]: pool.fmt.page_bytes for pool in pools}
        longest = int(table.count.max()) if len(table.count) else 0
        pages = dict(zip(KINDS, counts, strict=True))
        half = q.dtype != torch.float32
        tokens = pools[0].fmt.page_tokens if pools else 16
        return Load(q.shape[0], q.shape[1] * q.shape[2], q.shape[3], tokens, half, pages, page_bytes, longest)


def _kind(pool: Pool) -> int:
    return KINDS.index("float" if pool.fmt.is_float else pool.fmt.name)


@dataclass(frozen=True)
class Variant:
    """One way to run a call.

    Attributes:
        backend: "cpu", "triton" or "torch".
        schedule: how it is cut; `threads` is never 0 here.
        fused: all kinds of pages in one launch; else approximate entries in a second one, merged.
    """

    backend: str
    schedule: Schedule
    fused: bool = True

    @property
    def kernel(self) -> str:
        """What its coefficients are kept under."""
        s = self.schedule
        tile = f"-b{s.block_tokens}w{s.num_warps}s{s.num_stages}" if self.backend == "triton" else ""
        return f"{self.backend}-{s.arithmetic}{tile}" + ("" if self.fused else "-unfused")

    def describe(self) -> str:
        """One word for records: kernel, threads, how work is cut."""
        s = self.schedule
        return f"{self.kernel} threads={s.threads} split={s.split_tokens}x{s.item_splits}"


def features(load: Load, variant: Variant) -> list[float]:
    """The counts a variant's time is linear in, in the order of `FEATURES`.

    Work is charged at the share of it that the busiest of the threads does: total / threads where it can be dealt out
    evenly, the largest item where it can't.
    """
    schedule = variant.schedule
    item_pages = max(1, schedule.split_tokens * schedule.item_splits // load.page_tokens)
    row_blocks = -(-load.rows // ROW_BLOCK)
    total = max(1, sum(load.pages.values()))
    largest = min(load.longest_pages, item_pages) / (total * row_blocks)
    share = max(1 / schedule.threads, largest)
    items = max(load.streams, -(-total // item_pages)) * row_blocks
    out = [1.0 if variant.fused else 2.0, float(schedule.threads > 1), items * share]
    for kind in KINDS:
        pages = load.pages.get(kind, 0)
        rows_a_page = 1 if kind == "proto" else load.page_tokens
        out.append(pages * load.page_bytes.get(kind, 0) * row_blocks * share)
        out.append(pages * rows_a_page * load.head_dim * load.rows * share)
    return out


@dataclass(frozen=True)
class CostModel:
    """Coefficients in microseconds per feature, by `Variant.kernel`.

    Attributes:
        coefficients: kernel -> one number per name of `FEATURES`.
        source: where they come from: machine, date.
    """

    coefficients: Mapping[str, Sequence[float]]
    source: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses coefficients of another set of features."""
        for name, values in self.coefficients.items():
            if len(values) != len(FEATURES):
                raise ValueError(f"coefficients of {name!r}: must be {len(FEATURES)} numbers, are {len(values)}")
            for feature, value in zip(FEATURES, values, strict=True):
                check_real(f"coefficients of {name!r}: {feature}", value)

    def predict_us(self, load: Load, variant: Variant) -> float:
        """Predicted time.

        Raises:
            KeyError: no coefficients for the variant's kernel.
        """
        return sum(c * x for c, x in zip(self.coefficients[variant.kernel], features(load, variant), strict=True))

    def choose(self, load: Load, variants: Iterable[Variant]) -> Variant:
        """The variant predicted fastest; ties and kernels without coefficients go to the earlier one.

        Raises:
            ValueError: no variant at all.
        """
        ranked = list(variants)
        if not ranked:
            raise ValueError("choose among 0 variants: must be at least 1")
        known = [v for v in ranked if v.kernel in self.coefficients]
        return min(known, key=lambda v: self.predict_us(load, v)) if known else ranked[0]

    @staticmethod
    def read(path: Path = DEFAULTS) -> CostModel:
        """From a file written by `write`."""
        body = json.loads(path.read_text())
        return CostModel({k: tuple(v) for k, v in body["coefficients"].items()}, body["source"])

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rounded = {k: [float(f"{x:.4g}") for x in v] for k, v in self.coefficients.items()}
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps({"features": FEATURES, "coefficients": rounded, "source": self.source}, indent=1))
        aside.replace(path)


def safe_variants(backend: str, threads: int, half: bool = False) -> list[Variant]:
    """Variants that agree in every bit: threads and how many splits one takes at a time; the safest guess first.

    With `half` (queries of 16 bits) all take the arithmetic that "auto" stands for then.

    Raises:
        ValueError: an unknown backend, threads < 1.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}")
    check_int("threads", threads, 1)
    counts = (threads, 1) if threads > 1 and backend == "cpu" else (threads,)
    takes = (1, 4) if backend == "cpu" else (1,)
    name = "half" if half else "float32"
    cuts = [(n, k) for n in counts for k in takes if n > 1 or k == 1]
    return [Variant(backend, Schedule(name, threads=n, item_splits=k)) for n, k in cuts]


def all_variants(backend: str, threads: int, half: bool) -> list[Variant]:
    """Every variant within the error bounds of the queries' dtype."""
    cuts = [each for wide in sorted({False, half}) for each in safe_variants(backend, threads, wide)]
    return [replace(each, fused=fused) for each in cuts for fused in (True, False)]


@cache
def local_model() -> CostModel:
    """The coefficients fitted on this machine (`python -m kernels.fit`), else those that come with the package."""
    path = local_path()
    return CostModel.read(path if path.exists() else DEFAULTS)


def local_path() -> Path:
    """Where `python -m kernels.fit` keeps what it found for this CPU."""
    from kernels.cpu.build import cache_folder, cpu_features

    digest = hashlib.sha256(cpu_features().encode()).hexdigest()[:12]
    return cache_folder().parent / "kernels" / f"costs-{digest}.json"


def run(
    variant: Variant,
    q: Tensor,
    table: PageTable,
    pools: Sequence[Pool],
    first_position: Tensor,
    options: Options,
    parts: Sequence[PageTable] | None = None,
) -> Partial:
    """`kernels.api.attend` as the variant says.

    Args:
        variant: what was chosen.
        q: as there.
        table: as there.
        pools: as there.
        first_position: as there.
        options: as there; its schedule is the variant's.
        parts: what `split_by_kind` gave for the table, to be reused between calls that are not fused.

    Raises:
        ValueError: page mass is wanted of a call that is not fused; it is a mean over rows, which two launches weigh
            differently.
    """
    if options.want_mass and not variant.fused:
        raise ValueError("variant.fused=False: must be True where page mass is wanted")
    tables = [table] if variant.fused else split_by_kind(table, pools) if parts is None else parts
    options = replace(options, schedule=variant.schedule)
    done = [attend_with(options, q, part, pools, first_position, variant.backend) for part in tables]
    return done[0] if len(done) == 1 else merge(done)  # a merge would drop the mass


def split_by_kind(table: PageTable, pools: Sequence[Pool]) -> tuple[PageTable, PageTable]:
    """The table's entries of tokens, and those of prototypes; belongs to planning."""
    proto = torch.tensor([pool.fmt.name == "proto" for pool in pools] or [False], device=table.pool.device)
    inside = table.listed()
    approximate = proto[torch.where(inside, table.pool, 0).long()] & inside
    return _only(table, inside & ~approximate), _only(table, approximate)


def _only(table: PageTable, wanted: Tensor) -> PageTable:
    """The entries wanted [S, N] bool, compact from the left in their order."""
    count = wanted.sum(1, dtype=torch.int32)
    order = (~wanted).to(torch.int8).argsort(dim=1, stable=True)[:, : int(count.max()) if len(count) else 0]
    pool, slot, page = (x.gather(1, order) for x in (table.pool, table.slot, table.page))
    return PageTable(pool, slot, page, count)
