"""Copies pages from one store to another on the calling thread: bytes where the format stays, else decode and encode.

Blocking and in bounded blocks; every long part is native code that lets go of the interpreter's lock. Between slabs
of one kind of memory nothing is buffered. Elsewhere two buffers take turns: block i + 1 is read from the file while
block i is placed, is gathered while block i is written or crosses the bus of a GPU. There copies run on the staging's
stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from kernels.api import Pool, copy_pages
from kernels.pages import PageFormat, decode, encode
from testbed.cache.archive.file_pool import FilePool, Transfer, aligned_pages
from testbed.cache.pool import CacheError, SlabPool

BLOCK_BYTES = 4 << 20


class Source(Protocol):
    """What pages can be copied from."""

    fmt: PageFormat

    def read(self, slots: Tensor) -> Tensor:
        """Blobs at slots [M]: [M, page_bytes] uint8."""
        ...


class Target(Protocol):
    """What pages can be copied to."""

    fmt: PageFormat

    def write(self, slots: Tensor, blobs: Tensor) -> None:
        """Copies blobs [M, page_bytes] uint8 into slots [M]."""
        ...


class Staging:
    """What one thread needs beside the stores; not shared between threads.

    Args:
        device: of L0 and L1.
        block_bytes: what is under way at once; each buffer has that size.
        side_stream: CUDA: copies run beside the step; else on the stream that is current when they are made.

    Attributes:
        stream: the side stream; None without.
        read_done: called by `transfer` when the source was read and what is left is to place or write the pages.
    """

    def __init__(
        self, device: torch.device | str = "cpu", block_bytes: int = BLOCK_BYTES, side_stream: bool = True
    ) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes={block_bytes!r}: must be positive")
        self.device, self.block_bytes = torch.device(device), block_bytes
        self.stream = torch.cuda.Stream(self.device) if side_stream and self.device.type == "cuda" else None
        self.read_done: Callable[[], None] = _nothing
        self._aligned: dict[int, Tensor] = {}
        self._pinned: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []

    def block_pages(self, *formats: PageFormat) -> int:
        """Pages of a block, at least one."""
        return max(1, self.block_bytes // max(fmt.page_bytes for fmt in formats))

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Device work inside is on the side stream, if there is one."""
        if self.stream is None:
            yield
        else:
            with torch.cuda.stream(self.stream):
                yield

    def aligned(self, turn: int, pages: int, page_bytes: int) -> Tensor:
        """One of the two buffers for files as [pages, page_bytes], aligned for O_DIRECT."""
        index, wanted = turn % 2, pages * page_bytes
        if index not in self._aligned or self._aligned[index].numel() < wanted:
            self._aligned[index] = aligned_pages(1, max(wanted, self.block_bytes)).flatten()
        return self._aligned[index][:wanted].view(pages, page_bytes)

    def pinned(self, turn: int, pages: int, page_bytes: int) -> tuple[Tensor, torch.cuda.Event]:
        """One of the two pinned buffers as [pages, page_bytes], and its event: once that has passed it is free."""
        while len(self._pinned) < 2:
            self._pinned.append(torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=True))
            self._events.append(torch.cuda.Event())
        index = turn % 2
        if pages * page_bytes > self._pinned[index].numel():  # a page larger than a block
            self._pinned[index] = torch.empty(pages * page_bytes, dtype=torch.uint8, pin_memory=True)
        return self._pinned[index][: pages * page_bytes].view(pages, page_bytes), self._events[index]


def transfer(source: Source, source_slots: Tensor, target: Target, target_slots: Tensor, staging: Staging) -> None:
    """Copies pages; converts them if the formats differ.

    Beside a GPU, pages written to the device are there for work that follows that of the staging's stream; pages
    written to the host are there on return.

    Args:
        source: pages to read.
        source_slots: [M] int64.
        target: pages to write.
        target_slots: [M] int64, each once.
        staging: the calling thread's.

    Raises:
        ValueError: numbers of slots that differ.
        Exception: what the stores raise; some of the target slots may then have been written.
    """
    if source_slots.shape != target_slots.shape or source_slots.dim() != 1:
        raise ValueError(
            f"source_slots {tuple(source_slots.shape)}, target_slots {tuple(target_slots.shape)}: must be [M] each"
        )
    if not len(source_slots):
        return
    with staging.scope():
        if source.fmt == target.fmt and isinstance(source, SlabPool) and isinstance(target, SlabPool):
            _between_slabs(source, source_slots, target, target_slots, staging)
            return
        block_pages = staging.block_pages(source.fmt, target.fmt)
        blocks = list(zip(source_slots.split(block_pages), target_slots.split(block_pages), strict=True))
        if isinstance(source, FilePool):
            _from_file(source, target, blocks, staging)
        elif isinstance(target, FilePool):
            _to_file(source, target, blocks, staging)
        else:
            for turn, (taken, put) in enumerate(blocks, 1):
                blobs = source.read(taken)
                if turn == len(blocks):
                    staging.read_done()
                target.write(put, _converted(source, target, blobs))


