"""Native append, scores and selection touch no byte outside their tensors: each lies against an unreadable page."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
from pathlib import Path

import pytest
import torch
import warm
from torch import Tensor

from kernels.api import PageTable, Pool, append, choose_backend, gather, scatter
from kernels.pages import encode, page_format
from kernels.scoring import mean_key_score, narrow, query_bound, top_pages
from kernels.upkeep import Upkeep

PROT_NONE = 0


class Fence:
    """Copies of tensors that end right before an unreadable page, or begin right behind one."""

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.maps: list[mmap.mmap] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        page = mmap.PAGESIZE
        inner = -(-max(size, 1) // page) * page
        self.maps.append(mmap.mmap(-1, inner + 2 * page))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.maps[-1]))
        for wall in (start, start + page + inner):
            if self.libc.mprotect(wall, page, PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")
        first = start + page + (inner - size if self.at_end else 0)
        if not size:
            return tensor
        memory = (ctypes.c_uint8 * size).from_address(first)
        fenced = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        return fenced.copy_(tensor)


def use_everything(fence: Fence) -> None:
    """Every native function of store.cpp and score.cpp, at sizes that leave remainders."""
    rng = torch.Generator().manual_seed(0)
    for name, (page_tokens, head_dim), sealed in itertools.product(
        ("fp32", "bf16", "fp16"), ((16, 8), (16, 40), (32, 80), (16, 128)), ("int8", "int4", "bf16")
    ):
        formats = [page_format(name, page_tokens, head_dim), page_format(sealed, page_tokens, head_dim)]
        formats.append(page_format("proto", page_tokens, head_dim, 3))
        pool, copies, grouped = (
            Pool(f, tuple(fence(torch.zeros(2, f.page_bytes, dtype=torch.uint8)) for _ in range(2))) for f in formats
        )
        k, v = (fence(torch.randn(4, 2, head_dim, generator=rng).bfloat16()) for _ in range(2))
        slot = fence(torch.arange(4, dtype=torch.int32)[:, None].repeat(1, 2))
        offset = fence(torch.tensor([0, page_tokens - 1], dtype=torch.int32))
        fills = fence(torch.stack((torch.full((4,), -1), torch.arange(4).flip(0)), 1).int())
        low, high = (fence(torch.zeros(4, 3, head_dim, dtype=torch.bfloat16)) for _ in range(2))
        page = fence(torch.tensor([1, 2], dtype=torch.int32))
        append(k, v, slot, offset, pool, Upkeep(page, low, high, copies, fills, grouped, fills), "cpu")
        slots = fence(torch.tensor([3, 0, 2]))
        scatter(copies, slots, fence(gather(copies, slots, "cpu")), "cpu")
        whole = [fence(torch.randn(3, page_tokens, head_dim, generator=rng)) for _ in range(2)]
        encode(formats[1], whole[0], whole[1], "cpu")
    for dtype, head_dim, total in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), (8, 40, 44, 128), (1, 6, 13)
    ):
        q = fence(torch.randn(2, 3, 1, head_dim, generator=rng))
        low, high = (fence(torch.randn(2, total, head_dim, generator=rng).to(dtype)) for _ in range(2))
        count = fence(torch.tensor([total, 1], dtype=torch.int32))
        score = fence(query_bound(q, low, high, count, "cpu"))
        mean_key_score(q, low, count, "cpu")
        k = fence(torch.tensor([total // 2, 1], dtype=torch.int32))
        columns, number = top_pages(score, count, k, total, "cpu")
        slots = fence(torch.arange(2 * total, dtype=torch.int32).view(2, total))
        table = PageTable(fence(torch.zeros(2, total, dtype=torch.int8)), slots, fence(slots.clone()), count)
        narrow(table, fence(columns), fence(number), "cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect by ctypes is written for Linux")
@pytest.mark.parametrize("at_end", [True, False])
def test_native_code_stays_inside_its_tensors(at_end: bool) -> None:
    choose_backend("cpu")  # built before, so that the other process only loads it
    root = Path(__file__).parents[2]
    done = warm.run([__file__, str(int(at_end))], env={**os.environ, "PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect by ctypes is written for Linux")
def test_the_fence_stands() -> None:
    code = (
        "import ctypes, torch; from test_guard_store import Fence; x = Fence(True)(torch.zeros(3)); "
        "ctypes.string_at(x.data_ptr() + 12, 1)"
    )
    folder = Path(__file__).parent
    path = os.pathsep.join((str(folder), str(folder.parents[1])))
    done = warm.run(["-c", code], env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == -11


if __name__ == "__main__":
    use_everything(Fence(sys.argv[1] == "1"))
