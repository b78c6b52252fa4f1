"""L3: pages of one format in a page file, read and written in batches, each with a checksum.

Checksums are kept in memory, not in the file, and noted only after the write succeeded. So whatever the disk does with
a page (loses it, tears it, flips a bit, gives back an older one), it is found when the page is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.pages import PageFormat
from testbed.cache.archive.errors import CorruptPages, IoFault
from testbed.cache.archive.extent_slots import ExtentSlots
from testbed.cache.archive.header import HEADER_BYTES
from testbed.cache.archive.io import Batch, Ticket
from testbed.cache.archive.page_file import PageFile, stride_bytes

ALIGN_BYTES = 4096


class Transfer:
    """A read or a write under way.

    Attributes:
        blobs: [M, page_bytes] uint8 on the host, of a read: filled once `wait` has returned.
    """

    def __init__(self, pool: FilePool, slots: Tensor, blobs: Tensor, write: bool) -> None:
        self._pool, self._slots, self.blobs, self._write = pool, slots, blobs, write
        self._ticket: Ticket | None = None
        if not len(slots):
            return
        self._expected = pool.slots.noted(slots)
        if not write:
            self._check(self._expected[1])
        else:
            pool.slots.note(slots, None)
        offsets, self._places = (HEADER_BYTES + pool.offsets(slots)).sort()
        self._sums = torch.empty(len(slots), dtype=torch.int64)
        batch = Batch(write, offsets, self._places, blobs, pool.stride_bytes, self._sums)
        try:
            self._ticket = pool.file.engine.submit(batch)
        except IoFault as fault:
            raise self._explained(fault) from fault

    def wait(self) -> Tensor:
        """The blobs, once all is done.

        Raises:
            CorruptPages: of a read: what was read is not what was written.
            ArchiveError: a read or write failed; of a write, its slots hold nothing then.
        """
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return self.blobs
        try:
            ticket.wait()
        except IoFault as fault:
            raise self._explained(fault) from fault
        sums = torch.empty_like(self._sums)
        sums[self._places] = self._sums
        if self._write:
            self._pool.slots.note(self._slots, sums)
        else:
            self._check(sums == self._expected[0])
        return self.blobs

    def _check(self, right: Tensor) -> None:
        if not bool(right.all()):
            raise CorruptPages(self._pool.file.path, self._slots[~right])

    def _explained(self, fault: IoFault) -> Exception:
        return fault.explain(self._pool.file.path, "write" if self._write else "read")


class FilePool:
    """Pages of one format in a page file; a `pool.PageStore`.

    Args:
        fmt: of the pages.
        file: that they are in; several pools share it.
        compute_device: where `read` delivers.

    Attributes:
        slots: who has which slot, and the checksums.
        stride_bytes: from one page to its neighbour in the file.
    """

    def __init__(self, fmt: PageFormat, file: PageFile, compute_device: torch.device | None = None) -> None:
        if fmt.page_bytes > file.extent_bytes:
            raise ValueError(f"a page of {fmt.page_bytes} bytes is larger than {file.path}'s extents")
        self.fmt, self.file = fmt, file
        self.compute_device = compute_device or torch.device("cpu")
        self.stride_bytes = stride_bytes(fmt.page_bytes)
        self.slots = ExtentSlots(file.extent_bytes // self.stride_bytes)
        self._first = file.pools == 0
        file.pools += 1

    @property
    def used_pages(self) -> int:
        """Slots taken."""
        return self.slots.used

    @property
    def held_bytes(self) -> int:
        """Bytes of the pool's extents; the file's first pool has the header's too, and what no pool has."""
        shared = HEADER_BYTES + self.file.idle_bytes if self._first and self.file.held_bytes else 0
        return self.slots.held_extents * self.file.extent_bytes + shared

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory for the slots' tables and checksums."""
        return self.slots.memory_bytes

    def offsets(self, slots: Tensor) -> Tensor:
        """Where pages begin, in bytes after the header: slots [M] int64 -> [M] int64."""
        width = self.slots.width
        return slots // width * self.file.extent_bytes + slots % width * self.stride_bytes

    def available(self) -> int:
        """Slots that can be taken before cache.l3_bytes; what the disk holds shows only when asked for."""
        free = self.slots.held_extents * self.slots.width - self.slots.used
        room = self.file.room_bytes
        return 1 << 62 if room is None else free + room // self.file.extent_bytes * self.slots.width

    def allocate(self, pages: int, arena: int = 0) -> Tensor:
        """Slots [pages] int64, lowest free first, one reference each; arenas lie together in a file.

        Raises:
            PoolFull: cache.l3_bytes or the disk has no room; nothing is taken then.
        """
        missing = self.slots.missing_extents(pages)
        if missing:
            self.slots.add(self.file.claim(missing))
        return self.slots.take(pages)

    def share(self, slots: Tensor) -> None:
        """One more reference for each slot."""
        self.slots.share(slots)

    def free(self, slots: Tensor) -> None:
        """One reference less; extents left without a page go back to the file system."""
        gone = self.slots.give(slots)
        if len(gone):
            self.file.release(gone)

    def begin_write(self, slots: Tensor, blobs: Tensor) -> Transfer:
        """Starts to copy blobs [M, page_bytes] uint8 into slots [M]; host memory must stay as it is until waited for.

        Raises:
            ArchiveError: the archive can't be used.
        """
        return Transfer(self, slots.cpu(), blobs.cpu().contiguous(), write=True)

    def begin_read(self, slots: Tensor, out: Tensor | None = None) -> Transfer:
        """Starts to read slots [M] into `out` [M, page_bytes] uint8, contiguous on the host; or into memory of its own.

        Memory that begins at a multiple of 512 bytes takes no detour through a buffer under O_DIRECT.

        Raises:
            CorruptPages: a slot was never written, or its last write failed.
            ArchiveError: the archive can't be used.
        """
        shape = (len(slots), self.fmt.page_bytes)
        if out is None:
            out = aligned_pages(*shape)
        elif tuple(out.shape) != shape or out.dtype != torch.uint8 or out.is_cuda or not out.is_contiguous():
            raise ValueError(
                f"read into {list(out.shape)} {out.dtype} on {out.device}: must be {list(shape)} uint8, host"
            )
        return Transfer(self, slots.cpu(), out, write=False)

    def write(self, slots: Tensor, blobs: Tensor) -> None:
        """Copies blobs [M, page_bytes] uint8 into slots [M].

        Raises:
            ArchiveError: they can't be written; the slots hold nothing then.
        """
        self.begin_write(slots, blobs).wait()

    def read(self, slots: Tensor, out: Tensor | None = None) -> Tensor:
        """Blobs at slots [M]: [M, page_bytes] uint8 on the compute device, or in `out`, see `begin_read`.

        Raises:
            CorruptPages: with the slots that are lost or not what was written.
            ArchiveError: they can't be read.
        """
        blobs = self.begin_read(slots, out).wait()
        return blobs if out is not None else blobs.to(self.compute_device)

    def checksums(self, slots: Tensor) -> Tensor:
        """Of what was written into slots [M]: [M] int64.

        Raises:
            CorruptPages: a slot was never written, or its last write failed.
        """
        sums, noted = self.slots.noted(slots)
        if not bool(noted.all()):
            raise CorruptPages(self.file.path, slots[~noted])
        return sums

    def restore(self, slots: Tensor, checksums: Tensor) -> None:
        """Takes slots [M] int64 of a file that an earlier run left, one reference each.

        `checksums` [M] int64 is what the method of that name said then. Whether the pages are still there shows when
        they are read.

        Raises:
            PoolFull: cache.l3_bytes.
            ArchiveError: the place is taken already; restore before anything new is written.
        """
        absent = self.slots.absent(slots)
        if len(absent):
            self.file.claim_these(absent)
            self.slots.add(absent)
        self.slots.take_these(slots)
        self.slots.note(slots, checksums)

    def close(self) -> None:
        """Lets go of the tables; the file closes when `PageFile.close` says so, and a kept one keeps its pages."""
        self.slots = ExtentSlots(self.slots.width)


def aligned_pages(pages: int, page_bytes: int) -> Tensor:
    """Uninitialised host memory [pages, page_bytes] uint8 that begins at a multiple of 4,096 bytes."""
    total = pages * page_bytes
    memory = torch.empty(total + ALIGN_BYTES, dtype=torch.uint8)
    skip = -memory.data_ptr() % ALIGN_BYTES
    return memory[skip : skip + total].view(pages, page_bytes)
