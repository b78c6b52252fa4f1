"""Markers of tool calls: what may be given for them."""

from __future__ import annotations

import pytest
from tiny import decoder

from testbed.engine.signals import SignalContext, SignalError, build_sources


@pytest.mark.parametrize(
    "bad",
    [
        {"opening": "<<", "closing": ">>"},
        {"opening": "<<", "closing": [">", ">"]},
        {"opening": ["<<"], "closing": ">"},
        {"opening": {"<<": 1}, "closing": [">>"]},
        {"opening": 5},
        {"closing": None},
        {"opening": ["<<", ""], "closing": [">>", ">>"]},
        {"opening": ["<<", 3], "closing": [">>", ">>"]},
        {"opening": ["<<"], "closing": []},
    ],
    ids=str,
)
def test_markers_are_lists_of_texts(bad: dict[str, object]) -> None:
    with pytest.raises(SignalError, match=r"signals\.tool_call: opening=.*, closing=.*: must be lists of texts"):
        build_sources(frozenset({"tool_call"}), SignalContext(16, dict, decoder()), {"tool_call": bad})


def test_lists_of_markers_are_taken() -> None:
    given = {"opening": ["<<"], "closing": [">>"]}
    assert build_sources(frozenset({"tool_call"}), SignalContext(16, dict, decoder()), {"tool_call": given})
