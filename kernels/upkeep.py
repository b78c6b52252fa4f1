"""What an append keeps current beside K and V, so that no second pass over a page is needed.

Key bounds for Quest's score (arXiv 2406.10774), a quantised copy of each page as it fills (KIVI, arXiv 2402.02750,
quantises whole pages for the same reason), and its prototypes. All of it equals doing the steps one by one:
`kernels.scoring.page_bounds`, `kernels.pages.encode`, `kernels.prototypes.make_prototypes` of the page as stored, and
`kernels.linear_attention.add`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear_attention import FeatureMap, LinearState, check_map
from kernels.table import Pool

BOUND_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Upkeep:
    """What `kernels.api.append` keeps current; a part left None is not kept. Tensors are on the device of the keys.

    Attributes:
        page: [T] or [S, T] int32, 0 to N - 1: the column of `lowest` and `highest` each new token widens. Only read
            with bounds.
        lowest, highest: [S, N, D] fp32, bf16 or fp16, channels contiguous: least and greatest key of each page by
            channel. A page without tokens must start as +inf and -inf. Keys count as stored (rounded to the pool's
            dtype, then to the bounds'); a NaN moves no bound.
        sealed: pool for a copy of each page as it fills, of any format but "proto"; the page is read back as stored.
        sealed_slot: [S, T] int32: for a token that fills its page (offset P - 1) where the copy goes, else -1; -1
            also means no copy. Two copies of a call must not share a slot.
        prototypes: pool of format "proto" for the page's C groups, made as `kernels.prototypes.make_prototypes` does.
        prototype_slot: [S, T] int32, as `sealed_slot`.
        linear: state that the new tokens are added to, as given; a token must not be attended by a page as well.
        feature_map: of `linear`.
        linear_tokens: [S, T] bool, tokens that go into `linear`; all by default.
    """

    page: Tensor
    lowest: Tensor | None = None
    highest: Tensor | None = None
    sealed: Pool | None = None
    sealed_slot: Tensor | None = None
    prototypes: Pool | None = None
    prototype_slot: Tensor | None = None
    linear: LinearState | None = None
    feature_map: FeatureMap | None = None
    linear_tokens: Tensor | None = None

    def __post_init__(self) -> None:
        """Checks types and what belongs together; shapes against k are checked by `check`."""
        if self.page.dtype != torch.int32 or self.page.dim() not in (1, 2):
            raise ValueError(
                f"upkeep.page {self.page.dtype} {tuple(self.page.shape)}: must be torch.int32 [T] or [S, T]"
            )
        _check_bounds(self.lowest, self.highest)
        _check_copies("sealed", self.sealed, self.sealed_slot)
        _check_copies("prototype", self.prototypes, self.prototype_slot)
        if self.sealed is not None and self.sealed.fmt.name == "proto":
            raise ValueError("upkeep.sealed of format 'proto': must be another, see upkeep.prototypes")
        if self.prototypes is not None and self.prototypes.fmt.name != "proto":
            raise ValueError(f"upkeep.prototypes of format {self.prototypes.fmt.name!r}: must be 'proto'")
        if (self.linear is None) != (self.feature_map is None):
            raise ValueError("upkeep.linear and upkeep.feature_map: must both be given, or neither")
        if self.linear_tokens is not None and self.linear_tokens.dtype != torch.bool:
            raise ValueError(f"upkeep.linear_tokens {self.linear_tokens.dtype}: must be torch.bool [S, T]")

    def check(self, k: Tensor, pool: Pool) -> None:
        """Refuses what doesn't fit the keys and the pool they go to.

        Args:
            k: [S, T, D] new keys.
            pool: of the float pages.

        Raises:
            ValueError: naming what is wrong and what is allowed.
        """
        streams, tokens, head_dim = k.shape
        _check_fit("page", self.page, (tokens,) if self.page.dim() == 1 else (streams, tokens), k)
        low, high = self.lowest, self.highest
        if low is not None and high is not None:
            shape = (streams, low.shape[1], head_dim)
            _check_fit("lowest", low, shape, k)
            _check_fit("highest", high, shape, k)
        for name, target, slot in (
            ("sealed", self.sealed, self.sealed_slot),
            ("prototype", self.prototypes, self.prototype_slot),
        ):
            if target is None or slot is None:
                continue
            _check_fit(f"{name}_slot", slot, (streams, tokens), k)
            fmt = target.fmt
            if fmt.page_tokens != pool.fmt.page_tokens or fmt.head_dim != pool.fmt.head_dim:
                raise ValueError(
                    f"upkeep pool for {name}_slot of P={fmt.page_tokens}, D={fmt.head_dim}: must have "
                    f"P={pool.fmt.page_tokens}, D={pool.fmt.head_dim} like pool"
                )
            if target.slabs and target.device != k.device:
                raise ValueError(f"upkeep pool for {name}_slot on {target.device}: must be on k's device, {k.device}")
        if self.linear is not None and self.feature_map is not None:
            _check_fit("linear.s", self.linear.s, (streams, self.feature_map.features(head_dim), head_dim), k)
            check_map(self.linear, self.feature_map, head_dim)
            if self.linear_tokens is not None:
                _check_fit("linear_tokens", self.linear_tokens, (streams, tokens), k)


def _check_bounds(low: Tensor | None, high: Tensor | None) -> None:
    if low is None and high is None:
        return
    if low is None or high is None:
        raise ValueError("upkeep.lowest and upkeep.highest: must both be given, or neither")
    if low.dtype not in BOUND_DTYPES or low.dim() != 3 or low.stride(2) != 1:
        raise ValueError(
            f"upkeep.lowest {low.dtype} {tuple(low.shape)}, strides {low.stride()}: must be fp32, bf16 or fp16 "
            "[S, N, D] with contiguous channels"
        )
    if high.dtype != low.dtype or high.shape != low.shape or high.stride(2) != 1:
        raise ValueError(
            f"upkeep.highest {high.dtype} {tuple(high.shape)}, strides {high.stride()}: must be {low.dtype} "
            f"{tuple(low.shape)} like lowest, with contiguous channels"
        )


def _check_copies(name: str, pool: Pool | None, slot: Tensor | None) -> None:
    if pool is None and slot is None:
        return
    if pool is None or slot is None:
        raise ValueError(f"upkeep.{name}_slot and the pool it points into: must both be given, or neither")
    if slot.dtype != torch.int32 or slot.dim() != 2:
        raise ValueError(f"upkeep.{name}_slot {slot.dtype} {tuple(slot.shape)}: must be torch.int32 [S, T]")


def _check_fit(key: str, value: Tensor, shape: tuple[int, ...], k: Tensor) -> None:
    if value.shape != shape:
        raise ValueError(f"upkeep.{key} {tuple(value.shape)}: must be {shape}, for keys {tuple(k.shape)}")
    if value.device != k.device:
        raise ValueError(f"upkeep.{key} on {value.device}: must be on k's device, {k.device}")


def check_append(k: Tensor, v: Tensor, table_slot: Tensor, offset: Tensor, pool: Pool) -> None:
    """Refuses what can't be appended."""
    if not pool.fmt.is_float:
        raise ValueError(f"append to format {pool.fmt.name!r}: must be fp32, bf16 or fp16")
    if k.shape != v.shape or k.dim() != 3 or k.shape[:2] != table_slot.shape or _not_of_tokens(offset, k):
        raise ValueError(
            f"append k {tuple(k.shape)}, v {tuple(v.shape)}, table_slot {tuple(table_slot.shape)}, "
            f"offset {tuple(offset.shape)}: must be [S, T, D], [S, T, D], [S, T], [T] or [S, T]"
        )
    if k.shape[2] != pool.fmt.head_dim:
        raise ValueError(f"append k {tuple(k.shape)}: must have D={pool.fmt.head_dim} like pool")
    for name, value in (("k", k), ("v", v)):
        if not value.dtype.is_floating_point:
            raise ValueError(f"append {name} {value.dtype}: must be a float type")
    for name, value in (("table_slot", table_slot), ("offset", offset)):
        if value.dtype != torch.int32:
            raise ValueError(f"append {name} {value.dtype}: must be torch.int32")
    for name, value in (("v", v), ("table_slot", table_slot), ("offset", offset)):
        if value.device != k.device:
            raise ValueError(f"append {name} on {value.device}: must be on k's device, {k.device}")
    if pool.slabs and pool.device != k.device:
        raise ValueError(f"append pool on {pool.device}: must be on k's device, {k.device}")


def check_places(table_slot: Tensor, offset: Tensor, pool: Pool, upkeep: Upkeep | None) -> None:
    """Refuses slots, offsets and pages out of range; native code looks for itself."""
    page_tokens = pool.fmt.page_tokens
    _check_range("table_slot", table_slot, 0, pool.pages - 1)
    _check_range("offset", offset, 0, page_tokens - 1)
    if upkeep is None:
        return
    if upkeep.lowest is not None:
        _check_range("upkeep.page", upkeep.page, 0, upkeep.lowest.shape[1] - 1)
    for name, target, slot in (
        ("sealed", upkeep.sealed, upkeep.sealed_slot),
        ("prototype", upkeep.prototypes, upkeep.prototype_slot),
    ):
        if target is not None and slot is not None:
            _check_range(f"upkeep.{name}_slot", slot, -1, target.pages - 1)
            early = slot[(offset != page_tokens - 1).expand(slot.shape)]
            if bool((early >= 0).any()):
                raise ValueError(
                    f"upkeep.{name}_slot {int(early.max())} of a token that does not fill its page: must be -1"
                )


def _check_range(name: str, value: Tensor, least: int, most: int) -> None:
    if value.numel():
        low, high = (int(x) for x in value.aminmax())
        if low < least or high > most:
            raise ValueError(f"append {name} {low} to {high}: must be {least} to {most}")


def _not_of_tokens(x: Tensor, k: Tensor) -> bool:
    """Whether x is neither [T] nor [S, T] for keys k [S, T, D]."""
    return x.shape not in (k.shape[1:2], k.shape[:2])
