"""What a cache is made of: page size, dtype, which pages are hot, what a page costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kernels.pages import PageFormat, page_format
from policies.base import Format, PageBytes
from testbed.cache.pool import CacheError
from testbed.cache.sizes import Capacities, Size, device_memory_bytes, host_memory_bytes, resolve

COMPUTE_FORMATS = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
CHOICES: dict[str, tuple[bool | str, ...]] = {
    "background": ("learned", "mean"),
    "overlap": (True, False),
    "l3_io": ("auto", "uring", "threads", "mmap"),
    "l3_direct": ("auto", True, False),
    "on_lost": ("recompute", "drop", "error"),
}


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
        background: what a background state is: "mean" of its pages, or that moved by offsets that were learned for the
            model (`testbed.cache.offsets`); for a model without any both are the same.
        l1_bytes: most bytes on the device, L0 and L1 together: bytes, "2GiB", or a share of its memory (0.25, "25%");
            None = what budget.fraction says.
        l2_bytes: most bytes of the host, spelled alike; 0 = no L2, None = no limit.
        l3_bytes: most bytes of the archive; 0 = no L3, None = no limit but the disk.
        l3_path: a folder, where a page file lives as long as the run, or a page file that is kept (new or of this
            model); None = the system's folder for temporary files.
        swap_threshold: share of l1_bytes that plans fill, so that new and arriving pages find room.
        overlap: whether moves go on while the model computes; false: each is finished before the step goes on.
        l3_io: how the page file is read and written: auto, uring, threads or mmap.
        l3_direct: whether past the system's page cache (O_DIRECT): auto, true or false.
        l3_failures: failed reads or writes in a row after which L3 is switched off.
        on_lost: what becomes of a page that L3 lost: recompute (from its tokens), drop (with a warning) or error.
    """

    page_tokens: int = 16
    dtype: str = "bfloat16"
    sink_tokens: int = 16
    hot_tokens: int = 48
    slab_pages: int = 16
    prototypes: int = 1
    background: str = "learned"
    l1_bytes: Size | None = None
    l2_bytes: Size | None = None
    l3_bytes: Size | None = None
    l3_path: str | None = None
    swap_threshold: float = 0.8
    overlap: bool = True
    l3_io: str = "auto"
    l3_direct: bool | str = "auto"
    l3_failures: int = 3
    on_lost: str = "recompute"

    def __post_init__(self) -> None:
        """Checks ranges; the message names the key."""
        least = {
            "page_tokens": 16,
            "sink_tokens": 0,
            "hot_tokens": 1,
            "slab_pages": 1,
            "prototypes": 1,
            "l3_failures": 1,
        }
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
        self._check_tiers()

    def _check_tiers(self) -> None:
        """The keys of L1, L2 and L3; sizes for their spelling, against memory they are measured later."""
        for key, of_bytes, low in (("l1_bytes", 1, 1), ("l2_bytes", 1, 0), ("l3_bytes", None, 0)):
            resolve(getattr(self, key), of_bytes, key, low)
        if self.l3_path is not None and (not isinstance(self.l3_path, str) or not self.l3_path.strip()):
            raise CacheError(f"cache.l3_path={self.l3_path!r}: must be a folder, a file or null")
        share = self.swap_threshold
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 < share <= 1.0:
            raise CacheError(f"cache.swap_threshold={share!r}: must be above 0 and at most 1")
        for key, allowed in CHOICES.items():
            value = getattr(self, key)
            if not any(value is one or (isinstance(one, str) and value == one) for one in allowed):
                raise CacheError(f"cache.{key}={value!r}: must be one of {', '.join(str(x).lower() for x in allowed)}")

    def unlimited(self) -> CacheConfig:
        """The same without limits: nothing leaves the device."""
        return replace(self, l1_bytes=None, l2_bytes=None, l3_bytes=None, l3_path=None)

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

    def device_slab_bytes(self, head_dim: int) -> int:
        """Bytes of one slab of every pool on the device: what may be held and free, once pools are compacted."""
        each = self.page_bytes(head_dim, with_bounds=False)
        return self.slab_pages * (each.compute + each.int8 + each.int4 + each.prototype + each.background)

    def capacities(self, device: torch.device | str = "cpu") -> Capacities:
        """The tiers' sizes in bytes, shares being of the memory of that device and of the host."""
        device_bytes = device_memory_bytes(torch.device(device)) if self.l1_bytes is not None else 0
        return Capacities(
            resolve(self.l1_bytes, device_bytes, "l1_bytes", 1),
            resolve(self.l2_bytes, host_memory_bytes(), "l2_bytes"),
            resolve(self.l3_bytes, None, "l3_bytes"),
        )

    def archive_folder(self) -> Path:
        """Where L3 files go."""
        import tempfile

        return Path(self.l3_path or tempfile.gettempdir()).expanduser()


# Page state (mode, format, tier: 1 each; slot, prototype slot: 4 each) and kernel table (pool 1, slot 4, page 4,
# column 8).
TABLE_BYTES_PER_PAGE = 3 * 1 + 2 * 4 + 1 + 4 + 4 + 8


def device_budget(
    config: CacheConfig, fraction: float | None, full_bytes: int, device: torch.device | str = "cpu"
) -> int | None:
    """Most bytes a plan may put on the device: the smaller of two limits, None without any.

    Args:
        config: gives l1_bytes and the swap threshold.
        fraction: budget.fraction, share of the full cache; None = no such limit.
        full_bytes: the full cache in bf16 at the length planned for.
        device: whose memory shares of l1_bytes are of.
    """
    limits = [] if fraction is None else [int(fraction * full_bytes)]
    capacity = config.capacities(device).l1_bytes
    if capacity is not None:
        limits.append(int(config.swap_threshold * capacity))
    return min(limits, default=None)


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
