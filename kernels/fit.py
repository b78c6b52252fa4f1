"""Fits the scheduler's cost model to this machine and tells what its choices cost.

    python -m kernels.fit                # measures the grid (about a minute), fits, prints the regret, keeps the model

Two thirds of the grid are fitted, the last third judges: regret = time of the variant chosen / time of the fastest,
both measured in the same rounds. The model kept is then fitted to all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels.api import Options, PageTable, Pool, choose_backend
from kernels.cost import FEATURES, CostModel, Load, Variant, all_variants, features, local_path, run, split_by_kind
from kernels.pages import encode, page_format

SHAPES = ((3, 3, 64), (8, 4, 128))  # streams, group, head size: SmolLM2-135M, Llama-3.1-8B
LENGTHS = (128, 1024, 8192)
MIXES = {
    "bf16": {"bf16": 1.0},
    "int8": {"int8": 1.0},
    "int4": {"int4": 1.0},
    "redknot": {"bf16": 0.1, "int8": 0.5, "int4": 0.4},
    "elastic": {"bf16": 0.25, "proto": 0.75},
}
QUERY_TOKENS = (1, 16)
COPIES = 4  # sets of pages that take turns, so that little of one is still in the cache
LIMIT = 1.10
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One load of the grid with what it takes to run it; `tables` hold disjoint pages."""

    name: str
    q: Tensor
    tables: tuple[PageTable, ...]
    pools: tuple[Pool, ...]
    first_position: Tensor
    load: Load


def grid(half: bool) -> list[Case]:
    """All loads: shapes x lengths x mixes x query tokens, half of them ragged."""
    cases = []
    for shape in SHAPES:
        for length in LENGTHS:
            for mix in MIXES:
                for tokens in QUERY_TOKENS:
                    ragged = len(cases) // 3 % 2 == 1  # in step with no other axis
                    cases.append(make_case(shape, length, mix, tokens, ragged, half))
    return cases


