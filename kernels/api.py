"""What every attention backend offers, and the choice of backend.

A stream is one (sequence, layer, KV head) with its own page table, so streams differ in length, format and
pages; the G query heads that share the KV head are rows of one call. Nothing is padded to a common length and
K, V are never repeated.

    part = attend(q, table, pools, first_position, scale=D**-0.5)     # -> Partial(out, lse, mass)
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kernels.guards import INT32_MOST, check_int, check_real
from kernels.schedule import Schedule
from kernels.state import Partial
from kernels.table import PageTable, Pool
from kernels.upkeep import Upkeep, check_append, check_places

__all__ = [
    "BACKENDS",
    "Options",
    "PageTable",
    "Partial",
    "Pool",
    "Schedule",
    "Upkeep",
    "append",
    "attend",
    "copy_pages",
    "gather",
    "scatter",
]
NATIVE_MAX_DIM = 1024
QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("cpu", "triton", "torch", "reference")
DEFAULT_SCHEDULE = Schedule()
# Whether to look for table entries that point outside the pools, at the price of a pass over the table.
DEBUG = os.environ.get("TESTBED_DEBUG", "0") not in ("", "0")


@dataclass(frozen=True)
class Options:
    """What `attend` hands to a backend beside the tensors; see there."""

    scale: float
    window_tokens: int | Tensor = 0
    sink_tokens: int = 0
    slopes: Tensor | None = None
    want_mass: bool = False
    schedule: Schedule = DEFAULT_SCHEDULE


def attend(
    q: Tensor,
    table: PageTable,
    pools: Sequence[Pool],
    first_position: Tensor,
    *,
    scale: float,
    window_tokens: int | Tensor = 0,
    sink_tokens: int = 0,
    slopes: Tensor | None = None,
    want_mass: bool = False,
    schedule: Schedule = DEFAULT_SCHEDULE,
    backend: str | None = None,
) -> Partial:
    """Attention of T new queries a stream over the pages its table lists.

    Row t of a stream is at position first_position + t and sees key positions up to its own; with a window only
    those above its own minus window_tokens and those below sink_tokens. That also hides unwritten slots of the last
    page, which may hold anything, NaN included. A "proto" entry is always visible; log2 of its count is added to its
    base-2 logit. No row depends on the other streams, nor bitwise on the batch it sits in. A NaN or infinity in a
    query makes that row's out and lse NaN (and its stream's mass), and no other row's; a key that makes a logit +inf
    or NaN does the same to the rows that see it, -inf hides it.

    Args:
        q: [S, G, T, D] fp32, bf16 or fp16, of any strides. With fp32 all arithmetic is fp32 (relative error below
            1e-5 against the float64 oracle while logits stay below about 50 in size: their rounding alone is worth some
            6e-8 times the largest, 1e-4 at 1,000); with bf16 or fp16 products may be too (below 1e-2).
        table: the pages of each stream.
        pools: what table.pool counts; one page size and head size, formats may differ.
        first_position: [S] int32.
        scale: factor of the logits.
        window_tokens: newest keys each row sees, itself included, of all streams or [S] int32; 0 for no limit.
        sink_tokens: first positions that every window leaves visible (StreamingLLM, arXiv 2309.17453).
        slopes: [S, G] float32, ALiBi: logit += slope * key position (a proto page counts at its centre). A head
            whose slope is NaN is NaN.
        want_mass: whether to return the softmax mass of each entry.
        schedule: how the call is cut and computed.
        backend: "cpu", "triton", "torch", "reference", or None for the fastest there is for q's device.

    Returns:
        `Partial`; out 0 and lse -inf for a row that sees nothing.

    Raises:
        ValueError: types, devices or shapes that don't match, a negative number, an unknown backend, and
            (natively always, elsewhere with TESTBED_DEBUG=1) a table entry outside its pool; with TESTBED_DEBUG=1 also
            a slope that isn't finite and a negative window of one stream (which otherwise hides all but the sinks).
    """
    options = Options(scale, window_tokens, sink_tokens, slopes, want_mass, schedule)
    return attend_with(options, q, table, pools, first_position, backend)


def attend_with(
    options: Options,
    q: Tensor,
    table: PageTable,
    pools: Sequence[Pool],
    first_position: Tensor,
    backend: str | None = None,
) -> Partial:
    """`attend` with its options in one piece, for callers that pass them on."""
    _check(q, table, pools, first_position, options)
    name = choose_backend(backend, q.device.type)
    if name == "cpu" and q.device.type == "cpu" and q.shape[3] <= NATIVE_MAX_DIM:
        from kernels.cpu.backend import attend as run
    elif name == "triton":
        from kernels.gpu.attend import attend as run
    elif name == "reference":
        from kernels.reference import attend as run
    else:
        from kernels.torch_backend import attend as run
    return run(q, table, pools, first_position, options)


def append(
    k: Tensor,
    v: Tensor,
    table_slot: Tensor,
    offset: Tensor,
    pool: Pool,
    upkeep: Upkeep | None = None,
    backend: str | None = None,
) -> None:
    """Writes new tokens into float pages in place: token t of stream s to row offset[s, t] of its slot.

    With `upkeep` the pages' key bounds are widened, and of each page that fills a quantised copy and prototypes are
    made, as if by separate calls after the write. A call must not write two pages to one slot.

    Args:
        k: [S, T, D] float keys, of any strides. NaN and infinities are stored as they are.
        v: [S, T, D] float values, of any strides.
        table_slot: [S, T] int32, 0 to `pool.pages` - 1.
        offset: [T] int32 where all streams are alike, or [S, T]; 0 to P - 1.
        pool: of a float format.
        upkeep: what to keep current beside.
        backend: as in `attend`.

    Raises:
        ValueError: a pool whose pages can't be written token by token; types, shapes or devices that don't match; a
            slot, offset or page out of range (on a device only in debug mode). Nothing is written then.
    """
    check_append(k, v, table_slot, offset, pool)
    if upkeep is not None:
        upkeep.check(k, pool)
    name = choose_backend(backend, k.device.type)
    if name == "cpu" and k.device.type == "cpu":
        from kernels.cpu.store import append as run
    else:
        if k.device.type == "cpu" or DEBUG:
            check_places(table_slot, offset, pool, upkeep)
        if name == "triton":
            from kernels.gpu.append import append as run
        else:
            from kernels.torch_store import append as run
    run(k, v, table_slot, offset, pool, upkeep)
    if upkeep is not None and upkeep.linear is not None and upkeep.feature_map is not None:
        if name == "triton":
            from kernels.gpu.linear import add as run_linear
        else:
            from kernels.linear_attention import add as run_linear
        run_linear(upkeep.linear, upkeep.feature_map, k, v, upkeep.linear_tokens)


def gather(pool: Pool, slots: Tensor, backend: str | None = None, threads: int | None = None) -> Tensor:
    """Copies pages out of a pool.

    Args:
        pool: of any format.
        slots: [M] int64, each below `pool.pages`, on the device the result is wanted on.
        backend: as in `attend`.
        threads: most threads of the host, the calling one included; None for `torch.get_num_threads()`.

    Returns:
        [M, page_bytes] uint8.

    Raises:
        ValueError: a slot outside the pool.
    """
    _check_slot_type(slots, "slots")
    _check_threads(threads)
    name = choose_backend(backend, slots.device.type)
    if name == "cpu" and slots.device.type == "cpu" and _on_host(pool):
        from kernels.cpu.store import gather as native

        return native(pool, slots, threads)
    check_slots(pool, slots)
    if name == "triton" and pool.device == slots.device:
        from kernels.gpu.store import gather as run
    else:
        from kernels.torch_store import gather as run
    return run(pool, slots)


def scatter(pool: Pool, slots: Tensor, blobs: Tensor, backend: str | None = None, threads: int | None = None) -> None:
    """Copies pages [M, page_bytes] uint8 into slots [M] of a pool; the inverse of `gather`.

    Raises:
        ValueError: a slot outside the pool, blobs of another size.
    """
    _check_slot_type(slots, "slots")
    _check_threads(threads)
    if blobs.dtype != torch.uint8 or blobs.shape != (len(slots), pool.fmt.page_bytes):
        raise ValueError(
            f"blobs {blobs.dtype} {tuple(blobs.shape)}: must be uint8 [{len(slots)}, {pool.fmt.page_bytes}]"
        )
    name = choose_backend(backend, blobs.device.type)
    if name == "cpu" and blobs.device.type == slots.device.type == "cpu" and _on_host(pool):
        from kernels.cpu.store import scatter as native

        return native(pool, slots, blobs, threads)
    check_slots(pool, slots)
    if name == "triton" and pool.device == blobs.device == slots.device:
        from kernels.gpu.store import scatter as run
    else:
        from kernels.torch_store import scatter as run
    run(pool, slots, blobs)


def copy_pages(
    source: Pool,
    source_slots: Tensor,
    target: Pool,
    target_slots: Tensor,
    backend: str | None = None,
    threads: int | None = None,
) -> None:
    """Copies pages from slab to slab; on the host and within one GPU without a buffer in between.

    The host's other threads run Python meanwhile (the lock is let go). A worker beside a model should ask for
    `threads=1`: more are the model's own, which the two would then take turns with.

    Args:
        source: pages to read.
        source_slots: [M] int64, each below `source.pages`.
        target: pages to write, of the source's format; may be the source, if no page is both read and written.
        target_slots: [M] int64, each below `target.pages` and at most once, on the device of `source_slots`.
        backend: as in `attend`; between host and device it is always torch.
        threads: as in `gather`.

    Raises:
        ValueError: formats, shapes, types or devices that don't match, a slot outside its pool (from Triton only with
            slots on the host). Nothing is copied then.
    """
    if source.fmt != target.fmt:
        raise ValueError(f"copy of {source.fmt.name} pages to {target.fmt.name}: must be one format")
    if source_slots.shape != target_slots.shape or source_slots.device != target_slots.device:
        raise ValueError(
            f"source_slots {tuple(source_slots.shape)} on {source_slots.device}, target_slots "
            f"{tuple(target_slots.shape)} on {target_slots.device}: must be [M] each, on one device"
        )
    _check_threads(threads)
    host = source_slots.device.type == "cpu" and _on_host(source) and _on_host(target)
    name = choose_backend(backend, "cpu" if host else target.device.type)
    if name == "cpu" and host:
        from kernels.cpu.store import copy_pages as native

        for key, slots in (("source_slots", source_slots), ("target_slots", target_slots)):
            _check_slot_type(slots, key)
        return native(source, source_slots, target, target_slots, threads)
    check_slots(source, source_slots, "source_slots")
    check_slots(target, target_slots, "target_slots")
    if name == "triton" and source.device == target.device:
        from kernels.gpu.store import copy_pages as run

        source_slots, target_slots = (x.to(target.device) for x in (source_slots, target_slots))
    else:
        from kernels.torch_store import copy_pages as run
    run(source, source_slots, target, target_slots)


def _on_host(pool: Pool) -> bool:
    return pool.device.type == "cpu"


def _check_threads(threads: int | None) -> None:
    if threads is not None:
        check_int("threads", threads, 1)


def _check_slot_type(slots: Tensor, key: str) -> None:
    if slots.device.type == "meta":
        raise ValueError(f"{key} on meta: must be on a device that holds data")
    if slots.dim() != 1 or slots.dtype != torch.int64:
        raise ValueError(f"{key} {slots.dtype} {tuple(slots.shape)}: must be torch.int64 [M]")


def check_slots(pool: Pool, slots: Tensor, key: str = "slots") -> None:
    """Refuses slots of another type, and on the host those outside the pool: native code would go anywhere."""
    _check_slot_type(slots, key)
    if len(slots) and slots.device.type == "cpu":
        low, high = (int(x) for x in slots.aminmax())
        if low < 0 or high >= pool.pages:
            raise ValueError(f"{key} {low} to {high}: must be 0 to {pool.pages - 1}")


def choose_backend(name: str | None = None, device: str = "cpu") -> str:
    """The backend to use: the one named, or the fastest there is for a device.

    That is "triton" for tensors on a GPU, "cpu" on the host where a C++ compiler is there, else "torch" with a notice,
    printed once. A build that failed is not tried again.

    Raises:
        ValueError: an unknown name.
        RuntimeError: a backend was asked for by name that can't run here.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend={name!r}: must be one of {', '.join(BACKENDS)}, or None")
    return _chosen(name, device)


