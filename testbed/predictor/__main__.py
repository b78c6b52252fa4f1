"""`python -m testbed.predictor <command> [key=value ...]`: the learned core-token predictor.

train        record attention on real texts, learn weights for a model and keep them (conf/predictor.yaml)
evaluate     recall of every predictor on texts that trained none of them (conf/evaluation.yaml)
background   offsets of the background state, fitted and judged (conf/background.yaml)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from testbed.commands import guarded

COMMANDS = ("train", "evaluate", "background")


class CommandError(ValueError):
    """No such command."""


def run(args: Sequence[str]) -> None:
    """Runs the command that the first word names.

    Raises:
        CommandError: there is none of that name.
    """
    if not args or args[0] in ("-h", "--help"):
        print(__doc__)
        return
    name, *rest = args
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise CommandError(f"unknown command {name!r}.{hint} There are: {', '.join(COMMANDS)}")
    module = import_module(f"testbed.predictor.{name}")
    if set(rest) & {"-h", "--help"}:
        print(module.__doc__)
        return
    module.main(rest)


def main() -> None:
    """The command."""
    guarded(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
