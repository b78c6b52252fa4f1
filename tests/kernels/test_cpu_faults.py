"""The native backend where the process forks, memory or threads run out, tables are wide, and keys are all old."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm

from kernels.api import PageTable, Pool, attend
from kernels.pages import decode, encode, page_format, views

CASE = """
import os, resource, signal, threading
import torch
from kernels.api import PageTable, Pool, Schedule, attend
from kernels.pages import encode, page_format

def case(streams, pages, tokens=1, head_dim=64, width=None, slots=None):
    "Streams that list the same pages, one after another."
    rng = torch.Generator().manual_seed(1)
    fmt, slots = page_format("fp32", 16, head_dim), slots or pages
    slab = encode(fmt, *(torch.randn(slots, 16, head_dim, generator=rng) for _ in range(2)))
    page = torch.arange(width or pages, dtype=torch.int32).repeat(streams, 1)
    count = torch.full((streams,), pages, dtype=torch.int32)
    table = PageTable(torch.zeros_like(page, dtype=torch.int8), page % slots, page, count)
    q = torch.randn(streams, 4, tokens, head_dim, generator=rng)
    return q, table, [Pool(fmt, (slab,))], torch.full((streams,), pages * 16 - tokens, dtype=torch.int32)

def run(arguments, threads=1, **options):
    return attend(*arguments, scale=0.1, backend="cpu", schedule=Schedule(threads=threads), **options)

def held_bytes(which):
    return int(open("/proc/self/statm").read().split()[which]) * resource.getpagesize()
"""


def answer(code: str, fresh: bool = False) -> str:
    """What the code prints; `fresh`: in a process whose memory holds nothing else."""
    root = Path(__file__).parents[2]
    if fresh:
        done = subprocess.run(
            [sys.executable, "-c", CASE + code], cwd=root, timeout=120, capture_output=True, text=True
        )
    else:
        done = warm.run(["-c", CASE + code], cwd=root, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr[-800:])
    return done.stdout


def test_a_forked_child_answers() -> None:
    """Also one whose parent had another thread inside a call, holding the locks."""
    code = """
arguments, busy, stop = case(4, 512), case(4, 2048), threading.Event()
want = run(arguments, 4)

def loop():
    while not stop.is_set():
        run(busy, 2)

def bad_children(forks):
    bad = 0
    for _ in range(forks):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            same = all(torch.equal(run(arguments, 4).out, want.out) for _ in range(2))
            os._exit(0 if same else 1)
        bad += os.waitpid(child, 0)[1] != 0
    return bad

alone = bad_children(5)
other = threading.Thread(target=loop)
other.start()
beside = bad_children(5)
stop.set()
other.join()
print(alone, beside)
"""
    assert answer(code) == "0 0\n"


def test_no_memory_is_an_error_that_says_how_much() -> None:
    """8 streams of 256 rows and 1,024 splits need over 1 GB."""
    code = """
run(case(1, 4))
resource.setrlimit(resource.RLIMIT_AS, (held_bytes(0) + (700 << 20), -1))
try:
    run(case(8, 65536, tokens=64, head_dim=128, slots=4))
except MemoryError as error:
    print(error)
print(run(case(1, 4)).out.isfinite().all().item())
"""
    wanted = 4 * 8 * 256 * (1024 * (128 + 2) + 2)
    assert answer(code).splitlines() == [
        f"testbed_attend wanted {wanted} bytes of working memory, which can't be had",
        "True",
    ]


def test_threads_that_can_not_be_started_are_not_missed() -> None:
    """Their stacks of 8 MB do not fit, or there are more than the library takes."""
    code = """
arguments = case(64, 1, tokens=64)
want = run(arguments)
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, -1))
resource.setrlimit(resource.RLIMIT_AS, (held_bytes(0) + (100 << 20), -1))
print(torch.equal(run(arguments, 200).out, want.out))
print(torch.equal(run(arguments, 3000).out, want.out))
"""
    assert answer(code, fresh=True) == "True\nTrue\n"


def test_working_memory_follows_the_counts_and_shrinks() -> None:
    """8 streams of 256 rows: 4 of 65,536 columns are used, which takes 1 MB; all of 8,192 take 128 MB and more."""
    code = """
