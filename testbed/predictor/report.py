"""Tables of an evaluation of predictors, for reading."""

from __future__ import annotations

import statistics
from itertools import product
from typing import TYPE_CHECKING

from testbed.predictor.agents import PHASES
from testbed.predictor.recall import SHARES
from testbed.predictor.tally import Slice
from testbed.results.display import ABSENT, Sheet
from testbed.results.stats import Estimate

if TYPE_CHECKING:
    from testbed.predictor.evaluate import Evaluation

ORACLE = "oracle"  # the truth itself: what the full cache is about to attend to
LEARNED = ("hybrid", "hybrid_light", "mlp", "mlp_light")
TITLES = {
    "sparse": "recall of the next step's mass, sessions that attend to few pages",
    "full": "recall of the next step's mass, session of the full cache",
    "held": "recall over a window's steps by its first step's scores, sessions that attend to few pages",
    "contribution": "recall of absolute contributions to the next logit",
}


def tables(done: Evaluation) -> list[Sheet]:
    """Recall by case, by phase and by layer; tests; costs."""
    tallies, names = done.tallies, done.tallies.predictors
    columns = ["predictor", *(f"{share:.0%} of pages" for share in SHARES)]
    out = []
    for case, title in TITLES.items():
        rows = [[name, *(_said(tallies.mean(name, share, Slice(case))) for share in SHARES)] for name in names]
        out.append(Sheet(title, columns, rows))
    phases = [
        [n, *(_said(tallies.mean(n, 0.10, Slice("sparse", phase=at))) for at in range(len(PHASES)))] for n in names
    ]
    out.append(Sheet("recall at 10 % by phase of the token that is predicted", ["predictor", *PHASES], phases))
    shown = [name for name in (ORACLE, "hybrid", done.best["sparse"], "quest", "random") if name in names]
    shown = list(dict.fromkeys(shown))
    layers = [
        [str(layer), *(_said(tallies.mean(name, 0.10, Slice("sparse", layer)), ci=False) for name in shown)]
        for layer in range(tallies.layers)
    ]
    out.append(Sheet("recall at 10 % by layer", ["layer", *shown], layers))
    out.append(Sheet("against the best single signal, paired over documents", *_tests(done)))
    costs = [
        [
            name,
            f"{1e3 * statistics.median(cost.seconds):.2f} ms",
            f"{done.time_share(name):.1%}",
            f"{done.time_share(name, 16):.2%}",
            "" if cost.flops is None else f"{cost.flops / 1e6:.1f} M ({cost.flops / done.step_flops:.1%} of a step)",
        ]
        for name, cost in done.costs.items()
    ]
    header = ["predictor", "time a score", "of a step, every step", "every 16 steps", "FLOPs"]
    out.append(Sheet(f"cost of a score beside a step of {1e3 * statistics.median(done.step_s):.1f} ms", header, costs))
    return out


def _tests(done: Evaluation) -> tuple[list[str], list[list[str]]]:
    tallies, names, rows = done.tallies, done.tallies.predictors, []
    for case, best in done.best.items():
        for name, share in product([name for name in LEARNED if name in names], SHARES):
            found = tallies.compare(name, best, share, Slice(case))
            closed = tallies.closed(name, "quest", ORACLE, share, Slice(case)) if "quest" in names else None
            if found is not None:
                said = [f"{name} - {best}", case, f"{share:.0%}", _said(found.difference), f"{found.p:.4f}"]
                rows.append([*said, "yes" if found.significant else "no", _said(closed)])
    return ["difference", "case", "pages", "recall", "p", "better", "gap from quest to oracle closed"], rows


def _said(estimate: Estimate | None, ci: bool = True) -> str:
    if estimate is None:
        return ABSENT
    interval = "" if estimate.ci is None or not ci else f" [{estimate.ci[0]:.3f}, {estimate.ci[1]:.3f}]"
    return f"{estimate.value:.3f}{interval}"
