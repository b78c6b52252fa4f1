"""What all commands share: one clear line for what the user can mend, exit codes, no trace; keys that they share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from testbed.files import target_of
from testbed.workloads.base import check_list, check_whole

BAD_INPUT, INTERRUPTED = 2, 130
HELP = ("-h", "--help")
OURS = ("kernels", "policies", "testbed")
MENDABLE = (ValueError, RuntimeError, OSError, HydraException, OmegaConfBaseException)


def guarded(command: Callable[[], object], folder_key: str = "") -> None:
    """Runs a command; an error the user can mend becomes one line and exit code 2, Ctrl-C exit code 130.

    TESTBED_TRACE=1 shows the whole trace instead. `folder_key` names the folder that Hydra makes and writes to before
    the command proper begins, for the words of an error about it.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands errors on, else it prints a trace of its own
    if os.environ.get("TESTBED_TRACE") == "1":
        command()
        return
    try:
        command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except MENDABLE as error:
        hint = f"; name a writable folder with {folder_key}" if folder_key and isinstance(error, OSError) else ""
        print(f"error: {describe(error)}{hint}", file=sys.stderr)
        sys.exit(BAD_INPUT)


class CommandError(ValueError):
    """A command line that can't be followed."""


def dispatch(package: str, about: str | None, commands: Sequence[str], args: Sequence[str]) -> None:
    """Runs `main(rest)` of the module of a package that the first word names; help where it is asked for.

    Args:
        package: whose modules the commands are.
        about: printed as help.
        commands: names of the modules.
        args: of the command line.

    Raises:
        CommandError: there is none of that name.
    """
    if not args or args[0] in HELP:
        print(about)
        return
    name, *rest = args
    if name not in commands:
        near = get_close_matches(name, commands, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise CommandError(f"unknown command {name!r}.{hint} There are: {', '.join(commands)}")
    module = import_module(f"{package}.{name}")
    if any(word in HELP for word in rest):
        print(module.__doc__)
        return
    module.main(rest)


def job(command: Callable[[], object]) -> None:
    """Runs what a command does once Hydra has composed its configuration.

    A single run ends here, without Hydra's own words before the error's. In a sweep a failed job says so at once,
    the others go on, and the command fails in the end.
    """
    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        guarded(command)
        return
    try:
        command()
    except MENDABLE as error:
        print(f"job {hydra.job.num} ({hydra.job.override_dirname}) failed: {describe(error)}", file=sys.stderr)
        raise


def check_threads(key: str, threads: object) -> int | None:
    """The compute threads that a key asks for; None for all cores.

    Raises:
        WorkloadError: not a whole number of at least 1.
        CommandError: more than there are cores.
    """
    if threads is None:
        return None
    check_whole(key, threads, 1)
    assert isinstance(threads, int)
    cores = os.cpu_count() or 1
    if threads > cores:
        raise CommandError(f"{key}={threads}: this machine has {cores} cores; or null for all of them")
    return threads


def set_threads(threads: object) -> None:
    """Sets the compute threads of this process; None leaves all cores. Raises as `check_threads`."""
    wanted = check_threads("threads", threads)
    if wanted is not None:
        import torch  # here, so that help does not wait for it

        torch.set_num_threads(wanted)


def check_some(key: str, values: object) -> tuple[Any, ...]:
    """The values of a list, of which there may be none; see `check_list` for one that must hold some."""
    return () if values == [] else check_list(key, values)


def check_keys(key: str, node: object, known: Collection[str]) -> dict[str, Any]:
    """The plain values of a config node that holds these keys and no others.

    Raises:
        CommandError: it does not; names the key.
    """
    if not isinstance(node, DictConfig) or set(node) != set(known):
        raise CommandError(f"{key}={node!r}: must hold the keys {', '.join(known)} and no others")
    plain: Any = OmegaConf.to_container(node, resolve=True)
    return plain


def check_output(key: str, path: object, folder: bool = False) -> Path | None:
    """Where a command will write when its work is done, looked at before; None where it is given none.

    Args:
        key: that names it.
        path: of a file, or of a folder for files.
        folder: which of the two.

    Raises:
        CommandError: nothing can be written there.
    """
    if path is None:
        return None
    what = "folder" if folder else "file"
    if not isinstance(path, str) or not path:
        raise CommandError(f"{key}={path!r}: must be the path of a {what}, or null")
    given = Path(path).expanduser()
    try:
        place = given.resolve() if folder else target_of(given).parent
        while not place.exists():
            place = place.parent
    except OSError as error:
        raise CommandError(f"{key}={path}: {error.strerror}") from error
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise CommandError(f"{key}={path}: {place} is no folder that can be written to")
    return given


def describe(error: BaseException) -> str:
    """An error in one line."""
    cause = error.__cause__
    if isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException):
        return _unknown_key(cause) or _one_line(f"{error} {str(cause).splitlines()[0]}")
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    ours = type(error).__module__.partition(".")[0] in OURS
    plain = ours or isinstance(error, (ValueError, HydraException, OmegaConfBaseException))
    return _one_line(f"{'' if plain else type(error).__name__ + ': '}{error}")


def _unknown_key(error: OmegaConfBaseException) -> str:
    """Offers the keys there are, if the error is about one there is not."""
    parent = error.parent_node
    if not isinstance(parent, DictConfig) or not isinstance(error.key, str) or error.key in parent:
        return ""
    known = sorted(str(key) for key in parent if key not in ("hydra", "_target_"))
    near = get_close_matches(error.key, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"unknown key {error.full_key or error.key!r}.{hint} There are: {', '.join(known)}"


def _one_line(text: str) -> str:
    """Without Hydra's list of the places where it looked."""
    return " ".join(text.partition("Config search path:")[0].split())
