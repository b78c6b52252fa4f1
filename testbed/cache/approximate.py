"""What stands for pages that are not read token by token: prototypes per page, one background state per stream."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.prototypes import encode_prototypes, make_prototypes
from policies.base import Mode
from testbed.cache.pool import SlabPool


class Approximations:
    """Prototypes of CLUSTER pages and the background of BACKGROUND pages, both in L1.

    A background state is the mean key, the mean value and the log of the number of tokens of a stream's pages in that
    mode, kept as sums, so that pages may enter and leave.

    Attributes:
        slot: [S, N] int32, slot of each page's prototypes in `prototypes`; -1 = none.
        background_slot: [S] int32, slot of each stream's state in `background`; -1 = none.
    """

    def __init__(self, streams: int, head_dim: int, prototypes: SlabPool, background: SlabPool) -> None:
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

    def grow(self, pages: int) -> None:
        """Adds columns for new pages."""
        fresh = torch.full((len(self.slot), pages), -1, dtype=torch.int32)
        self.slot = torch.cat((self.slot, fresh), dim=1)

    def lacking(self, mode: Tensor, old_mode: Tensor) -> Tensor:
        """[S, N] bool: pages whose tokens must be looked at for the modes [S, N] to hold."""
        background = (mode == Mode.BACKGROUND) != (old_mode == Mode.BACKGROUND)
        return background | ((mode == Mode.CLUSTER) & (self.slot < 0))

    def update(self, at: Tensor, k: Tensor, v: Tensor, mode: Tensor, old_mode: Tensor) -> None:
        """Makes prototypes of pages that turn CLUSTER; adds or takes off pages that enter or leave BACKGROUND.

        Args:
            at: [M, 2] stream and page.
            k: [M, P, D] their keys.
            v: [M, P, D] their values.
            mode: [S, N] to come.
            old_mode: [S, N] in force.
        """
        if not len(at):
            return
        row, page = at[:, 0], at[:, 1]
        new, old = mode[row, page], old_mode[row, page]
        make = (new == Mode.CLUSTER) & (self.slot[row, page] < 0)
        if bool(make.any()):
            slots = self.prototypes.allocate(int(make.sum()))
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

    def settle(self, mode: Tensor) -> None:
        """After all updates: frees prototypes that no page uses, writes the background states."""
        at = ((mode != Mode.CLUSTER) & (self.slot >= 0)).nonzero()
        if len(at):
            self.prototypes.free(self.slot[at[:, 0], at[:, 1]].long())
            self.slot[at[:, 0], at[:, 1]] = -1
        if self._sums is not None:
            self._write_background(self._sums)

    def _write_background(self, sums: Tensor) -> None:
        d = self.head_dim
        used = sums[:, 2 * d] > 0.5  # a whole number of tokens, so never near the bound
        held = self.background_slot >= 0
        self.background.free(self.background_slot[held & ~used].long())
        self.background_slot[held & ~used] = -1
        fresh = (used & ~held).nonzero().flatten()
        self.background_slot[fresh] = self.background.allocate(len(fresh)).int()
        sums = sums[used].to(self.device)
        tokens = sums[:, 2 * d :]
        k, v = (sums[:, i * d : (i + 1) * d] / tokens for i in range(2))
        blobs = encode_prototypes(self.background.fmt, k.unsqueeze(1), v.unsqueeze(1), tokens.log2())
        self.background.write(self.background_slot[used].long(), blobs)

    def clone(self) -> Approximations:
        """An independent copy."""
        other = Approximations(len(self.slot), self.head_dim, self.prototypes.clone(), self.background.clone())
        other.slot, other.background_slot = self.slot.clone(), self.background_slot.clone()
        other._sums = None if self._sums is None else self._sums.clone()
        return other

    def close(self) -> None:
        """Frees everything."""
        self.prototypes.close()
        self.background.close()
