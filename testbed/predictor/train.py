"""Trains the core-token predictor on recordings of a model's own attention.

    python -m testbed.predictor train [model=...] [key=value ...]

One row is one head at one step. The loss is the cross entropy between the true mass of its candidate pages, scaled to
sum to 1, and a softmax of the scores: it is least where scores are log mass. Documents, not rows, are held out. With
the same recordings, seed and threads on one machine the weights are the same to the bit.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from testbed.commands import check_output, set_threads
from testbed.compose import compose_named
from testbed.engine.signals.core import LIGHT
from testbed.models.base import Decoder
from testbed.predictor.corpus import documents, settings_of
from testbed.predictor.drive import Course
from testbed.predictor.network import Network, NetworkShape, layer_groups
from testbed.predictor.recall import SHARES, caught
from testbed.predictor.recording import FEATURES, Recording, RecordingSettings, data_hash, record
from testbed.predictor.weights import About, file_name, trained_path, write_weights
from testbed.results.progress import Progress as Bar
from testbed.setup import build

START = {"mass_fast": 0.5, "mass_last": 0.5}
"""Weights of features that scores begin with: log mass of the last steps, which the perceptrons learn to correct."""
Progress = Callable[[str, float], None]


class TrainingError(ValueError):
    """Recordings or settings that nothing can be learnt from."""


@dataclass(frozen=True)
class TrainingConfig:
    """How weights are learnt; built by Hydra from conf/training.

    Attributes:
        epochs: times every row is seen.
        batch_rows: rows of one document and one group in a step.
        learning_rate: at its highest; rises over the first tenth, then falls to 0 along a cosine.
        contribution_weight: of a second cross entropy, with the pages' contributions to the logit, where recorded.
        seed: of the first weights and the order of rows.
    """

    epochs: int = 4
    batch_rows: int = 60
    learning_rate: float = 4e-3
    contribution_weight: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses what can't be trained with."""
        for key in ("epochs", "batch_rows"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise TrainingError(f"training.{key}={value!r}: must be a whole number of at least 1")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise TrainingError(f"training.seed={self.seed!r}: must be a whole number of at least 0")
        for key, most in (("learning_rate", 1.0), ("contribution_weight", 100.0)):
            value = getattr(self, key)
            least = 1e-6 if key == "learning_rate" else 0.0
            if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
                raise TrainingError(f"training.{key}={value!r}: must be a number from {least:g} to {most:g}")


@dataclass(frozen=True)
class Trained:
    """What came of it.

    Attributes:
        network: rounded to float16, as it is kept.
        losses: mean cross entropy of each epoch, nats.
        rows: learnt from.
        seconds: of training alone.
    """

    network: Network
    losses: tuple[float, ...]
    rows: int
    seconds: float


def train(
    recordings: Sequence[Recording],
    layers: int,
    kv_heads: int,
    config: TrainingConfig,
    progress: Progress = lambda what, done: None,
) -> Trained:
    """Learns from all rows given; those of documents held out are not among them.

    Args:
        recordings: of training documents.
        layers: L of the model.
        kv_heads: Hk.
        config: how.
        progress: called with the share that is done.

    Raises:
        TrainingError: no rows with mass on candidates, recordings of different features, or a loss that is no number.
    """
    _check(recordings, layers * kv_heads)
    started = time.perf_counter()
    first = recordings[0]
    groups = first.contexts.shape[1]  # as the features have them
    shape = NetworkShape(layers, kv_heads, groups, len(first.names), first.contexts.shape[2])
    network = Network(shape, config.seed)
    network.mean, network.spread = _scales(recordings)
    for name in START.keys() & set(first.names):
        column = first.names.index(name)
        network.head_skip.data[:, column] = START[name] * network.spread[column]
    group_of_head = layer_groups(layers, groups).repeat_interleave(kv_heads)
    sets = [_Rows(recording, group_of_head, config) for recording in recordings]
    steps = config.epochs * sum(rows.steps for rows in sets)
    optimizer = torch.optim.Adam(network.parameters(), lr=config.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.learning_rate, total_steps=steps, pct_start=0.1)
    chance = torch.Generator().manual_seed(config.seed)
    losses: list[float] = []
    done = 0
    for epoch in range(config.epochs):
        total = 0.0
        for loss in _epoch(network, sets, chance):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
            done += 1
            if done % 50 == 0:
                progress(f"training, epoch {epoch + 1} of {config.epochs}", done / steps)
        losses.append(total / (steps // config.epochs))
        if losses[-1] != losses[-1]:
            raise TrainingError(f"training: the loss is no number in epoch {epoch + 1}; lower training.learning_rate")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.half().float())
    network.requires_grad_(False).eval()
    return Trained(network, tuple(losses), sum(rows.count for rows in sets), time.perf_counter() - started)


def judge(network: Network, recordings: Sequence[Recording]) -> dict[str, dict[str, list[float]]]:
    """Mean recall of next-step mass at `SHARES` on recordings: {"full" or "sparse": {predictor: recall}}.

    The network beside the single signals whose recall was recorded with the rows.
    """
    found: dict[str, dict[str, list[Tensor]]] = {"full": {}, "sparse": {}}
    group_of_head = network.shape.group_of_layers().repeat_interleave(network.shape.kv_heads)
    for recording in recordings:
        score = torch.zeros(recording.mass.shape)
        with torch.no_grad():
            for group in range(network.shape.groups):
                rows = (group_of_head[recording.head] == group).nonzero().squeeze(1)
                for part in rows.split(512):
                    context = recording.contexts[recording.moment[part], group].float()
                    score[part] = network.rows(recording.features[part].float(), context, recording.head[part], group)
        recall = caught(score, recording.mass.float(), recording.candidate).recall.float()
        for case, inside in (("full", recording.share >= 1.0), ("sparse", recording.share < 1.0)):
            for name, values in {"mlp": recall, **recording.recall}.items():
                found[case].setdefault(name, []).append(values[inside])
    return {
        case: {name: torch.cat(values).nanmean(0).tolist() for name, values in by_name.items()}
        for case, by_name in found.items()
        if by_name and sum(map(len, next(iter(by_name.values()))))
    }


class _Rows:
    """The rows of one document that have mass to learn from, by group of layers."""

    def __init__(self, recording: Recording, group_of_head: Tensor, config: TrainingConfig) -> None:
        self.recording, self.config = recording, config
        mass = recording.mass.float() * recording.candidate
        useful = mass.sum(-1) > 0
        groups = group_of_head[recording.head]
        self.groups = [(useful & (groups == group)).nonzero().squeeze(1) for group in range(int(group_of_head[-1]) + 1)]
        self.count = int(useful.sum())
        self.steps = sum(-(-len(rows) // config.batch_rows) for rows in self.groups)

    def batches(self, chance: torch.Generator) -> Iterator[tuple[int, Tensor]]:
        """(group, rows), the rows in a new order."""
        for group, rows in enumerate(self.groups):
            for part in rows[torch.randperm(len(rows), generator=chance)].split(self.config.batch_rows):
                if len(part):
                    yield group, part

    def loss(self, network: Network, group: int, rows: Tensor) -> Tensor:
        """Mean cross entropy of some rows of one group."""
        recording = self.recording
        candidate = recording.candidate[rows]
        context = recording.contexts[recording.moment[rows], group].float()
        score = network.rows(recording.features[rows].float(), context, recording.head[rows], group)
        logs = score.masked_fill(~candidate, -torch.inf).log_softmax(-1).masked_fill(~candidate, 0.0)
        loss = _cross_entropy(logs, recording.mass[rows].float() * candidate).mean()
        weight = self.config.contribution_weight
        if weight and bool(recording.has_contribution[rows].any()):
            gains = recording.contribution[rows].float().abs() * candidate
            loss = loss + weight * (_cross_entropy(logs, gains) * recording.has_contribution[rows]).mean()
        return loss


def _cross_entropy(logs: Tensor, worth: Tensor) -> Tensor:
    """Of each row: logs [R, N] of shares, worth [R, N] at least 0, scaled to sum to 1."""
    return -(worth / worth.sum(-1, keepdim=True).clamp(min=1e-12) * logs).sum(-1)


def _epoch(network: Network, sets: Sequence[_Rows], chance: torch.Generator) -> Iterator[Tensor]:
    """The losses of all batches of all documents, in a new order."""
    batches = [(rows, group, part) for rows in sets for group, part in rows.batches(chance)]
    for index in torch.randperm(len(batches), generator=chance).tolist():
        rows, group, part = batches[index]
        yield rows.loss(network, group, part)


def _scales(recordings: Sequence[Recording]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every feature over candidate pages; 1 for features that never change."""
    total, squares, count = 0.0, 0.0, 0
    for recording in recordings:
        x = recording.features[recording.candidate].double()
        total, squares, count = total + x.sum(0), squares + x.square().sum(0), count + len(x)
    mean = torch.as_tensor(total) / count
    spread = (torch.as_tensor(squares) / count - mean.square()).clamp(min=0).sqrt()
    return mean.float(), torch.where(spread > 1e-3, spread, 1.0).float()


def _check(recordings: Sequence[Recording], heads: int) -> None:
    """Refuses recordings that don't go together."""
    if not recordings or not any(bool((each.mass * each.candidate).any()) for each in recordings):
        raise TrainingError("no recorded step with attention beyond the hot pages: longer documents are needed")
    for each in recordings:
        if each.names != recordings[0].names or each.contexts.shape[1:] != recordings[0].contexts.shape[1:]:
            raise TrainingError(f"recording {each.document}: of other features than {recordings[0].document}")
        if each.rows and int(each.head.max()) >= heads:
            raise TrainingError(f"recording {each.document}: head {int(each.head.max())} of a model with {heads}")


def described(result: Trained, judged: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """What weights say of how they were learnt and what they are worth; plain numbers."""
    recall = {
        case: {name: [round(value, 4) for value in values] for name, values in by_name.items()}
        for case, by_name in judged.items()
    }
    learnt = {"rows": result.rows, "losses_nats": [round(loss, 4) for loss in result.losses]}
    return learnt | {"recall_shares": list(SHARES), "recall": recall}


def main(args: Sequence[str]) -> None:
    """The command; see conf/predictor.yaml."""
    cfg = compose_named("predictor", args)
    set_threads(cfg.threads)
    if not isinstance(cfg.judge, bool):
        raise TrainingError(f"judge={cfg.judge!r}: must be true or false")
    folder, texts = check_output("output", cfg.output, folder=True), settings_of(cfg.corpus)
    settings = RecordingSettings(heads_one_in=cfg.heads_one_in, points=cfg.points)
    course = Course(settings.chooser, shares=cfg.shares, cache=build(cfg.cache, "cache"))
    config: TrainingConfig = build(cfg.training, "training")
    decoder: Decoder = build(cfg.model, "model")
    corpus = documents(decoder, **texts)
    parts = {part: [document for document in corpus if document.part == part] for part in ("train", "test")}
    geometry = decoder.geometry
    about: dict[str, Any] = {
        "model": decoder.name,
        "fingerprint": decoder.fingerprint,
        "data": data_hash(decoder, parts["train"], settings, course),
        "seed": config.seed,
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "testbed": version("testbed")},
        "settings": {**asdict(config), "threads": cfg.threads},
    }
    said = []
    with Bar() as bar:
        learnt = record(decoder, parts["train"], settings, course, bar.fraction)
        judging = record(decoder, parts["test"], replace(settings, points=0), course, bar.fraction) if cfg.judge else []
        for names in FEATURES.values():
            chosen = [recording.of(names) for recording in learnt]
            result = train(chosen, geometry.layers, geometry.kv_heads, config, bar.fraction)
            judged = judge(result.network, [recording.of(names) for recording in judging])
            this = About(names=names, shape=result.network.shape, measured=described(result, judged), **about)
            path = trained_path(decoder, names) if folder is None else folder / file_name(decoder, names)
            write_weights(path, result.network, this)
            said.append(printed(this, result, path))
    print("\n".join(said))


def printed(about: About, result: Trained, path: Path) -> str:
    """What the command says of one network in the end."""
    losses = ", ".join(f"{loss:.3f}" for loss in result.losses)
    kind = "without key bounds" if about.names == LIGHT else "with key bounds"
    lines = [f"{kind}: trained on {result.rows} rows in {result.seconds:.0f} s; loss by epoch {losses} nats"]
    for case, by_name in about.measured["recall"].items():
        best = max((name for name in by_name if name != "mlp"), key=lambda name, by_name=by_name: by_name[name][0])
        for name in ("mlp", best):
            shares = ", ".join(f"{v:.3f} at {s:.0%}" for s, v in zip(SHARES, by_name[name], strict=True))
            lines.append(f"recall on test documents, {case}, {name}: {shares}")
    return "\n".join([*lines, f"weights: {path} ({path.stat().st_size} bytes, data {about.data})"])
