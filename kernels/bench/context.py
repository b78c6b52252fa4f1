"""Where a GPU stage runs and how large: the device, or tiny on the host in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.bench.contenders import ours
from kernels.bench.streams import Paged, Streams, make_paged, make_streams
from kernels.bench.timing import Contender, Times, take_turns

TILES = ((0, 0, 0), (32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 8, 3), (32, 2, 4))
SPLITS = (512, 2048, 4096, 8192)


@dataclass(frozen=True)
class Context:
    """Where a stage runs and how large.

    Attributes:
        device: "cuda", or "cpu" in a dry run.
        half: the half precision that stands for bf16.
        head_dim, group: D, G.
        batch: streams of the batch (8 sequences of 8 KV heads).
        batch_tokens, single_tokens: tokens of each stream of the batch, and of 8 streams of one long sequence.
        checked: lengths of the correctness stage.
        copy_bytes: of the copy that is the roofline.
        cold_bytes: copies of an input hold at least this: twice the L2.
        rounds, limit_s: of `take_turns`.
        tiles: block tokens, warps, stages of the variants.
    """

    device: str
    half: torch.dtype
    head_dim: int
    group: int
    batch: int
    batch_tokens: int
    single_tokens: int
    checked: tuple[int, ...]
    copy_bytes: int
    cold_bytes: int
    rounds: int
    limit_s: float
    tiles: Sequence[tuple[int, int, int]] = TILES

    @staticmethod
    def here(dry_run: bool) -> Context:
        """Of this machine."""
        if dry_run:
            return Context("cpu", torch.float16, 64, 2, 2, 64, 128, (0, 1, 17, 86), 1 << 16, 0, 0, 0.0, TILES[:2])
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        checked = (0, 1, 15, 16, 17, 63, 64, 65, 421, 3000)
        return Context("cuda", torch.bfloat16, 128, 4, 64, 32768, 131072, checked, 4 << 30, 2 * l2_bytes, 10, 12.0)

    @property
    def dry(self) -> bool:
        """Whether times mean nothing."""
        return self.device == "cpu"

    @property
    def formats(self) -> tuple[str, ...]:
        """Float and quantised formats to time."""
        return (self.compute, "int4") if self.dry else (self.compute, "int8", "int4")

    @property
    def compute(self) -> str:
        """The float format that stands for bf16."""
        return "fp16" if self.dry else "bf16"

    def turns(self, contenders: Sequence[Contender]) -> dict[str, Times]:
        """Times of all contenders."""
        return take_turns(contenders, self.rounds, self.limit_s, self.device)

    def ours(
        self, name: str, streams: Streams, formats: tuple[str, ...], p: int = 16, *, share: float = 1.0, **more: Any
    ) -> Contender:
        """Our Triton attention over its own copies, tables sorted before."""
        return self.over(name, streams, make_paged(streams, formats, p, self.cold_bytes, share=share), **more)

    def over(self, name: str, streams: Streams, paged: Paged, **more: Any) -> Contender:
        """Our Triton attention over given pages."""
        return ours(name, streams, paged, self.half, backend="triton", **{"prepared": True, **more})

    def streams(self, lengths: Sequence[int], seed: int) -> Streams:
        """Random streams on the device."""
        return make_streams(lengths, self.group, self.head_dim, seed, self.device)
