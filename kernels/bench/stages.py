"""The GPU's stages: right first, then graphs, bandwidth, ragged and mixed loads, what else a step does, variants.

`STAGES` names them with their time limits, which together keep the whole under 8 minutes. A dry run takes the same path
on the host, tiny, in Triton's interpreter; bf16 arithmetic is wrong there, so fp16 stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kernels.bench.context import Context
from kernels.bench.proofs import correct, graph
from kernels.bench.record import Row
from kernels.bench.speeds import decode, ragged, store, variants


@dataclass(frozen=True)
class Stage:
    """A stage and the seconds it may take."""

    run: Callable[[Context], Iterator[Row]]
    limit_s: float


STAGES: Mapping[str, Stage] = MappingProxyType(
    {
        "correct": Stage(correct, 150.0),
        "graph": Stage(graph, 40.0),
        "decode": Stage(decode, 100.0),
        "ragged": Stage(ragged, 60.0),
        "store": Stage(store, 40.0),
        "variants": Stage(variants, 90.0),
    }
)
