"""Measures every head of a model once and keeps the result: `python -m testbed.calibrate [model=...]`.

Policies that class heads read these measures as signals. The map is made on calibration text, keys and numbers that
no test shows, saved in $TESTBED_CACHE/headmaps and used again as long as model and settings are the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from kernels.prefill import chunk_attention
from testbed.assets import cache_dir
from testbed.commands import guarded, job
from testbed.compose import register
from testbed.engine.measure_heads import CopyMass, Shape
from testbed.engine.prefill import ContextError, prefill
from testbed.models.base import Decoder
from testbed.results.progress import Progress as Bar
from testbed.results.record import RecordError, write_atomically
from testbed.workloads.base import Sample, check_whole
from testbed.workloads.needle import Needle
from testbed.workloads.text import Continuation

SCHEMA = 1
MEASURES = ("retrieval_score", "head_entropy", "head_local_ratio", "head_long_range")
Progress = Callable[[str, float], None]


class CalibrationError(ValueError):
    """A head map that can't be made or read."""


@dataclass(frozen=True)
class CalibrationConfig:
    """What heads are measured on; built by Hydra from conf/calibration.

    Attributes:
        needle_lengths: contexts of the retrieval score; each at depths .1, .5 and .9.
        needle_samples_per_cell: how often each.
        text_tokens, text_samples: plain text of the other measures.
        local_window_tokens: what counts as near.
        long_range_tokens: what counts as far.
        seed: of texts and needles.
    """

    needle_lengths: tuple[int, ...] = (1024, 2048)
    needle_samples_per_cell: int = 2
    text_tokens: int = 2048
    text_samples: int = 2
    local_window_tokens: int = 128
    long_range_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks ranges; lists from YAML become tuples."""
        object.__setattr__(self, "needle_lengths", tuple(self.needle_lengths))
        for length in self.needle_lengths:
            check_whole("calibration.needle_lengths", length, 64)
        for key in ("needle_samples_per_cell", "text_tokens", "text_samples", "local_window_tokens"):
            check_whole(f"calibration.{key}", getattr(self, key), 1)
        check_whole("calibration.long_range_tokens", self.long_range_tokens, 1)
        if self.long_range_tokens >= self.text_tokens:
            raise CalibrationError(
                f"calibration.long_range_tokens={self.long_range_tokens}: must be below text_tokens={self.text_tokens}"
            )


def fingerprint(decoder: Decoder) -> str:
    """Tells models apart by what they say to eight fixed tokens, so that a renamed or retrained model is noticed."""
    geometry = decoder.geometry
    ids = torch.arange(1, 9, device=decoder.device).remainder(geometry.vocab).unsqueeze(0)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"scale": geometry.scale[layer], "slopes": geometry.slopes}
        return chunk_attention(q[0], k[0], v[0], **options)[0].unsqueeze(0).to(q.dtype)

    with torch.inference_mode():
        logits = decoder.forward(ids, torch.arange(8, device=decoder.device).unsqueeze(0), attend, "all")
    assert logits is not None
    top = logits[0].topk(min(5, geometry.vocab)).indices.tolist()
    shape = (decoder.name, decoder.weights_bytes, geometry.layers, geometry.kv_heads, geometry.head_dim)
    return hashlib.blake2b(repr((shape, top)).encode(), digest_size=8).hexdigest()


def map_path(decoder: Decoder, config: CalibrationConfig) -> Path:
    """Where the head map of that model and those settings is kept."""
    settings = hashlib.blake2b(repr((SCHEMA, asdict(config))).encode(), digest_size=4).hexdigest()
    return cache_dir() / "headmaps" / f"{decoder.name.replace('/', '_')}-{fingerprint(decoder)}-{settings}.json"


def head_measures(
    decoder: Decoder, config: CalibrationConfig, progress: Progress = lambda what, part: None
) -> Mapping[str, Tensor]:
    """The measures of every head, [L, Hk] each: read if they were made before, else made and kept.

    Raises:
        CalibrationError: the kept file is broken, or the model is too short-sighted for the calibration contexts.
    """
    path = map_path(decoder, config)
    if not path.exists():
        measures = measure(decoder, config, progress)
        about = {"schema": SCHEMA, "model": decoder.name, "calibration": asdict(config)}
        body = {name: [[round(x, 6) for x in row] for row in value.tolist()] for name, value in measures.items()}
        try:
            write_atomically(path, json.dumps({**about, "measures": body}, indent=1))
        except RecordError as error:
            raise CalibrationError(f"can't keep the head map: {error}") from error
    return read_map(path)


def read_map(path: Path) -> Mapping[str, Tensor]:
    """A kept head map.

    Raises:
        CalibrationError: not a head map of this version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise CalibrationError(f"{path}: schema {data['schema']!r}, this version reads {SCHEMA}; delete the file")
        return {name: torch.tensor(data["measures"][name], dtype=torch.float32) for name in MEASURES}
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CalibrationError):
            raise
        raise CalibrationError(f"{path}: not a head map ({error}); delete the file to have it made again") from error


