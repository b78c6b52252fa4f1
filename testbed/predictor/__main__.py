"""`python -m testbed.predictor <command> [key=value ...]`: the learned core-token predictor.

train        record attention on real texts, learn weights for a model and keep them (conf/predictor.yaml)
evaluate     recall of every predictor on texts that trained none of them (conf/evaluation.yaml)
needles      what predictors buy: needles at equal pages (conf/needles.yaml)
background   offsets of the background state, fitted and judged (conf/background.yaml)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from testbed.commands import dispatch, guarded

COMMANDS = ("train", "evaluate", "needles", "background")


def run(args: Sequence[str]) -> None:
    """Runs the command that the first word names; see `testbed.commands.dispatch`."""
    dispatch("testbed.predictor", __doc__, COMMANDS, args)


def main() -> None:
    """The command."""
    guarded(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
