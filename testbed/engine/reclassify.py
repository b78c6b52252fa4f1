"""Heads that turn out to be of another kind while they decode: what changed, when, and what could not be undone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from policies.base import Classifier, Head, PolicyError, Reclassifying, Signals, Tier
from testbed.engine.trail import Trail


@dataclass(frozen=True)
class HeadChange:
    """One head of another class from one plan on.

    Attributes:
        step: decode steps taken before it.
        layer, head: which KV head.
        before, after: codes of `Head`.
        missed_pages: pages it dropped earlier, which its new class would have kept: they do not come back.
    """

    step: int
    layer: int
    head: int
    before: int
    after: int
    missed_pages: int

    def plain(self) -> dict[str, Any]:
        """For records: classes by name."""
        names = {key: Head(getattr(self, key)).name.lower() for key in ("before", "after")}
        return asdict(self) | names


def reclassified(classifier: Classifier, signals: Signals, changes: Trail[HeadChange]) -> Signals:
    """The signals with the classes that hold from now on; notes every head that changed.

    Raises:
        PolicyError: classes of another shape or unknown codes.
    """
    if not isinstance(classifier, Reclassifying) or signals.classes is None:
        return signals
    classes = classifier.reclassify(signals)
    if classes.shape != signals.classes.shape or not set(classes.flatten().tolist()) <= set(Head):
        raise PolicyError(
            f"{type(classifier).__name__}.reclassify gave {list(classes.shape)} with codes "
            f"{sorted(set(classes.flatten().tolist()))}: must be {list(signals.classes.shape)} of 0 to {max(Head):d}"
        )
    dropped = (signals.held.tier == Tier.DROPPED).sum(-1)
    for layer, head in (classes != signals.classes).nonzero().tolist():
        after = int(classes[layer, head])
        missed = 0 if after == Head.LOCAL else int(dropped[layer, head])
        changes.append(HeadChange(signals.step, layer, head, int(signals.classes[layer, head]), after, missed))
    return replace(signals, classes=classes.to(torch.int8))


def summary(changes: list[HeadChange]) -> dict[str, int]:
    """Counts for a record."""
    return {
        "changes": len(changes),
        "to_global": sum(each.after == Head.GLOBAL for each in changes),
        "to_local": sum(each.after == Head.LOCAL for each in changes),
        "heads": len({(each.layer, each.head) for each in changes}),
        "missed_pages": sum(each.missed_pages for each in changes),
    }
