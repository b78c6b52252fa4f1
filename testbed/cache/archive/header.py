"""The first block of a page file: what it is, of which version, for which model and shape.

Three lines of text, padded with zeros: the magic with the version, the SHA-256 of the third line, JSON.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from testbed.cache.archive.errors import ArchiveError

VERSION = 2
MAGIC = b"testbed pages "
HEADER_BYTES = 4096  # one block, so that pages start aligned
MODEL_CHARS = 1024


@dataclass(frozen=True)
class ArchiveAbout:
    """Whose pages a file holds.

    Attributes:
        model: the model's name and version, or any text that tells models apart; "" = any.
        layers, kv_heads, head_dim, page_tokens: L, Hk, D, P.
        formats: name of each page format -> page_bytes.
    """

    model: str
    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    formats: Mapping[str, int]

    def __post_init__(self) -> None:
        """Refuses what a header can't say."""
        if not isinstance(self.model, str) or len(self.model.encode()) > MODEL_CHARS:
            raise ValueError(f"archive model={self.model!r}: must be text of at most {MODEL_CHARS} bytes")
        for key in ("layers", "kv_heads", "head_dim", "page_tokens"):
            value = getattr(self, key)
            if type(value) is not int or value < 1:
                raise ValueError(f"archive {key}={value!r}: must be an int of at least 1")
        for name, page_bytes in self.formats.items():
            if type(page_bytes) is not int or page_bytes < 8 or page_bytes % 8:
                raise ValueError(f"archive formats: {name} of {page_bytes!r} bytes: must be a multiple of 8")
        if not self.formats:
            raise ValueError("archive formats={}: must name at least one page format")


@dataclass(frozen=True)
class Header:
    """All that the first block says.

    Attributes:
        about: whose pages.
        extent_bytes: grain in which formats share the file.
        identity: made once with the file, so that a saved session finds the file it meant.
        clean: the run that had the file last closed it.
    """

    about: ArchiveAbout
    extent_bytes: int
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    clean: bool = False

    def packed(self) -> bytes:
        """HEADER_BYTES bytes."""
        body = asdict(self) | {"about": asdict(self.about) | {"formats": dict(self.about.formats)}}
        line = json.dumps(body, sort_keys=True).encode()
        digest = hashlib.sha256(line).hexdigest().encode()
        packed = MAGIC + str(VERSION).encode() + b"\n" + digest + b"\n" + line + b"\n"
        if len(packed) > HEADER_BYTES:
            raise ValueError(f"archive: its description takes {len(packed)} bytes, a header has {HEADER_BYTES}")
        return packed.ljust(HEADER_BYTES, b"\0")


def parse(block: bytes, path: Path) -> Header:
    """The header in a file's first HEADER_BYTES bytes.

    Raises:
        ArchiveError: no page file, another version, a damaged header.
    """
    first, _, rest = block.partition(b"\n")
    version = first.removeprefix(MAGIC)
    if not first.startswith(MAGIC) or not version.isdigit():
        raise ArchiveError(f"cache.l3_path={path}: is not a page file; name a folder, a new file or a page file")
    if int(version) != VERSION:
        raise ArchiveError(
            f"cache.l3_path={path}: is a page file of version {int(version)}, this testbed has version {VERSION}; "
            f"name another file"
        )
    digest, _, rest = rest.partition(b"\n")
    line = rest.partition(b"\n")[0]
    if len(block) < HEADER_BYTES or hashlib.sha256(line).hexdigest().encode() != digest:
        raise ArchiveError(f"cache.l3_path={path}: the page file's header is damaged; remove the file")
    body = json.loads(line)
    return Header(ArchiveAbout(**body.pop("about")), **body)


def check_same(there: ArchiveAbout, here: ArchiveAbout, path: Path) -> None:
    """Refuses the pages of another model or shape.

    Raises:
        ArchiveError: names what differs with both values; a model of "" fits any.
    """
    for key in (f.name for f in fields(ArchiveAbout)):
        old, new = getattr(there, key), getattr(here, key)
        if key == "model" and "" in (old, new):
            continue
        if (dict(old) != dict(new)) if key == "formats" else old != new:
            raise ArchiveError(
                f"cache.l3_path={path}: holds pages of another model or cache: {key} is {_said(old)} there, "
                f"{_said(new)} here; name another file"
            )


def _said(value: object) -> str:
    return repr(dict(value)) if isinstance(value, Mapping) else repr(value)
