"""`python -m testbed.heads verdict [MAP] classifiers=[retrieval,described]`: which head maps beat chance, and why not.

Every classifier is run under the policy `redknot` beside maps with the same classes dealt by chance: the same number of
heads of each class, and with it the same bytes (`testbed.heads.trial`, `testbed.heads.judge`). The verdict is written
into the map, or, where none is named, kept for the model; whatever shows a map or a run says it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from policies.base import Classifier, Head, Phase, Plan, Policy, PolicyError, Signals
from testbed.assets import cache_dir
from testbed.cache.layout import CacheConfig
from testbed.commands import check_output, set_threads
from testbed.compose import compose_policy
from testbed.engine.signals import SignalContext
from testbed.heads import trial
from testbed.heads.configured import composed
from testbed.heads.headmap import HeadMap, HeadMapError, read_verdict
from testbed.heads.judge import Verdict, judge, reason
from testbed.heads.library import head_measures
from testbed.models.base import Decoder, Geometry
from testbed.results.display import Sheet, value_text
from testbed.results.progress import Progress
from testbed.results.record import write_atomically
from testbed.results.table import PLAIN_WIDTH, sheet_table
from testbed.setup import build
from testbed.workloads.base import Sample, check_list

POLICY = "redknot"


@dataclass(frozen=True)
class Judged:
    """A classifier with its verdict.

    Attributes:
        classes: [L, Hk] int8 of `Head`.
        identity: see `identity`.
        verdict: how it did.
    """

    classes: Tensor
    identity: str
    verdict: Verdict

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {**self.verdict.plain(), "identity": self.identity}


def identity(classifier: Classifier) -> str:
    """What a classifier is, whatever its thresholds: its class and the measures it reads."""
    kind = type(classifier)
    return f"{kind.__module__}.{kind.__qualname__}({', '.join(sorted(classifier.needs))})"


def classifier_of(name: str, config: trial.TrialConfig) -> Classifier:
    """The named classifier, at the trial's quantiles where it has any.

    Raises:
        PolicyError: there is no such classifier.
    """
    made = compose_policy(POLICY, [f"policy/classifier={name}"]).classifier
    if hasattr(made, "local_quantile"):
        changes: Any = {"local_quantile": config.local_quantile, "global_quantile": config.global_quantile}
        made = replace(made, **changes)  # type: ignore[type-var]
    return made


def classes_of(
    classifier: Classifier, geometry: Geometry, measures: Mapping[str, Tensor], page_bytes: Any, seed: int = 0
) -> Tensor:
    """[L, Hk] int8 of `Head`: what a classifier says of a model whose heads are measured.

    Raises:
        PolicyError: it reads something that is not a measure of heads, or that nobody measured.
    """
    missing = sorted(name for name in classifier.needs if name not in measures)
    if missing:
        raise PolicyError(
            f"{identity(classifier)}: nobody measured {missing[0]!r}; there are {', '.join(sorted(measures))}"
        )
    signals = Signals(
        phase=Phase.COMPRESS,
        step=0,
        length_tokens=1,
        page_tokens=16,
        hot=torch.zeros(1, dtype=torch.bool),
        held=Plan.dense(geometry.layers, geometry.kv_heads, 1),
        page_bytes=page_bytes,
        values={name: measures[name] for name in classifier.needs},
        seed=seed,
    )
    return classifier.classify(signals)


def dealt(classes: Tensor, maps: int, seed: int) -> list[Tensor]:
    """So many maps with the same number of heads of each class, dealt by chance."""
    counts = torch.cat([torch.full((int((classes == head).sum()),), int(head), dtype=torch.int8) for head in Head])
    out = []
    for at in range(maps):
        order = torch.randperm(len(counts), generator=torch.Generator().manual_seed(1000 * seed + at))
        out.append(counts[order].reshape(classes.shape))
    return out


def verdicts(
    decoder: Decoder,
    classifiers: Mapping[str, Classifier],
    measures: Mapping[str, Tensor],
    config: trial.TrialConfig,
    samples: Sequence[Sample],
    cache: CacheConfig | None = None,
    policy: Policy | None = None,
    tick: trial.Tick = lambda tokens: None,
) -> dict[str, Judged]:
    """The verdict on every classifier.

    Args:
        decoder: the model.
        classifiers: name -> part.
        measures: name -> [L, Hk]; all that the classifiers read.
        config: how many random maps, and their seed.
        samples: what they are tried on.
        cache: None = the default one.
        policy: whose classifier is replaced; None = `redknot`.
        tick: called with the tokens of each context that is done.
    """
    cache = cache or CacheConfig()
    policy = policy or compose_policy(POLICY)
    size = cache.page_bytes(decoder.geometry.head_dim, with_bounds=False)
    classes = {name: classes_of(part, decoder.geometry, measures, size) for name, part in classifiers.items()}
    maps: dict[str, Tensor] = dict(classes)
    controls: dict[str, list[str]] = {}
    for name, mine in classes.items():
        counts = [int((mine == head).sum()) for head in Head]
        controls[name] = [f"random {counts} {at}" for at in range(config.random_maps)]
        maps |= dict(zip(controls[name], dealt(mine, config.random_maps, config.seed), strict=True))
    trials = trial.run(decoder, maps, policy, cache, samples, SignalContext(cache.page_tokens, lambda: measures), tick)
    known = {name for part in classifiers.values() for name in part.needs}
    seen = {name: measures[name] for name in sorted(known) if name in measures}
    return {
        name: Judged(
            classes[name],
            identity(part),
            judge(trials, name, controls[name], classes[name], reason(classes[name], seen)),
        )
        for name, part in classifiers.items()
    }


# --- kept verdicts -----------------------------------------------------------------------------------------------


def kept_path(fingerprint: str) -> Path:
    """Where verdicts about a model are kept on this machine."""
    return cache_dir() / "headmaps" / f"verdicts-{fingerprint}.json"


def kept(fingerprint: str) -> dict[str, dict[str, Any]]:
    """Classifier -> verdict, of this machine over those that come with the testbed; empty for an unknown model.

    Raises:
        HeadMapError: a file that is no such thing; names it.
    """
    found: dict[str, dict[str, Any]] = {}
    shipped = resources.files("testbed.heads") / "verdicts" / f"{fingerprint}.json"
    for path in (shipped, kept_path(fingerprint)):
        if not path.is_file():
            continue
        found |= _read(path)
    return found


def _read(path: Any) -> dict[str, dict[str, Any]]:
    """The verdicts in a file."""
    try:
        return {name: read_verdict(name, verdict) for name, verdict in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise HeadMapError(f"{path}: not verdicts ({error}); delete the file") from error


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One process at a time reads and replaces a head map or the verdicts that are kept."""
    path = cache_dir() / "headmaps" / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # the kernel lets go of it when its holder dies
        yield


