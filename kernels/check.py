"""Ahead-of-time gate: compiles every Triton kernel for every target without a GPU and judges the machine code.

    python -m kernels.check [--targets sm_80,sm_90,sm_100,gfx942] [--ops attend,...] [--json FILE] [--record]

Prints a table of registers, stack, shared memory, occupancy and instruction mix. Exits with 1, and one line for each
fault, when a kernel does not compile, spills, asks for more shared memory than the target has, lacks an instruction
that its SPEC expects, has no budget, or exceeds the budget recorded in kernels/gpu/budgets.json by more than 10 %.
--record writes the budgets. They hold for the version of Triton that recorded them: another one reports them only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import kernels.gpu
from kernels.gpu import aot
from kernels.gpu.aot import GPUS, Facts
from kernels.gpu.spec import ASYNC_128, LOAD_128, TARGETS, TENSOR_CORE, Spec, Variant
from kernels.gpu.workers import Job, compile_all, specs_of

BUDGETS = Path(kernels.gpu.__file__).with_name("budgets.json")
SLACK = 1.1
# Loads that lose their width show as many narrow ones, long before the last wide one is gone.
BUDGETED = ("registers", "shared_bytes", "narrow_loads")
WORKERS = 2
# op -> variant -> target -> one of BUDGETED -> value
Budgets = dict[str, dict[str, dict[str, dict[str, int]]]]


@dataclass(frozen=True)
class Op:
    """A Spec and the module it was found in."""

    module: str
    spec: Spec

    def variant(self, name: str) -> Variant:
        """The variant of that name."""
        return next(variant for variant in self.spec.variants if variant.name == name)


@dataclass(frozen=True)
class Book:
    """The recorded budgets and the version of Triton that they hold for."""

    triton: str = ""
    budgets: Budgets = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Book:
        """From a file; empty if there is none."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, path: Path) -> None:
        """To a file, one line a variant, so that a diff shows what changed."""
        ops = []
        for op, variants in sorted(self.budgets.items()):
            lines = [f"   {json.dumps(name)}: {json.dumps(targets)}" for name, targets in sorted(variants.items())]
            ops.append(f"  {json.dumps(op)}: {{\n" + ",\n".join(lines) + "\n  }")
        path.write_text(f'{{\n "triton": {json.dumps(self.triton)},\n "budgets": {{\n' + ",\n".join(ops) + "\n }\n}\n")


def modules_of(package: Any = kernels.gpu) -> list[str]:
    """Names of the modules of a package, sorted."""
    return sorted(f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__))


def find_ops(modules: Sequence[str]) -> tuple[list[Op], list[str]]:
    """Every Spec of the modules, and faults: a module that can't be imported, or has kernels but no SPEC."""
    ops: list[Op] = []
    faults: list[str] = []
    for module in modules:
        try:
            specs = specs_of(module)
        except Exception as error:
            faults.append(f"{module}: import: {type(error).__name__}: {' '.join(str(error).split())}")
            continue
        if specs is None and _has_kernels(module):
            faults.append(f"{module}: SPEC: none, allowed: a Spec, a tuple of them, () if nothing in it is launched")
        ops += [Op(module, spec) for spec in specs or ()]
    names = [op.spec.name for op in ops]
    twice = sorted({name for name in names if names.count(name) > 1})
    faults += [f"{name}: SPEC: {names.count(name)} of this name, allowed: 1" for name in twice]
    return ops, faults


def _has_kernels(module: str) -> bool:
    import triton

    members = vars(importlib.import_module(module)).values()
    return any(isinstance(x, triton.JITFunction) and x.fn.__module__ == module for x in members)


