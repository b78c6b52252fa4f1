"""Runs pytest in forks of one process that has imported torch, which takes longer than most mutants' tests.

A line of JSON asks for a run: {"place", "environment", "arguments", "limit_seconds"}; the answer is its exit status.
Nothing of ours is imported before the fork, so each run sees the copy in its place alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import hypothesis.strategies  # noqa: F401
import numpy as np  # noqa: F401
import pytest
import torch  # noqa: F401


def child(place: str, environment: dict[str, str], arguments: list[str], limit_seconds: int) -> None:
    """Becomes the run; does not return."""
    signal.alarm(limit_seconds)
    os.chdir(place)
    os.environ.update(environment)
    sys.path.insert(0, place)
    log = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os._exit(int(pytest.main(arguments)))


def main() -> None:
    """Serves until its input ends."""
    ours = ("kernels", "policies", "testbed", "triton")  # Triton's interpreter is chosen when it is imported
    assert not any(name.split(".")[0] in ours for name in sys.modules)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            child(**json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
