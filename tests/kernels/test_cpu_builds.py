"""The native library as other CPUs get it: without AVX2, and with dot products of bf16 pairs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import warm

CODE = """
import sys
from dataclasses import replace
import torch
sys.path.insert(0, "tests/kernels")
from paged_case import make_case

for head_dim, page_tokens, tokens in ((64, 16, 1), (80, 32, 2), (72, 16, 1)):
    case = make_case(head_dim, ("bf16", "fp32", "fp16", "int8", "int4", "proto"), (0, 5, 300), head_dim, page_tokens,
                     tokens=tokens) if tokens == 1 else make_case(1, ("bf16", "int4"), (70, 300), head_dim, page_tokens,
                     tokens=tokens)
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)):
        half = replace(case, q=case.q.to(dtype))
        got = half.run("cpu", want_mass=True)
        want = replace(half, q=half.q.float()).run("reference", want_mass=True)
        assert (got.out - want.out).abs().max() <= most * want.out.abs().max(), (dtype, head_dim)
        assert (got.mass - want.mass).abs().max() <= most, (dtype, head_dim)
        error = float((got.out - want.out).abs().max() / want.out.abs().max())
        print(dtype, head_dim, error)
q = case.q.bfloat16()
q[1, 0, 0, 0] = float("nan")
spoilt = replace(case, q=q).run("cpu").out
assert spoilt[1, 0, 0].isnan().all() and torch.equal(spoilt[2], replace(case, q=case.q.bfloat16()).run("cpu").out[2])
print("right")
"""


def built(tmp_path: Path, flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TESTBED_CACHE": str(tmp_path), "TESTBED_NATIVE_FLAGS": f"-O0 {flags}"}
    root = Path(__file__).parents[2]
    return warm.run(["-c", CODE], cwd=root, env=environment)


@pytest.mark.parametrize("flags", ["-march=x86-64", "-DTESTBED_EMULATE_BF16"])
def test_other_builds_match_the_oracle(flags: str, tmp_path: Path) -> None:
    done = built(tmp_path, flags)
    lines = done.stdout.splitlines()
    assert lines[-1:] == ["right"], (done.returncode, done.stderr[-800:])
    half = max(float(line.split()[-1]) for line in lines if line.startswith("torch.bfloat16"))
    assert (half > 1e-4) == (flags != "-march=x86-64")  # products of 16 bits are taken where they should be


def test_a_build_for_wider_lanes_compiles(tmp_path: Path) -> None:
    """AVX-512 with VNNI and BF16: this machine may not be able to run it."""
    source = Path(__file__).parents[2] / "kernels" / "cpu" / "attend.cpp"
    for march in ("icelake-server", "sapphirerapids"):
        command = ["g++", "-std=c++17", f"-march={march}", "-Wno-psabi", "-fsyntax-only", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:800]
