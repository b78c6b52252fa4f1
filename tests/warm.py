"""Python processes that begin with torch, transformers and Hydra imported, which takes longer than most of them run.

    done = warm.run(["-m", "testbed.run", "policy=full"])      as subprocess.run([sys.executable, "-m", ...])
    process = warm.start(["-c", "print(1)"])                   as subprocess.Popen

This file is also the server: it imports what is not ours and forks one process an order. What it forks leaves the
server's loop, runs what it was given as `__main__` and ends as an interpreter does: exit code, signals, threads and
`atexit` are its own. Nothing of ours is imported before the fork; OMP_NUM_THREADS is 1.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO, Any

IMPORTED = (
    *("torch", "torch.distributed.tensor", "torch.export", "numpy", "scipy.stats", "hydra.utils", "rich.table"),
    *("transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "safetensors.torch"),
    *("transformers.tokenization_utils_tokenizers", "jinja2"),
)


class Process:
    """A started process, used like a `subprocess.Popen` in text mode with both outputs piped."""

    def __init__(self, args: Sequence[str], pid: int, files: tuple[IO[str], IO[str]], status: IO[str]) -> None:
        self.args, self.pid, self.returncode = list(args), pid, None
        self.stdout, self.stderr = files
        self._status = status
        self.returncode: int | None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is left of both outputs, once it has ended."""
        read: dict[IO[str], str] = {}

        def take(file: IO[str]) -> None:
            with file:
                read[file] = file.read()

        threads = [threading.Thread(target=take, args=(file,), daemon=True) for file in (self.stdout, self.stderr)]
        end = None if timeout is None else time.monotonic() + timeout
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if end is None else max(0.1, end - time.monotonic()))
        return read[self.stdout], read[self.stderr]


@cache
def _server() -> socket.socket:
    ours, its = socket.socketpair()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, str(its.fileno())], pass_fds=[its.fileno()], stdin=subprocess.DEVNULL,
        env=environment,
    )  # fmt: skip
    its.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def start(
    arguments: Sequence[str],
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    most_file_bytes: int | None = None,
) -> Process:
    """Starts `python *arguments`, where they begin with -m, -c or a script.

    Args:
        arguments: as on the command line.
        env: its whole environment; this process's by default.
        cwd: where it runs; here by default.
        most_file_bytes: no file it writes may grow longer.
    """
    pipes = [os.pipe() for _ in range(3)]
    order = {
        "arguments": list(arguments),
        "environment": dict(os.environ if env is None else env),
        "cwd": str(Path(cwd or ".").resolve()),
        "most_file_bytes": most_file_bytes,
    }
    text = json.dumps(order).encode()
    server = _server()
    socket.send_fds(server, [len(text).to_bytes(8, "little")], [write for _, write in pipes])
    server.sendall(text)
    for _, write in pipes:
        os.close(write)
    out, error, status = (open(read) for read, _ in pipes)  # noqa: SIM115
    return Process(arguments, int(status.readline()), (out, error), status)


def run(arguments: Sequence[str], timeout: float = 300.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """`start`, and to its end; killed after `timeout` seconds."""
    process = start(arguments, **options)
    try:
        out, error = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.wait(), out, error)


# --- the server -----------------------------------------------------------------------------------------------------


def _serve(orders: socket.socket) -> dict[str, Any]:
    """Forks for each order; returns in the forked processes alone, with what they are to do."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no wait
    while True:
        size, files, _, _ = socket.recv_fds(orders, 8, 3)
        if not size:
            os._exit(0)
        text = b""
        while len(text) < int.from_bytes(size, "little"):
            text += orders.recv(1 << 20)
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders.close()
            _keep(files)
            return json.loads(text)
        for file in files:
            os.close(file)


def _keep(files: Sequence[int]) -> None:
    """Forks once more and returns there; the process between the two tells how the other ended."""
    out, error, status = files
    pid = os.fork()
    if pid:
        os.close(out)
        os.close(error)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.write(status, f"{pid}\n".encode())
        os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
        os._exit(0)
    os.close(status)
    for at, file in enumerate((out, error), 1):
        os.dup2(file, at)
        os.close(file)


def _become(order: dict[str, Any]) -> None:
    """Runs what was ordered as `__main__`."""
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    if order["most_file_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["most_file_bytes"],) * 2)
    here, (what, *rest) = sys.path.pop(0), order["arguments"]
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path.append(here)
    sys.stdout.flush()
    if what == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = [rest[0], *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path.insert(0, str(Path(what).resolve().parent))
        sys.argv = [what, *rest]
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    sys.path = [path for path in sys.path if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    for name in IMPORTED:
        importlib.import_module(name)
    assert not {"kernels", "policies", "testbed"} & set(sys.modules)
    faulthandler.enable()
    gc.freeze()
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
