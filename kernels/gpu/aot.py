"""One Triton kernel compiled ahead of time, without a GPU, and what its machine code says.

Triton's wheel ships ptxas, cuobjdump and AMD's assembler, so registers, stack, shared memory and the instruction mix
of every target can be read on any Linux machine. Importing this module does not import Triton: whoever compiles sets
the environment first (see `fix_environment`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.gpu.spec import Variant


@dataclass(frozen=True)
class Target:
    """A GPU as far as it bounds a kernel.

    Attributes:
        backend, arch, warp_threads: as Triton names them.
        shared_limit_bytes: the most that one block may have.
        shared_bytes: of a whole SM or CU.
        reserved_bytes: shared memory that the driver adds to each block.
        registers: of 32 bits, of a whole SM or CU.
        warps, blocks: the most that an SM or CU holds.
    """

    backend: str
    arch: int | str
    warp_threads: int
    shared_limit_bytes: int
    shared_bytes: int
    reserved_bytes: int
    registers: int
    warps: int
    blocks: int


# CUDA C++ programming guide, "Compute capabilities"; AMD Instinct MI300 ISA guide: 4 SIMDs of 512 x 64 registers, at
# most 8 waves each, 64 KB of LDS.
GPUS = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024, 164 * 1024, 1024, 65536, 64, 32),
    "sm_90": Target("cuda", 90, 32, 227 * 1024, 228 * 1024, 1024, 65536, 64, 32),
    "sm_100": Target("cuda", 100, 32, 227 * 1024, 228 * 1024, 1024, 65536, 64, 32),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024, 64 * 1024, 0, 4 * 512 * 64, 32, 32),
}


@dataclass(frozen=True)
class Facts:
    """What one variant became on one target.

    Attributes:
        registers: a thread. On gfx942 vector registers, accumulators included.
        stack_bytes: local memory a thread, where registers spill to and arrays with computed indices live.
        spills: instructions that touch local memory (NVIDIA), spilled vector registers (AMD).
        shared_bytes: a block.
        blocks: that fit on an SM or CU at once; 0 if one does not.
        occupancy: their share of the warps that an SM or CU holds, 0 to 1.
        tensor_core: matrix instructions (HMMA, IMMA, wgmma, tcgen05; v_mfma).
        async_128: 128-bit or bulk copies from global to shared memory past the registers (cp.async, TMA).
        load_128: 128-bit global loads into registers.
        narrow_loads: other global loads and copies.
        int_to_float, float_multiply: I2F, FMUL and their kin.
        compile_s: seconds, next to nothing where Triton's cache had it.
    """

    registers: int
    stack_bytes: int
    spills: int
    shared_bytes: int
    blocks: int
    occupancy: float
    tensor_core: int
    async_128: int
    load_128: int
    narrow_loads: int
    int_to_float: int
    float_multiply: int
    compile_s: float


MIX = ("tensor_core", "async_128", "load_128", "narrow_loads", "int_to_float", "float_multiply")
# First match counts. SASS: cp.async is LDGSTS, cp.async.bulk is UBLKCP, a tensor-map copy UTMALDG.
SASS_CLASSES = {
    "tensor_core": r"[DHIOQ]G?MMA\b|UTC\w*MMA\b",
    "async_128": r"LDGSTS\S*\.128\b|UBLKCP\b|UTMALDG\b",
    "load_128": r"LDG\.\S*(128|256)\b",
    "narrow_loads": r"LDG\b|LDGSTS\b",
    "int_to_float": r"I2FP?\b",
    "float_multiply": r"FMUL2?\b",
    "spills": r"(STL|LDL)\b",
}
AMDGCN_CLASSES = {
    "tensor_core": r"v_s?mfma",
    "load_128": r"(global|buffer|flat)_load_(lds_)?dwordx4\b",
    "narrow_loads": r"(global|buffer|flat)_load_",
    "int_to_float": r"v_cvt_(pk_)?f(16|32)_[iu]",
    "float_multiply": r"v_(pk_)?mul_f32\b",
}
SASS_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
AMDGCN_OPCODE = re.compile(r"^\t([a-z]\w+)\s", re.MULTILINE)


def fix_environment() -> None:
    """Makes code generation independent of who calls; must run before the first import of Triton in a process."""
    # From 3.10 Triton no longer fuses multiply and add by default.
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    # In the interpreter's process @triton.jit yields what can't be compiled.
    os.environ.pop("TRITON_INTERPRET", None)


def compile_variant(kernel: Any, variant: Variant, target_name: str) -> Facts:
    """Compiles a variant of a @triton.jit function and reads the result.

    Args:
        kernel: also one under @triton.autotune or @triton.heuristics.
        variant: what to compile.
        target_name: of `GPUS`.

    Raises:
        Exception: whatever the compiler raises; it may also abort the process.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    while not isinstance(kernel, triton.JITFunction):
        kernel = kernel.fn
    target = GPUS[target_name]
    source = ASTSource(
        kernel,
        dict(variant.signature),
        constexprs=dict(variant.constants),
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(variant.signature)
            if name in variant.divisible
        },
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
    start = time.perf_counter()
    gpu = GPUTarget(target.backend, target.arch, target.warp_threads)
    compiled = triton.compile(source, target=gpu, options={**options, **variant.options})
    compile_s = time.perf_counter() - start
    counts = read_counts(compiled, target)
    shared_bytes = compiled.metadata.shared
    blocks = blocks_that_fit(target, counts["registers"], shared_bytes, compiled.metadata.num_warps)
    return Facts(
        **counts,
        shared_bytes=shared_bytes,
        blocks=blocks,
        occupancy=blocks * compiled.metadata.num_warps / target.warps,
        compile_s=round(compile_s, 3),
    )


