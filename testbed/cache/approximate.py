"""What stands for pages that are not read token by token: prototypes per page, one background state per stream."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.prototypes import encode_prototypes, make_prototypes
from policies.base import Mode
from testbed.cache.offsets import BackgroundOffsets
from testbed.cache.pool import PoolFull, SlabPool


class Approximations:
    """Prototypes of CLUSTER pages and the background of BACKGROUND pages, both in L1.

    A background state is the mean key, the mean value and the log of the number of tokens of a stream's pages in that
    mode, kept as sums, so that pages may enter and leave; where the model's offsets are known it is moved by them.

    Attributes:
        slot: [S, N] int32, slot of each page's prototypes in `prototypes`; -1 = none.
        background_slot: [S] int32, slot of each stream's state in `background`; -1 = none.
    """

    def __init__(
        self,
        streams: int,
        head_dim: int,
        prototypes: SlabPool,
        background: SlabPool,
        offsets: BackgroundOffsets | None = None,
    ) -> None:
        self.offsets = None if offsets is None else offsets.to(prototypes.device)
        self.head_dim, self.device = head_dim, prototypes.device
        self.prototypes, self.background = prototypes, background
        self.slot = torch.zeros(streams, 0, dtype=torch.int32)
        self.background_slot = torch.full((streams,), -1, dtype=torch.int32)
        # [S, 2 * D + 1]: keys, values, tokens; in host memory, made when a page first turns BACKGROUND.
        self._sums: Tensor | None = None

    @property
    def sums_bytes(self) -> int:
        """Bytes of the sums behind the background states, in host memory."""
        return 0 if self._sums is None else self._sums.nbytes

    @property
    def most_sums_bytes(self) -> int:
        """Bytes of the sums once a page is BACKGROUND."""
        return 4 * len(self.slot) * (2 * self.head_dim + 1)

    @property
    def held_bytes(self) -> int:
        """Bytes of the prototypes and states of this sequence, on the device."""
        prototypes = int((self.slot >= 0).sum()) * self.prototypes.fmt.page_bytes
        return prototypes + int((self.background_slot >= 0).sum()) * self.background.fmt.page_bytes

    def grow(self, pages: int) -> None:
        """Adds columns for new pages."""
        fresh = torch.full((len(self.slot), pages), -1, dtype=torch.int32)
        self.slot = torch.cat((self.slot, fresh), dim=1)

    def lacking(self, mode: Tensor, old_mode: Tensor) -> Tensor:
        """[S, N] bool: pages whose tokens must be looked at for the modes [S, N] to hold."""
        background = (mode == Mode.BACKGROUND) != (old_mode == Mode.BACKGROUND)
        return background | ((mode == Mode.CLUSTER) & (self.slot < 0))

    def update(self, at: Tensor, k: Tensor, v: Tensor, mode: Tensor, old_mode: Tensor) -> int:
        """Makes prototypes of pages that turn CLUSTER; adds or takes off pages that enter or leave BACKGROUND.

        Where the device has no room for prototypes the pages are skipped instead, in `mode` too.

        Args:
            at: [M, 2] stream and page.
            k: [M, P, D] their keys.
            v: [M, P, D] their values.
            mode: [S, N] to come.
            old_mode: [S, N] in force.

        Returns:
            Pages that got no prototypes for want of room.
        """
        if not len(at):
            return 0
        row, page = at[:, 0], at[:, 1]
        new, old = mode[row, page], old_mode[row, page]
        make = (new == Mode.CLUSTER) & (self.slot[row, page] < 0)
        slots, refused = None, 0
        if bool(make.any()):
            try:
                slots = self.prototypes.allocate(int(make.sum()))
            except PoolFull:
                refused = int(make.sum())
                mode[row[make], page[make]] = int(Mode.SKIP)
        if slots is not None:
            means = make_prototypes(k[make], v[make], self.prototypes.fmt.groups)
            self.prototypes.write(slots, encode_prototypes(self.prototypes.fmt, *means))
            self.slot[row[make], page[make]] = slots.int()
        sign = (new == Mode.BACKGROUND).float() - (old == Mode.BACKGROUND).float()
        if bool(sign.any()):
            if self._sums is None:
                self._sums = torch.zeros(len(self.slot), 2 * self.head_dim + 1)
            tokens = torch.full((len(at), 1), float(k.shape[1]), device=k.device)
            total = torch.cat((k.float().sum(1), v.float().sum(1), tokens), dim=1)
            self._sums.index_add_(0, row, total.cpu() * sign.unsqueeze(1))
        return refused

    def settle(self, mode: Tensor) -> int:
        """After all updates: frees prototypes that no page uses, writes the background states.

        A stream whose state finds no room on the device has its BACKGROUND pages skipped, in `mode` too.

        Returns:
            Streams without room.
        """
        at = ((mode != Mode.CLUSTER) & (self.slot >= 0)).nonzero()
        if len(at):
            self.prototypes.free(self.slot[at[:, 0], at[:, 1]].long())
            self.slot[at[:, 0], at[:, 1]] = -1
        return 0 if self._sums is None else self._write_background(self._sums, mode)

    def _write_background(self, sums: Tensor, mode: Tensor) -> int:
        used = sums[:, 2 * self.head_dim] > 0.5  # a whole number of tokens, so never near the bound
        sums[~used] = 0.0  # what rounding left, or a page of numbers that are none
        held = self.background_slot >= 0
        self.background.free(self.background_slot[held & ~used].long())
        self.background_slot[held & ~used] = -1
        fresh = (used & ~held).nonzero().flatten()
        refused = self._make_room(fresh)
        if refused:
            mode[fresh] = mode[fresh].masked_fill(mode[fresh] == Mode.BACKGROUND, int(Mode.SKIP))
            sums[fresh] = 0.0
            used[fresh] = False
        self._encode(sums, used)
        return refused

    def _make_room(self, streams: Tensor) -> int:
        """Slots for the states of streams [M]; M if there is no room, else 0."""
        try:
            self.background_slot[streams] = self.background.allocate(len(streams)).int()
        except PoolFull:
            return len(streams)
        return 0

    def _encode(self, sums: Tensor, used: Tensor) -> None:
        """Writes the states of the streams used [S]."""
        d = self.head_dim
        sums = sums[used].to(self.device)
        tokens = sums[:, 2 * d :]
        k, v = (sums[:, i * d : (i + 1) * d] / tokens for i in range(2))
        log2_count = tokens[:, 0].log2()
        if self.offsets is not None:
            v, log2_count = self.offsets.of(used.to(self.device)).moved(v, log2_count)
        blobs = encode_prototypes(self.background.fmt, k.unsqueeze(1), v.unsqueeze(1), log2_count.unsqueeze(1))
        self.background.write(self.background_slot[used].long(), blobs)

    def fork(self, prototypes: SlabPool, background: SlabPool) -> Approximations:
        """The same in other pools, or in the same ones, where prototypes, which never change, are shared."""
        other = Approximations(len(self.slot), self.head_dim, prototypes, background, self.offsets)
        other.slot, other.background_slot = self.slot.clone(), self.background_slot.clone()
        held = self.background_slot >= 0  # first, since a pool that is full refuses before anything is taken
        other.background_slot[held] = _copied(self.background, background, self.background_slot[held])
        held = self.slot >= 0
        if prototypes is self.prototypes:
            prototypes.share(self.slot[held].long())
        else:
            other.slot[held] = _copied(self.prototypes, prototypes, self.slot[held])
        other._sums = None if self._sums is None else self._sums.clone()
        return other

    def close(self) -> None:
        """Gives all slots back."""
        self.prototypes.free(self.slot[self.slot >= 0].long())
        self.background.free(self.background_slot[self.background_slot >= 0].long())
        self.slot.fill_(-1)
        self.background_slot.fill_(-1)


def _copied(source: SlabPool, target: SlabPool, slots: Tensor) -> Tensor:
    """Copies of the blobs at slots [M] int32 in another pool, or in fresh slots of the same: their slots."""
    fresh = target.allocate(len(slots))
    target.write(fresh, source.read(slots.long()))
    return fresh.int()