def make_case(shape: tuple[int, int, int], length: int, mix: str, tokens: int, ragged: bool, half: bool) -> Case:
    """One load; ragged: a quarter of the streams (at least one) twice as long, the others short."""
    streams, group, head_dim = shape
    lengths = [length] * streams
    if ragged:
        long = max(1, streams // 4)
        lengths = [2 * length if s < long else max(64, length // 4) for s in range(streams)]
    rng = torch.Generator().manual_seed(length + tokens)
    pages = [n // 16 for n in lengths]
    names = list(MIXES[mix])
    kinds = torch.tensor(list(MIXES[mix].values())).multinomial(COPIES * sum(pages), replacement=True, generator=rng)
    pools = tuple(_pool(name, int((kinds == i).sum()), head_dim) for i, name in enumerate(names))
    slot = torch.zeros_like(kinds, dtype=torch.int32)
    for i in range(len(names)):
        slot[kinds == i] = torch.randperm(int((kinds == i).sum()), generator=rng).int()
    width = max(pages)
    tables = []
    for c in range(COPIES):
        columns = [torch.zeros(streams, width, dtype=t) for t in (torch.int8, torch.int32)]
        at = c * sum(pages)
        for s, count in enumerate(pages):
            columns[0][s, :count], columns[1][s, :count] = kinds[at : at + count].to(torch.int8), slot[at : at + count]
            at += count
        page = torch.arange(width, dtype=torch.int32).repeat(streams, 1)
        tables.append(PageTable(columns[0], columns[1], page, torch.tensor(pages, dtype=torch.int32)))
    q = torch.randn(streams, group, tokens, head_dim, generator=rng)
    q = q.bfloat16() if half else q
    first = torch.tensor(lengths, dtype=torch.int32) - tokens
    name = f"S{streams} G{group} D{head_dim} {length} {mix} T{tokens}{' ragged' if ragged else ''}"
    return Case(name, q, tuple(tables), pools, first, Load.of(q, tables[0], pools))


def _pool(name: str, pages: int, head_dim: int) -> Pool:
    """A pool of random pages; a few are encoded and repeated, since what they hold costs no time."""
    fmt = page_format(name, 16, head_dim)
    some = min(max(pages, 1), 256)
    k, v = torch.randn(2, some, 16, head_dim, generator=torch.Generator().manual_seed(some))
    return Pool(fmt, (encode(fmt, k, v).repeat(-(-max(pages, 1) // some), 1)[: max(pages, 1)].contiguous(),))


def measure(case: Case, variants: Sequence[Variant], least_s: float = 0.03) -> list[float]:
    """Microseconds of each variant: the shortest of many rounds in which all take turns."""
    options = Options(scale=case.q.shape[3] ** -0.5)
    splits = [split_by_kind(table, case.pools) for table in case.tables]
    best = [float("inf")] * len(variants)
    turn, started = 0, time.perf_counter()
    while turn < 3 * COPIES or (turn < 100 and time.perf_counter() - started < least_s * len(variants)):
        c = turn % COPIES
        for i, variant in enumerate(variants):
            began = time.perf_counter()
            run(variant, case.q, case.tables[c], case.pools, case.first_position, options, splits[c])
            best[i] = min(best[i], 1e6 * (time.perf_counter() - began))
        turn += 1
    return best


def fit(loads: Sequence[Load], variants: Sequence[Variant], times_us: Sequence[Sequence[float]]) -> CostModel:
    """Non-negative least squares of the relative error, one problem a kernel.

    Args:
        loads: what was run.
        variants: how.
        times_us: [loads][variants].
    """
    from scipy.optimize import nnls

    coefficients = {}
    for kernel in dict.fromkeys(v.kernel for v in variants):
        rows, ones = [], []
        for load, times in zip(loads, times_us, strict=True):
            for variant, time_us in zip(variants, times, strict=True):
                if variant.kernel == kernel:
                    rows.append(np.array(features(load, variant)) / time_us)
                    ones.append(1.0)
        matrix = np.array(rows)
        size = np.abs(matrix).max(0).clip(1e-30)  # features differ by many orders of magnitude
        coefficients[kernel] = tuple(float(x) for x in nnls(matrix / size, np.array(ones))[0] / size)
    return CostModel(coefficients)


@dataclass(frozen=True)
class Regret:
    """What the model's choice cost on one load."""

    name: str
    chosen: str
    best: str
    chosen_us: float
    best_us: float

    @property
    def ratio(self) -> float:
        """Time of the choice over time of the fastest."""
        return self.chosen_us / self.best_us


def regrets(
    model: CostModel, cases: Sequence[Case], variants: Sequence[Variant], times_us: Sequence[Sequence[float]]
) -> list[Regret]:
    """The choice for each load beside the fastest."""
    out = []
    for case, times in zip(cases, times_us, strict=True):
        chosen = model.choose(case.load, variants)
        i, best = list(variants).index(chosen), min(range(len(variants)), key=times.__getitem__)
        out.append(Regret(case.name, chosen.describe(), variants[best].describe(), times[i], times[best]))
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, fits, judges, keeps."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.fit", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="most threads a variant may use")
    parser.add_argument("--out", type=Path, help="where the model goes; by default this machine's place in the cache")
    parser.add_argument("--record", type=Path, help="a JSON file for every time measured")
    given = parser.parse_args(arguments)
    if given.threads < 1:
        parser.error(f"--threads {given.threads}: must be at least 1")
    torch.set_num_threads(given.threads)
    backend, cases, times, variants = choose_backend(), [], [], []
    for half in (True, False):
        mine = all_variants(backend, given.threads, half)
        variants.append(mine)
        cases.append(grid(half))
        times.append([])
        for n, case in enumerate(cases[-1]):
            if n % 10 == 0:
                print(f"{'half' if half else 'float32'} queries: load {n + 1} of {len(cases[-1])}", flush=True)
            times[-1].append(measure(case, mine))
    held_out, all_fitted, found = [], CostModel({}), []
    for mine, some, took in zip(variants, cases, times, strict=True):
        loads = [case.load for case in some]
        trained = fit(_kept(loads), mine, _kept(took))
        held_out += regrets(trained, some[::3], mine, took[::3])
        whole = fit(loads, mine, took)
        found += regrets(whole, some, mine, took)
        all_fitted = replace(all_fitted, coefficients={**whole.coefficients, **all_fitted.coefficients})
    for title, part in (("loads held out of the fit", held_out), ("all loads, fitted to all", found)):
        _report(title, part)
    source = {"machine": platform.processor() or platform.machine(), "threads": given.threads, "backend": backend}
    source |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "load": os.getloadavg()[0]}
    out = given.out or local_path()
    replace(all_fitted, source=source).write(out)
    print(f"model: {out}")
    if given.record:
        rows = [vars(r) | {"ratio": r.ratio} for r in held_out]
        given.record.write_text(json.dumps({"source": source, "features": FEATURES, "held_out": rows}, indent=1))
    return 0


def _kept(values: Sequence[T]) -> list[T]:
    """What is fitted: two of three; the third judges."""
    return [value for i, value in enumerate(values) if i % 3]


def _report(title: str, found: Sequence[Regret]) -> None:
    ratios = np.array([r.ratio for r in found])
    within = float((ratios <= LIMIT).mean())
    print(
        f"{title}: choice / fastest: mean {ratios.mean():.3f}, 95th percentile {np.quantile(ratios, 0.95):.3f}, worst "
        f"{ratios.max():.3f}; within {LIMIT:.2f}: {within:.0%} of {len(found)}"
    )
    for r in sorted(found, key=lambda r: -r.ratio)[:5]:
        print(f"  {r.ratio:.2f}  {r.name}: {r.chosen} {r.chosen_us:.0f} us, fastest {r.best} {r.best_us:.0f} us")


if __name__ == "__main__":
    raise SystemExit(main())