def judge(job: Job, variant: Variant, facts: Facts | str, book: Book, triton: str) -> list[str]:
    """The faults of one compiled variant, each a line: op, variant, target, what, value, allowed."""
    if isinstance(facts, str):
        return [f"{job}: compile: {facts}"]
    seen = {
        TENSOR_CORE: facts.tensor_core,
        # gfx942 has no 128-bit copy past the registers.
        ASYNC_128: facts.async_128 if GPUS[job.target].backend == "cuda" else facts.load_128,
        LOAD_128: facts.async_128 + facts.load_128,
    }
    limits = {
        "stack_bytes": (facts.stack_bytes, 0),
        "spills": (facts.spills, 0),
        "shared_bytes": (facts.shared_bytes, GPUS[job.target].shared_limit_bytes),
    }
    faults = [
        f"{job}: {key}: {value}, allowed: at most {most}" for key, (value, most) in limits.items() if value > most
    ]
    faults += [f"{job}: {key}: 0, allowed: 1 or more" for key in sorted(variant.expects) if not seen[key]]
    budget = book.budgets.get(job.op, {}).get(job.variant, {}).get(job.target)
    if budget is None:
        return [*faults, f"{job}: budget: none, allowed: one in {BUDGETS.name} (--record)"]
    if triton == book.triton:
        faults += [
            f"{job}: {key}: {getattr(facts, key)}, allowed: {SLACK:g} x the budget of {budget[key]}"
            for key in BUDGETED
            if getattr(facts, key) > SLACK * budget[key]
        ]
    return faults


def stale(ops: Sequence[Op], book: Book, every_op: bool) -> list[str]:
    """Faults: budgets of variants, or with `every_op` of operations, that are no more."""
    wanted = {(op.spec.name, v.name, target) for op in ops for v in op.spec.variants for target in v.targets}
    names = {op.spec.name for op in ops}
    return [
        f"{op} {variant} {target}: budget: recorded, allowed: none, since there is no such variant (--record)"
        for op, variants in book.budgets.items()
        for variant, targets in variants.items()
        for target in targets
        if (every_op or op in names) and (op, variant, target) not in wanted
    ]


def recorded(ops: Sequence[Op], results: Mapping[Job, Facts | str], book: Book, every_op: bool, triton: str) -> Book:
    """The book with the budgets of what was compiled replaced and stale ones removed.

    Raises:
        ValueError: the book holds budgets of another version of Triton that would stay.
    """
    budgets: Budgets = {}
    gone = {line.split(": ")[0] for line in stale(ops, book, every_op)}
    replaced = {str(job) for job in results}
    for op, variants in book.budgets.items():
        for variant, targets in variants.items():
            for target, budget in targets.items():
                if f"{op} {variant} {target}" in gone | replaced:
                    continue
                budgets.setdefault(op, {}).setdefault(variant, {})[target] = budget
    if budgets and triton != book.triton:
        raise ValueError(f"--record: budgets are of triton {book.triton}, this is {triton}: record all ops and targets")
    for job, facts in results.items():
        if isinstance(facts, Facts):
            of_variant = budgets.setdefault(job.op, {}).setdefault(job.variant, {})
            of_variant[job.target] = {key: getattr(facts, key) for key in BUDGETED}
    for variants in budgets.values():
        for variant, targets in variants.items():
            variants[variant] = {target: targets[target] for target in TARGETS if target in targets}
    return Book(triton, budgets)


COLUMNS = {
    "registers": "regs",
    "stack_bytes": "stack",
    "spills": "spills",
    "shared_bytes": "shared",
    "blocks": "blocks",
    "occupancy": "occup",
    "tensor_core": "tensor",
    "async_128": "async128",
    "load_128": "load128",
    "narrow_loads": "narrow",
    "int_to_float": "I2F",
    "float_multiply": "FMUL",
}


def table(results: Mapping[Job, Facts | str]) -> str:
    """Results as aligned text."""
    rows = [["op", "variant", "target", *COLUMNS.values()]]
    for job, facts in results.items():
        cells = ["failed"] if isinstance(facts, str) else [_cell(key, facts) for key in COLUMNS]
        rows.append([job.op, job.variant, job.target, *cells])
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        )
        for row in rows
    )


