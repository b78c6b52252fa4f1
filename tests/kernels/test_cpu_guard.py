"""Native attention reads and writes nothing beyond its arguments: each ends where unreadable memory begins."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import warm

CODE = """
import ctypes, mmap, sys
import torch

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = LIBC.mprotect.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def guarded(x):
    "A copy of x in page-aligned memory whose last byte is the last that may be touched."
    size = x.numel() * x.element_size()
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    base = LIBC.mmap(None, room + mmap.PAGESIZE, 3, 0x22, -1, 0)
    assert LIBC.mprotect(base + room, mmap.PAGESIZE, 0) in (0, None)
    raw = (ctypes.c_uint8 * size).from_address(base + room - size)
    return torch.frombuffer(raw, dtype=x.dtype).view(x.shape).copy_(x)

from kernels.api import PageTable, Pool, attend
from kernels.pages import encode, page_format
import kernels.cpu.build
kernels.cpu.build.library()
empty, empty_like = torch.empty, torch.empty_like

def results(x):
    return guarded(x.fill_(float("nan")))

def attend_guarded(*arguments, **options):
    torch.empty = lambda *shape, **how: results(empty(*shape, **how))
    torch.empty_like = lambda like: results(empty_like(like))
    try:
        return attend(*arguments, backend="cpu", **options)
    finally:
        torch.empty, torch.empty_like = empty, empty_like

rng = torch.Generator().manual_seed(1)
for page_tokens in map(int, sys.argv[1].split(",")):
    for head_dim in map(int, sys.argv[2].split(",")):
        for name in ("fp32", "bf16", "fp16", "int8", "int4", "proto"):
            fmt = page_format(name, page_tokens, head_dim, 3 if name == "proto" else 1)
            k, v = (torch.randn(1, page_tokens, head_dim, generator=rng) for _ in range(2))
            pool = Pool(fmt, (guarded(encode(fmt, k, v)),))
            entries = 5
            page = torch.arange(entries, dtype=torch.int32).repeat(2, 1)
            columns = (torch.zeros(2, entries, dtype=torch.int8), torch.zeros(2, entries, dtype=torch.int32), page)
            table = PageTable(*map(guarded, columns), guarded(torch.tensor([entries, 3], dtype=torch.int32)))
            first = guarded(torch.tensor([entries * page_tokens - 4, 3 * page_tokens - 1], dtype=torch.int32))
            for dtype in (torch.float32, torch.bfloat16):
                q = guarded(torch.randn(2, 3, 1, head_dim, generator=rng).to(dtype))
                got = attend_guarded(q, table, (pool,), first, scale=0.1, want_mass=True)
                want = attend(q.float(), table, (pool,), first, scale=0.1, want_mass=True, backend="reference")
                most = 1e-5 if dtype is torch.float32 else 1e-2
                for a, b in ((got.out, want.out), (got.lse, want.lse), (got.mass, want.mass)):
                    assert (a - b).abs().max() <= most * b.abs().max(), (name, head_dim, page_tokens)
print("inside")
"""


def guarded_run(page_tokens: str, head_dims: str, code: str = CODE) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return warm.run(["-c", code, page_tokens, head_dims], cwd=root)


def test_nothing_beyond_the_arguments_is_touched() -> None:
    done = guarded_run("16,32", "40,64,80,128")
    assert done.stdout == "inside\n", (done.returncode, done.stderr[-800:])


@pytest.mark.parametrize("what", ["read", "write"])
def test_the_guard_bites(what: str) -> None:
    touch = "ctypes.string_at(x.data_ptr() + 16, 1)" if what == "read" else "ctypes.memset(x.data_ptr() + 16, 0, 1)"
    code = CODE[: CODE.index("from kernels.api")] + f"x = guarded(torch.zeros(4))\n{touch}\n"
    assert guarded_run("", "", code).returncode < 0
