"""What single parts decide, against plain loops and cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from policy_trace import (
    KV_HEADS,
    LAYERS,
    PAGE_BYTES,
    PAGE_TOKENS,
    PAGES,
    first_signals,
    full_bytes,
    scrambled,
    values_for,
)
from scipy.stats import rankdata
from torch import Tensor

from policies.attention.elastic import Elastic
from policies.attention.window import Window
from policies.base import Format, Head, Mode, Plan, PolicyError, PoolLayout, Signals, Tier
from policies.budgets.per_class import PerClass
from policies.budgets.uniform import Uniform
from policies.eviction.core_lru import CoreLru
from policies.eviction.fifo import Fifo
from policies.formats.per_class import PerClass as PerClassFormat
from policies.predictors.hybrid import Hybrid
from policies.predictors.judges import Judges
from policies.predictors.random import Random
from policies.predictors.rules import Rules, core_pages
from policies.predictors.snapkv import SnapKV
from policies.prefetch.next_step import NextStep
from policies.ranks import share_below

SHAPE = (LAYERS, KV_HEADS, PAGES)


def signals_with(**values: Tensor) -> Signals:
    return replace(
        first_signals(frozenset()), values=values_for(frozenset({"role", "tool_call", "locked"}), PAGES, 0) | values
    )


def test_snapkv_averages_neighbours_and_keeps_pages_after_the_prompt() -> None:
    mass = scrambled(SHAPE, 5)
    mass[..., -3:] = -1.0
    score = SnapKV(kernel_pages=3).score(signals_with(window_mass=mass))
    for n in range(PAGES - 4):
        near = mass[..., max(0, n - 1) : n + 2]
        torch.testing.assert_close(score[..., n], near.mean(-1))
    assert (score[..., -3:] > score[..., :-3].amax(-1, keepdim=True)).all()


def test_share_below_is_the_minimum_rank() -> None:
    value = (scrambled((4, 33), 9) * 8).floor()
    expected = (rankdata(value.numpy(), method="min", axis=-1) - 1) / 32
    torch.testing.assert_close(share_below(value), torch.from_numpy(expected).float())
    assert share_below(torch.full((5,), 3.0)).tolist() == [0.0] * 5
    assert share_below(torch.ones(1)).tolist() == [0.0]
    assert share_below(torch.tensor([-0.0, 0.0, -1.0])).tolist() == [0.5, 0.5, 0.0]  # equals, whatever their bits


@pytest.mark.parametrize("combine", ["max", "mean"])
def test_judges_are_free_of_scale_and_combine_as_they_say(combine: str) -> None:
    part = Judges(combine, rules_weight=0.5, retrieval_weight=1.0, attention_weight=2.0, sink_tokens=16)
    retrieval, ema = scrambled((PAGES,), 1), scrambled(SHAPE, 2)
    score = part.score(signals_with(retrieval=retrieval, attention_ema=ema))
    rules = torch.tensor([1.0] + [n / (PAGES - 1) for n in range(1, PAGES)])
    ranked = [torch.from_numpy(rankdata(x.numpy(), "min", axis=-1) - 1).float() / (PAGES - 1) for x in (retrieval, ema)]
    weighted = torch.stack([(rules * 0.5).expand(SHAPE), ranked[0].expand(SHAPE), ranked[1] * 2.0])
    expected = weighted.amax(0) if combine == "max" else weighted.sum(0) / 3.5
    torch.testing.assert_close(score, expected)
    scaled = part.score(signals_with(retrieval=retrieval * 1e-6, attention_ema=ema * 1e6 + 5))
    torch.testing.assert_close(scaled, score)


def test_a_signal_shared_by_all_streams_may_come_expanded() -> None:
    part = Judges("max", 0.0, 1.0, 0.0, 0)
    flat = scrambled((PAGES,), 1)
    assert torch.equal(part.score(signals_with(retrieval=flat)), part.score(signals_with(retrieval=flat.expand(SHAPE))))
    assert part.needs == {"retrieval"}
    assert "role" in Judges("max", 0.5, 1.0, 0.0, 0).needs


def test_rules_put_sinks_and_recent_pages_first() -> None:
    score = Rules(sink_tokens=20, last_tokens=0).score(signals_with())[0, 0].tolist()
    assert score[:2] == [1.0, 1.0]
    assert score[2:] == pytest.approx([n / (PAGES - 1) for n in range(2, PAGES)])


def test_system_pages_and_the_users_last_turn_are_core() -> None:
    """Against a plain loop; a conversation of two turns with documents, tools and answers between them."""
    letters = "SSTTDDDDUUDGGGUUUGGGT"  # a short turn may leave no page of its own
    for cut in range(len(letters), 2, -1):
        text = (letters[:cut] * 2)[-PAGES:].rjust(PAGES, "?")
        role = torch.tensor(["STDUG".find(letter) for letter in text], dtype=torch.int8)
        score = Rules(sink_tokens=0, last_tokens=0).score(signals_with(role=role))[1, 1].tolist()
        core = [n for n, letter in enumerate(text) if letter == "S"]
        page = text.rfind("U")
        while page >= 0 and text[page] == "U":
            core.append(page)
            page -= 1
        expected = [1.0 if n in core else n / (PAGES - 1) for n in range(PAGES)]
        assert score == pytest.approx(expected), text


def test_rules_and_hybrid_put_first_what_is_being_answered() -> None:
    """A user's turn, a tool's description and two results; one span locked; the score beside them says nothing."""
    letters = "STTDDDRRDDURRGGG".ljust(PAGES, "G")
    role = torch.tensor(["STDUGR".find(letter) for letter in letters], dtype=torch.int8)
    locked = torch.zeros(PAGES)
    locked[4] = 1.0
    fixed = {0, 4, PAGES - 3, PAGES - 2, PAGES - 1}  # sinks, locked, the last 40 tokens
    always = fixed | {10}  # the turn
    learned = scrambled(SHAPE, 6) * 9 - 20
    for calling, core in ((0.0, always), (1.0, always | {1, 2, 11, 12})):
        signals = signals_with(role=role, locked=locked, tool_call=torch.full((PAGES,), calling), core_score=learned)
        assert set(core_pages(signals, 16, 40).nonzero().flatten().tolist()) == core
        ones = Rules(16, 40).score(signals)[0, 0] == 1.0
        assert set(ones.nonzero().flatten().tolist()) == core
        for nats in (0.0, 1.5):
            score = Hybrid("core_score", 16, 40, nats).score(signals)
            for stream, plain in zip(score.flatten(0, 1).tolist(), learned.flatten(0, 1).tolist(), strict=True):
                raised = [value + nats * (page in core) for page, value in enumerate(plain)]
                expected = sorted(range(PAGES), key=lambda page, raised=raised: (page in fixed, raised[page]))
                assert sorted(range(PAGES), key=stream.__getitem__) == expected


def test_a_role_that_differs_between_streams_is_refused() -> None:
    with pytest.raises(PolicyError, match="'role'"):
        Rules(16, 0).score(signals_with(role=torch.zeros(SHAPE, dtype=torch.int8)))


def test_pools_follow_the_classes() -> None:
    signals = signals_with()
    pools = PerClass(16, None, 33, 1, 1, 1, 8, 32, 16, 64).pools(signals)
    assert signals.classes is not None
    assert torch.equal(pools.arena, signals.classes)
    assert [pools.block_pages[head] for head in (Head.LOCAL, Head.GLOBAL, Head.SPECIAL, Head.DENSE)] == [8, 32, 16, 64]


@pytest.mark.parametrize(
    ("arena", "block_pages", "words"),
    [
        (torch.zeros(2, 2, dtype=torch.int8), (), "block_pages"),
        (torch.zeros(2, 2, dtype=torch.int8), (16, 0), "block_pages"),
        (torch.full((2, 2), 2, dtype=torch.int8), (16, 16), "0 to 1"),
        (torch.full((2, 2), -1, dtype=torch.int8), (16, 16), "0 to 1"),
        (torch.zeros(2, 2), (16,), "int8"),
        (torch.zeros(4, dtype=torch.int8), (16,), "int8"),
    ],
)
def test_pools_that_can_not_be_are_refused(arena: Tensor, block_pages: tuple[int, ...], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        PoolLayout(arena, block_pages)


def test_random_scores_follow_seed_and_step_alone() -> None:
    base = signals_with()
    score = Random().score(base)
    assert torch.equal(score, Random().score(base))
    assert not torch.equal(score, Random().score(replace(base, step=1)))
    assert not torch.equal(score, Random().score(replace(base, seed=12)))


@pytest.mark.parametrize(("local", "everything"), [(40, 104), (41, 105), (42, 106)])
def test_windows_keep_exactly_the_pages_that_touch_them(local: int, everything: int) -> None:
    signals = replace(signals_with(), length_tokens=PAGES * PAGE_TOKENS - 7)
    share = PerClass(local, everything, 33, 1, 1, 1, 16, 64, 32, 64).share(signals, _formats(Format.INT4))
    assert signals.classes is not None
    windows = {Head.LOCAL: local, Head.GLOBAL: everything}
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            kind = Head(int(signals.classes[layer, head]))
            window = range(signals.length_tokens - windows.get(kind, 10**9), signals.length_tokens)
            expected = [
                any(t in window for t in range(n * PAGE_TOKENS, min((n + 1) * PAGE_TOKENS, signals.length_tokens)))
                for n in range(PAGES)
            ]
            assert share.eligible[layer, head].tolist() == expected, kind
            quota = 3 * PAGE_BYTES.int4 if kind == Head.SPECIAL else float("inf")
            assert share.quota_bytes[layer, head] == quota


def test_uniform_spends_the_whole_budget_evenly() -> None:
    signals = replace(signals_with(), device_budget_bytes=full_bytes() // 2)
    quota = Uniform().share(signals, _formats(Format.COMPUTE)).quota_bytes
    fixed = 3 * PAGE_BYTES.compute + PAGES * PAGE_BYTES.metadata
    assert quota.flatten().tolist() == [full_bytes() / 2 / 6 - fixed] * 6


def test_layerwise_is_int8_first_and_int4_after() -> None:
    part = PerClassFormat("compute", "layerwise", "int4", "int8", first_layers=1)
    for kind, expected in {
        Head.LOCAL: [Format.COMPUTE] * 3,
        Head.GLOBAL: [Format.INT8, Format.INT4, Format.INT4],
        Head.SPECIAL: [Format.INT4] * 3,
        Head.DENSE: [Format.INT8] * 3,
    }.items():
        classes = torch.full((LAYERS, KV_HEADS), int(kind), dtype=torch.int8)
        chosen = part.choose(replace(signals_with(), classes=classes), torch.zeros(SHAPE))
        assert [set(layer.flatten().tolist()) for layer in chosen] == [{code} for code in expected]


def test_core_lru_ranks_by_score_then_age() -> None:
    score = (scrambled(SHAPE, 4) * 4).floor()
    rank = CoreLru("l2").rank(signals_with(), score)
    for stream_rank, stream_score in zip(rank.flatten(0, 1).tolist(), score.flatten(0, 1).tolist(), strict=True):
        leaving = sorted(range(PAGES), key=lambda n: stream_rank[n])
        assert leaving == sorted(range(PAGES), key=lambda n: (stream_score[n], n))  # noqa: B023


def test_fifo_lets_the_oldest_leave() -> None:
    rank = Fifo("dropped").rank(signals_with(), scrambled(SHAPE, 4))
    assert rank[1, 1].argsort().tolist() == list(range(PAGES))


def test_prefetch_takes_the_best_pages_that_are_away() -> None:
    score, resident = scrambled(SHAPE, 6), scrambled(SHAPE, 7) < 0.6
    signals = signals_with()
    held = replace(signals.held, tier=torch.where(scrambled(SHAPE, 8) < 0.2, int(Tier.DROPPED), 1).to(torch.int8))
    signals = replace(signals, held=held)
    fetched = NextStep(pages=2).fetch(signals, score, resident)
    away = held.alive & ~resident & ~signals.hot
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            pages = away[layer, head].nonzero().flatten().tolist()
            best = sorted(pages, key=lambda n: -float(score[layer, head, n]))[:2]  # noqa: B023
            assert fetched[layer, head].nonzero().flatten().tolist() == sorted(best)


def test_window_attention_reads_hot_pages_and_the_window() -> None:
    resident = torch.ones(SHAPE, dtype=torch.bool)
    resident[..., -5] = False
    mode = Window(window_tokens=6 * PAGE_TOKENS).modes(signals_with(), torch.zeros(SHAPE), resident, _spare(0))
    assert mode[0, 0].nonzero().flatten().tolist() == [0, *(n for n in range(PAGES - 6, PAGES) if n != PAGES - 5)]


ELASTIC = Elastic(
    core_fraction=0.25, cluster_load=0.5, background_load=1.0, skip_load=2.0, skip_fraction=0.5, prototype_share=0.1
)


def elastic_counts(load: float, spare_bytes: float, resident: bool = True) -> dict[Mode, int]:
    """Modes of one special stream of 24 pages (6 core ones, the newest), 3 hot ones among them."""
    signals = signals_with()
    signals = replace(signals, classes=torch.full((LAYERS, KV_HEADS), int(Head.SPECIAL), dtype=torch.int8))
    if load:
        signals = replace(signals, device_budget_bytes=int(full_bytes() / load))
    here = torch.full(SHAPE, resident) | signals.hot
    mode = ELASTIC.modes(signals, torch.arange(PAGES).float().expand(SHAPE), here, _spare(spare_bytes))
    streams = mode.flatten(0, 1).tolist()
    assert all(stream == streams[0] for stream in streams)
    return {kind: streams[0].count(kind) for kind in Mode}


def _spare(spare_bytes: float) -> Tensor:
    return torch.full((LAYERS, KV_HEADS), spare_bytes, dtype=torch.float64)


def _formats(fmt: Format) -> Tensor:
    return torch.full(SHAPE, int(fmt), dtype=torch.int8)


@pytest.mark.parametrize(
    ("load", "spare_pages", "resident", "exact", "cluster", "background", "skip"),
    [
        (0.0, 99, True, 24, 0, 0, 0),  # no budget: all exact
        (0.5, 99, True, 24, 0, 0, 0),
        (0.8, 99, True, 6, 17, 0, 0),  # the sink page is hot and counted below
        (0.8, 5, True, 6, 5, 12, 0),  # prototypes while bytes last
        (1.5, 99, True, 6, 8, 9, 0),  # half way up the ramp: half of 17
        (2.5, 99, True, 6, 0, 9, 8),  # the lower half of 17 skipped
        (0.8, -1, True, 6, 0, 0, 17),  # not even a background state fits
        (0.0, 99, False, 3, 21, 0, 0),  # away: prototypes, core first
        (0.0, 5, False, 3, 5, 16, 0),
    ],
)
def test_elastic_gives_up_exactness_as_the_load_grows(
    load: float, spare_pages: int, resident: bool, exact: int, cluster: int, background: int, skip: int
) -> None:
    counts = elastic_counts(
        load, spare_pages * PAGE_BYTES.prototype + PAGE_BYTES.background * (spare_pages >= 0), resident
    )
    # The hot sink page is neither core nor in the rest above the first threshold; `Policy.plan` makes it exact.
    above = load > ELASTIC.cluster_load
    expected = {Mode.EXACT: exact, Mode.CLUSTER: cluster, Mode.BACKGROUND: background, Mode.SKIP: skip + above}
    assert counts == expected


def test_elastic_leaves_local_heads_exact() -> None:
    signals = replace(signals_with(), device_budget_bytes=full_bytes() // 4)
    signals = replace(signals, classes=torch.full((LAYERS, KV_HEADS), int(Head.LOCAL), dtype=torch.int8))
    resident = scrambled(SHAPE, 1) < 0.5
    mode = ELASTIC.modes(signals, scrambled(SHAPE, 2), resident, _spare(1e9))
    assert torch.equal(mode == Mode.EXACT, resident)
    assert set(mode.unique().tolist()) == {Mode.EXACT, Mode.SKIP}


def test_elastic_load_counts_alive_pages_in_their_format() -> None:
    tier = torch.ones(SHAPE, dtype=torch.int8)
    tier[..., :4] = int(Tier.DROPPED)
    held = Plan(tier, _formats(Format.INT4), tier)
    signals = replace(signals_with(), held=held, device_budget_bytes=10_000)
    assert float(ELASTIC.load(signals)) == pytest.approx(LAYERS * KV_HEADS * (PAGES - 4) * PAGE_BYTES.int4 / 10_000)
