"""The ahead-of-time gate: what it reads from machine code, that seeded faults fail it, that our kernels pass it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels import check
from kernels.gpu.aot import GPUS, blocks_that_fit, parse_amdgcn, parse_sass
from kernels.gpu.spec import TARGETS, Spec, Variant
from kernels.gpu.workers import Job, compile_all

SEEDED = ["seeded_ops"]

SASS = """
Resource usage:
 Common:
  GLOBAL:0
 Function scores:
  REG:80 STACK:48 SHARED:1024 LOCAL:0 CONSTANT[0]:576 TEXTURE:0 SURFACE:0 SAMPLER:0
		Function : scores
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                       /* 0x00000a00ff017b82 */
                                                                                /* 0x000fe20000000800 */
        /*0010*/                   LDG.E.128 R8, desc[UR8][R2.64] ;             /* 0x0000000802087981 */
        /*0020*/               @P0 LDG.E.U16.CONSTANT R7, desc[UR8][R2.64] ;    /* 0x0000000802087981 */
        /*0030*/              @!P1 LDGSTS.E.BYPASS.128 [R43], desc[UR8][R16.64], P0 ;
        /*0040*/                   LDGSTS.E.BYPASS.LTC128B.128 [R43+0x800], desc[UR8][R18.64] ;
        /*0050*/                   LDGSTS.E.LTC128B.64 [R43+0x800], desc[UR8][R18.64] ;
        /*0060*/                   UBLKCP.S.G [UR8], [UR6], UR4 ;
        /*0070*/                   HMMA.16816.F32 R4, R4, R8, RZ ;
        /*0080*/                   HGMMA.64x64x16.F32 R24, gdesc[UR8], !UPT ;
        /*0090*/                   UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR4] ;
        /*00a0*/                   I2FP.F32.S32 R3, R3 ;
        /*00b0*/                   I2F.S8 R4, R3 ;
        /*00c0*/                   FMUL R3, R3, R3 ;
        /*00d0*/                   FMUL2 R3, R3, R3 ;
        /*00e0*/                   FFMA R3, R3, R3, R3 ;
        /*00f0*/                   STL.64 [R1], R4 ;
        /*0100*/                   LDL.64 R4, [R1] ;
        /*0110*/                   STS.128 [R2], R8 ;
"""

AMDGCN = """
scores:
	global_load_dwordx4 v[2:5], v[2:3], off
	buffer_load_dwordx4 v[2:5], v2, s[4:7], 0 offen
	global_load_ushort v1, v[2:3], off
	s_load_dwordx4 s[0:3], s[4:5], 0x0
	v_mfma_f32_16x16x16_f16 v[2:5], v[6:7], v[8:9], v[2:5]
	v_cvt_f32_i32_e32 v1, v1
	v_cvt_f32_ubyte0_e32 v1, v1
	v_pk_mul_f32 v[2:3], v[2:3], v[4:5]
	ds_write_b128 v1, v[2:5]
    .private_segment_fixed_size: 16
    .sgpr_spill_count: 2
    .vgpr_count:     68
    .vgpr_spill_count: 3
