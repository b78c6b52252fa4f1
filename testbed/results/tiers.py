"""The tiers of a record as tables of text and lines, the same for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.results.display import ABSENT, Sheet, number_text, value_text
from testbed.results.record import Record

STALL_NAMES = {"demand": "pages asked for", "prefetch_late": "late prefetches", "room": "room on the device"}


def sheets(record: Record) -> list[Sheet]:
    """What is where, and what moved; empty for a record without tiers."""
    tiers = record.tiers
    if not tiers:
        return []
    return [_residency(tiers), *(sheet for sheet in (_pools(tiers), _moves(tiers)) if sheet.rows)]


def _residency(tiers: Mapping[str, Any]) -> Sheet:
    """One line a tier, then one for each format in it; last the pages that are in no tier any more."""
    rows: list[tuple[str, ...]] = []
    at_end: Mapping[str, Mapping[str, float]] = tiers["at_end"]
    held_at_end: Mapping[str, float] = tiers.get("held_at_end_bytes", {})  # older records have none
    for tier, held in tiers["mean_held_bytes"].items():
        inside = {name: place for name, place in at_end.items() if name.startswith(f"{tier}/")}
        if not inside and not held and not held_at_end.get(tier):
            continue
        most = tiers["capacity_bytes"].get(tier)
        pages = sum(place.get("pages", 0) for place in inside.values())
        used = sum(place.get("bytes", 0) for place in inside.values())
        limit = ABSENT if most is None else value_text(most, "bytes") + (" with L0" if tier == "L1" else "")
        shown = [value_text(number, "bytes") for number in (used, held_at_end.get(tier), held)]
        rows.append((tier, _count(pages), *shown, limit))
        for name, place in inside.items():
            pages_text = _count(place["pages"]) if "pages" in place else ABSENT
            rows.append(
                (f"  {name.partition('/')[2]}", pages_text, value_text(place.get("bytes"), "bytes"), "", "", "")
            )
    if "dropped" in at_end:
        rows.append(("dropped", _count(at_end["dropped"]["pages"]), "", "", "", ""))
    columns = ("tier", "pages at the end", "bytes at the end", "held at the end", "held, mean over steps", "capacity")
    return Sheet("Tiers, mean over samples; held: with slack (measured)", columns, rows)


def _pools(tiers: Mapping[str, Any]) -> Sheet:
    """One line a format and head class: what the device's pools hold for it, and what of that is empty."""
    rows = [
        (
            name.replace("/", ", "),
            _count(pool["block_pages"]),
            _count(pool["used_pages"]),
            _count(pool["held_pages"]),
            value_text(pool["slack_bytes"], "bytes"),
            value_text(1.0 - pool["used_pages"] / pool["held_pages"] if pool["held_pages"] else 0.0, "fraction"),
        )
        for name, pool in tiers.get("pools", {}).items()
    ]
    columns = ("pool in L1", "pages a block", "pages used", "pages held", "slack", "empty")
    return Sheet("Pools of the device by head class, mean over samples (measured)", columns, rows)


def _moves(tiers: Mapping[str, Any]) -> Sheet:
    """One line a link: what went over it for question and answer."""
    rows = [
        (
            link.replace(">", " → "),
            _count(moved["pages"]),
            value_text(moved["bytes"], "bytes"),
            value_text(moved["busy_share"], "fraction"),
        )
        for link, moved in tiers["links"].items()
    ]
    title = "Moves between tiers since the context was compressed, for question and answer, sum over samples (measured)"
    return Sheet(title, ("link", "pages", "bytes", "busy, share of steps"), rows)


def lines(record: Record) -> list[str]:
    """Hits, stalls and prefetches, one line each."""
    tiers = record.tiers
    if not tiers:
        return []
    found = []
    lookups, stall_s, prefetch = tiers["lookups"], tiers["stall_s"], tiers["prefetch"]
    if lookups["attended"]:
        text = f"{_count(lookups['hit'])} of {_count(lookups['attended'])} pages attended exactly were there before"
        found.append(f"hits: {text} ({number_text(record.get('tier.hit_rate'))})")
    share = number_text(record.get("tier.stall_share"))
    causes = ", ".join(
        f"{name} {value_text(stall_s[key], 's')}" for key, name in STALL_NAMES.items() if stall_s.get(key)
    )
    found.append(f"exposed stall: {share} of the steps' time{f' ({causes})' if causes else ''}")
    if prefetch["issued"]:
        outcomes = ", ".join(f"{_count(prefetch[name])} {name}" for name in ("useful", "late", "useless", "harmful"))
        found.append(f"prefetched pages: {_count(prefetch['issued'])}: {outcomes}")
    return found


def warnings(record: Record) -> list[str]:
    """What went wrong in the tiers, each kind once, with how often."""
    found = [f"{event}{f' ({count} times)' if count > 1 else ''}" for event, count in _events(record).items()]
    failures = record.tiers.get("failures", {})
    said = ", ".join(f"{_count(count)} {name}" for name, count in failures.items() if count)
    return [*found, f"failures of the archive: {said}"] if said else found


def _events(record: Record) -> Mapping[str, int]:
    return record.tiers.get("events", {})


def _count(value: float) -> str:
    return f"{value:,.0f}"
