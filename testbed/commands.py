"""What all commands share: one clear line for what the user can mend, exit codes, no trace."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

BAD_INPUT, INTERRUPTED = 2, 130


def guarded(command: Callable[[], object]) -> None:
    """Runs a command; an error the user can mend becomes one line and exit code 2, Ctrl-C exit code 130.

    TESTBED_TRACE=1 shows the whole trace instead.
    """
    if os.environ.get("TESTBED_TRACE") == "1":
        command()
        return
    try:
        command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except (ValueError, RuntimeError, OSError) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        print(f"error: {kind}{error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
