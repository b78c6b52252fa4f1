"""What classifiers say of heads, against cases worked out by hand and plain loops."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from policy_trace import KV_HEADS, LAYERS, first_signals, scrambled
from scipy.stats import rankdata
from torch import Tensor

from policies.base import Head, Plan, PolicyError, Signals
from policies.classifiers.bracket import Bracket
from policies.classifiers.by_measure import ByMeasure
from policies.classifiers.by_measures import ByMeasures
from policies.classifiers.coverage import Coverage
from policies.classifiers.described import Described
from policies.classifiers.random import Random
from policies.classifiers.stride import Stride

LOCAL, SPECIAL, GLOBAL, DENSE = Head.LOCAL, Head.SPECIAL, Head.GLOBAL, Head.DENSE
SIX = torch.tensor([[0.9, 0.1], [0.5, 0.1], [0.0, 0.7]])


def signals_with(**values: Tensor) -> Signals:
    """The fixed trace's first moment with these measures."""
    return replace(first_signals(frozenset()), values=values)


def of_shape(layers: int, kv_heads: int, seed: int = 0) -> Signals:
    """A model of another shape, nothing measured."""
    return replace(signals_with(), held=Plan.dense(layers, kv_heads, 4), seed=seed)


def counts(classes: Tensor) -> list[int]:
    """Heads of each class, in the order of the codes."""
    return [int((classes == head).sum()) for head in Head]


def test_a_measure_cuts_the_ranking_of_heads_at_the_quantiles() -> None:
    classes = ByMeasure("m", local_quantile=0.5, global_quantile=0.8, local_end="low").classify(signals_with(m=SIX))
    # Ascending: .0, .1, .1 local; .5, .7 special; .9 (place 5 = round(.8 * 6)) global.
    assert classes.tolist() == [[GLOBAL, LOCAL], [SPECIAL, LOCAL], [LOCAL, SPECIAL]]


def test_high_values_may_be_the_local_ones() -> None:
    classes = ByMeasure("m", 0.5, 0.8, "high").classify(signals_with(m=SIX))
    # Descending: .9, .7, .5 local; the two of .1, first layer first, special; .0 global.
    assert classes.tolist() == [[LOCAL, SPECIAL], [LOCAL, SPECIAL], [GLOBAL, LOCAL]]


@pytest.mark.parametrize("end", ["low", "high"])
def test_equal_heads_fall_in_the_order_of_layer_and_head(end: str) -> None:
    classes = ByMeasure("m", 0.5, 1.0, end).classify(signals_with(m=torch.zeros(LAYERS, KV_HEADS)))
    assert classes.flatten().tolist() == [LOCAL] * 3 + [SPECIAL] * 3


@pytest.mark.parametrize("combine", ["value", "rank"])
def test_the_larger_of_two_measures_decides(combine: str) -> None:
    shift, edge = scrambled((6, 5), 1) * 0.01, (scrambled((6, 5), 2) * 8).floor()
    held = Plan.dense(6, 5, 4)
    signals = replace(signals_with(shift=shift, edge=edge), held=held)
    classes = ByMeasures(["shift", "edge"], combine, 0.6, 0.8).classify(signals)
    each = [measure.flatten().numpy() for measure in (shift, edge)]
    if combine == "rank":
        each = [rankdata(one, "min") for one in each]
    order = np.argsort(np.maximum(*each), kind="stable")
    expected = np.empty(30, dtype=np.int64)
    expected[order[:18]], expected[order[18:24]], expected[order[24:]] = LOCAL, SPECIAL, GLOBAL
    assert classes.flatten().tolist() == expected.tolist()


def test_random_heads_keep_the_proportions_and_follow_the_seed() -> None:
    part = Random(0.5, 0.8, "heads")
    maps = [part.classify(replace(signals_with(), seed=seed)) for seed in range(20)]
    for classes in maps:
        assert counts(classes) == [3, 1, 2, 0]
    assert len({tuple(classes.flatten().tolist()) for classes in maps}) > 10


