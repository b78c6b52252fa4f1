"""This machine's numbers for the twin, measured in under 3 s and kept with their date.

Each is a small benchmark of one resource (a stream of weights, a product, one page pool, an empty decoder layer,
a copy, a file), the best of several tries. None looks at the decode time of a run, so comparing the twin's
prediction with that time says something. Sizes are large enough to come from memory and not from the caches.

    python -m testbed.sim.measure        # measures again, prints the table
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.gemv import NATIVE_ROWS, gemv_bf16
from testbed.assets import cache_dir
from testbed.files import replacing
from testbed.sim.hardware import UNITS, Hardware, HardwareError, Quantity, quantity

TIMED_CODE = ("testbed/models", "testbed/sim", "kernels", "kernels/cpu")  # a change there asks for new numbers
MB = 1_000_000
WEIGHT_SHAPE = (1536, 576)  # of a matrix in the stream of weights: 3.5 MB in float32
CACHED_SHAPE = (256, 576)  # of a matrix that is not read from memory: 0.3 MB in bfloat16
BUSY_LOAD = 1.5  # processes that want to run, per core
HEAD_DIM, GROUP, STREAMS, PAGE_TOKENS = 64, 3, 3, 16


def local(name: str = "local", fresh: bool = False) -> Hardware:
    """Hydra's target for this machine: measured once per host, threads and versions, then read from a file.

    Raises:
        HardwareError: a number came out impossible.
    """
    path = cache_dir() / "hardware" / f"{fingerprint()}.json"
    stored = None if fresh else _stored(path, name)
    if stored:
        return stored
    quantities = measure()
    machine = Hardware(name, quantities, overlap=False)
    if not busy():
        _store(path, {key: asdict(item) for key, item in quantities.items()})
    return machine


def fingerprint() -> str:
    """16 hex digits that change with the host, its CPU, the compute threads, torch, and the code that is timed."""
    facts = (platform.node(), _cpu(), os.cpu_count(), torch.get_num_threads(), torch.__version__)
    digest = hashlib.sha256(repr(facts).encode())
    root = Path(__file__).parents[2]
    for folder in TIMED_CODE:
        for path in sorted((root / folder).glob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@torch.inference_mode()
def measure() -> dict[str, Quantity]:
    """Every number of `testbed.sim.hardware.QUANTITIES` for this machine."""
    threads = torch.get_num_threads()
    date = datetime.now(UTC).date().isoformat()
    where = f"{_cpu()}, {threads} thread{'s' if threads > 1 else ''}"
    found: dict[str, Quantity] = {}

    def note(key: str, base: float, unit: str, how: str) -> None:
        found[key] = Quantity(base / UNITS[unit][1], unit, f"{where}: {how}", date, "measured")

    memory = _weights(note)
    _compute(note)
    _attention(note, memory, found["fp32_flops"].base)
    _overheads(note, found["layer_overhead"].base)
    _host(note)
    _disk(note)
    note("memory_capacity", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "GB", "physical memory")
    note("chunk", 64 * MB, "MB", "moves are not cut into pieces")
    return found


Note = Callable[[str, float, str, str], None]


def best_us(run: Callable[[], Any], least_us: float = 50_000, tries: int = 5, most_us: float = 250_000) -> float:
    """Shortest time of a call: at least `tries` and `least_us` of them, but no more than `most_us` in all."""
    run()
    best, spent, done = float("inf"), 0.0, 0
    while (done < tries or spent < least_us) and (not done or spent < most_us):
        start = time.perf_counter_ns()
        run()
        us = (time.perf_counter_ns() - start) / 1e3
        best, spent, done = min(best, us), spent + us, done + 1
    return best


def busy() -> bool:
    """Whether others compute here: numbers taken now are used, but not kept for later."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > BUSY_LOAD * (os.cpu_count() or 1)


