"""Attention over ragged paged streams on a GPU: split over the keys, all formats and heads in one launch.

A program takes one (stream, chunk of its pages) and a block of the stream's query rows; see `kernels.gpu.core`. A chunk
covers a fixed number of keys, so what a row adds up, and in which order, depends on its own stream alone.

Tiles were chosen by registers, shared memory and instruction mix of the compiled code (`python -m kernels.check`), not
yet by time on a GPU.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# Launches pass plain numbers for constexpr, and options of the launch beside the arguments.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kernels.gpu.core import attend_kernel
from kernels.gpu.merge import MASS_ENTRIES, MERGE_ITEMS, mass_kernel, merge_kernel
from kernels.gpu.prepare import COLUMN_BITS, PROTO_SHARE, Prepared, prepared_for
from kernels.gpu.spec import ASYNC_128, LOAD_128, TARGETS, TENSOR_CORE, Spec, Variant
from kernels.pages import FORMAT_IDS
from kernels.schedule import Schedule
from kernels.state import Partial
from kernels.table import PageTable, Pool

if TYPE_CHECKING:
    from kernels.api import Options

MIN_BLOCK = 16
MOST_ROWS = 64
MOST_HEAD_DIM = 512
DEFAULTS = Schedule()
LOG2_E = 1.4426950408889634
NO_WINDOW, ONE_WINDOW, WINDOWS = 0, 1, 2


@dataclass(frozen=True)
class Shape:
    """How a call is tiled; every field is part of the compiled kernel."""

    formats: int
    groups: int
    page_tokens: int
    head_dim: int
    block_d: int
    block_m: int
    block_rows: int
    replicas: int
    block_n: int
    proto_n: int
    lanes: int
    num_warps: int
    num_stages: int

    def constants(self, window: int, has_slopes: bool, want_mass: bool, dot: Any) -> dict[str, Any]:
        """The kernel's constexprs."""
        return {
            "FORMATS": self.formats,
            "GROUPS": self.groups,
            "P": self.page_tokens,
            "D": self.head_dim,
            "BLOCK_D": self.block_d,
            "BLOCK_M": self.block_m,
            "BLOCK_ROWS": self.block_rows,
            "REPLICAS": self.replicas,
            "BLOCK_N": self.block_n,
            "PROTO_N": self.proto_n,
            "LANES": self.lanes,
            "COLUMN_BITS": COLUMN_BITS,
            "SHARE": PROTO_SHARE,
            "WINDOW": window,
            "HAS_SLOPES": has_slopes,
            "WANT_MASS": want_mass,
            "DOT": dot,
        }