"""


def test_sass_is_counted_by_kind() -> None:
    assert parse_sass(SASS) == {
        "registers": 80,
        "stack_bytes": 48,
        "spills": 2,
        "tensor_core": 3,
        "async_128": 3,
        "load_128": 1,
        "narrow_loads": 2,
        "int_to_float": 2,
        "float_multiply": 2,
    }
    with pytest.raises(ValueError, match="no resource usage or no code"):
        parse_sass("")


def test_amd_assembly_is_counted_by_kind() -> None:
    assert parse_amdgcn(AMDGCN) == {
        "registers": 68,
        "stack_bytes": 16,
        "spills": 3,
        "tensor_core": 1,
        "async_128": 0,
        "load_128": 2,
        "narrow_loads": 1,
        "int_to_float": 2,
        "float_multiply": 1,
    }
    with pytest.raises(ValueError, match="vgpr_count"):
        parse_amdgcn(AMDGCN.replace(".vgpr_count", ".x"))


@pytest.mark.parametrize(
    ("target", "registers", "shared_bytes", "warps", "blocks"),
    [
        ("sm_90", 102, 39424, 4, 4),  # 13,312 of 65,536 registers a block
        ("sm_90", 138, 23552, 4, 3),
        ("sm_90", 32, 100 * 1024, 4, 2),  # 101 of 228 KB a block
        ("sm_80", 32, 100 * 1024, 4, 1),
        ("sm_90", 16, 0, 1, 32),  # no more than 32 blocks
        ("sm_90", 32, 0, 8, 8),  # no more than 64 warps
        ("sm_80", 32, 163 * 1024, 4, 1),
        ("sm_80", 32, 163 * 1024 + 1, 4, 0),
        ("gfx942", 68, 32768, 4, 2),
        ("gfx942", 300, 0, 4, 1),  # 304 of the 512 of a SIMD: one wave each
    ],
)
def test_blocks_that_fit(target: str, registers: int, shared_bytes: int, warps: int, blocks: int) -> None:
    assert blocks_that_fit(GPUS[target], registers, shared_bytes, warps) == blocks


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Variant("v", {"x": "*fp32"}, {"D": 1}), r"constants=\['D'\]"),
        (lambda: Variant("v", {"x": "*fp32"}, divisible=frozenset({"y"})), r"divisible=\['y'\]"),
        (lambda: Variant("v", {"x": "*fp32"}, expects=frozenset({"speed"})), r"expects=\['speed'\].*tensor_core"),
        (lambda: Variant("v", {"x": "*fp32"}, targets=("sm_70",)), r"targets=\['sm_70'\].*sm_80"),
        (lambda: Spec("s", SimpleNamespace(arg_names=["y"]), (Variant("v", {"x": "*fp32"}),)), r"signature=\['x'\]"),
        (lambda: Spec("s", SimpleNamespace(arg_names=["x"]), (Variant("v", {"x": "*fp32"}),) * 2), "name of its own"),
    ],
)
def test_a_wrong_spec_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--targets", "sm_90,sm_70"], "--targets: 'sm_70': must be of sm_80, sm_90, sm_100, gfx942"),
        (["--ops", "sound,nothing"], "--ops: 'nothing': must be of aborting, faulty, refused, sound"),
        (["--workers", "0"], "--workers: 0: must be 1 or more"),
    ],
)
@pytest.mark.aot
def test_a_bad_argument_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        check.main(arguments, SEEDED)
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"python -m kernels.check: error: {message}"


@dataclass(frozen=True)
class Outcome:
    """What a run of the gate returned."""

    code: int
    results: list[dict[str, object]]
    faults: list[str]

    def of(self, *words: str) -> list[str]:
        """What follows the given words in the faults that begin with them."""
        start = " ".join(words)
        return [fault.removeprefix(start + ": ") for fault in self.faults if fault.startswith(start + ": ")]


def run(folder: Path, *arguments: str) -> Outcome:
    report = folder / "report.json"
    code = check.main([*arguments, "--json", str(report)], SEEDED, folder / "budgets.json")
    written = json.loads(report.read_text())
    return Outcome(code, written["results"], written["faults"])


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The gate over kernels with seeded faults, after the budgets were recorded."""
    return run(tmp_path_factory.mktemp("seeded"), "--record")


@pytest.mark.aot
def test_seeded_faults_fail_and_the_sound_kernel_does_not(seeded: Outcome) -> None:
    assert seeded.code == 1
    assert not [fault for fault in seeded.faults if fault.startswith("sound")]
    (stack, spills) = seeded.of("faulty", "spills", "sm_80")
    assert stack.startswith("stack_bytes: ")
    assert spills.startswith("spills: ")
    for target in TARGETS:
        limit = {"sm_80": 166912, "gfx942": 65536}.get(target, 232448)
        (shared,) = seeded.of("faulty", "too-much-shared", target)
        assert shared.startswith("shared_bytes: 26")
        assert shared.endswith(f", allowed: at most {limit}")
    for target in ("sm_80", "sm_90", "sm_100"):
        assert "async_128: 0, allowed: 1 or more" in seeded.of("faulty", "odd-stride", target)


@pytest.mark.aot
def test_an_abort_of_the_compiler_is_one_fault(seeded: Outcome) -> None:
    """The variants after it in the same process's queue are compiled by a new one."""
    for target in ("sm_80", "sm_90"):
        (aborted,) = seeded.of("aborting", "any", target)
        assert aborted.startswith("compile: the compiler ended its process (SIGABRT)")
        assert "LLVM ERROR: seeded abort" in aborted
    (refused,) = seeded.of("refused", "any", "sm_80")
    assert refused.startswith("compile: CompilationError: ")
    assert "power of 2" in refused
    assert len(seeded.results) == 4 * 3 + 1 + 2 + 1


