"""Numbers as people read them: one place, so that table, HTML and plots agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from testbed.results.record import Number, Record

ABSENT = "–"
_BYTE_STEPS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(frozen=True)
class Sheet:
    """A table of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def value_text(value: float | None, unit: str) -> str:
    """A value in its unit, rounded for reading: bytes with a binary prefix, fractions in percent."""
    if value is None:
        return ABSENT
    if unit == "bytes":
        for size, name in _BYTE_STEPS:
            if abs(value) >= size:
                return f"{value / size:.2f} {name}"
        return f"{value:.0f} B"
    if unit == "fraction":
        return f"{100 * value:.1f} %"
    if unit == "ratio":
        return f"{value:.2f}×"
    if unit == "tokens":
        return f"{value:,.0f} tokens"
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.3g} {unit}"


def number_text(number: Number | None, interval: bool = True) -> str:
    """A result with its interval, or the sign of absence."""
    if number is None or number.value is None:
        return ABSENT
    text = value_text(number.value, number.unit)
    if not interval or number.ci is None:
        return text
    low, high = (value_text(end, number.unit) for end in number.ci)
    if low == high:  # an interval too narrow to read says nothing
        return text
    suffix = text.partition(" ")[2]
    if suffix and low.endswith(f" {suffix}") and high.endswith(f" {suffix}"):
        low = low.removesuffix(f" {suffix}")
    return f"{text} [{low}, {high}]"


def counted(number: int, what: str) -> str:
    """So many of something, as "1 sample" and "2 samples"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def plain_policy_name(record: Record) -> str:
    """The policy of a record, from its configuration."""
    policy = record.config.get("policy")
    name = policy.get("name", "?") if isinstance(policy, dict) else policy
    return "?" if name is None else str(name)


def policy_name(record: Record) -> str:
    """The same for titles and labels: it says whether the policy was guarded."""
    return plain_policy_name(record) + (" with a guard" if record.activity.get("guard") else "")


def budget_text(record: Record) -> str:
    """The budget of a record, or the sign of absence."""
    fraction = budget_fraction(record)
    return ABSENT if fraction is None else f"{100 * fraction:g} %"


def budget_fraction(record: Record) -> float | None:
    """The budget in force: `budget.fraction` of the configuration, else what the policy itself asks for."""
    for node, key in (("budget", "fraction"), ("policy", "budget_fraction")):
        values = record.config.get(node)
        fraction = values.get(key) if isinstance(values, dict) else None
        if isinstance(fraction, (int, float)) and not isinstance(fraction, bool):
            return float(fraction)
    return None