def shape_for(
    formats: Mapping[str, int],
    page_tokens: int,
    head_dim: int,
    rows: int,
    schedule: Schedule = DEFAULTS,
    wide: bool = False,
    amd: bool = False,
) -> Shape:
    """The tiles of a call.

    Args:
        formats: names of the pools' formats -> most rows a page.
        page_tokens: P.
        head_dim: D.
        rows: G * T.
        schedule: `block_tokens`, `num_warps`, `num_stages`; 0 for what is chosen here.
        wide: products in float32, which take more registers.
        amd: whether for a GPU of AMD, whose 64 KB of shared memory hold two stages.
    """
    block_d = max(MIN_BLOCK, triton.next_power_of_2(head_dim))
    # Several loops in one kernel keep more alive, and wide tiles would spill.
    block_n = schedule.block_tokens or (32 if wide or block_d > 128 or len(formats) > 2 else 64)
    block_n = max(MIN_BLOCK, page_tokens, triton.next_power_of_2(block_n))
    block_rows = min(MOST_ROWS, triton.next_power_of_2(rows))
    num_warps = schedule.num_warps or 4
    replicas = 1
    if "int8" in formats or "int4" in formats:
        replicas = min(block_n // page_tokens, MOST_ROWS // block_rows)
        block_n = replicas * page_tokens
    block_rows = max(block_rows, MIN_BLOCK // replicas)
    groups = triton.next_power_of_2(formats.get("proto", 1))
    # Triton fetches addresses one stage ahead of pages, so 5 stages hold two tiles and 3 hold one; several loops with
    # 5 stages each run out of registers.
    stages = 2 if wide or amd else 5 if len(formats) == 1 else 3
    return Shape(
        formats=sum(1 << FORMAT_IDS[name] for name in formats),
        groups=groups,
        page_tokens=page_tokens,
        head_dim=head_dim,
        block_d=block_d,
        block_m=block_rows * replicas,
        block_rows=block_rows,
        replicas=replicas,
        block_n=block_n,
        proto_n=max(32, groups),
        lanes=(16 if amd else 8) * num_warps,
        num_warps=num_warps,
        num_stages=schedule.num_stages or stages,
    )


def attend(
    q: Tensor,
    table: PageTable,
    pools: Sequence[Pool],
    first_position: Tensor,
    options: Options,
    prepared: Prepared | None = None,
) -> Partial:
    """As `kernels.api.attend`: two launches, or four for a table not seen before, or one more for the mass.

    Nothing waits for the device and no shape depends on data. Within a CUDA graph hand in `prepared`, or the table is
    sorted again in every replay.

    Args:
        q: see there; the rest too.
        table: rows contiguous.
        pools: slabs aligned to 16 bytes.
        first_position: [S] int32.
        options: `schedule.block_tokens`, `num_warps`, `num_stages` are the tile's, `split_tokens` a work item's.
        prepared: what `prepare` made of the same table and pools.

    Raises:
        ValueError: D above 512.
    """
    streams, group, tokens, head_dim = q.shape
    rows, entries = group * tokens, table.pool.shape[1]
    held = [pool for pool in pools if pool.slabs]
    if head_dim > MOST_HEAD_DIM:
        raise ValueError(f"q of D={head_dim}: must be at most {MOST_HEAD_DIM} for backend 'triton'")
    if not held or not entries or not streams or not rows:
        mass = torch.zeros(table.pool.shape, device=q.device) if options.want_mass else None
        lse = torch.full(q.shape[:3], -math.inf, device=q.device)
        return Partial(torch.zeros(q.shape, device=q.device), lse, mass)
    schedule = options.schedule
    if prepared is None:
        prepared = prepared_for(table, pools, schedule.split_tokens)
    dot = dot_type(q.dtype, schedule.arithmetic)
    formats: dict[str, int] = {}
    for pool in held:
        formats[pool.fmt.name] = max(pool.fmt.rows, formats.get(pool.fmt.name, 1))
    shape = shape_for(
        formats,
        pools[0].fmt.page_tokens,
        head_dim,
        rows,
        schedule,
        wide=dot == tl.float32,
        amd=torch.version.hip is not None,
    )
    items = len(prepared.item_stream)
    window = options.window_tokens
    each = isinstance(window, Tensor)
    slopes = None if options.slopes is None else options.slopes.float().contiguous()
    first_position = first_position.contiguous()
    empty = partial(torch.empty, dtype=torch.float32, device=q.device)
    part_out = empty(items, rows, head_dim)
    part_top, part_total = empty(2, items, rows)
    entry_lse = empty(streams, rows, entries) if options.want_mass else part_top
    attend_kernel[(items, triton.cdiv(rows, shape.block_rows))](
        q,
        *q.stride(),
        prepared.base,
        prepared.address,
        prepared.page,
        prepared.origin,
        prepared.segment,
        prepared.item_start,
        prepared.item_stream,
        entries,
        prepared.chunk_entries,
        first_position,
        window.contiguous() if isinstance(window, Tensor) else first_position,
        0 if each else window,
        options.sink_tokens,
        part_top if slopes is None else slopes,
        float(options.scale) * LOG2_E,
        part_out,
        part_top,
        part_total,
        entry_lse,
        streams,
        rows,
        tokens,
        **shape.constants(
            WINDOWS if each else ONE_WINDOW if window else NO_WINDOW, slopes is not None, options.want_mass, dot
        ),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    out = empty(q.shape)
    lse, row_top, row_total = empty(3, streams, group, tokens)
    merge_kernel[(streams, rows)](
        part_out,
        part_top,
        part_total,
        prepared.item_start,
        first_position,
        part_top if slopes is None else slopes,
        out,
        lse,
        row_top,
        row_total,
        rows,
        tokens,
        D=head_dim,
        BLOCK_D=shape.block_d,
        ITEMS=MERGE_ITEMS,
        HAS_SLOPES=slopes is not None,
        WANT_MASS=options.want_mass,
        num_warps=1,
    )
    if not options.want_mass:
        return Partial(out, lse)
    mass = empty(streams, entries)
    mass_kernel[(streams, triton.cdiv(entries, MASS_ENTRIES))](
        entry_lse,
        row_top,
        row_total,
        prepared.origin,
        prepared.segment,
        mass,
        rows,
        entries,
        BLOCK=MASS_ENTRIES,
        COLUMN_BITS=COLUMN_BITS,
    )
    return Partial(out, lse, mass)


def dot_type(dtype: torch.dtype, arithmetic: str) -> Any:
    """The type of the products: float32 for float32 queries, else theirs; float32 in place of bf16 in the interpreter.

    The interpreter multiplies the bits of bf16 numbers.
    """
    half = tl.float16 if dtype == torch.float16 else tl.bfloat16
    if arithmetic == "float32" or (arithmetic == "auto" and dtype == torch.float32):
        return tl.float32
    return tl.float32 if half == tl.bfloat16 and knobs.runtime.interpret else half


def _variant(
    names: tuple[str, ...],
    head_dim: int,
    page_tokens: int,
    rows: int = 4,
    want_mass: bool = False,
    amd: bool = False,
) -> Variant:
    """A variant for bf16 queries and two prototypes a page; with mass also windows."""
    formats = {name: 2 if name == "proto" else page_tokens for name in names}
    shape = shape_for(formats, page_tokens, head_dim, rows, amd=amd)
    constants = shape.constants(WINDOWS if want_mass else NO_WINDOW, False, want_mass, tl.bfloat16)
    types = {
        "q": "*bf16",
        **dict.fromkeys(("q_stream_stride", "q_group_stride", "q_token_stride", "q_dim_stride"), "i32"),
        "base": "*u8",
        "address": "*i64",
        **dict.fromkeys(("page", "origin", "segment", "item_start", "item_stream"), "*i32"),
        **dict.fromkeys(("entries", "chunk_entries"), "i32"),
        **dict.fromkeys(("first_position", "windows"), "*i32"),
        **dict.fromkeys(("window_tokens", "sinks"), "i32"),
        "slopes": "*fp32",
        "scale": "fp32",
        **dict.fromkeys(("part_out", "part_top", "part_total", "entry_lse"), "*fp32"),
        **dict.fromkeys(("streams", "rows", "tokens"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    wide_loads = LOAD_128 if amd else ASYNC_128
    return Variant(
        f"{'+'.join(names)}-d{head_dim}-p{page_tokens}-m{shape.block_m}{'-mass-windows' if want_mass else ''}"
        f"{'-amd' if amd else ''}",
        types,
        constants,
        divisible=frozenset({"q", "q_stream_stride", "q_group_stride", "base", "part_out"}),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        expects=frozenset({TENSOR_CORE, wide_loads}),
        targets=tuple(target for target in TARGETS if target.startswith("gfx") == amd),
    )


EVERY = ("bf16", "int8", "int4", "proto")
SPEC = Spec(
    "attend",
    attend_kernel,
    (
        _variant(("bf16",), 128, 16),
        _variant(("bf16",), 64, 32),
        _variant(("bf16",), 128, 16, rows=64),
        _variant(("int8",), 128, 16),
        _variant(("int8",), 64, 32),
        _variant(("int4",), 128, 16),
        _variant(("int4",), 128, 64),
        _variant(EVERY, 128, 16, want_mass=True),
        _variant(("bf16",), 128, 16, amd=True),
        _variant(("int8",), 128, 16, amd=True),
        _variant(("int4",), 128, 16, amd=True),
        _variant(EVERY, 128, 16, want_mass=True, amd=True),
    ),
)