def keep(fingerprint: str, judged: Mapping[str, Mapping[str, Any]]) -> Path:
    """Adds verdicts to those kept on this machine, whoever else does so."""
    path = kept_path(fingerprint)
    with locked():
        plain = {**(_read(path) if path.is_file() else {}), **judged}
        write_atomically(path, json.dumps(plain, indent=1, allow_nan=False) + "\n")
    return path


def add(path: Path, fingerprint: str, judged: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds verdicts to a head map as it is by now, whoever else wrote it since.

    Raises:
        HeadMapError: it is of other weights by now, or can't be read or written.
    """
    with locked():
        head_map = HeadMap.read(path)
        if head_map.fingerprint != fingerprint:
            raise HeadMapError(f"{path}: was replaced by a map of other weights ({head_map.fingerprint})")
        for name, verdict in judged.items():
            head_map = head_map.with_verdict(name, verdict)
        head_map.write(path)


def label(classifier: Classifier, fingerprint: str) -> str:
    """What must be said wherever this classifier is used on this model: "" unless it failed to beat chance."""
    for verdict in kept(fingerprint).values():
        if verdict.get("identity") == identity(classifier) and not verdict["beats_random"]:
            return f"this head map is not better than random: {verdict['why']}"
    return ""


def lines(judged: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """One line a classifier: kept verdicts, or `Judged.plain`."""
    for name, verdict in judged.items():
        says = "beats random" if verdict["beats_random"] else "not better than random"
        yield f"{name}: {says}: {verdict['why']}"


# --- the command -------------------------------------------------------------------------------------------------


def sheet(judged: Mapping[str, Judged]) -> Sheet:
    """The verdicts as a table."""
    rows = []
    for name, each in judged.items():
        found = each.verdict
        rows.append(
            (
                name,
                "beats random" if found.beats_random else "not better than random",
                f"{found.kl:.3f}",
                f"{found.kl_random:.3f} ({found.kl_random_low:.3f} to {found.kl_random_high:.3f})",
                f"{found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}]",
                f"{found.p:.3f}",
                f"{found.p_map:.4f}",
                f"{found.loss:+.3f} / {found.loss_random:+.3f}",
                f"{found.text_kl:.4f} / {found.text_kl_random:.4f}",
                value_text(found.device_bytes, "bytes"),
            )
        )
    some = next(iter(judged.values())).verdict
    title = (
        f"Head maps against {some.random_maps} random ones of the same bytes, {some.samples} needles in "
        f"{some.contexts} contexts; KL to the full cache in nats"
    )
    columns = (
        "classifier",
        "verdict",
        "KL",
        "random",
        "difference",
        "p, contexts",
        "p, a further map",
        "loss / random",
        "KL on text / random",
        "bytes",
    )
    return Sheet(title, columns, rows)


def main(args: list[str]) -> None:
    """The command.

    Raises:
        ValueError: what the user can mend.
    """
    words, cfg = composed("heads_verdict", args)
    if len(words) > 1:
        raise HeadMapError(f"verdict takes one head map, not {len(words)}: {' '.join(words)}")
    config: trial.TrialConfig = build(cfg.trial, "trial")
    classifiers = {name: classifier_of(name, config) for name in map(str, check_list("classifiers", cfg.classifiers))}
    cache: CacheConfig = build(cfg.cache, "cache")
    path = check_output("MAP", words[0]) if words else None
    head_map = None if path is None else HeadMap.read(path)
    set_threads(cfg.threads)
    with Progress() as progress:
        progress.start("loading the model")
        decoder: Decoder = build(cfg.model, "model")
        kept(decoder.fingerprint)  # broken ones are told now, not after the trial
        measures: Mapping[str, Tensor]
        if head_map is not None:
            head_map.check_model(decoder)
            measures = {name: measured.value for name, measured in head_map.measures.items()}
        else:
            measures = head_measures(decoder, build(cfg.calibration, "calibration"), progress.fraction)
        samples = config.samples(decoder)
        total = sum(config.lengths) * (config.contexts + config.texts)
        progress.start("trying head maps", total)
        judged = verdicts(decoder, classifiers, measures, config, samples, cache, tick=progress.advance)
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.print(sheet_table(sheet(judged)))
    plain = {name: each.plain() for name, each in judged.items()}
    for line in lines(plain):
        print(line)
    try:
        if path is not None:
            add(path, decoder.fingerprint, plain)
            print(f"head map: {path}")
    finally:
        print(f"verdicts: {keep(decoder.fingerprint, plain)}")
