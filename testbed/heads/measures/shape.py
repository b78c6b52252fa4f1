"""The shape of attention on a text: how far heads look, and how evenly. One pass for all of these measures.

The distances of all rows are pooled into one histogram a query head, exact to the token; windows are quantiles of that
pooled histogram, not means of the rows' own. Rows with nothing in the long range are left out: their mass is near
by construction.

* `head_entropy`: row entropy in bits / log2 of the row's length, mean over rows.
* `head_local_ratio`: mass within the last `local_window_tokens`; `head_long_range`: mass from `long_range_tokens` on.
* `head_sink_mass`: mass on the first `sink_tokens`.
* `head_window90`, `95`, `99`: tokens of the smallest window that holds that share of the mass together with the sinks;
  `..._published`: without the sinks, as RedKnot's coverage profiler (`mla_head_profiler.py`) means it.
* `head_edge_mass`: mass beyond `edge_window_tokens` and sinks, mean over rows that reach there; `..._published`: mean
  over all rows, as RedKnot's `head_profiler.py` has it: rows inside the window dilute it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from testbed.engine.signals.base import PrefillChunk, Source
from testbed.heads.calibration import CalibrationConfig
from testbed.heads.measures.rows import attention_rows, row_blocks
from testbed.models.base import Geometry

COVERAGES = {"90": 0.90, "95": 0.95, "99": 0.99}
UNITS = {
    "head_entropy": "share",
    "head_local_ratio": "share",
    "head_long_range": "share",
    "head_sink_mass": "share",
    **{f"head_window{name}{suffix}": "tokens" for suffix in ("", "_published") for name in COVERAGES},
    "head_edge_mass": "share",
    "head_edge_mass_published": "share",
}


class Shape(Source):
    """Watches one prefill of a text; `measures` afterwards.

    Args:
        geometry: of the model.
        config: windows, and how many rows.
        total: tokens of the text, more than `config.first_row`.
    """

    def __init__(self, geometry: Geometry, config: CalibrationConfig, total: int) -> None:
        heads = (geometry.layers, geometry.kv_heads, geometry.group)
        self._config, self._total = config, total
        self._blocks = list(row_blocks(config.first_row, total, config.rows))
        self._rows = sum(end - begin for begin, end in self._blocks)
        self._entropy = torch.zeros(heads, dtype=torch.float64)
        self._distance = torch.zeros(*heads, total, dtype=torch.float64)  # mass by distance
        self._sink = torch.zeros(*heads, total, dtype=torch.float64)  # that of it which is on sinks

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """Adds the rows of the chosen blocks that are inside this chunk."""
        stop = chunk.start + chunk.q.shape[1]
        for begin, end in self._blocks:
            first, last = max(begin, chunk.start), min(end, stop)
            if first < last:
                self._add(chunk, torch.arange(first - chunk.start, last - chunk.start, device=chunk.q.device))

    def _add(self, chunk: PrefillChunk, rows: Tensor) -> None:
        p = attention_rows(chunk, rows)
        first, count = chunk.start + int(rows[0]), len(rows)
        length = torch.arange(first + 1, first + count + 1, device=p.device)
        entropy = torch.special.entr(p).sum(-1) / length.log()
        self._entropy[chunk.layer] += entropy.sum(-1).double().cpu()
        self._distance[chunk.layer, ..., : first + count] += by_distance(p, first).double().cpu()
        for key in range(min(self._config.sink_tokens, first)):
            self._sink[chunk.layer, ..., first - key : first - key + count] += p[..., key].double().cpu()

    def measures(self) -> dict[str, Tensor]:
        """Name -> [L, Hk, G]."""
        config, window = self._config, self._config.edge_window_tokens
        distance, sink = self._distance / self._rows, self._sink / self._rows
        beyond = distance - sink
        edge = beyond[..., window:].sum(-1)
        out = {
            "head_entropy": self._entropy / self._rows,
            "head_local_ratio": distance[..., : config.local_window_tokens].sum(-1),
            "head_long_range": distance[..., config.long_range_tokens :].sum(-1),
            "head_sink_mass": sink.sum(-1),
            "head_edge_mass": edge,
            "head_edge_mass_published": edge * (self._total - window - config.sink_tokens) / self._total,
        }
        for name, part in COVERAGES.items():
            out[f"head_window{name}"] = window_of(beyond, part - sink.sum(-1))
            out[f"head_window{name}_published"] = window_of(distance, torch.full_like(edge, part))
        return {name: value.float() for name, value in out.items()}


def by_distance(p: Tensor, first: int) -> Tensor:
    """Mass summed over rows, by distance from the query: the sums over the diagonals, without a copy of the matrix.

    Args:
        p: [..., R, first + R].
        first: position of the first of the R rows.

    Returns:
        [..., first + R], distance 0 (the query itself) to first + R - 1.
    """
    p = p.contiguous()
    rows, keys = p.shape[-2:]
    stride = p.stride()
    # Diagonal c runs from (0, c) to (R - 1, c + R - 1): distance first - c. Those below begin in the first column.
    diagonals = p.as_strided((*p.shape[:-2], rows, first + 1), (*stride[:-2], stride[-2] + 1, 1)).sum(-2)
    corner = torch.nn.functional.pad(p[..., :rows].tril(-1), (rows, 0))  # room to shift row r by r: columns add up
    stride = corner.stride()
    below = corner.as_strided((*p.shape[:-2], rows, rows), (*stride[:-2], stride[-2] + 1, 1)).sum(-2)
    return torch.cat((diagonals.flip(-1), below[..., 1:].flip(-1)), -1)


def window_of(mass: Tensor, part: Tensor) -> Tensor:
    """Tokens of the smallest window that holds `part` of the mass: mass [..., T] by distance, part [...] -> [...].

    A part of 0 or less needs a window of the query alone.
    """
    total = mass.cumsum(-1)
    # Sums of softmax rows may end a hair below what is asked for.
    return ((total < (part - 1e-6).unsqueeze(-1)).sum(-1) + 1).clamp(max=mass.shape[-1])