def test_uniform_gives_every_layer_the_same() -> None:
    maps = [Random(0.75, 0.85, "layers").classify(of_shape(30, 3, seed)) for seed in range(20)]
    totals = counts(Random(0.75, 0.85, "heads").classify(of_shape(30, 3)))
    for classes in maps:
        assert counts(classes) == totals
        for head in (LOCAL, SPECIAL, GLOBAL):
            each = (classes == head).sum(1)
            assert int(each.max() - each.min()) <= 1
    assert len({tuple(classes.flatten().tolist()) for classes in maps}) == 20
    first = torch.stack([classes[:, 0] != LOCAL for classes in maps]).float().mean()
    assert 0.1 < float(first) < 0.4  # no place inside a layer is preferred


def test_stride_is_the_shipped_parity_map() -> None:
    classes = Stride(251 / 256, 251 / 256).classify(of_shape(32, 8))
    assert (classes == GLOBAL).nonzero().tolist() == [[0, 0], [6, 3], [12, 6], [19, 2], [25, 5]]
    assert counts(classes) == [251, 5, 0, 0]
    assert counts(Stride(0.75, 0.85).classify(of_shape(30, 3))) == counts(
        Random(0.75, 0.85, "heads").classify(of_shape(30, 3))
    )


def test_described_follows_its_description() -> None:
    local = torch.tensor([[0.71, 0.7], [0.2, 0.2], [0.9, 0.0]])
    far = torch.tensor([[0.9, 0.51], [0.5, 0.6], [0.0, 0.0]])
    classes = Described("near", 0.7, "far", 0.5).classify(signals_with(near=local, far=far))
    assert classes.tolist() == [[LOCAL, GLOBAL], [SPECIAL, GLOBAL], [LOCAL, SPECIAL]]


def test_coverage_is_dense_first_then_global_where_half_the_context_is_not_enough() -> None:
    window = torch.tensor([[100.0, 2000.0], [1023.0, 1024.0], [0.0, 2048.0]])
    classes = Coverage("window", longest_tokens=2048, global_share=0.5, dense_layers=1).classify(
        signals_with(window=window)
    )
    assert classes.tolist() == [[DENSE, DENSE], [LOCAL, GLOBAL], [LOCAL, GLOBAL]]


def test_bracket_heads_that_would_be_local_are_special() -> None:
    bracket = torch.tensor([[0.8, 0.3], [0.0, 0.2], [0.29, 0.9]])
    signals = signals_with(retrieval_score=SIX, head_bracket=bracket)
    classes = Bracket(bracket_score=0.3, local_quantile=0.5, global_quantile=0.8).classify(signals)
    # By retrieval [[G, L], [S, L], [L, S]]; of the local ones only (0, 1) matches brackets.
    assert classes.tolist() == [[GLOBAL, SPECIAL], [SPECIAL, LOCAL], [LOCAL, SPECIAL]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ByMeasure("m", 0.8, 0.5, "low"), "local_quantile"),
        (lambda: ByMeasures(["m"], "rank", 0.5, 0.8), "measures"),
        (lambda: ByMeasures("shift", "rank", 0.5, 0.8), "measures"),
    ],
)
def test_what_can_not_be_is_refused(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(PolicyError, match=words):
        make()


def test_controls_of_all_seeds_and_quantiles_add_up() -> None:
    for low, high in ((0.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.33, 0.34)):
        every = [
            Random(low, high, "heads").classify(of_shape(5, 3)),
            Random(low, high, "layers").classify(of_shape(5, 3)),
            Stride(low, high).classify(of_shape(5, 3)),
            ByMeasure("m", low, high, "low").classify(replace(of_shape(5, 3), values={"m": scrambled((5, 3), 1)})),
        ]
        assert len(Counter(tuple(counts(classes)) for classes in every)) == 1, (low, high)
