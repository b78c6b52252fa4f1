"""Groups of measures that one pass over the texts of one task gives; conf/measure names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from testbed.engine.prefill import ContextError, prefill
from testbed.engine.signals.base import PrefillWatcher
from testbed.heads.calibration import CalibrationConfig, CalibrationError, Tick
from testbed.heads.headmap import Measured
from testbed.heads.measures.copying import SpanMass
from testbed.heads.measures.shape import UNITS, Shape
from testbed.heads.measures.shift import NAMES as SHIFTS
from testbed.heads.measures.shift import Kept, Shift, seam
from testbed.heads.texts import Asking, CalibrationText, prefixed, texts
from testbed.models.base import Decoder

RATIOS = ("head_tool_result", "head_role_following")


def text_group(decoder: Decoder, config: CalibrationConfig, tick: Tick) -> dict[str, Measured]:
    """The shape of attention on plain text."""
    return _of_task("text", decoder, config, tick)


def induction_group(decoder: Decoder, config: CalibrationConfig, tick: Tick) -> dict[str, Measured]:
    """`head_induction`, and the shape of attention on random tokens that are repeated."""
    return _of_task("induction", decoder, config, tick)


def code_group(decoder: Decoder, config: CalibrationConfig, tick: Tick) -> dict[str, Measured]:
    """`head_bracket`, and the shape of attention on source code."""
    return _of_task("code", decoder, config, tick)


def dialogue_group(decoder: Decoder, config: CalibrationConfig, tick: Tick) -> dict[str, Measured]:
    """`head_tool_result`, `head_role_following`, and the shape of attention on what agents say."""
    return _of_task("dialogue", decoder, config, tick)


def other_language_group(decoder: Decoder, config: CalibrationConfig, tick: Tick) -> dict[str, Measured]:
    """The shape of attention on another language."""
    return _of_task("other_language", decoder, config, tick)


def needle_group(decoder: Decoder, config: CalibrationConfig, tick: Tick) -> dict[str, Measured]:
    """`retrieval_score`, and the shape of attention on the same texts: on all rows, and on those that copy."""
    found = [
        replace(text, asks={**text.asks, **_reach(text.asks["retrieval_score"], config)})
        for length in config.needle_lengths
        for text in texts("needle", decoder, length, config.needle_samples_per_cell, config.seed)
    ]
    return watch(decoder, config, found, tick)


def shift_group(decoder: Decoder, config: CalibrationConfig, tick: Tick) -> dict[str, Measured]:
    """`head_prefix_shift`, as published and corrected: every text alone, then behind each of its prefixes.

    Raises:
        CalibrationError: text and prefix are beyond the model's limit.
    """
    each: dict[str, list[Tensor]] = {name: [] for name in SHIFTS}
    total = config.text_samples * (config.shift_tokens + config.prefixes * (config.shift_tokens + config.prefix_tokens))
    done = 0

    def run(tokens: Sequence[int], watcher: PrefillWatcher) -> None:
        nonlocal done
        try:
            prefill(decoder, tokens, decoder.dtype, [watcher])
        except ContextError as error:
            raise CalibrationError(f"calibration.shift_tokens + prefix_tokens: {error}") from error
        done += len(tokens)
        tick(min(done / total, 1.0))

    for text, prefixes in prefixed(decoder, config):
        tokens, kept = decoder.encode(text), Kept(decoder.geometry.layers)
        run(tokens, kept)
        alone = [kept.whole(layer) for layer in range(decoder.geometry.layers)]
        shifts = []
        for prefix in prefixes:
            joined = decoder.encode(prefix + text)
            shift = Shift(alone, *seam(tokens, joined))
            run(joined, shift)
            shifts.append(shift.measures())
        for name in SHIFTS:
            each[name].append(torch.stack([shift[name] for shift in shifts]).mean(0))
    lengths = [config.shift_tokens] * config.text_samples
    return {name: Measured.of(values, "text", "share", lengths, config.seed) for name, values in each.items()}


def _of_task(task: str, decoder: Decoder, config: CalibrationConfig, tick: Tick) -> dict[str, Measured]:
    found = texts(task, decoder, config.text_tokens, config.text_samples, config.seed)
    return watch(decoder, config, found, tick)


def _reach(asking: Asking, config: CalibrationConfig) -> dict[str, Asking]:
    """How near and how far the rows look that copy an answer; sinks, which every head keeps, are not far."""
    near = tuple(((max(0, row + 1 - config.local_window_tokens), row + 1),) for row in asking.rows)
    sinks = config.sink_tokens
    far = tuple(((sinks, max(sinks, row + 1 - config.long_range_tokens)),) for row in asking.rows)
    return {
        "head_local_ratio_copying": Asking(asking.rows, near),
        "head_long_range_copying": Asking(asking.rows, far),
    }


@dataclass
class _Values:
    """Values of one measure, text by text."""

    unit: str
    each: list[Tensor] = field(default_factory=list)
    length_tokens: list[int] = field(default_factory=list)


def watch(
    decoder: Decoder, config: CalibrationConfig, found: Sequence[CalibrationText], tick: Tick
) -> dict[str, Measured]:
    """One prefill a text, watched by all that there is to see in it.

    Returns:
        The texts' own measures, and those of `Shape`, as "name@task" unless the task is plain text; a text shorter
        than the windows has no shape.

    Raises:
        CalibrationError: a text is beyond the model's limit.
    """
    geometry, task = decoder.geometry, found[0].task
    total, done = sum(len(text.tokens) for text in found), 0
    values: dict[str, _Values] = {}

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        tick(done / total)

    def keep(name: str, unit: str, value: Tensor, text: CalibrationText) -> None:
        entry = values.setdefault(name, _Values(unit))
        entry.each.append(value)
        entry.length_tokens.append(text.context_tokens)

    for text in found:
        masses = {
            name: SpanMass(geometry.layers, geometry.kv_heads, geometry.group, asking)
            for name, asking in text.asks.items()
        }
        shape = Shape(geometry, config, len(text.tokens)) if len(text.tokens) > config.first_row else None
        watchers = [*masses.values(), *([shape] if shape is not None else [])]
        try:
            prefill(decoder, text.tokens, decoder.dtype, watchers, progress=advance)
        except ContextError as error:
            key = "needle_lengths" if task == "needle" else "text_tokens"
            raise CalibrationError(f"calibration.{key}: {error}") from error
        for name, mass in masses.items():
            ratio = name in RATIOS
            keep(name, "ratio" if ratio else "share", mass.ratio if ratio else mass.mass, text)
        for name, value in (shape.measures() if shape is not None else {}).items():
            keep(name if task == "text" else f"{name}@{task}", UNITS[name], value, text)
    return {
        name: Measured.of(each.each, task, each.unit, each.length_tokens, config.seed) for name, each in values.items()
    }