@pytest.mark.aot
def test_narrow_loads_exceed_the_budget_where_one_wide_load_is_left(tmp_path: Path) -> None:
    """On gfx942 the query is still loaded by 128 bits, so `expects` alone would not see the odd stride."""
    run(tmp_path, "--ops", "sound", "--targets", "gfx942", "--record")
    path = tmp_path / "budgets.json"
    book = check.Book.read(path)
    book.budgets["faulty"] = {"odd-stride": book.budgets.pop("sound")["d128"]}
    book.write(path)
    (fault,) = run(tmp_path, "--ops", "faulty", "--targets", "gfx942").of("faulty", "odd-stride", "gfx942")[1:]
    assert fault == "narrow_loads: 32, allowed: 1.1 x the budget of 0"


@pytest.mark.aot
def test_budgets(tmp_path: Path) -> None:
    path = tmp_path / "budgets.json"
    sound = ("--ops", "sound", "--targets", "sm_90")
    outcome = run(tmp_path, *sound)
    assert outcome.code == 1
    assert outcome.faults == ["sound d128 sm_90: budget: none, allowed: one in budgets.json (--record)"]
    assert run(tmp_path, *sound, "--record").code == 0
    assert run(tmp_path, *sound).code == 0

    book = check.Book.read(path)
    budget = book.budgets["sound"]["d128"]["sm_90"]
    used = budget["registers"]
    for allowed, code in ((used / 1.09, 0), (used / 1.12, 1)):
        budget["registers"] = allowed  # pyright: ignore[reportArgumentType]
        book.write(path)
        assert run(tmp_path, *sound).code == code
    assert outcome.results[0]["registers"] == used
    (fault,) = run(tmp_path, *sound).faults
    assert fault.startswith(f"sound d128 sm_90: registers: {used}, allowed: 1.1 x the budget of ")

    check.Book("0.0", book.budgets).write(path)
    assert run(tmp_path, *sound).code == 0, "budgets of another version are reported only"
    with pytest.raises(SystemExit):
        run(tmp_path, "--ops", "sound", "--targets", "sm_80", "--record")

    budget["registers"] = used
    book.budgets["sound"]["d64"] = {"sm_90": budget}
    book.write(path)
    (fault,) = run(tmp_path, *sound).faults
    assert fault.startswith("sound d64 sm_90: budget: recorded, allowed: none")
    assert run(tmp_path, "--ops", "sound", "--targets", "sm_80", "--record").code == 0
    assert set(check.Book.read(path).budgets["sound"]) == {"d128"}
    assert set(check.Book.read(path).budgets["sound"]["d128"]) == {"sm_80", "sm_90"}


@pytest.mark.aot
def test_modules_must_say_what_they_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef k(x):\n    tl.store(x, 1)\n"
    (tmp_path / "says_nothing.py").write_text(kernel)
    (tmp_path / "helper_only.py").write_text(kernel + "\n\nSPEC = ()\n")
    (tmp_path / "broken_import.py").write_text("raise RuntimeError('no\\nway')\n")
    monkeypatch.syspath_prepend(tmp_path)
    ops, faults = check.find_ops(["broken_import", "helper_only", "says_nothing", "seeded_ops", "seeded_ops"])
    assert [op.spec.name for op in ops][:4] == ["sound", "faulty", "aborting", "refused"]
    assert faults[0] == "broken_import: import: RuntimeError: no way"
    assert faults[1].startswith("says_nothing: SPEC: none, allowed: ")
    assert faults[2] == "aborting: SPEC: 2 of this name, allowed: 1"
    for name in ("says_nothing", "helper_only"):
        sys.modules.pop(name)


@pytest.mark.aot
def test_a_compiler_that_hangs_is_ended() -> None:
    job = Job("seeded_ops", "sound", "d128", "sm_90")
    assert list(compile_all([job], 1, timeout_s=0.001)) == [(job, "did not end within 0.001 s")]


@pytest.mark.aot
def test_every_kernel_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """What `python -m kernels.check` does, over all kernels and targets."""
    code = check.main([])
    out = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in out.splitlines() if line.startswith("FAULT"))
