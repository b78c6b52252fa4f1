"""Lines under a run's table: what the quality guard did, which heads turned out to be of another class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def lines(activity: Mapping[str, Any]) -> list[str]:
    """For people."""
    out = []
    if activity.get("head_map"):
        out.append(str(activity["head_map"]))
    guard, heads = activity.get("guard"), activity.get("head_changes")
    if guard:
        better = "the full cache" if guard["reference"] == "full" else f"a budget of {guard['reference']}"
        out.append(
            f"guard: {guard['below_threshold']} of {guard['probes']} probes below {guard['threshold']}; budget raised "
            f"{guard['raised']} times; {guard['switched']} of {guard['answers']} answers went on with {better}"
        )
    if heads:
        out.append(
            f"heads that changed their class: {heads['heads']} ({heads['to_global']} times to global, "
            f"{heads['to_local']} to local); {heads['missed_pages']} pages that they would have kept were gone"
        )
    return out