def _weights(note: Note) -> float:
    """Memory bandwidth and the part of it that one row times a stream of weights reaches; bytes a microsecond."""
    matrices = [torch.full(WEIGHT_SHAPE, 0.5) for _ in range(40)]
    size = sum(matrix.nbytes for matrix in matrices)
    row = torch.full((1, WEIGHT_SHAPE[1]), 0.5)

    def decode() -> None:
        for matrix in matrices:
            linear(row, matrix)

    flat = torch.full((size // 4,), 0.5)
    gemv = size / best_us(decode, 150_000)
    memory = max(gemv, size / best_us(flat.sum, 100_000))
    note("memory_bandwidth", memory, "GB/s", f"best of summing and multiplying {size // MB} MB of float32")
    note("contiguous_efficiency", gemv / memory, "fraction", f"one row times {len(matrices)} float32 matrices")
    return memory


def _compute(note: Note) -> None:
    square = torch.full((512, 512), 0.5)
    flops = 2 * 512**3
    note("fp32_flops", flops / best_us(lambda: square @ square), "GFLOP/s", "float32 product of 512 cubed")
    weight = torch.full(CACHED_SHAPE, 0.5, dtype=torch.bfloat16)
    rows = torch.full((NATIVE_ROWS, CACHED_SHAPE[1]), 0.5)
    us = best_us(lambda: gemv_bf16(rows, weight), 30_000)
    how = f"{NATIVE_ROWS} float32 rows times a bfloat16 matrix in the cache"
    note("bf16_flops", 2 * NATIVE_ROWS * weight.numel() / us, "GFLOP/s", how)
    note("matmul_efficiency", 1.0, "fraction", "the rates above are reached rates")


def _attention(note: Note, memory: float, flops: float) -> None:
    """Rates of paged attention from the slope over pages, one call's own cost from its intercept."""
    short, long, layers = 32, 256, 12
    slopes, intercepts = {}, []
    for name in ("bf16", "int8", "int4"):
        times = [best_us(_attend(name, pages, layers), 40_000) / layers for pages in (short, long)]
        values = STREAMS * PAGE_TOKENS * HEAD_DIM * 2 * (long - short)
        rise = times[1] - times[0]
        if rise <= 0:  # noise was larger than the pages' time: count all of the longer call as theirs
            rise = times[1] * (long - short) / long
        slopes[name] = rise / values  # microseconds a value
        intercepts.append(max(0.0, times[0] - slopes[name] * values * short / (long - short)))
    how = f"attention of {STREAMS} x {GROUP} heads of {HEAD_DIM} over {long} against {short} pages"
    note("paged_efficiency", min(1.0, 2 / slopes["bf16"] / memory), "fraction", f"bfloat16 {how}")
    for name in ("int8", "int4"):
        # What is left of a value's time when its products are paid; never less than a tenth of it.
        own = max(slopes[name] - 2 * GROUP / flops, slopes[name] / 10)
        note(f"{name}_dequant", 1 / own, "Gvalue/s", f"{name} {how}")
    note("layer_overhead", min(intercepts), "us", "intercept of the same")


def _attend(name: str, pages: int, layers: int) -> Callable[[], None]:
    """One decode step's attention over `layers` page pools of one format."""
    from kernels.api import PageTable, Pool, attend
    from kernels.pages import encode, page_format

    fmt = page_format(name, PAGE_TOKENS, HEAD_DIM)
    total = STREAMS * pages
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(total, PAGE_TOKENS, HEAD_DIM, generator=draw) for _ in range(2))
    blobs = encode(fmt, k, v)
    pools = [Pool(fmt, (blobs.clone(),)) for _ in range(layers)]
    slot = torch.randperm(total, generator=draw).int().view(STREAMS, pages)
    page = torch.arange(pages, dtype=torch.int32).expand(STREAMS, pages).contiguous()
    count = torch.full((STREAMS,), pages, dtype=torch.int32)
    table = PageTable(torch.zeros_like(slot, dtype=torch.int8), slot, page, count)
    query = torch.randn(STREAMS, GROUP, 1, HEAD_DIM, generator=draw)
    first = torch.full((STREAMS,), pages * PAGE_TOKENS, dtype=torch.int32)

    def run() -> None:
        for pool in pools:
            attend(query, table, (pool,), first, scale=HEAD_DIM**-0.5)

    return run


def _overheads(note: Note, attention_us: float) -> None:
    """What a step costs beside weights and pages: an almost weightless decoder, and a plan's tensor operations."""
    few, many = (best_us(_empty_decoder(layers), 60_000) for layers in (2, 10))
    layer_us = max(0.0, many - few) / 8
    how = "a decoder of 2 and of 10 layers of width 64 with no attention, one token"
    note("layer_overhead", layer_us + attention_us, "us", f"{how}; and the intercept of an attention call")
    note("step_overhead", max(0.0, few - 2 * layer_us), "us", how)
    note("plan_overhead", best_us(_plan_like), "us", "the tensor operations of one plan on [30, 3, 256] pages")


def _empty_decoder(layers: int) -> Callable[[], object]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from testbed.models import wrap

    width, heads = 64, 4
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        vocab_size=128,
        max_position_embeddings=4096,
    )
    decoder = wrap(LlamaForCausalLM(config).eval())
    tokens, positions = torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), 1000)

    def nothing(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q

    return lambda: decoder.forward(tokens, positions, nothing, "last")


def _plan_like() -> Tensor:
    """Score, rank, fill and choose for every page, as a plan does; about 30 operations."""
    score = torch.linspace(0, 1, 30 * 3 * 256).view(30, 3, 256)
    fmt = torch.zeros(30, 3, 256, dtype=torch.int8)
    alive = score > 0.1
    for _ in range(2):
        order = score.masked_fill(~alive, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        cost = torch.tensor([4096, 2048, 1024])[fmt.long()].double()
        spent = torch.where(alive, cost, 0.0).gather(-1, order).cumsum(-1)
        fits = torch.zeros_like(alive).scatter_(-1, order, spent < 1e5)
        fmt = torch.where(fits, fmt, torch.maximum(fmt, (~fits).to(torch.int8)))
    return fmt


def _host(note: Note) -> None:
    """L2 on this machine is other memory: a copy."""
    source = torch.ones(32 * MB, dtype=torch.uint8)
    target = torch.empty_like(source)
    rate = source.nbytes / best_us(lambda: target.copy_(source), 60_000)
    for key, factor in (("host_read", 1), ("host_write", 1), ("host_both", 1)):
        note(key, factor * rate, "GB/s", "copy of 32 MB")
    little, room = torch.ones(64, dtype=torch.uint8), torch.empty(64, dtype=torch.uint8)
    note("host_setup", best_us(lambda: room.copy_(little), 2_000), "us", "copy of 64 bytes")


def _disk(note: Note) -> None:
    """L3 is a file in the cache folder; reads come from the disk where the kernel lets go of its copy."""
    folder = cache_dir() / "hardware"
    folder.mkdir(parents=True, exist_ok=True)
    size, block = 32 * MB, b"\x5a" * (8 * MB)
    with tempfile.TemporaryFile(dir=folder) as file:
        handle = file.fileno()

        def write() -> None:
            for offset in range(0, size, len(block)):
                os.pwrite(handle, block, offset)
            os.fsync(handle)

        def forget() -> None:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

        def read(length: int) -> float:
            forget()
            start = time.perf_counter_ns()
            os.pread(handle, length, 0)
            return (time.perf_counter_ns() - start) / 1e3

        written = size / best_us(write, 0, 2)
        reads = min(read(size) for _ in range(3))
        setup = min(read(4096) for _ in range(5))
    note("disk_write", written, "GB/s", f"{size // MB} MB to a file and fsync")
    note("disk_read", size / max(reads - setup, 1e-3), "GB/s", f"{size // MB} MB of a file after DONTNEED")
    note("disk_setup", setup, "us", "4 kB of the same file")


def _cpu() -> str:
    """The CPU's name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _stored(path: Path, name: str) -> Hardware | None:
    """What an earlier call measured, or None where there is nothing whole to read: then it is measured again."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return Hardware(name, {key: quantity(key, item, name) for key, item in raw.items()}, overlap=False)
    except (OSError, ValueError, AttributeError):
        return None


def _store(path: Path, raw: dict[str, Any]) -> None:
    """Keeps the numbers; a cache folder that can't be written costs a measurement each time, no more."""
    with contextlib.suppress(OSError), replacing(path) as partial:
        partial.write_text(json.dumps(raw, indent=1), encoding="utf-8")


def main() -> None:
    """Measures again and prints what came out."""
    start = time.perf_counter()
    try:
        machine = local(fresh=True)
    except HardwareError as error:
        raise SystemExit(f"testbed: {error}") from error
    for key, item in machine.quantities.items():
        print(f"{key:22} {item.value:10.3f} {item.unit:9} {item.source}")
    print(f"{time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
