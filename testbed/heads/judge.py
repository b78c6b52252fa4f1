"""Does a head map beat maps dealt by chance, at the same bytes and on the same samples?

Random maps differ among themselves far more than samples do: one that happens to spare the right heads is better than
the average of all, significantly and on every sample, and yet knows nothing. So a map has to pass three tests:

1. paired over samples, its KL is below the random maps' mean: 95 % bootstrap interval of the difference, whole contexts
   resampled;
2. paired over contexts, it is below that mean more often than chance has it (sign test, exact, one-sided, 5 %);
3. it is better than a further random map would be: by its rank among them, exact whatever their distribution, 5 %. That
   takes 19 random maps at least, and then it has to beat every one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats as tests
from torch import Tensor

from policies.base import Head
from testbed.heads.trial import Trial
from testbed.results import stats

LEVEL = 0.05


@dataclass(frozen=True)
class Verdict:
    """What the trials say of one classifier.

    Attributes:
        beats_random: passes all three tests.
        difference: mean KL on needles less that of the random maps, nats; below 0 is better.
        low, high: its 95 % interval; infinite with a single context.
        p: of the sign test over contexts.
        p_map: how likely a further random map is at least as good, by rank.
        samples, contexts, random_maps: how many.
        kl, kl_random: mean KL on needles, nats.
        random_as_good: how many of the random maps are at least as good.
        kl_random_low, kl_random_high: the best and the worst random map.
        loss, loss_random: mean loss of the right answer beyond the full cache's, nats a token.
        text_kl, text_kl_random: mean KL on plain text; NaN without any.
        device_bytes, device_bytes_random: mean over samples.
        heads: class -> heads.
        why: in words.
    """

    beats_random: bool
    difference: float
    low: float
    high: float
    p: float
    p_map: float
    samples: int
    contexts: int
    random_maps: int
    kl: float
    kl_random: float
    random_as_good: int
    kl_random_low: float
    kl_random_high: float
    loss: float
    loss_random: float
    text_kl: float
    text_kl_random: float
    device_bytes: float
    device_bytes_random: float
    heads: Mapping[str, int]
    why: str

    def plain(self) -> dict[str, Any]:
        """As JSON values: numbers that nobody could tell, as an interval from one context, are None."""
        unknown = {key for key, value in vars(self).items() if isinstance(value, float) and not math.isfinite(value)}
        return {key: None if key in unknown else value for key, value in asdict(self).items()}


def judge(trials: Sequence[Trial], name: str, controls: Sequence[str], classes: Tensor, reason: str = "") -> Verdict:
    """The verdict on one map.

    Args:
        trials: of all maps, each on the same samples in the same order.
        name: the map.
        controls: names of random maps with as many heads of each class.
        classes: [L, Hk] of the map.
        reason: what the map does to the heads that matter, in words; ends the explanation.
    """
    mine = _by_map(trials, "needle")
    kl = {key: np.array([trial.kl for trial in each]) for key, each in mine.items()}
    contexts = [trial.context_id for trial in mine[name]]
    chance = np.mean([kl[control] for control in controls], 0)
    paired = stats.delta(kl[name], chance, groups=contexts)
    low, high = paired.ci or (-math.inf, math.inf)
    p = _sign_test(kl[name] - chance, contexts)
    each = sorted(float(kl[control].mean()) for control in controls)
    p_map, as_good = further_map(float(kl[name].mean()), each)
    beats = high < 0 and p <= LEVEL and p_map <= LEVEL
    ours, dealt = _means(trials, [name]), _means(trials, controls)
    heads = {head.name.lower(): int((classes == head).sum()) for head in Head}
    facts = {
        "difference": paired.value,
        "low": low,
        "high": high,
        "p": p,
        "p_map": p_map,
        "samples": len(contexts),
        "contexts": len(set(contexts)),
        "random_maps": len(controls),
        "kl": ours["kl"],
        "kl_random": dealt["kl"],
        "random_as_good": as_good,
        "kl_random_low": each[0],
        "kl_random_high": each[-1],
        "loss": ours["loss"],
        "loss_random": dealt["loss"],
        "text_kl": ours["text_kl"],
        "text_kl_random": dealt["text_kl"],
        "device_bytes": ours["device_bytes"],
        "device_bytes_random": dealt["device_bytes"],
    }
    return Verdict(beats_random=beats, heads=heads, why=_words(facts, beats, reason), **facts)


def further_map(value: float, controls: Sequence[float]) -> tuple[float, int]:
    """How likely one more random map is at least as good, by rank.

    Args:
        value: mean KL of the map.
        controls: of the random ones.

    Returns:
        p, and how many of the random maps are at least as good.
    """
    as_good = sum(each <= value for each in controls)
    return (1 + as_good) / (1 + len(controls)), as_good


def _sign_test(differences: np.ndarray, contexts: Sequence[str]) -> float:
    """P of as many contexts below 0, by mean, were the sign a matter of chance; contexts at 0 are left out."""
    by_context = defaultdict(list)
    for context, difference in zip(contexts, differences, strict=True):
        by_context[context].append(float(difference))
    means = [np.mean(each) for each in by_context.values()]
    better, worse = sum(mean < 0 for mean in means), sum(mean > 0 for mean in means)
    if better + worse == 0:
        return 1.0
    return float(tests.binomtest(better, better + worse, alternative="greater").pvalue)


def _by_map(trials: Sequence[Trial], task: str) -> dict[str, list[Trial]]:
    out = defaultdict(list)
    for trial in trials:
        if trial.task == task:
            out[trial.map].append(trial)
    return out


def _means(trials: Sequence[Trial], names: Sequence[str]) -> dict[str, float]:
    """Over all samples of these maps."""
    needles = [trial for trial in trials if trial.task == "needle" and trial.map in names]
    texts = [trial for trial in trials if trial.task == "text" and trial.map in names]
    return {
        "kl": float(np.mean([trial.kl for trial in needles])),
        "loss": float(np.mean([trial.loss - trial.loss_full for trial in needles])),
        "text_kl": float(np.mean([trial.kl for trial in texts])) if texts else math.nan,
        "device_bytes": float(np.mean([trial.device_bytes for trial in needles])),
    }


def _words(facts: Mapping[str, Any], beats: bool, reason: str) -> str:
    """One or two sentences."""
    compared = (
        f"KL {facts['kl']:.3g} nats on needles, {facts['random_maps']} random maps of the same bytes "
        f"{facts['kl_random']:.3g} on average ({facts['kl_random_low']:.3g} to {facts['kl_random_high']:.3g})"
    )
    failed = []
    if math.isinf(facts["high"]):
        failed.append(f"{facts['contexts']} context gives no interval")
    elif facts["high"] >= 0:
        failed.append(f"the difference may be 0 or worse (95 % up to {facts['high']:+.2g})")
    if facts["p"] > LEVEL:
        failed.append(f"it is not better in enough contexts (p {facts['p']:.2g})")
    if facts["p_map"] > LEVEL:
        failed.append(f"a further random map is as good with a probability of {facts['p_map']:.2g}")
    as_good = facts["random_as_good"]
    judged = f"better than {f'all but {as_good}' if as_good else 'all'} of them" if beats else "; ".join(failed)
    return f"{compared}; {judged}{'; ' + reason if reason else ''}"


def reason(classes: Tensor, measures: Mapping[str, Tensor]) -> str:
    """What a map does to the heads that matter for copying.

    Args:
        classes: [L, Hk].
        measures: some of `retrieval_score` [L, Hk], `head_restrict_kl` [L, Hk]; others are not looked at.
    """
    local = classes == Head.LOCAL
    share = float(local.float().mean())
    said = []
    for name, what in (
        ("retrieval_score", "of the attention that copied answers put on their source"),
        ("head_restrict_kl", "of what heads cost when cut short one by one"),
    ):
        if name in measures:
            value = measures[name].clamp(min=0)
            part = float(value[local].sum() / value.sum().clamp(min=1e-30))
            said.append(f"{part:.0%} {what}")
    if not said:
        return ""
    return f"its local heads, {share:.0%} of all, carry {' and '.join(said)}"
