"""Pages in flight: their move is decided and in the page state, but the copy is not done yet.

A flight keeps its source slots until the copy is done, so it can be taken back, and the bytes never exist nowhere.
What the page state says does not depend on how far a flight is: policies and logs see the same whatever the machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from policies.base import Format, Mode, Tier
from testbed.cache.archive import ArchiveError, CorruptPages
from testbed.cache.mover import CAUSES, Job, Priority, State
from testbed.cache.pool import CacheError, PageStore
from testbed.cache.shield import shielded
from testbed.cache.transfer import transfer

if TYPE_CHECKING:
    from testbed.cache.paged import PagedCache


class LostPages(CacheError):
    """Pages that attention needs can't be had from the archive.

    Attributes:
        at: [M, 2] int64 stream and page.
    """

    def __init__(self, at: Tensor, reason: str) -> None:
        super().__init__(reason)
        self.at = at


class Staged:
    """Blobs that wait to be written, as a store: what leaves the ring can't wait in its slot."""

    def __init__(self, like: PageStore, blobs: Tensor) -> None:
        self.fmt, self.blobs = like.fmt, blobs

    def read(self, slots: Tensor) -> Tensor:
        """Blobs at [M]: [M, page_bytes] uint8."""
        return self.blobs[slots]


@dataclass
class Flight:
    """Pages that move together.

    Attributes:
        job: what the mover does.
        at: [M, 2] int64 stream and page.
        source: tier and format they come from.
        target: tier and format they go to, which is what the page state says.
        staged: the source is a buffer of its own and no slots.
    """

    job: Job
    at: Tensor
    source: tuple[Tier, Format]
    target: tuple[Tier, Format]
    staged: bool = False

    @property
    def link(self) -> str:
        """As traffic names it."""
        return f"{self.source[0].name}>{self.target[0].name}"

    @property
    def source_bytes(self) -> int:
        """Bytes that the source slots still take."""
        return 0 if self.staged else self.job.source.fmt.page_bytes * len(self.at)


