"""Traffic adds up; the prefetch book agrees with a slow model, one page at a time, and with closed cases."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.base import Mode, Tier
from testbed.cache.traffic import PrefetchBook, Traffic

EXACT, SKIP = int(Mode.EXACT), int(Mode.SKIP)
L0, L1, L2, L3, DROPPED = (int(tier) for tier in Tier)
State = list[list[tuple[int, int]]]  # [S][N] of (tier, mode)


class SlowBook:
    """The definitions, word by word, on Python objects."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("issued", "useful", "late", "useless", "harmful"), 0)
        self.lookups = dict.fromkeys(("attended", "hit", "waited"), 0)
        self.there: dict[tuple[int, int], dict] = {}
        self.sent_off: dict[tuple[int, int], int] = {}
        self.number = 0

    def plan(self, before: State, after: State) -> None:
        self.number += 1
        moves = [
            ((s, n), before[s][n][0], tier, mode) for s in range(len(after)) for n, (tier, mode) in enumerate(after[s])
        ]
        for page, was, tier, mode in moves:
            if mode == EXACT and tier == L1:
                self.lookups["attended"] += 1
                self.lookups["waited" if was in (L2, L3) else "hit"] += 1
            if page in self.there and mode == EXACT and not self.there[page]["used"]:
                self.there[page]["used"] = True
                self.counts["useful"] += 1
        for page, was, _, mode in moves:
            if was in (L2, L3) and mode == EXACT:
                for other, fate in self.there.items():
                    if other[0] == page[0] and fate["plan"] == self.sent_off.get(page):
                        fate["harm"] = True
        for page, was, tier, mode in moves:
            if was in (L0, L1) and tier in (L2, L3, DROPPED):
                self.gone(page)
                self.sent_off[page] = self.number
            if was in (L2, L3) and tier in (L0, L1):
                self.sent_off.pop(page, None)
                if mode != EXACT:
                    self.counts["issued"] += 1
                    self.there[page] = {"plan": self.number, "used": False, "harm": False, "late": False}

    def gone(self, page: tuple[int, int]) -> None:
        fate = self.there.pop(page, None)
        if fate and not fate["used"]:
            self.counts["useless"] += 1
            self.counts["harmful"] += fate["harm"]

    def late(self, pages: list[tuple[int, int]]) -> None:
        for page in set(pages):
            fate = self.there.get(page)
            if fate and fate["used"] and not fate["late"]:
                fate["late"] = True
                self.counts["late"] += 1

    def finish(self) -> None:
        for page in list(self.there):
            self.gone(page)


def tensors(before: State, after: State) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    was, now = torch.tensor(before, dtype=torch.int8), torch.tensor(after, dtype=torch.int8)
    return was[..., 0], now[..., 0], now[..., 1]


def run(book: PrefetchBook, *states: State) -> None:
    for before, after in zip(states, states[1:], strict=False):
        book.plan(*tensors(before, after))


@st.composite
def histories(draw: st.DrawFn) -> list[State]:
    """States of a few pages, plan by plan: new pages begin in L0, dropped ones stay so."""
    streams, pages = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    state: State = [[(draw(st.sampled_from([L0, L1, L2, L3])), SKIP) for _ in range(pages)] for _ in range(streams)]
    out = [state]
    for _ in range(draw(st.integers(1, 9))):
        grown = draw(st.integers(0, 1))
        out[-1] = [row + [(L0, EXACT)] * grown for row in out[-1]]
        following: State = []
        for row in out[-1]:
            new = []
            for tier, _ in row:
                to = tier if tier == DROPPED else draw(st.sampled_from([tier, L1, L1, L2, L3, DROPPED]))
                new.append((to, draw(st.sampled_from([EXACT, SKIP])) if to <= L1 else SKIP))
            following.append(new)
        out.append(following)
    return out


