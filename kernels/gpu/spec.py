"""What `python -m kernels.check` needs to compile a kernel ahead of time: signatures, constants, what must be seen.

Every module of kernels/gpu that holds @triton.jit functions has a SPEC: a Spec, or a tuple of them; `SPEC = ()` says
that nothing in it is launched (functions that other kernels call).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")

# What the disassembly of a variant must show: matrix instructions; 128-bit copies to shared memory that don't pass
# through registers (gfx942 has none of that width: 128-bit loads count); 128-bit global loads of either kind.
TENSOR_CORE, ASYNC_128, LOAD_128 = "tensor_core", "async_128", "load_128"
EXPECTATIONS = (TENSOR_CORE, ASYNC_128, LOAD_128)


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel.

    Attributes:
        name: unique within its Spec, e.g. "bf16-d128-p16-m16".
        signature: argument -> Triton type ("*bf16", "*u8", "i32", "i64", "fp32"), "constexpr" for constants; in the
            kernel's order.
        constants: argument -> value of every "constexpr".
        divisible: arguments known to be divisible by 16 (pointers: in bytes); without it there are no 128-bit loads.
        num_warps, num_stages: of the launch.
        expects: of `TENSOR_CORE`, `ASYNC_128`, `LOAD_128`.
        targets: of `TARGETS`; where this variant is launched at all, for variants tuned for one maker.
        options: further options of the compiler, e.g. {"maxnreg": 128}.
    """

    name: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    divisible: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 3
    expects: frozenset[str] = frozenset()
    targets: tuple[str, ...] = TARGETS
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        constant = {name for name, kind in self.signature.items() if kind == "constexpr"}
        if constant != set(self.constants):
            raise ValueError(
                f"variant {self.name}: constants={sorted(self.constants)}: must be the signature's constexprs, "
                f"{sorted(constant)}"
            )
        for key, given, allowed in (
            ("divisible", self.divisible, set(self.signature) - constant),
            ("expects", self.expects, set(EXPECTATIONS)),
            ("targets", self.targets, set(TARGETS)),
        ):
            if not set(given) <= allowed:
                raise ValueError(f"variant {self.name}: {key}={sorted(given)}: must be of {sorted(allowed)}")


@dataclass(frozen=True)
class Spec:
    """A kernel and the variants that must compile for their targets within the budgets of budgets.json.

    Attributes:
        name: of the operation, e.g. "attend".
        kernel: the @triton.jit function.
        variants: what is compiled.
    """

    name: str
    kernel: Any
    variants: tuple[Variant, ...]

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"spec {self.name}: variants={names}: must be one or more, each with a name of its own")
        for variant in self.variants:
            if list(variant.signature) != list(self.kernel.arg_names):
                raise ValueError(
                    f"spec {self.name}, variant {variant.name}: signature={list(variant.signature)}: must be the "
                    f"kernel's arguments in order, {list(self.kernel.arg_names)}"
                )
