"""Sizes as people write them: bytes, "2GiB", or a share of a memory; and how large the memories of this machine are.

Shares are of the whole memory, not of what is free right now, so that a configuration means the same in every run.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from pydantic import ByteSize, TypeAdapter, ValidationError

from testbed.cache.pool import CacheError

Size = int | float | str
_BYTES = TypeAdapter(ByteSize)
_SPELLINGS = 'a number of bytes such as 1073741824 or "2GiB"'
_SHARES = ', a share above 0 and at most 1 such as 0.25 or "25%"'


@dataclass(frozen=True)
class Capacities:
    """Most bytes of each place; None = no limit, 0 = no such tier.

    Attributes:
        l1_bytes: device, L0 and L1 together.
        l2_bytes: host.
        l3_bytes: archive.
    """

    l1_bytes: int | None = None
    l2_bytes: int | None = None
    l3_bytes: int | None = None


def resolve(value: Size | None, of_bytes: int | None, key: str, least: int = 0) -> int | None:
    """A size in bytes; None stays None.

    Args:
        value: whole bytes, a text with a unit (kB = 1000, KiB = 1024), a share as a number in (0, 1] or as "25%".
        of_bytes: what shares are of; None = shares are refused.
        key: names the value in errors.
        least: smallest size allowed.

    Raises:
        CacheError: naming key, value and what is allowed.
    """
    if value is None:
        return None
    allowed = f"must be {_SPELLINGS}{_SHARES if of_bytes is not None else ''}, or null"
    refused = CacheError(f"cache.{key}={value!r}: {allowed}" + (f"; at least {least}" if least else ""))
    share = _share(value)
    if share is not None:
        if of_bytes is None or not 0.0 < share <= 1.0:
            raise refused
        return max(int(share * of_bytes), least)
    size = _whole(value)
    if size is None or size < least:
        raise refused
    return size


def _share(value: Size) -> float | None:
    """A share: "25%" or a number with a point up to 1; None where the value is something else."""
    if isinstance(value, float):
        return value if value <= 1.0 and value != 0.0 else None
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip()[:-1]) / 100.0
        except ValueError:
            return math.nan
    return None


def _whole(value: Size) -> int | None:
    """Bytes of a number or a text with a unit; None where it is neither."""
    if isinstance(value, bool) or (isinstance(value, float) and not (math.isfinite(value) and value.is_integer())):
        return None
    try:
        size = int(_BYTES.validate_python(value if isinstance(value, str) else int(value)))
    except (ValidationError, ValueError, OverflowError, TypeError):
        return None
    return size if size < 2**63 else None


@cache
def device_memory_bytes(device: torch.device) -> int:
    """All memory of a device: of a GPU its own, of a CPU the host's."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_memory_bytes()


@cache
def host_memory_bytes() -> int:
    """Memory of this machine, or what the container around this process may use of it."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_cgroup_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def _cgroup_limits(root: Path, own: Path) -> list[int]:
    """Memory limits of the control groups a process is in, innermost to outermost (version 2, then version 1)."""
    try:
        lines = own.read_text().split()
    except OSError:
        return []
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        inner = base / place.lstrip("/")
        # In a container the path may be the host's, of which only the root is to be seen.
        for folder in [inner, *inner.parents]:
            if folder == base or base in folder.parents:
                found += _limit(folder / name)
    return found


def _limit(file: Path) -> list[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdecimal() and int(text) > 0 else []