@cache
def _chosen(name: str | None, device: str) -> str:
    """As `choose_backend`, of a known name; cached, since every call asks."""
    if name in ("torch", "reference"):
        return name
    wanted = name or ("cpu" if device == "cpu" else "triton")
    missing = _lacking_native() if wanted == "cpu" else _lacking_triton(device)
    if missing is None:
        return wanted
    if name is not None:
        raise RuntimeError(f"backend={name!r}: {missing}")
    _notice(wanted, missing)
    return "torch"


@cache
def _notice(wanted: str, missing: str) -> None:
    """Says once what is not there."""
    print(f"testbed: {wanted} attention not available, using torch ({missing})", file=sys.stderr)


@cache
def _lacking_native() -> str | None:
    """Why the native backend can't run here, or None."""
    from kernels.cpu.build import BuildError, library

    try:
        library()
    except BuildError as error:
        return str(error)
    return None


def _lacking_triton(device: str) -> str | None:
    """Why Triton kernels can't run on a device, or None."""
    try:
        from triton import knobs
    except ImportError as error:
        return f"triton can't be imported: {error}"
    if device == "cpu" and not knobs.runtime.interpret:
        return "tensors are on the host, which Triton reaches only in its interpreter (TRITON_INTERPRET=1)"
    return None


def _check(q: Tensor, table: PageTable, pools: Sequence[Pool], first_position: Tensor, options: Options) -> None:
    """Refuses what no backend could answer."""
    streams = table.count.shape[0]
    if q.dim() != 4 or q.shape[0] != streams or first_position.shape != table.count.shape:
        raise ValueError(
            f"q {tuple(q.shape)}, first_position {tuple(first_position.shape)}: must be [S, G, T, D] and [S] "
            f"with S={streams}"
        )
    if q.dtype not in QUERY_DTYPES:
        raise ValueError(f"q {q.dtype}: must be one of {', '.join(map(str, QUERY_DTYPES))}")
    if first_position.dtype != torch.int32:
        raise ValueError(f"first_position {first_position.dtype}: must be torch.int32 [S]")
    _check_devices(q.device, table=table.pool, first_position=first_position)
    if not isinstance(pools, Sequence):
        raise ValueError(f"pools={type(pools).__name__}: must be a sequence of Pool")
    for pool in pools:
        if pool.fmt.head_dim != q.shape[3] or pool.fmt.page_tokens != pools[0].fmt.page_tokens:
            raise ValueError(
                f"pool of D={pool.fmt.head_dim}, P={pool.fmt.page_tokens}: must have D={q.shape[3]} like q "
                f"and P={pools[0].fmt.page_tokens} like the first pool"
            )
        if pool.slabs and pool.device != q.device:
            raise ValueError(f"pool {pool.fmt.name} on {pool.device}: must be on q's device, {q.device}")
    slopes, window = options.slopes, options.window_tokens
    if slopes is not None:
        if slopes.shape != q.shape[:2]:
            raise ValueError(f"slopes {tuple(slopes.shape)}: must be [S, G] = {tuple(q.shape[:2])}")
        if not slopes.dtype.is_floating_point:
            raise ValueError(f"slopes {slopes.dtype}: must be a float type")
        _check_devices(q.device, slopes=slopes)
    if isinstance(window, Tensor):
        if window.shape != (streams,) or window.dtype != torch.int32:
            raise ValueError(f"window_tokens {window.dtype} {tuple(window.shape)}: must be torch.int32 [{streams}]")
        _check_devices(q.device, window_tokens=window)
    elif type(window) is not int or not 0 <= window <= INT32_MOST:
        check_int("window_tokens", window, 0, meaning=" (no limit)")
    if type(options.sink_tokens) is not int or not 0 <= options.sink_tokens <= INT32_MOST:
        check_int("sink_tokens", options.sink_tokens, 0)
    if type(options.scale) is not float or not math.isfinite(options.scale):
        check_real("scale", options.scale)
    if not isinstance(options.schedule, Schedule):
        raise ValueError(f"schedule={options.schedule!r}: must be a Schedule")
    if DEBUG:
        table.check(pools)
        if isinstance(window, Tensor) and bool((window < 0).any()):
            raise ValueError(f"window_tokens {int(window.min())} of a stream: must be 0 (no limit) or more")
        if slopes is not None and not bool(slopes.isfinite().all()):
            raise ValueError("slopes with NaN or infinity: must be finite")


def _check_devices(device: torch.device, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} on {tensor.device}: must be on q's device, {device}")