def measure(decoder: Decoder, config: CalibrationConfig, progress: Progress) -> dict[str, Tensor]:
    """Runs the calibration texts."""
    geometry = decoder.geometry
    needle = Needle(
        config.needle_lengths,
        samples_per_cell=config.needle_samples_per_cell,
        needles_per_context=len(Needle.depths),
        split="calibration",
    )
    samples = list(needle.samples(decoder.encode, decoder.decode, config.seed))
    copies = [copying(decoder, list(group)) for _, group in groupby(samples, key=lambda sample: sample.context_id)]
    text = Continuation(lengths=(config.text_tokens,), samples_per_length=config.text_samples, split="calibration")
    texts = list(text.samples(decoder.encode, decoder.decode, config.seed))
    total = sum(len(copy.tokens) for copy in copies) + sum(len(sample.context_tokens) for sample in texts)
    done = 0

    def tick(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress("measuring heads", done / total)

    score = torch.zeros(geometry.layers, geometry.kv_heads)
    shape = Shape(geometry.layers, geometry.kv_heads, config.local_window_tokens, config.long_range_tokens)
    try:
        for copy in copies:
            source = CopyMass(geometry.layers, geometry.kv_heads, copy.asking, copy.sources)
            prefill(decoder, copy.tokens, decoder.dtype, [source], progress=tick)
            score += source.score / len(copies)
        for sample in texts:
            prefill(decoder, sample.context_tokens, decoder.dtype, [shape], progress=tick)
    except ContextError as error:
        raise CalibrationError(f"calibration.needle_lengths, text_tokens: {error}") from error
    return {"retrieval_score": score, **shape.measures()}


@dataclass(frozen=True)
class Copying:
    """A text in which answers are copied from needles.

    Attributes:
        tokens: context, then each question with its right answer.
        asking: positions whose next token is an answer token.
        sources: for each asking position, [begin, end) of the number it copies from.
    """

    tokens: list[int]
    asking: list[int]
    sources: list[tuple[int, int]]


def copying(decoder: Decoder, samples: Sequence[Sample]) -> Copying:
    """The questions about one context, asked and answered one after the other.

    Raises:
        CalibrationError: the tokenizer writes the number differently in needle and answer, so nothing is copied.
    """
    tokens = list(samples[0].context_tokens)
    asking: list[int] = []
    sources: list[tuple[int, int]] = []
    for sample in samples:
        answer = decoder.encode(sample.answer)
        begin = int(sample.meta["needle_position"])
        needle = tokens[begin : begin + int(sample.meta["needle_tokens"])]
        offsets = [at for at in range(len(needle) - len(answer) + 1) if needle[at : at + len(answer)] == answer]
        if not offsets or sample.continuation_tokens[-len(answer) :] != answer:
            raise CalibrationError(
                f"the tokenizer of {decoder.name} splits {sample.answer!r} differently in needle and answer; choose "
                "another wording (workload.needle, workload.question)"
            )
        tokens += [*sample.question_tokens, *sample.continuation_tokens]
        asking += range(len(tokens) - len(answer) - 1, len(tokens) - 1)
        source = begin + offsets[-1]
        sources += [(source, source + len(answer))] * len(answer)
    return Copying(tokens, asking, sources)


def main() -> None:
    """The command."""
    register()
    guarded(_hydra_main, "hydra.run.dir")


@hydra.main(config_path="pkg://conf", config_name="config", version_base="1.3")
def _hydra_main(cfg: DictConfig) -> None:
    job(lambda: calibrate(cfg))


def calibrate(cfg: DictConfig) -> None:
    """One model's heads."""
    with Bar() as progress:
        progress.start("loading the model")
        decoder = instantiate(cfg.model)
        config = instantiate(cfg.calibration, _convert_="all")
        head_measures(decoder, config, progress.fraction)
    print(f"head map: {map_path(decoder, config)}")


if __name__ == "__main__":
    main()
