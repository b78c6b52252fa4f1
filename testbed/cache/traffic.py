"""What the tiers of one cache did: bytes by link, exposed stalls, hits, what became of prefetches.

Plain numbers that add up (`Traffic.merge`), so that a run's record can be made from many caches. `PrefetchBook` follows
every prefetched page from plan to plan; the words useful, late, useless and harmful are defined there. The kinds are
those of Srinath et al., "Feedback Directed Prefetching" (HPCA 2007): accuracy, lateness, pollution.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from policies.base import Mode, Tier

LINK_KEYS = ("pages", "bytes", "busy_s")
STALLS = ("demand", "prefetch_late", "room")
LOOKUPS = ("attended", "hit", "waited")
PREFETCH = ("issued", "useful", "late", "late_s", "useless", "harmful")
FAILURES = ("read", "write", "corrupt")


def _zeros(keys: Iterable[str]) -> dict[str, float]:
    return {key: 0.0 if key.endswith("_s") else 0 for key in keys}


@dataclass
class Traffic:
    """Counters of one cache.

    Attributes:
        links: "L2>L1" -> {"pages", "bytes", "busy_s"}; busy_s is the time a worker spent on it.
        stall_s: what the step waited for: a demand, a prefetch that was late, room on the device.
        lookups: pages outside L0 attended exactly, summed over plans; those that were on the device before the plan
            (hit); those it had to fetch (waited). attended = hit + waited.
        prefetch: outcomes, see `PrefetchBook`; late_s is what was waited for late pages.
        failures: failed reads and writes of jobs, pages whose checksum differed.
        events: warnings, one line each.
    """

    links: dict[str, dict[str, float]] = field(default_factory=dict)
    stall_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STALLS, 0.0))
    lookups: dict[str, float] = field(default_factory=lambda: _zeros(LOOKUPS))
    prefetch: dict[str, float] = field(default_factory=lambda: _zeros(PREFETCH))
    failures: dict[str, float] = field(default_factory=lambda: _zeros(FAILURES))
    events: list[str] = field(default_factory=list)

    def moved(self, link: str, pages: int, moved_bytes: int, busy_s: float) -> None:
        """Counts a copy over a link, e.g. "L2>L1"."""
        entry = self.links.setdefault(link, _zeros(LINK_KEYS))
        for key, value in zip(LINK_KEYS, (pages, moved_bytes, busy_s), strict=True):
            entry[key] += value

    def stalled(self, cause: str, seconds: float) -> None:
        """Counts time that a step waited; for a late prefetch under late_s too."""
        self.stall_s[cause] += seconds
        if cause == "prefetch_late":
            self.prefetch["late_s"] += seconds

    def warn(self, event: str) -> None:
        """Notes what a user must know, in one line."""
        self.events.append(" ".join(event.split()))

    @property
    def total_stall_s(self) -> float:
        """Exposed stall of all causes."""
        return sum(self.stall_s.values())

    @property
    def hit_rate(self) -> float | None:
        """Share of lookups that found the page on the device; None without lookups."""
        return self.lookups["hit"] / self.lookups["attended"] if self.lookups["attended"] else None

    def summary(self) -> dict[str, Any]:
        """Plain JSON values: the counters, the hit rate and the whole stall; independent of this object."""
        plain: dict[str, Any] = {"links": {link: dict(entry) for link, entry in sorted(self.links.items())}}
        for name in ("stall_s", "lookups", "prefetch", "failures"):
            plain[name] = dict(getattr(self, name))
        return plain | {"events": list(self.events), "hit_rate": self.hit_rate, "total_stall_s": self.total_stall_s}

    @staticmethod
    def merge(each: Iterable[Traffic]) -> Traffic:
        """The sum, as a new object; events in the order given."""
        out = Traffic()
        for one in each:
            for link, entry in list(one.links.items()):
                out.moved(link, int(entry["pages"]), int(entry["bytes"]), entry["busy_s"])
            for part in fields(one):
                if part.name not in ("links", "events"):
                    mine, theirs = getattr(out, part.name), getattr(one, part.name)
                    for key, value in theirs.items():
                        mine[key] = mine.get(key, 0) + value
            out.events += one.events
        return out

    def since(self, before: Traffic) -> Traffic:
        """What was counted after `before`, an earlier copy of this object (`Traffic.merge([t])`), as a new object.

        Prefetches whose fate was open then count as issued, since it is decided later: so no outcome exceeds them.
        Links without traffic and earlier events are left out.
        """
        out = Traffic.merge([self])
        for link, entry in before.links.items():
            out.moved(link, -int(entry["pages"]), -int(entry["bytes"]), -entry["busy_s"])
        out.links = {link: entry for link, entry in out.links.items() if entry["pages"] or entry["bytes"]}
        for name in ("stall_s", "lookups", "prefetch", "failures"):
            mine = getattr(out, name)
            for key, value in getattr(before, name).items():
                mine[key] -= value
        out.prefetch["issued"] += before.prefetch["issued"] - before.prefetch["useful"] - before.prefetch["useless"]
        del out.events[: len(before.events)]
        return out


class PrefetchBook:
    """Follows prefetched pages [S, N] and counts what became of them into a `Traffic`.

    Issued: a plan brings the page from L2 or L3 to L1 in a mode other than exact.
    Useful: a later plan attends it exactly before it left the device again.
    Late: useful, and attention had to wait since it was still in flight.
    Useless: it left the device, or the run ended, never attended exactly.
    Harmful: useless, and while it was there a page of its stream was demanded that the plan which fetched it had moved
        off the device.
    So issued = useful + useless + those whose fate is open; late is part of useful, harmful of useless.

    All work is over whole tensors; a plan costs a few passes over [S, N].
    """

    def __init__(self, streams: int, traffic: Traffic) -> None:
        self.traffic = traffic
        self._plan = 0
        self._issued = torch.zeros(streams, 0, dtype=torch.int32)  # plan that fetched a page that is there; 0 = none
        self._sent_off = torch.zeros(streams, 0, dtype=torch.int32)  # plan that moved a page off the device; 0 = there
        self._used = torch.zeros(streams, 0, dtype=torch.bool)
        self._late = torch.zeros(streams, 0, dtype=torch.bool)
        self._harm = torch.zeros(streams, 0, dtype=torch.bool)
        self._tracks = False  # whether any page is followed: most runs never prefetch

    def plan(self, source_tier: Tensor, target_tier: Tensor, target_mode: Tensor) -> None:
        """Takes in one plan.

        Args:
            source_tier: [S, N] int8, where pages were before it.
            target_tier: [S, N] int8, where it puts them.
            target_mode: [S, N] int8, how it attends them.

        Raises:
            ValueError: shapes that differ, or fewer pages than before.
        """
        self._grow(source_tier, target_tier, target_mode)
        self._plan += 1
        exact = target_mode == Mode.EXACT
        was_away = (source_tier == Tier.L2) | (source_tier == Tier.L3)
        away = target_tier > Tier.L1
        demanded = was_away & exact
        attended, waited = int((exact & (target_tier == Tier.L1)).sum()), int(demanded.sum())
        for key, value in zip(LOOKUPS, (attended, attended - waited, waited), strict=True):
            self.traffic.lookups[key] += value
        left = away & (source_tier <= Tier.L1)
        if self._tracks:
            self._follow(exact, left, demanded, waited)
        back = was_away & ~away
        self._sent_off[back] = 0
        self._sent_off[left] = self._plan
        issued = back & ~exact
        count = int(issued.sum())
        if count:
            self._issued[issued] = self._plan
            self._tracks = True
            self.traffic.prefetch["issued"] += count

    def _grow(self, *given: Tensor) -> None:
        shape = given[0].shape
        have = self._issued.shape
        if any(x.shape != shape for x in given) or len(shape) != 2 or shape[0] != have[0] or shape[1] < have[1]:
            shapes = ", ".join(str(tuple(x.shape)) for x in given)
            raise ValueError(f"plan of shapes {shapes}: must be [{have[0]}, N] each, N at least {have[1]}")
        more = shape[1] - have[1]
        if more:
            for name in ("_issued", "_sent_off", "_used", "_late", "_harm"):
                setattr(self, name, torch.nn.functional.pad(getattr(self, name), (0, more)))

    def _follow(self, exact: Tensor, left: Tensor, demanded: Tensor, demands: int) -> None:
        """Outcomes of this plan for pages fetched by earlier ones."""
        followed = self._issued > 0
        useful = followed & exact & ~self._used
        self.traffic.prefetch["useful"] += int(useful.sum())
        self._used |= useful
        if demands:
            self._mark_harm(demanded)
        self._settle(followed & left)

    def _mark_harm(self, demanded: Tensor) -> None:
        """Pages fetched by the very plan that sent off what is now demanded in their stream."""
        at = demanded.nonzero(as_tuple=True)
        followed = (self._issued > 0).nonzero(as_tuple=True)
        # One number names a stream and a plan; plan 0 is none and never followed.
        plans = self._plan + 1
        wanted = at[0] * plans + self._sent_off[at]
        mine = followed[0] * plans + self._issued[followed]
        hit = torch.isin(mine, wanted)
        self._harm[followed[0][hit], followed[1][hit]] = True

    def _settle(self, gone: Tensor) -> None:
        """Followed pages that are there no more."""
        useless = gone & ~self._used
        self.traffic.prefetch["useless"] += int(useless.sum())
        self.traffic.prefetch["harmful"] += int((useless & self._harm).sum())
        self._issued[gone] = 0
        for mark in (self._used, self._late, self._harm):
            mark[gone] = False
        self._tracks = bool(self._issued.any())

    def late(self, at: Tensor) -> int:
        """Pages at [M, 2] (stream, page) are awaited by attention, still in flight.

        Call it before the wait, whose seconds `Mover.wait` counts. Pages that were no prefetch, that are not attended
        exactly or were late before are passed over.

        Returns:
            How many were counted.
        """
        if not self._tracks or not len(at):
            return 0
        at = at.unique(dim=0)
        index = (at[:, 0], at[:, 1])
        fresh = (self._issued[index] > 0) & self._used[index] & ~self._late[index]
        self._late[at[fresh, 0], at[fresh, 1]] = True
        count = int(fresh.sum())
        self.traffic.prefetch["late"] += count
        return count

    def finish(self) -> None:
        """The run ends: what was never attended exactly was useless. Safe to call twice."""
        if self._tracks:
            self._settle(self._issued > 0)

    def clone(self, traffic: Traffic) -> PrefetchBook:
        """For a fork: it counts its own prefetches; those under way stay this book's, so that none counts twice."""
        other = PrefetchBook(self._issued.shape[0], traffic)
        other._grow(self._issued)
        other._plan, other._sent_off = self._plan, self._sent_off.clone()
        return other
