"""Windows that slide in steps, windows of single heads, precision by importance: against plain loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from policy_trace import KV_HEADS, LAYERS, PAGE_BYTES, PAGE_TOKENS, first_signals, scrambled
from torch import Tensor

from policies.base import Format, Head, Plan, PolicyError, Signals
from policies.budgets.per_class import PerClass
from policies.budgets.per_head import PerHead
from policies.formats.by_importance import ByImportance
from policies.formats.per_class import PerClass as PerClassFormat

BLOCKS = (16, 64, 32, 64)


def at_length(length_tokens: int, **values: Tensor) -> Signals:
    """The fixed trace's heads in a sequence of that length."""
    pages = -(-length_tokens // PAGE_TOKENS)
    held = Plan.dense(LAYERS, KV_HEADS, pages)
    hot = torch.zeros(pages, dtype=torch.bool)
    return replace(first_signals(frozenset()), length_tokens=length_tokens, held=held, hot=hot, values=values)


def formats(signals: Signals, fmt: Format) -> Tensor:
    return torch.full(signals.shape, int(fmt), dtype=torch.int8)


def touches(length_tokens: int, begin: int) -> list[bool]:
    """Which pages hold a token of [begin, length)."""
    pages = -(-length_tokens // PAGE_TOKENS)
    return [min((n + 1) * PAGE_TOKENS, length_tokens) > begin for n in range(pages)]


@pytest.mark.parametrize("steps", [1, 7, 16, 64])
def test_a_window_slides_once_in_so_many_tokens(steps: int) -> None:
    part = PerClass(40, 200, 33, steps, 2 * steps, steps, *BLOCKS)
    quotas, starts = set(), set()
    for length in range(300, 440):
        signals = at_length(length)
        share = part.share(signals, formats(signals, Format.INT8))
        assert signals.classes is not None
        slid = length // steps * steps
        begins = {Head.LOCAL: slid - 40, Head.GLOBAL: length // (2 * steps) * (2 * steps) - 200}
        for layer, head in ((layer, head) for layer in range(LAYERS) for head in range(KV_HEADS)):
            kind = Head(int(signals.classes[layer, head]))
            assert share.eligible[layer, head].tolist() == touches(length, begins.get(kind, 0)), (length, kind)
            quota = float(share.quota_bytes[layer, head])
            if kind == Head.SPECIAL:
                assert quota == math.ceil((33 + length - slid) / PAGE_TOKENS) * PAGE_BYTES.int8
                quotas.add(quota)
            else:
                assert quota == math.inf
            if kind == Head.LOCAL:
                starts.add(int(share.eligible[layer, head].int().argmax()))
    # 140 tokens: the window begins anew once in `steps`, or once a page where that is more.
    assert len(starts) == pytest.approx(140 / max(steps, PAGE_TOKENS), abs=1.5)
    assert len(quotas) == math.ceil((33 + steps - 1) / PAGE_TOKENS) - 2


@pytest.mark.parametrize("name", ["head_bracket", "retrieval_score", "window_mass", ""])
def test_a_window_is_in_tokens(name: str) -> None:
    with pytest.raises(PolicyError, match=f"PerHead.window='{name}': must be"):
        PerHead(name, 1.5, 64, 40, 1, 1, *BLOCKS)


def test_every_local_head_has_its_own_window() -> None:
    window = torch.tensor([[10.0, 1.0], [100.0, 3.0], [50.2, 0.0]])
    signals = at_length(500, head_window_w=window)
    classes = torch.full((LAYERS, KV_HEADS), int(Head.LOCAL), dtype=torch.int8)
    classes[0, 1], classes[1, 1] = int(Head.SPECIAL), int(Head.GLOBAL)
    signals = replace(signals, classes=classes)
    part = PerHead("head_window_w", 1.5, 64, 40, 1, 1, *BLOCKS)
    share = part.share(signals, formats(signals, Format.INT4))
    # 1.5 * 10 is below the least of 64; 1.5 * 100 = 150 and 1.5 * 50.2 = 75.3 are rounded up to pages; 0 = no window.
    expected = [[64, None], [160, None], [80, None]]
    for layer, head in ((layer, head) for layer in range(LAYERS) for head in range(KV_HEADS)):
        tokens = expected[layer][head]
        assert share.eligible[layer, head].tolist() == touches(500, 0 if tokens is None else 500 - tokens)
    assert float(share.quota_bytes[0, 1]) == 3 * PAGE_BYTES.int4
    assert share.quota_bytes.isinf().sum() == LAYERS * KV_HEADS - 1
    pools = part.pools(signals)
    assert torch.equal(pools.arena, classes)
    assert pools.block_pages == BLOCKS


def test_the_most_important_heads_get_the_most_bits() -> None:
    value = scrambled((4, 5), 3)
    signals = replace(at_length(64, loss=value), held=Plan.dense(4, 5, 4))
    chosen = ByImportance("loss", compute_share=0.1, int8_share=0.25).choose(signals, torch.zeros(4, 5, 4))
    order = value.flatten().argsort().tolist()
    expected = dict.fromkeys(order[:13], Format.INT4) | dict.fromkeys(order[13:18], Format.INT8)
    expected |= dict.fromkeys(order[18:], Format.COMPUTE)
    for head, stream in enumerate(chosen.flatten(0, 1).tolist()):
        assert stream == [expected[head]] * 4


def test_shares_of_more_than_all_heads_are_refused() -> None:
    with pytest.raises(PolicyError, match="at most 1 together"):
        ByImportance("loss", 0.6, 0.5)


def test_layerwise_int8_is_exact_first_and_int8_after() -> None:
    part = PerClassFormat("layerwise_int8", "layerwise", "int4", "compute", first_layers=2)
    signals = at_length(64)
    for kind, expected in {
        Head.LOCAL: [Format.COMPUTE, Format.COMPUTE, Format.INT8],
        Head.GLOBAL: [Format.INT8, Format.INT8, Format.INT4],
    }.items():
        classes = torch.full((LAYERS, KV_HEADS), int(kind), dtype=torch.int8)
        chosen = part.choose(replace(signals, classes=classes), torch.zeros(signals.shape))
        assert [set(layer.flatten().tolist()) for layer in chosen] == [{code} for code in expected]
