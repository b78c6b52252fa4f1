"""Which slots of a pool are taken, by whom, and in which blocks: free lists with references and arenas.

A pool grows by slabs of `slab_pages` slots. An arena (a head class) owns whole blocks of consecutive slabs, so that its
pages lie together; a block without a page goes back to the pool, where any arena may take it. A slot may have
several references: forks of a sequence share pages until one of them lets go (copy on write).
"""

from __future__ import annotations

import torch
from torch import Tensor


class SlotError(RuntimeError):
    """A slot was freed or shared that nobody holds; a fault of the caller, never of the user."""


class SlotMap:
    """Free lists of one pool. Lowest slot first, so that packing and logs are deterministic.

    Attributes:
        slab_pages: slots a slab.
        references: [slabs * slab_pages] int32, holders of each slot; 0 = free.
        owner: [slabs] int16, arena of each slab; -1 = nobody's, its memory is given back.
        block: [slabs] int64, first slab of the block a slab is part of; -1 = none.
    """

    def __init__(self, slab_pages: int) -> None:
        self.slab_pages = slab_pages
        self.references = torch.zeros(0, dtype=torch.int32)
        self.owner = torch.zeros(0, dtype=torch.int16)
        self.block = torch.zeros(0, dtype=torch.int64)
        self.block_slabs: dict[int, int] = {}  # arena -> slabs a block, 1 if not said
        self._used_in = torch.zeros(0, dtype=torch.int64)  # [slabs] slots taken

    @property
    def slabs(self) -> int:
        """Slabs in the range, returned ones included."""
        return len(self.owner)

    @property
    def used(self) -> int:
        """Slots taken."""
        return int(self._used_in.sum())

    @property
    def held(self) -> int:
        """Slots of slabs that somebody owns."""
        return int((self.owner >= 0).sum()) * self.slab_pages

    def used_by(self, arena: int) -> int:
        """Slots an arena has taken."""
        return int(self._used_in[self.owner == arena].sum())

    def held_by(self, arena: int) -> int:
        """Slots of the slabs an arena owns."""
        return int((self.owner == arena).sum()) * self.slab_pages

    def arenas(self) -> list[int]:
        """Arenas that own slabs."""
        return self.owner[self.owner >= 0].unique().tolist()

    def block_pages(self, arena: int) -> int:
        """Slots a block of an arena."""
        return self.block_slabs.get(arena, 1) * self.slab_pages

    def missing_blocks(self, pages: int, arena: int) -> int:
        """Blocks an arena must claim before it can take so many slots."""
        short = pages - (self.held_by(arena) - self.used_by(arena))
        return max(0, -(-short // self.block_pages(arena)))

    def claim(self, blocks: int, arena: int) -> Tensor:
        """Gives an arena blocks of slabs, the lowest that nobody owns, then new ones: slabs [blocks * b] int64."""
        width = self.block_slabs.get(arena, 1)
        first = self._free_runs(width)[:blocks]
        missing = blocks - len(first)
        if missing:
            first = torch.cat((first, self.slabs + width * torch.arange(missing)))
            self._grow(width * missing)
        slabs = (first.unsqueeze(1) + torch.arange(width)).flatten()
        self.owner[slabs] = arena
        self.block[slabs] = first.repeat_interleave(width)
        return slabs

    def _free_runs(self, width: int) -> Tensor:
        """First slabs of all runs of `width` slabs that nobody owns, without overlap."""
        free = self.owner < 0
        if self.slabs < width:
            return torch.zeros(0, dtype=torch.int64)
        index = torch.arange(self.slabs)
        segment = torch.where(free, -1, index).cummax(0).values + 1  # where the free stretch around a slab begins
        fits = free.to(torch.int64).unfold(0, width, 1).sum(1) == width
        return (fits & ((index - segment)[: len(fits)] % width == 0)).nonzero().flatten()

    def _grow(self, slabs: int) -> None:
        self.owner = torch.cat((self.owner, torch.full((slabs,), -1, dtype=torch.int16)))
        self.block = torch.cat((self.block, torch.full((slabs,), -1, dtype=torch.int64)))
        self._used_in = torch.cat((self._used_in, torch.zeros(slabs, dtype=torch.int64)))
        self.references = torch.cat((self.references, torch.zeros(slabs * self.slab_pages, dtype=torch.int32)))

    def take(self, pages: int, arena: int = 0) -> Tensor:
        """The lowest free slots of an arena [pages] int64, one reference each.

        Raises:
            SlotError: the arena has too few; claim blocks before.
        """
        free = (self.references == 0).view(-1, self.slab_pages) & (self.owner == arena).unsqueeze(1)
        slots = free.flatten().nonzero().flatten()[:pages]
        if len(slots) < pages:
            raise SlotError(f"{pages} slots wanted, arena {arena} has {len(slots)} free")
        self.references[slots] = 1
        self._count(slots, 1)
        return slots

    def share(self, slots: Tensor) -> None:
        """One more reference for slots that are taken.

        Raises:
            SlotError: one is free.
        """
        if bool((self.references[slots] == 0).any()):
            raise SlotError("a free slot was shared")
        self.references.index_add_(0, slots, torch.ones(len(slots), dtype=torch.int32))

    def give(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """One reference less.

        Returns:
            Slots that became free [F] int64, and slabs [E] int64 whose block nobody uses any more and that are
            given back.

        Raises:
            SlotError: a slot was freed more often than it was taken; nothing is changed then.
        """
        left = self.references.clone()
        left.index_add_(0, slots, torch.full((len(slots),), -1, dtype=torch.int32))
        if bool((left[slots] < 0).any()):
            raise SlotError("a slot was freed twice")
        self.references = left
        freed = slots[left[slots] == 0].unique()
        self._count(freed, -1)
        return freed, self._empty_blocks(freed)

    def _count(self, slots: Tensor, sign: int) -> None:
        each = torch.full((len(slots),), sign, dtype=torch.int64)
        self._used_in.index_add_(0, slots // self.slab_pages, each)

    def _empty_blocks(self, freed: Tensor) -> Tensor:
        """Slabs of blocks that lost their last page, now nobody's."""
        blocks = self.block[(freed // self.slab_pages).unique()].unique()
        if not len(blocks):
            return blocks
        used = torch.zeros(self.slabs, dtype=torch.int64)
        owned = self.block >= 0
        used.index_add_(0, self.block[owned], self._used_in[owned])
        gone = torch.isin(self.block, blocks[used[blocks] == 0])
        self.owner[gone] = -1
        self.block[gone] = -1
        return gone.nonzero().flatten()

    def packed_end(self, arena: int) -> int:
        """First slot beyond those that an arena's pages would fill if they lay without holes, in whole blocks."""
        blocks = -(-self.used_by(arena) // self.block_pages(arena))
        slabs = (self.owner == arena).nonzero().flatten()[: blocks * self.block_slabs.get(arena, 1)]
        return (int(slabs[-1]) + 1) * self.slab_pages if len(slabs) else 0
