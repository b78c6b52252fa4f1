"""How one attention call is cut and computed, without changing what it means."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.guards import INT32_MOST, check_int

ARITHMETICS = ("auto", "float32", "half")


@dataclass(frozen=True)
class Schedule:
    """A variant of the kernel and how its work is cut.

    Attributes:
        arithmetic: "float32" (relative error below 1e-5), "half" (bf16, fp16 or integer dot products, below 1e-2),
            "auto": half exactly if the queries are bf16 or fp16.
        split_tokens: keys a split covers. Part of the result's rounding, so a constant keeps rows bitwise the same in
            any batch.
        threads: of the native backend; 0 for torch's number.
        item_splits: consecutive splits one thread takes at a time (native); no part of the result.
        block_tokens, num_warps, num_stages: of the Triton kernel's tile; 0 for its defaults.
    """

    arithmetic: str = "auto"
    split_tokens: int = 1024
    threads: int = 0
    item_splits: int = 1
    block_tokens: int = 0
    num_warps: int = 0
    num_stages: int = 0

    def __post_init__(self) -> None:
        """Refuses what no backend takes."""
        if self.arithmetic not in ARITHMETICS:
            raise ValueError(f"schedule.arithmetic={self.arithmetic!r}: must be one of {', '.join(ARITHMETICS)}")
        if type(self.split_tokens) is not int or not 256 <= self.split_tokens <= INT32_MOST or self.split_tokens % 256:
            raise ValueError(f"schedule.split_tokens={self.split_tokens}: must be a positive multiple of 256, an int")
        for key, least in (
            ("threads", 0),
            ("item_splits", 1),
            ("block_tokens", 0),
            ("num_warps", 0),
            ("num_stages", 0),
        ):
            check_int(f"schedule.{key}", getattr(self, key), least)
