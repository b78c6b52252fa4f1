"""A C++ compiler for mutants: no optimisation, and object files kept, so that only a mutated source is compiled.

CXX=<a script that runs this file> OBJECTS=<folder>      see test_mutants.py
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


def included(source: Path) -> set[Path]:
    """A source and all files of ours that it includes."""
    found, left = set(), [source]
    while left:
        path = left.pop()
        if path not in found and path.exists():
            found.add(path)
            left += [path.with_name(name) for name in re.findall(r'#include "([^"]+)"', path.read_text())]
    return found


def main(arguments: list[str]) -> int:
    """Compiles and links as the arguments say."""
    compiler = next(name for name in ("g++", "c++", "clang++") if shutil.which(name))
    sources = [Path(x) for x in arguments if x.endswith(".cpp")]
    if not sources:
        return subprocess.call([compiler, *arguments])
    at = arguments.index("-o")
    rest = [x for i, x in enumerate(arguments) if not x.endswith(".cpp") and i not in (at, at + 1)]
    flags = ["-O0" if x.startswith("-O") else x for x in rest]
    objects = []
    for source in sources:
        digest = hashlib.sha256(" ".join(flags).encode())
        for text in sorted(included(source)):
            digest.update(text.read_bytes() + b"\0")
        objects.append(Path(os.environ["OBJECTS"]) / f"{source.stem}-{digest.hexdigest()[:16]}.o")
        if not objects[-1].exists():
            part = objects[-1].with_suffix(f".{os.getpid()}")
            done = subprocess.call(
                [compiler, *[x for x in flags if x != "-shared"], "-c", str(source), "-o", str(part)]
            )
            if done:
                return done
            part.replace(objects[-1])
    return subprocess.call([compiler, *flags, *map(str, objects), "-o", arguments[at + 1]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
