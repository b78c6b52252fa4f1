"""Small kernels, one sound and the others with one known fault each, for the tests of `kernels.check`."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.spec import ASYNC_128, LOAD_128, TENSOR_CORE, Spec, Variant


@triton.jit
def scores(q, k, out, row_stride, tokens, M: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Sums q k^T over blocks of keys: [M, D] and [tokens, D] -> [M, BLOCK]."""
    rows, dims, block = tl.arange(0, M), tl.arange(0, D), tl.arange(0, BLOCK)
    queries = tl.load(q + rows[:, None] * D + dims[None, :])
    total = tl.zeros([M, BLOCK], tl.float32)
    for first in range(0, tokens, BLOCK):
        keys = tl.load(k + (first + block)[None, :] * row_stride + dims[:, None])
        total += tl.dot(queries, keys)
    tl.store(out + rows[:, None] * BLOCK + block[None, :], total)


@triton.constexpr_function
def end_the_process() -> int:
    """What a failed assertion inside the compiler does."""
    # Imported here: Triton refuses a kernel that refers to a function it can't read.
    from os import abort

    print("LLVM ERROR: seeded abort", flush=True)
    abort()


@triton.jit
def aborts(out):
    """Kills whoever compiles it."""
    tl.store(out, end_the_process())


@triton.jit
def refused(out):
    """A shape that the language does not allow."""
    tl.store(out + tl.arange(0, 3), 1.0)


SIGNATURE = {
    "q": "*fp16",
    "k": "*fp16",
    "out": "*fp32",
    "row_stride": "i32",
    "tokens": "i32",
    "M": "constexpr",
    "D": "constexpr",
    "BLOCK": "constexpr",
}
SHAPE = {"M": 16, "D": 128, "BLOCK": 64}
ALIGNED = frozenset({"q", "k", "out", "row_stride"})
EXPECTED = frozenset({TENSOR_CORE, ASYNC_128, LOAD_128})
LARGE = {"M": 16, "D": 128, "BLOCK": 256}

SPEC = (
    Spec("sound", scores, (Variant("d128", SIGNATURE, SHAPE, ALIGNED, expects=EXPECTED),)),
    Spec(
        "faulty",
        scores,
        (
            Variant("spills", SIGNATURE, {**SHAPE, "M": 64}, ALIGNED, targets=("sm_80",), options={"maxnreg": 32}),
            Variant("odd-stride", SIGNATURE, SHAPE, ALIGNED - {"row_stride"}, expects=EXPECTED),
            Variant("too-much-shared", SIGNATURE, LARGE, ALIGNED, num_warps=8, num_stages=5),
        ),
    ),
    Spec("aborting", aborts, (Variant("any", {"out": "*i32"}, targets=("sm_80", "sm_90")),)),
    Spec("refused", refused, (Variant("any", {"out": "*fp32"}, targets=("sm_80",)),)),
)