@settings(max_examples=120, deadline=None)
@given(histories(), st.data())
def test_book_agrees_with_the_definitions(states: list[State], data: st.DataObject) -> None:
    traffic, slow = Traffic(), SlowBook()
    book = PrefetchBook(len(states[0]), traffic)
    for before, after in zip(states, states[1:], strict=False):
        pages = len(after[0])
        before = [row + [(L0, EXACT)] * (pages - len(row)) for row in before]
        book.plan(*tensors(before, after))
        slow.plan(before, after)
        places = st.tuples(st.integers(0, len(after) - 1), st.integers(0, pages - 1))
        late = data.draw(st.lists(places, max_size=4))
        had = slow.counts["late"]
        slow.late(late)
        assert book.late(torch.tensor(late, dtype=torch.long).view(-1, 2)) == slow.counts["late"] - had
        assert {key: traffic.prefetch[key] for key in slow.counts} == slow.counts
        assert traffic.lookups == slow.lookups
    for _ in range(2):
        book.finish()
        slow.finish()
    assert {key: traffic.prefetch[key] for key in slow.counts} == slow.counts
    assert traffic.prefetch["issued"] == traffic.prefetch["useful"] + traffic.prefetch["useless"]


OLD, FETCHED, WANTED, AWAY = (L1, SKIP), (L1, SKIP), (L1, EXACT), (L2, SKIP)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        # fetched, then attended: useful, also if it leaves afterwards
        ([[[AWAY]], [[FETCHED]], [[WANTED]], [[AWAY]]], {"issued": 1, "useful": 1, "useless": 0, "harmful": 0}),
        # fetched and sent back: useless
        ([[[AWAY]], [[FETCHED]], [[AWAY]]], {"issued": 1, "useful": 0, "useless": 1, "harmful": 0}),
        # the page sent off for it was demanded meanwhile: harmful
        (
            [[[AWAY, OLD]], [[FETCHED, AWAY]], [[FETCHED, WANTED]], [[AWAY, WANTED]]],
            {"issued": 1, "useful": 0, "useless": 1, "harmful": 1},
        ),
        # the same, but it proved useful in the end
        (
            [[[AWAY, OLD]], [[FETCHED, AWAY]], [[FETCHED, WANTED]], [[WANTED, WANTED]]],
            {"issued": 1, "useful": 1, "useless": 0, "harmful": 0},
        ),
        # demanded only after the fetched page had left: no harm
        (
            [[[AWAY, OLD]], [[FETCHED, AWAY]], [[AWAY, AWAY]], [[AWAY, WANTED]]],
            {"issued": 1, "useful": 0, "useless": 1, "harmful": 0},
        ),
        # sent off by another plan: no harm
        (
            [[[AWAY, OLD]], [[AWAY, AWAY]], [[FETCHED, AWAY]], [[FETCHED, WANTED]], [[AWAY, WANTED]]],
            {"issued": 1, "useful": 0, "useless": 1, "harmful": 0},
        ),
        # of another stream: no harm
        (
            [[[AWAY], [OLD]], [[FETCHED], [AWAY]], [[FETCHED], [WANTED]], [[AWAY], [WANTED]]],
            {"issued": 1, "useful": 0, "useless": 1, "harmful": 0},
        ),
        # a demand is no prefetch
        ([[[AWAY]], [[WANTED]], [[AWAY]]], {"issued": 0, "useful": 0, "useless": 0, "harmful": 0}),
    ],
)
def test_closed_cases(states: list[State], expected: dict[str, int]) -> None:
    traffic = Traffic()
    book = PrefetchBook(len(states[0]), traffic)
    run(book, *states)
    assert {key: traffic.prefetch[key] for key in expected} == expected


def test_a_fork_goes_its_own_way() -> None:
    first, second = Traffic(), Traffic()
    book = PrefetchBook(1, first)
    run(book, [[AWAY]], [[FETCHED]])
    other = book.clone(second)
    run(book, [[FETCHED]], [[WANTED]])
    run(other, [[FETCHED]], [[AWAY]])
    assert (first.prefetch["issued"], first.prefetch["useful"], first.prefetch["useless"]) == (1, 1, 0)
    other.finish()
    assert not any(second.prefetch.values())


def test_a_fork_knows_what_was_sent_off() -> None:
    traffic = Traffic()
    book = PrefetchBook(1, Traffic())
    run(book, [[AWAY, OLD]], [[AWAY, AWAY]])
    other = book.clone(traffic)
    # the plan of the fork that fetches is another than the one that sent off
    run(other, [[AWAY, AWAY]], [[FETCHED, AWAY]], [[FETCHED, WANTED]], [[AWAY, WANTED]])
    assert (traffic.prefetch["issued"], traffic.prefetch["useless"], traffic.prefetch["harmful"]) == (1, 1, 0)


