"""What a cache is made of: page size, dtype, which pages are hot, what a page costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.pages import PageFormat, page_format
from policies.base import Format, PageBytes
from testbed.cache.pool import CacheError

COMPUTE_FORMATS = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


@dataclass(frozen=True)
class CacheConfig:
    """Built by Hydra from conf/cache/*.yaml.

    Attributes:
        page_tokens: P, tokens a page; the unit of every decision.
        dtype: of pages in compute format: bfloat16, float16 or float32.
        sink_tokens: first positions that stay hot for ever (StreamingLLM, arXiv 2309.17453).
        hot_tokens: newest positions that stay hot, in compute dtype.
        slab_pages: pages a slab, the grain in which pools grow and shrink.
        prototypes: K/V prototypes kept for a page that is attended by CLUSTER.
        l3_path: folder of the L3 page files; None = the system's folder for temporary files.
    """

    page_tokens: int = 16
    dtype: str = "bfloat16"
    sink_tokens: int = 16
    hot_tokens: int = 48
    slab_pages: int = 16
    prototypes: int = 1
    l3_path: str | None = None

    def __post_init__(self) -> None:
        """Checks ranges; the message names the key."""
        least = {"page_tokens": 16, "sink_tokens": 0, "hot_tokens": 1, "slab_pages": 1, "prototypes": 1}
        for key, low in least.items():
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise CacheError(f"cache.{key}={value!r}: must be a whole number of at least {low}")
        if self.page_tokens not in (16, 32, 64):
            raise CacheError(f"cache.page_tokens={self.page_tokens}: must be 16, 32 or 64")
        for key in ("sink_tokens", "hot_tokens"):
            if getattr(self, key) % self.page_tokens:
                raise CacheError(
                    f"cache.{key}={getattr(self, key)}: must be a multiple of cache.page_tokens={self.page_tokens}"
                )
        if self.prototypes > self.page_tokens:
            raise CacheError(f"cache.prototypes={self.prototypes}: a page has {self.page_tokens} tokens")
        if self.dtype not in COMPUTE_FORMATS:
            raise CacheError(f"cache.dtype={self.dtype!r}: must be one of {', '.join(COMPUTE_FORMATS)}")
        if self.l3_path is not None and not isinstance(self.l3_path, str):
            raise CacheError(f"cache.l3_path={self.l3_path!r}: must be a folder or null")

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of pages in compute format."""
        return getattr(torch, self.dtype)

    def formats(self, head_dim: int) -> dict[Format, PageFormat]:
        """Page format of every `Format` code."""
        names = {Format.COMPUTE: COMPUTE_FORMATS[self.dtype], Format.INT8: "int8", Format.INT4: "int4"}
        return {code: page_format(name, self.page_tokens, head_dim) for code, name in names.items()}

    def prototype_format(self, head_dim: int) -> PageFormat:
        """Of one page's prototypes."""
        return page_format("proto", self.page_tokens, head_dim, groups=self.prototypes)

    def background_format(self, head_dim: int) -> PageFormat:
        """Of one stream's background state."""
        return page_format("proto", self.page_tokens, head_dim, groups=1)

    def page_bytes(self, head_dim: int, with_bounds: bool) -> PageBytes:
        """What pages cost; `with_bounds` adds the key bounds that Quest reads."""
        formats = self.formats(head_dim)
        return PageBytes(
            compute=formats[Format.COMPUTE].page_bytes,
            int8=formats[Format.INT8].page_bytes,
            int4=formats[Format.INT4].page_bytes,
            prototype=self.prototype_format(head_dim).page_bytes,
            background=self.background_format(head_dim).page_bytes,
            metadata=TABLE_BYTES_PER_PAGE + (2 * head_dim * self.torch_dtype.itemsize if with_bounds else 0),
        )

    def archive_folder(self) -> Path:
        """Where L3 files go."""
        import tempfile

        return Path(self.l3_path or tempfile.gettempdir())


# Page state (mode, format, tier: 1 each; slot, prototype slot: 4 each) and kernel table (pool 1, slot 4, page 4,
# column 8).
TABLE_BYTES_PER_PAGE = 3 * 1 + 2 * 4 + 1 + 4 + 4 + 8


@dataclass(frozen=True)
class Hot:
    """Which pages are in L0 and where: sinks first, then a ring over the recent window."""

    page_tokens: int
    sink_tokens: int
    hot_tokens: int

    @property
    def sink_pages(self) -> int:
        """Pages that never leave."""
        return self.sink_tokens // self.page_tokens

    @property
    def ring_pages(self) -> int:
        """The page being written and `hot_tokens` before it."""
        return self.hot_tokens // self.page_tokens + 1

    @property
    def stream_pages(self) -> int:
        """L0 slots of one stream."""
        return self.sink_pages + self.ring_pages

    def pages(self, length_tokens: int) -> int:
        """Pages that hold `length_tokens` positions."""
        return -(-length_tokens // self.page_tokens)

    def mask(self, length_tokens: int) -> Tensor:
        """[N] bool: hot pages of a sequence of that length."""
        pages = self.pages(length_tokens)
        page, first = torch.arange(pages), pages - self.ring_pages
        return (page < self.sink_pages) | (page >= first)

    def slot(self, page: Tensor) -> Tensor:
        """Slot of a hot page inside its stream's L0 region."""
        ring = self.sink_pages + (page - self.sink_pages) % self.ring_pages
        return torch.where(page < self.sink_pages, page, ring)