def _nothing() -> None:
    """Nobody waits for the source."""


def _converted(source: Source, target: Target, blobs: Tensor) -> Tensor:
    """Blobs of the source as the target stores them."""
    return blobs if source.fmt == target.fmt else encode(target.fmt, *decode(source.fmt, blobs))


def _from_file(source: FilePool, target: Target, blocks: list[tuple[Tensor, Tensor]], staging: Staging) -> None:
    """A block is placed while the next is read."""

    def begin(turn: int) -> Transfer | None:
        if turn == len(blocks):
            return None
        taken, _ = blocks[turn]
        return source.begin_read(taken, staging.aligned(turn, len(taken), source.fmt.page_bytes))

    reading = begin(0)
    try:
        for turn, (_, put) in enumerate(blocks):
            assert reading is not None
            current, reading = reading, begin(turn + 1)
            blobs = current.wait()
            if reading is None:
                staging.read_done()
            target.write(put, _converted(source, target, blobs))
    finally:
        _settle(reading)


def _to_file(source: Source, target: FilePool, blocks: list[tuple[Tensor, Tensor]], staging: Staging) -> None:
    """A block is gathered and converted while the one before is written; on return all is written."""
    writing: Transfer | None = None
    try:
        for turn, (taken, put) in enumerate(blocks, 1):
            blobs = _converted(source, target, source.read(taken))
            if turn == len(blocks):
                staging.read_done()
            if writing is not None:
                current, writing = writing, None
                current.wait()
            writing = target.begin_write(put, blobs)
        if writing is not None:
            current, writing = writing, None
            current.wait()
    finally:
        _settle(writing)


def _settle(under_way: Transfer | None) -> None:
    """After an error: memory that is being read or written must outlive it; that it fails too adds nothing."""
    if under_way is not None:
        with contextlib.suppress(CacheError):
            under_way.wait()


def _between_slabs(
    source: SlabPool, source_slots: Tensor, target: SlabPool, target_slots: Tensor, staging: Staging
) -> None:
    """Slab to slab, by the way their devices ask for."""
    pools = (source.kernel_view(), target.kernel_view())
    if source.device.type == target.device.type:
        copy_pages(pools[0], source_slots, pools[1], target_slots)
    elif target.device.type == "cuda":
        _to_device(pools[0], source_slots, pools[1], target_slots, staging)
    else:
        _to_host(pools[0], source_slots, pools[1], target_slots, staging)


def _to_device(source: Pool, source_slots: Tensor, target: Pool, target_slots: Tensor, staging: Staging) -> None:
    """Host to device: a block is gathered into one pinned buffer while the other crosses."""
    fmt = source.fmt
    block_pages = staging.block_pages(fmt)
    for turn, taken in enumerate(source_slots.split(block_pages)):
        buffer, event = staging.pinned(turn, len(taken), fmt.page_bytes)
        event.synchronize()
        pages = torch.arange(len(taken))
        copy_pages(source, taken, Pool(fmt, (buffer,)), pages)
        arrived = buffer.to(staging.device, non_blocking=True)
        put = target_slots[turn * block_pages :][: len(taken)]
        copy_pages(Pool(fmt, (arrived,)), pages, target, put)
        event.record()


def _to_host(source: Pool, source_slots: Tensor, target: Pool, target_slots: Tensor, staging: Staging) -> None:
    """Device to host: a block is spread over the host's slabs while the next one crosses."""
    fmt = source.fmt
    block_pages = staging.block_pages(fmt)
    crossing: tuple[Tensor, torch.cuda.Event, Tensor] | None = None
    for turn, taken in enumerate(source_slots.split(block_pages)):
        buffer, event = staging.pinned(turn, len(taken), fmt.page_bytes)
        pages = torch.arange(len(taken))
        leaving = Pool(fmt, (torch.empty(buffer.shape, dtype=torch.uint8, device=staging.device),))
        copy_pages(source, taken, leaving, pages)
        buffer.copy_(leaving.slabs[0], non_blocking=True)
        event.record()
        if crossing is not None:
            _land(crossing, target)
        crossing = (buffer, event, target_slots[turn * block_pages :][: len(taken)])
    if crossing is not None:
        _land(crossing, target)


def _land(crossing: tuple[Tensor, torch.cuda.Event, Tensor], target: Pool) -> None:
    """Waits for a block and spreads it."""
    buffer, event, put = crossing
    event.synchronize()
    copy_pages(Pool(target.fmt, (buffer,)), torch.arange(len(put)), target, put)
