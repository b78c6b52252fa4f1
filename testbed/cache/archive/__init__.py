"""L3, the archive: pages in a file with checksums, read and written in batches (`FilePool` on a `PageFile`)."""

from testbed.cache.archive.errors import ArchiveError, CorruptPages, IoFault
from testbed.cache.archive.file_pool import FilePool
from testbed.cache.archive.header import ArchiveAbout
from testbed.cache.archive.page_file import PageFile
from testbed.cache.archive.places import check_archive

__all__ = ["ArchiveAbout", "ArchiveError", "CorruptPages", "FilePool", "IoFault", "PageFile", "check_archive"]
