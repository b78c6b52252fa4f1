"""Compilation in processes of its own: a compiler that aborts or hangs costs one variant, not the run."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kernels.gpu import aot
from kernels.gpu.aot import Facts
from kernels.gpu.spec import Spec

TIMEOUT_S = 600.0
MESSAGE_CHARS = 400


@dataclass(frozen=True)
class Job:
    """A variant to compile for a target.

    Attributes:
        module: that holds the SPEC.
        op, variant: names of the Spec and the Variant.
        target: of `kernels.gpu.spec.TARGETS`.
    """

    module: str
    op: str
    variant: str
    target: str

    def __str__(self) -> str:
        return f"{self.op} {self.variant} {self.target}"


def specs_of(module: str) -> tuple[Spec, ...] | None:
    """The SPEC of a module as a tuple; None if it has none."""
    spec = getattr(importlib.import_module(module), "SPEC", None)
    return (spec,) if isinstance(spec, Spec) else spec


def compile_all(jobs: Sequence[Job], workers: int, timeout_s: float = TIMEOUT_S) -> Iterator[tuple[Job, Facts | str]]:
    """Compiles in `workers` processes; yields each job with its facts, or what went wrong, as they are done."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Job, Facts | str] | BaseException] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    stop = threading.Event()

    def serve() -> None:
        try:
            with Worker(timeout_s) as worker:
                while not stop.is_set():
                    job = waiting.get_nowait()
                    done.put((job, worker.run(job)))
        except queue.Empty:
            pass
        except BaseException as error:
            done.put(error)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(min(workers, len(jobs)))]
    for thread in threads:
        thread.start()
    try:
        for _ in jobs:
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            yield result
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class Worker:
    """A process that compiles one job after the other and is started again when one of them ends it."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.process: Any = None
        self.pipe: Connection | None = None
        # Compilers print whole listings on an error; what they say last is kept for the fault.
        self.folder = tempfile.TemporaryDirectory(prefix="compile-")
        self.log = Path(self.folder.name) / "log"
        self.log.touch()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self.folder.cleanup()

    def run(self, job: Job) -> Facts | str:
        """Facts, or one line that says what failed."""
        pipe = self.pipe if self.pipe is not None and self.process.is_alive() else self._start()
        written_bytes = self.log.stat().st_size
        try:
            pipe.send(job)
            if not pipe.poll(self.timeout_s):
                self._end()
                return f"did not end within {self.timeout_s:g} s"
            return pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            cause = signal.Signals(-code).name if code < 0 else f"exit {code}"
            self._end()
            said = self.log.read_bytes()[written_bytes:].decode(errors="replace")
            return shorten(f"the compiler ended its process ({cause}): {said}")

    def _start(self) -> Connection:
        # Spawned, not forked: Triton must be imported under an environment of our choice.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, str(self.log)), daemon=True)
        self.process.start()
        theirs.close()
        return self.pipe

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        if self.pipe is not None:
            self.pipe.close()
        self.process = self.pipe = None


def _serve(pipe: Connection, log: str) -> None:
    """What a worker process does: compiles what it is sent until the pipe closes."""
    aot.fix_environment()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_compile(job))
        except Exception as error:
            pipe.send(shorten(f"{type(error).__name__}: {error}"))


def _compile(job: Job) -> Facts:
    for spec in specs_of(job.module) or ():
        for variant in spec.variants:
            if (spec.name, variant.name) == (job.op, job.variant):
                return aot.compile_variant(spec.kernel, variant, job.target)
    raise LookupError(f"{job.module} has no variant {job.op} {job.variant}")


def shorten(text: str) -> str:
    """One line: what a compiler says first and last."""
    line = " ".join(text.split())
    if len(line) <= MESSAGE_CHARS:
        return line
    half = MESSAGE_CHARS // 2
    return f"{line[:half]} ... {line[-half:]}"
