"""Slots of one format in a page file: which are taken, by how many, and the checksum of each.

A slot's number says where its page is: slot = extent * pages_per_extent + place in the extent. So numbers mean the same
when a saved session comes back. Tables have a row for each extent that the pool has, not for each of the file.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from testbed.cache.slots import SlotError


class ExtentSlots:
    """Accounts of one pool. Taking, sharing and giving is one thread's; checksums may be noted and asked on any.

    Attributes:
        width: slots an extent.
        extents: [E] int64, extents of each row; -1 = the row is free.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.extents = torch.zeros(0, dtype=torch.int64)
        self._row = torch.zeros(0, dtype=torch.int64)  # [extents of the file] row, -1 = not ours
        self._references = torch.zeros(0, width, dtype=torch.int32)
        self._used_in = torch.zeros(0, dtype=torch.int64)  # [E] slots taken
        self._sums = torch.zeros(0, width, dtype=torch.int64)
        self._noted = torch.zeros(0, width, dtype=torch.bool)
        self._lock = threading.Lock()  # tables are replaced when they grow

    @property
    def used(self) -> int:
        """Slots taken."""
        return int(self._used_in.sum())

    @property
    def held_extents(self) -> int:
        """Extents that the pool has."""
        return int((self.extents >= 0).sum())

    @property
    def memory_bytes(self) -> int:
        """Of all tables."""
        tables = (self.extents, self._row, self._references, self._used_in, self._sums, self._noted)
        return sum(table.nbytes for table in tables)

    def missing_extents(self, pages: int) -> int:
        """Extents to add before so many slots can be taken."""
        free = self.held_extents * self.width - self.used
        return max(0, -(-(pages - free) // self.width))

    def add(self, extents: Tensor) -> None:
        """Extents [E] int64 that the pool has from now on, all slots free."""
        with self._lock:
            rows = (self.extents < 0).nonzero().flatten()[: len(extents)]
            missing = len(extents) - len(rows)
            if missing:
                rows = torch.cat((rows, len(self.extents) + torch.arange(missing)))
                grow = max(missing, len(self.extents) // 4)  # so that growing costs little on the whole
                self.extents = torch.cat((self.extents, torch.full((grow,), -1, dtype=torch.int64)))
                for name in ("_references", "_sums", "_noted", "_used_in"):
                    table: Tensor = getattr(self, name)
                    setattr(self, name, torch.cat((table, table.new_zeros(grow, *table.shape[1:]))))
            beyond = int(extents.max()) + 1 - len(self._row) if len(extents) else 0
            if beyond > 0:
                self._row = torch.cat((self._row, torch.full((beyond,), -1, dtype=torch.int64)))
            self.extents[rows], self._row[extents] = extents, rows

    def take(self, pages: int) -> Tensor:
        """The lowest free slots [pages] int64, one reference each.

        Raises:
            SlotError: there are too few; add extents before.
        """
        rows = ((self.extents >= 0) & (self._used_in < self.width)).nonzero().flatten()
        rows = rows[self.extents[rows].argsort()]
        enough = torch.searchsorted((self.width - self._used_in[rows]).cumsum(0), pages) + 1
        rows = rows[: int(enough)]
        free = (self._references[rows] == 0).nonzero()[:pages]
        if len(free) < pages:
            raise SlotError(f"{pages} slots wanted, {len(free)} are free")
        row, place = rows[free[:, 0]], free[:, 1]
        self._begin(row, place)
        return self.extents[row] * self.width + place

    def take_these(self, slots: Tensor) -> None:
        """Named slots [M] int64 that are free, in extents the pool has; one reference each.

        Raises:
            SlotError: one is taken or named twice.
        """
        row, place = self._at(slots)
        if len(slots.unique()) < len(slots) or bool((self._references[row, place] > 0).any()):
            raise SlotError("a slot was restored twice")
        self._begin(row, place)

    def _begin(self, row: Tensor, place: Tensor) -> None:
        self._references[row, place] = 1
        self._used_in.index_add_(0, row, torch.ones_like(row))

    def share(self, slots: Tensor) -> None:
        """One more reference for slots that are taken.

        Raises:
            SlotError: one is free.
        """
        row, place = self._at(slots)
        if bool((self._references[row, place] == 0).any()):
            raise SlotError("a free slot was shared")
        one = torch.ones(len(slots), dtype=torch.int32)
        self._references.view(-1).index_add_(0, row * self.width + place, one)

    def give(self, slots: Tensor) -> Tensor:
        """One reference less.

        Returns:
            Extents [E] int64 that lost their last page; the pool has them no more.

        Raises:
            SlotError: a slot was freed more often than it was taken; nothing is changed then.
        """
        row, place = self._at(slots)
        flat, references = row * self.width + place, self._references.view(-1)
        one = torch.ones(len(slots), dtype=torch.int32)
        references.index_add_(0, flat, -one)
        if bool((references[flat] < 0).any()):
            references.index_add_(0, flat, one)
            raise SlotError("a slot was freed twice")
        freed = flat[references[flat] == 0].unique()
        rows = freed // self.width
        self._used_in.index_add_(0, rows, -torch.ones_like(rows))
        rows = rows.unique()
        rows = rows[self._used_in[rows] == 0]
        gone = self.extents[rows]
        with self._lock:
            self._noted.view(-1)[freed] = False
            self._row[gone] = -1
            self.extents[rows] = -1
        return gone

    def note(self, slots: Tensor, sums: Tensor | None) -> None:
        """Sets checksums [M] int64 of slots [M]; None = what they hold is unknown."""
        with self._lock:
            row, place = self._at(slots)
            self._noted[row, place] = sums is not None
            if sums is not None:
                self._sums[row, place] = sums

    def noted(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Checksums [M] int64 of slots [M], and whether there is one [M] bool."""
        with self._lock:
            row, place = self._at(slots)
            return self._sums[row, place], self._noted[row, place]

    def _at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Row and place of slots.

        Raises:
            SlotError: one lies in no extent of the pool.
        """
        extent, place = slots // self.width, slots % self.width
        known = (extent >= 0) & (extent < len(self._row))
        row = torch.where(known, self._row[extent.clamp(0, max(0, len(self._row) - 1))], -1) if len(self._row) else None
        if row is None or bool((row < 0).any()):
            if not len(slots):
                return extent, place
            raise SlotError("a slot that the pool doesn't have")
        return row, place

    def absent(self, slots: Tensor) -> Tensor:
        """Extents [E] int64 of slots [M] that the pool doesn't have."""
        extents = (slots // self.width).unique()
        inside = extents[extents < len(self._row)]
        return extents[~torch.isin(extents, inside[self._row[inside] >= 0])]