def test_wrong_shapes_are_refused() -> None:
    book = PrefetchBook(2, Traffic())
    three, two = torch.zeros(2, 3, dtype=torch.int8), torch.zeros(2, 2, dtype=torch.int8)
    book.plan(three, three, three)
    for given_shapes in ((three, three, two), (two, two, two), (three[:1], three[:1], three[:1])):
        with pytest.raises(ValueError, match=r"must be \[2, N\]"):
            book.plan(*given_shapes)


def test_sums_and_summaries() -> None:
    one, two = Traffic(), Traffic()
    one.moved("L2>L1", 3, 300, 0.5)
    two.moved("L2>L1", 1, 100, 0.25)
    two.moved("L1>L3", 2, 200, 1.0)
    one.stalled("demand", 0.125)
    two.stalled("prefetch_late", 0.5)
    two.lookups.update(attended=4, hit=3, waited=1)
    two.failures["corrupt"] += 2
    one.warn("L2 full:\n 3 pages dropped")
    whole = Traffic.merge([one, two, Traffic()])
    assert whole.summary() == {
        "links": {
            "L1>L3": {"pages": 2, "bytes": 200, "busy_s": 1.0},
            "L2>L1": {"pages": 4, "bytes": 400, "busy_s": 0.75},
        },
        "stall_s": {"demand": 0.125, "prefetch_late": 0.5, "room": 0.0},
        "lookups": {"attended": 4, "hit": 3, "waited": 1},
        "prefetch": {"issued": 0, "useful": 0, "late": 0, "late_s": 0.5, "useless": 0, "harmful": 0},
        "failures": {"read": 0, "write": 0, "corrupt": 2},
        "events": ["L2 full: 3 pages dropped"],
        "hit_rate": 0.75,
        "total_stall_s": 0.625,
    }
    json.dumps(whole.summary(), allow_nan=False)
    whole.summary()["links"]["L2>L1"]["pages"] = 0
    assert whole.links["L2>L1"]["pages"] == 4
    assert one.links["L2>L1"]["pages"] == 3
    assert Traffic().hit_rate is None
    with pytest.raises(KeyError):
        one.stalled("nosuch", 1.0)


def test_since_is_what_came_later() -> None:
    was = Traffic()
    was.moved("L2>L1", 3, 300, 0.5)
    was.moved("L1>L2", 7, 700, 0.5)
    was.stalled("prefetch_late", 0.25)
    was.failures["read"] += 1
    was.warn("before")
    copy = Traffic.merge([was])
    was.moved("L2>L1", 2, 200, 0.25)
    was.moved("L3>L1", 1, 100, 1.0)
    was.stalled("prefetch_late", 0.5)
    was.stalled("room", 1.0)
    was.lookups.update(attended=5, hit=4, waited=1)
    was.failures["write"] += 2
    was.warn("after")
    later = was.since(copy)
    assert later.links == {
        "L2>L1": {"pages": 2, "bytes": 200, "busy_s": 0.25},
        "L3>L1": {"pages": 1, "bytes": 100, "busy_s": 1.0},
    }
    assert later.stall_s == {"demand": 0.0, "prefetch_late": 0.5, "room": 1.0}
    assert (later.prefetch["late_s"], later.lookups) == (0.5, {"attended": 5, "hit": 4, "waited": 1})
    assert (later.failures, later.events) == ({"read": 0, "write": 2, "corrupt": 0}, ["after"])
    assert was.links["L2>L1"]["pages"] == 5
    assert was.since(was).summary() == Traffic().summary()


def test_a_prefetch_under_way_counts_where_its_fate_is_decided() -> None:
    """Two pages are fetched; one is used at once, the other after the copy was made: one issued and one useful."""
    traffic = Traffic()
    book = PrefetchBook(1, traffic)
    away, there = [[(L2, SKIP), (L2, SKIP)]], [[(L1, SKIP), (L1, SKIP)]]
    first, second = [[(L1, EXACT), (L1, SKIP)]], [[(L1, SKIP), (L1, EXACT)]]
    book.plan(*tensors(away, there))
    book.plan(*tensors(there, first))
    before = Traffic.merge([traffic])
    book.plan(*tensors(first, second))
    book.finish()
    later = traffic.since(before)
    assert {key: later.prefetch[key] for key in ("issued", "useful", "useless")} == {
        "issued": 1,
        "useful": 1,
        "useless": 0,
    }