run(case(1, 4))
before = held_bytes(1)
wide = case(8, 4, tokens=64, width=65536)
run(wide)
run(wide, want_mass=True)
print(held_bytes(1) - before < 64 << 20)
window = torch.full((8,), 16, dtype=torch.int32)
run(case(8, 8192, tokens=64, head_dim=128, slots=4), want_mass=True, window_tokens=window)
grown = held_bytes(1) - before
for _ in range(8):
    run(case(1, 4))
print(grown > 200 << 20, held_bytes(1) - before < grown / 4)
"""
    assert answer(code) == "True\nTrue True\n"


@pytest.mark.parametrize("slabs", [0, 1])
def test_pages_of_an_empty_pool_are_refused(slabs: int) -> None:
    fmt = page_format("fp32", 16, 64)
    full = Pool(fmt, (encode(fmt, torch.zeros(1, 16, 64), torch.zeros(1, 16, 64)),))
    empty = Pool(fmt, tuple(torch.zeros(0, fmt.page_bytes, dtype=torch.uint8) for _ in range(slabs)))
    zeros = torch.zeros(1, 1, dtype=torch.int32)
    q, first = torch.ones(1, 1, 1, 64), torch.tensor([15], dtype=torch.int32)

    def run(number: int, count: int) -> torch.Tensor:
        columns = torch.full((1, 1), number, dtype=torch.int8), zeros, zeros
        table = PageTable(*columns, torch.tensor([count], dtype=torch.int32))
        return attend(q, table, (full, empty), first, scale=1.0, backend="cpu").lse

    with pytest.raises(ValueError, match="pool 1 .*holds none"):
        run(1, 1)
    assert run(0, 1).item() == 4.0  # log2 of 16 equal keys
    assert run(1, 0).item() == float("-inf")


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alibi_of_old_keys_is_exact(hidden: bool, dtype: torch.dtype) -> None:
    """The 64 keys seen are a million tokens old; with `hidden`, newer ones are listed that the window hides."""
    rng = torch.Generator().manual_seed(2)
    fmt = page_format("fp32", 16, 64)
    pool = Pool(fmt, (encode(fmt, torch.randn(6, 16, 64, generator=rng), torch.randn(6, 16, 64, generator=rng)),))
    page = torch.tensor([[0, 1, 2, 3, 30_000, 40_000]], dtype=torch.int32)
    slot = torch.arange(6, dtype=torch.int32)[None]
    count = torch.tensor([6 if hidden else 4], dtype=torch.int32)
    table = PageTable(torch.zeros_like(slot, dtype=torch.int8), slot, page, count)
    q = torch.randn(1, 2, 3, 64, generator=rng).to(dtype)
    first = torch.tensor([1_000_000], dtype=torch.int32)
    options = {
        "scale": 0.125,
        "slopes": torch.tensor([[0.5, 0.0625]]),
        "window_tokens": 100 if hidden else 0,
        "sink_tokens": 64 if hidden else 0,
    }
    got = attend(q, table, (pool,), first, backend="cpu", **options)
    want = attend(q.float(), table, (pool,), first, backend="reference", **options)
    assert (got.out - want.out).abs().max() < 1e-5 * want.out.abs().max()
    assert (got.lse - want.lse).abs().max() < 1e-5 * want.lse.abs().max()


@pytest.mark.parametrize(("name", "size"), [("int8", 3e-37), ("int4", 1e-38), ("int8", 1.0), ("int4", 1.0)])
def test_steps_near_the_least_float_are_kept(name: str, size: float) -> None:
    """Off by half a step and what denormals round; the portable encoder writes the same bytes."""
    rng = torch.Generator().manual_seed(3)
    fmt = page_format(name, 16, 64)
    k, v = (torch.rand(4, 16, 64, generator=rng) * size for _ in range(2))
    blobs = encode(fmt, k, v, backend="cpu")
    arrays = views(fmt, blobs)
    step = arrays["k_scale"].double() * arrays["header"][:, :1].double()
    error = (decode(fmt, blobs)[0].double() - k.double()).abs().amax(1)
    assert bool((error <= step * 0.55).all())
    assert torch.equal(blobs, encode(fmt, k, v, backend="torch"))
