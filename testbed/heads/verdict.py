"""`python -m testbed.heads verdict [MAP] classifiers=[retrieval,described]`: which head maps beat chance, and why not.

Every classifier is run under the policy `redknot` beside maps with the same classes dealt by chance: the same number of
heads of each class, and with it the same bytes (`testbed.heads.trial`, `testbed.heads.judge`). The verdict is written
into the map, or, where none is named, kept for the model; whatever shows a map or a run says it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from policies.base import Classifier, Head, Phase, Plan, Policy, PolicyError, Signals
from testbed.cache.layout import CacheConfig
from testbed.commands import check_output, set_threads
from testbed.compose import compose_policy
from testbed.engine.signals import SignalContext
from testbed.heads import trial
from testbed.heads.configured import composed
from testbed.heads.headmap import HeadMap, HeadMapError
from testbed.heads.judge import Verdict, judge, reason
from testbed.heads.kept import add, keep, kept, lines
from testbed.heads.library import head_measures
from testbed.models.base import Decoder, Geometry
from testbed.results.display import ABSENT, Sheet, counted, value_text
from testbed.results.progress import Progress
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


def label(classifier: Classifier, fingerprint: str) -> str:
    """What must be said wherever this classifier is used on this model: "" unless it failed to beat chance."""
    for verdict in kept(fingerprint).values():
        if verdict.get("identity") == identity(classifier) and not verdict["beats_random"]:
            return f"this head map is not better than random: {verdict['why']}"
    return ""


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
                f"{found.difference:+.3f} [{_known('{:+.3f}, {:+.3f}', found.low, found.high)}]",
                f"{found.p:.3f}",
                f"{found.p_map:.4f}",
                f"{found.loss:+.3f} / {found.loss_random:+.3f}",
                _known("{:.4f} / {:.4f}", found.text_kl, found.text_kl_random),
                value_text(found.device_bytes, "bytes"),
            )
        )
    some = next(iter(judged.values())).verdict
    title = (
        f"Head maps against {some.random_maps} random ones of the same bytes, {counted(some.samples, 'needle')} "
        f"in {counted(some.contexts, 'context')}; KL to the full cache in nats"
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


def _known(text: str, *values: float) -> str:
    """The values in a text, or the sign of absence where nobody could tell one."""
    return text.format(*values) if all(map(math.isfinite, values)) else ABSENT


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
