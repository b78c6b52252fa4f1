"""`python -m testbed.heads <command> ...`: measures of heads, maps of them, what the maps are worth.

analyse [model=... output=map.json]   measure every head and write a head map with its evidence
show MAP                              tables of a head map
compare A B ...                       do maps agree beyond chance?
recommend MAP [budget.fraction=...]   a strategy for each class of heads
verdict [MAP] [classifiers=[...]]     does a map beat a random one at equal bytes?
convert IN OUT                        RedKnot, DuoAttention and HeadKV files
published [FOLDER]                    figures of published maps, made again from their files
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from testbed.commands import guarded

COMMANDS = ("analyse", "show", "compare", "recommend", "verdict", "convert", "published")


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
    module = import_module(f"testbed.heads.{name}")
    if set(rest) & {"-h", "--help"}:
        print(module.__doc__)
        return
    module.main(rest)


def main() -> None:
    """The command."""
    guarded(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
