"""What `python -m kernels.check` needs to compile a kernel ahead of time: signatures, constants, what must be seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# What the disassembly of a variant must show.
TENSOR_CORE, ASYNC_128 = "tensor_core", "async_128"


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel.

    Attributes:
        name: unique within its Spec, e.g. "bf16-d128-p16-m16".
        signature: argument -> Triton type ("*bf16", "*u8", "i32", "i64", "fp32"), "constexpr" for constants; in the
            kernel's order.
        constants: argument -> value of every "constexpr".
        divisible: arguments known to be divisible by 16; without it there are no 128-bit loads.
        num_warps, num_stages: of the launch.
        expects: of `TENSOR_CORE`, `ASYNC_128`.
    """

    name: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    divisible: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 3
    expects: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Spec:
    """A kernel and the variants that must compile for every target within the budgets of budgets.json.

    Attributes:
        name: of the operation, e.g. "attend".
        kernel: the @triton.jit function.
        variants: what is compiled.
    """

    name: str
    kernel: Any
    variants: tuple[Variant, ...]