def _cell(key: str, facts: Facts) -> str:
    value = getattr(facts, key)
    return f"{value:.0%}" if key == "occupancy" else str(value)


def compile_jobs(jobs: Sequence[Job], workers: int) -> dict[Job, Facts | str]:
    """Compiles with progress on the standard error stream; the results in the order of the jobs."""
    results: dict[Job, Facts | str] = {}
    tty = sys.stderr.isatty()
    for job, facts in compile_all(jobs, workers):
        results[job] = facts
        count = len(results)
        if tty:
            print(f"\r\x1b[K{count}/{len(jobs)} {job}", end="", file=sys.stderr, flush=True)
        elif count % max(len(jobs) // 10, 1) == 0:
            print(f"{count}/{len(jobs)} compiled", file=sys.stderr, flush=True)
    if tty:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return {job: results[job] for job in jobs}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ends the program with a message for what it does not know."""
    parser = argparse.ArgumentParser(prog="python -m kernels.check", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--targets", default=",".join(TARGETS), help=f"of {','.join(TARGETS)}; default: all")
    parser.add_argument("--ops", default="", help="names of SPECs; default: all")
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"compiling processes; default: {WORKERS}")
    parser.add_argument("--record", action="store_true", help=f"write {BUDGETS.name}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write facts and faults")
    options = parser.parse_args(arguments)
    options.targets = options.targets.split(",")
    options.ops = [name for name in options.ops.split(",") if name]
    for target in options.targets:
        if target not in TARGETS:
            parser.error(f"--targets: {target!r}: must be of {', '.join(TARGETS)}")
    if options.workers < 1:
        parser.error(f"--workers: {options.workers}: must be 1 or more")
    options.parser = parser
    return options


def main(arguments: Sequence[str] | None = None, modules: Sequence[str] | None = None, budgets: Path = BUDGETS) -> int:
    """The command; see the module. `modules` and `budgets` replace those of kernels/gpu."""
    options = parse(arguments)
    aot.fix_environment()
    start = time.perf_counter()
    ops, faults = find_ops(modules_of() if modules is None else modules)
    known = [op.spec.name for op in ops]
    for name in options.ops:
        if name not in known:
            options.parser.error(f"--ops: {name!r}: must be of {', '.join(sorted(known))}")
    chosen = [op for op in ops if not options.ops or op.spec.name in options.ops]
    jobs = {
        Job(op.module, op.spec.name, variant.name, target): variant
        for op in chosen
        for variant in op.spec.variants
        for target in options.targets
        if target in variant.targets
    }
    results = compile_jobs(list(jobs), options.workers)

    import triton

    book = Book.read(budgets)
    if options.record:
        try:
            book = recorded(chosen, results, book, not options.ops, triton.__version__)
        except ValueError as error:
            options.parser.error(str(error))
        book.write(budgets)
    for job, facts in results.items():
        faults += judge(job, jobs[job], facts, book, triton.__version__)
    faults += stale(chosen, book, not options.ops)
    print(table(results))
    enforced = "enforced" if triton.__version__ == book.triton else f"not enforced (of {book.triton or 'no version'})"
    print(
        f"{len(results)} compiled in {time.perf_counter() - start:.0f} s, triton {triton.__version__}, "
        f"budgets {enforced}, {len(faults)} faults"
    )
    for fault in faults:
        print(f"FAULT {fault}")
    if options.json:
        write_json(options.json, results, faults, triton.__version__)
    return 1 if faults else 0


def write_json(path: Path, results: Mapping[Job, Facts | str], faults: Sequence[str], triton: str) -> None:
    """Everything that was seen, for other programs."""
    rows = [
        {**asdict(job), **({"failed": facts} if isinstance(facts, str) else asdict(facts))}
        for job, facts in results.items()
    ]
    path.write_text(json.dumps({"triton": triton, "results": rows, "faults": list(faults)}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