def blocks_that_fit(target: Target, registers: int, shared_bytes: int, warps: int) -> int:
    """Blocks that an SM or CU holds at once; registers are given to warps in units of 8 a thread."""
    if shared_bytes > target.shared_limit_bytes:
        return 0
    per_block = -(-registers // 8) * 8 * target.warp_threads * warps
    shared_per_block = shared_bytes + target.reserved_bytes
    return min(
        target.blocks,
        target.warps // warps,
        target.registers // max(per_block, 1),
        target.shared_bytes // max(shared_per_block, 1),
    )


def count_opcodes(opcodes: list[str], classes: dict[str, str]) -> dict[str, int]:
    """How many opcodes fall into each class; one falls into the first whose pattern it begins with."""
    patterns = [(name, re.compile(pattern)) for name, pattern in classes.items()]
    counts: dict[str, int] = dict.fromkeys((*MIX, "spills"), 0)
    for opcode in opcodes:
        for name, pattern in patterns:
            if pattern.match(opcode):
                counts[name] += 1
                break
    return counts


def read_counts(compiled: Any, target: Target) -> dict[str, int]:
    """Counts of `Facts`, kept beside the binary in Triton's cache: disassembling takes longer than compiling."""
    from triton.runtime.cache import get_cache_manager

    # Whoever changes how machine code is read, reads it again.
    reader = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    cache = get_cache_manager(compiled.hash)
    kept = cache.get_file(f"counts-{reader}.json")
    if kept is not None:
        return json.loads(Path(kept).read_text())
    counts = read_cuda(compiled) if target.backend == "cuda" else read_amd(compiled)
    cache.put(json.dumps(counts), f"counts-{reader}.json", binary=False)
    return counts


def read_cuda(compiled: Any) -> dict[str, int]:
    """Registers, stack and mix from the cubin; Triton itself learns them only where there is a GPU."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = str(knobs.nvidia.cuobjdump.path)
        dump = subprocess.run([tool, "-res-usage", "-sass", str(cubin)], capture_output=True, text=True, check=True)
    return parse_sass(dump.stdout)


def parse_sass(dump: str) -> dict[str, int]:
    """Counts of `Facts` from what cuobjdump prints with -res-usage and -sass.

    Raises:
        ValueError: there is no resource usage or no code in it.
    """
    usage = re.search(r"REG:(\d+) STACK:(\d+) \S+ LOCAL:(\d+)", dump)
    opcodes = SASS_OPCODE.findall(dump)
    if usage is None or not opcodes:
        raise ValueError("cuobjdump shows no resource usage or no code")
    registers, stack, local = (int(number) for number in usage.groups())
    return {"registers": registers, "stack_bytes": stack + local, **count_opcodes(opcodes, SASS_CLASSES)}


def read_amd(compiled: Any) -> dict[str, int]:
    """Registers, scratch and mix from the assembly's metadata."""
    return parse_amdgcn(compiled.asm["amdgcn"])


def parse_amdgcn(assembly: str) -> dict[str, int]:
    """Counts of `Facts` from AMD assembly. Scalar registers spill into lanes of vector registers, never to memory.

    Raises:
        ValueError: the metadata lacks one of the numbers.
    """

    def number(key: str) -> int:
        found = re.search(rf"^\s*\.{key}:\s*(\d+)", assembly, re.MULTILINE)
        if found is None:
            raise ValueError(f"the assembly has no .{key}")
        return int(found.group(1))

    counts = count_opcodes(AMDGCN_OPCODE.findall(assembly), AMDGCN_CLASSES)
    return {
        **counts,
        "registers": number("vgpr_count"),
        "stack_bytes": number("private_segment_fixed_size"),
        "spills": number("vgpr_spill_count"),
    }
