"""Writes golden.json, the decisions of every named policy on the fixed trace.

    python tests/policies/make_golden.py

Run it only after a change that is meant to change decisions, and read the difference before committing it.
"""

from __future__ import annotations

import json
from pathlib import Path

from policy_trace import POLICIES, full_bytes, walk
from torch import Tensor

from testbed.compose import compose_policy

GOLDEN = Path(__file__).with_name("golden.json")
BUDGET_BYTES = full_bytes() * 45 // 100


def decisions(name: str) -> list[dict[str, str]]:
    """One entry a moment; a letter a page, a word a stream."""
    plans = (plan for _, plan in walk(compose_policy(name), BUDGET_BYTES))
    return [
        {"mode": _letters(p.mode, "-ECB"), "format": _letters(p.format, "c84"), "tier": _letters(p.tier, "0123x")}
        for p in plans
    ]


def _letters(codes: Tensor, alphabet: str) -> str:
    return " ".join("".join(alphabet[c] for c in stream) for stream in codes.flatten(0, 1).tolist())


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: decisions(name) for name in POLICIES}, indent=1) + "\n")
