"""L3, the archive: pages in a file with checksums, read and written in batches (`FilePool` on a `PageFile`)."""

from pathlib import Path

from testbed.cache.archive.errors import ArchiveError, CorruptPages, IoFault
from testbed.cache.archive.file_pool import FilePool
from testbed.cache.archive.header import ArchiveAbout
from testbed.cache.archive.page_file import PageFile
from testbed.cache.archive.places import check_archive

__all__ = ["ArchiveAbout", "ArchiveError", "CorruptPages", "FilePool", "IoFault", "PageFile", "check_archive"]


def check_folder(folder: Path) -> None:
    """As `check_archive`, for what must be a folder; made if missing.

    Raises:
        ArchiveError: not a folder that files can be made in.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArchiveError(f"cache.l3_path={folder}: {error.strerror or error}; name a writable folder") from error
    check_archive(folder)
