"""What can go wrong with the archive."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from torch import Tensor

from testbed.cache.pool import CacheError

CUT = 0  # code of a file that is shorter than its pages; no errno has it
HINTS = {
    errno.ENOSPC: "; free some space or lower cache.l3_bytes",
    errno.EDQUOT: "; free some space or lower cache.l3_bytes",
    errno.EFBIG: "; lower cache.l3_bytes, or use a file system for larger files",
}


class ArchiveError(CacheError):
    """The page file can't be made, written or read."""


class CorruptPages(ArchiveError):
    """Pages whose checksum is not the one that was noted, or that were never written.

    Attributes:
        slots: [B] int64, of those asked for.
    """

    def __init__(self, path: Path, slots: Tensor) -> None:
        self.slots = slots
        listed = ", ".join(map(str, slots[:4].tolist())) + (", ..." if len(slots) > 4 else "")
        super().__init__(f"{path}: {len(slots)} pages are lost or not what was written (slots {listed})")


class IoFault(Exception):
    """A read or write of an engine failed.

    Attributes:
        code: errno, or CUT.
        offset_bytes: where in the file, -1 if unknown.
    """

    def __init__(self, code: int, offset_bytes: int = -1) -> None:
        self.code, self.offset_bytes = code, offset_bytes
        super().__init__(code, offset_bytes)

    def explain(self, path: Path, doing: str) -> ArchiveError:
        """The same for a user: one line that names the file."""
        if self.code == CUT:
            return ArchiveError(f"{path} is shorter than its pages: it was cut by someone else")
        where = f" at byte {self.offset_bytes}" if self.offset_bytes >= 0 else ""
        return ArchiveError(f"can't {doing} {path}{where}: {os.strerror(self.code)}{HINTS.get(self.code, '')}")
