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

from testbed.commands import dispatch, guarded

COMMANDS = ("analyse", "show", "compare", "recommend", "verdict", "convert", "published")


def run(args: Sequence[str]) -> None:
    """Runs the command that the first word names; see `testbed.commands.dispatch`."""
    dispatch("testbed.heads", __doc__, COMMANDS, args)


def main() -> None:
    """The command."""
    guarded(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