class Flights:
    """All flights of one cache.

    Attributes:
        pending: [S, N] int32, number of the flight a page is in; 0 = none.
    """

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        self.pending = torch.zeros(cache.streams, 0, dtype=torch.int32)
        self._open: dict[int, Flight] = {}
        self._due: dict[int, list[int]] = {}  # layer -> flights whose pages it reads
        self._last = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._open.values())

    def grow(self, pages: int) -> None:
        """Adds columns for new pages."""
        self.pending = torch.nn.functional.pad(self.pending, (0, pages))

    def source_bytes(self) -> dict[Tier, int]:
        """Tier -> bytes of slots that are only kept until a copy is done."""
        out: dict[Tier, int] = {}
        for flight in self._open.values():
            out[flight.source[0]] = out.get(flight.source[0], 0) + flight.source_bytes
        return out

    # --- departure -------------------------------------------------------------------------------------------

    def launch(self, flight: Flight) -> None:
        """Hands the flight to the mover; the page state already says where it goes."""
        self._last += 1
        self._open[self._last] = flight
        self.pending[flight.at[:, 0], flight.at[:, 1]] = self._last
        if flight.job.priority == Priority.DEMAND:
            self._due.setdefault(flight.job.layer, []).append(self._last)
        mover = self.cache.pools.mover
        started = time.perf_counter()
        mover.submit(flight.job)
        if not mover.overlap:
            self.cache.traffic.stalled(CAUSES[flight.job.asked], time.perf_counter() - started)

    def demand(self, wanted: Tensor) -> Tensor:
        """Pages [S, N] bool that attention will read: those still on their way are waited for at their layer.

        Returns:
            [S, N] bool, which of them are late.
        """
        late = wanted & (self.pending > 0)
        if not bool(late.any()):
            return late
        at = late.nonzero()
        layers = at[:, 0] // self.cache.kv_heads
        pairs = torch.stack((layers, self.pending[at[:, 0], at[:, 1]].long()), 1).unique(dim=0)
        for layer, number in pairs.tolist():
            if number not in self._due.setdefault(layer, []):
                self._due[layer].append(number)
            self.cache.pools.mover.escalate(self._open[number].job)
        return late

    # --- arrival -----------------------------------------------------------------------------------------------

    def arrive(self, layer: int) -> None:
        """Waits until all pages that a layer reads are there.

        Raises:
            LostPages: some can't be had; they are back in the state they came from.
        """
        numbers = self._due.pop(layer, None)
        if not numbers:
            return
        self._wait([self._open[number] for number in numbers if number in self._open])
        failed = [number for number in numbers if number in self._open and self._open[number].job.error is not None]
        lost = [self._settle(number) for number in failed]
        at = torch.cat(lost) if lost else torch.zeros(0, 2, dtype=torch.int64)
        needed = self.cache.state["mode"][at[:, 0], at[:, 1]] == Mode.EXACT
        if bool(needed.any()):
            raise LostPages(at[needed], f"{int(needed.sum())} pages that attention reads can't be had from the archive")

    def _wait(self, flights: Iterable[Flight]) -> None:
        """Waits, and books the seconds by what each flight was for."""
        for flight in flights:
            seconds = self.cache.pools.mover.wait([flight.job])
            self.cache.traffic.stalled(CAUSES[flight.job.asked], seconds)

    @shielded
    def reap(self) -> None:
        """Frees the source slots of flights that are done, takes failed ones back."""
        self.cache.pools.mover.finished()  # each cache looks at its own
        freed: dict[tuple[Tier, Format], list[Tensor]] = {}
        for number in [number for number, flight in self._open.items() if flight.job.done]:
            self._settle(number, freed)
        for key, slots in freed.items():
            self.cache.pools.stores[key].free(torch.cat(slots))

    def resolve(self, touched: Tensor) -> None:
        """Ends the flights of pages [S, N] bool that a new plan moves again: taken back, or waited for."""
        for number in self.pending[touched].unique().tolist():
            if not number:
                continue
            flight = self._open[number]
            keep = ~touched[flight.at[:, 0], flight.at[:, 1]]
            # A conversion is never taken back: what comes next would start from other bits than if it had been done.
            converts = flight.source[1] != flight.target[1]
            if converts or bool(keep.any()) or not self.cache.pools.mover.cancel(flight.job):
                self._wait([flight])
            self._settle(number)

    def drain(self) -> None:
        """Ends all flights."""
        self._finish()
        self.reap()

    def _finish(self) -> None:
        """Waits until nothing is copied any more, beside a GPU too, since slots are about to change hands."""
        self._wait(list(self._open.values()))
        for flight in self._open.values():
            for event in flight.job.events:
                event.synchronize()

    def free_sources(self) -> None:
        """Waits for all flights and frees the slots of those that arrived.

        For the midst of a plan: one that failed stays in flight, since taking it back would move its pages.
        """
        self._finish()
        for number in [number for number, flight in self._open.items() if flight.job.state == State.DONE]:
            self._settle(number)

    @shielded
    def _settle(self, number: int, freed: dict[tuple[Tier, Format], list[Tensor]] | None = None) -> Tensor:
        """Settles a flight that is done, failed or cancelled: pages [M, 2] that are lost for now.

        Source slots are freed, or, if `freed` is given, added to it, so that many flights take one call.
        """
        flight = self._open.pop(number)
        for numbers in self._due.values():
            if number in numbers:
                numbers.remove(number)
        self.pending[flight.at[:, 0], flight.at[:, 1]] = 0
        if flight.job.state == State.FAILED:
            self._report(flight)
        if flight.job.state == State.DONE:
            good = torch.ones(len(flight.at), dtype=torch.bool)
        elif flight.job.state == State.FAILED and flight.source[0] == Tier.L3:
            good = flight.job.arrived.clone()
            self._salvage(flight, good)
        else:
            good = torch.zeros(len(flight.at), dtype=torch.bool)
        if bool(good.any()):
            if not flight.staged:
                slots = flight.job.source_slots[good]
                if freed is None:
                    self.cache.pools.stores[flight.source].free(slots)
                else:
                    freed.setdefault(flight.source, []).append(slots)
            if Tier.L3 in (flight.source[0], flight.target[0]):
                self.cache.pools.archive_worked()
            self.cache.traffic.moved(flight.link, int(good.sum()), flight.job.bytes, flight.job.busy_s)
        self._take_back(flight, ~good)
        return flight.at[~good]

    def _salvage(self, flight: Flight, good: Tensor) -> None:
        """Reads what a failed batch left out once more, by halves, and marks in good [M] what came.

        One bad page must not cost its neighbours their place.
        """
        job, pools = flight.job, self.cache.pools
        parts = [(~good).nonzero().flatten()]
        while parts and not pools.archive_off:
            part = parts.pop()
            try:
                transfer(job.source, job.source_slots[part], job.target, job.target_slots[part], pools.mover.staging)
                good[part] = True
            except (ArchiveError, OSError) as error:
                if len(part) > 1:
                    parts += part.chunk(2)
                elif not isinstance(error, CorruptPages):
                    self.note_failure("read", error)

    def _take_back(self, flight: Flight, which: Tensor) -> None:
        """Pages which [M] of a flight are where they came from."""
        if not bool(which.any()):
            return
        cache, at = self.cache, flight.at[which]
        cache.pools.stores[flight.target].free(flight.job.target_slots[which])
        if flight.staged:
            assert isinstance(flight.job.source, Staged)
            cache.place_staged(at, flight.source[1], flight.job.source.blobs[which])
            return
        tier, code = flight.source
        cache.state["tier"][at[:, 0], at[:, 1]] = int(tier)
        cache.state["format"][at[:, 0], at[:, 1]] = int(code)
        cache.state["slot"][at[:, 0], at[:, 1]] = flight.job.source_slots[which].int()
        cache.tables_stale = True

    def _report(self, flight: Flight) -> None:
        """Failures of the archive go into the traffic; any other is a fault of ours."""
        error = flight.job.error
        if not isinstance(error, (CorruptPages, ArchiveError, OSError)):
            raise CacheError(f"a move {flight.link} of {len(flight.at)} pages failed: {error!r}") from error
        self.note_failure("write" if flight.target[0] == Tier.L3 else "read", error)

    def note_failure(self, kind: str, error: Exception) -> None:
        """Books a failed read or write of the archive; after so many in a row L3 takes no more pages."""
        cache = self.cache
        if isinstance(error, CorruptPages):
            cache.traffic.failures["corrupt"] += len(error.slots)
            return
        cache.traffic.failures[kind] += 1
        if cache.pools.archive_failed(str(error)):
            cache.traffic.warn(f"L3 switched off after {cache.config.l3_failures} failures in a row: {error}")
