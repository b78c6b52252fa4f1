"""Signals against the attention that transformers itself computes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiny import Run, decode, decoder, hugging_face, measures, text
from torch import Tensor

from policies.base import Phase
from testbed.compose import compose_policy
from testbed.engine.session import Session
from testbed.engine.signals import SignalContext, build_sources
from testbed.engine.signals.base import SignalError

CONTEXT, STEPS, PAGE = 150, 6, 16
TOKENS = text(CONTEXT + STEPS)
PAGES = -(-(CONTEXT + STEPS) // PAGE)


@cache
def attention() -> Tensor:
    """[L, Hk, T, T] mean over the query group, of the whole text."""
    with torch.no_grad():
        rows = hugging_face("llama")(input_ids=torch.tensor([TOKENS]), output_attentions=True).attentions
    return torch.stack([layer[0].unflatten(0, (2, 3)).mean(1) for layer in rows])


def by_page(queries: slice, pages: int = PAGES) -> Tensor:
    """[L, Hk, N] sum over some queries of the mass on each page."""
    mass = attention()[:, :, queries].sum(2)
    mass = torch.nn.functional.pad(mass, (0, PAGES * PAGE - mass.shape[-1]))
    return mass.unflatten(-1, (PAGES, PAGE)).sum(-1)[..., :pages]


def session(predictor: str) -> Session:
    return Run().start(compose_policy("full", [f"policy/predictor={predictor}"]), TOKENS[:CONTEXT])


def value(at: Session, name: str) -> Tensor:
    return at._signals(Phase.DECODE, 0)[name]


def test_mass_of_the_last_queries() -> None:
    at = session("snapkv")
    torch.testing.assert_close(value(at, "window_mass"), by_page(slice(CONTEXT - 64, CONTEXT), 10), atol=1e-4, rtol=0)
    decode(at, TOKENS[CONTEXT:])
    assert at.cache.pages == 10
    decode(at, text(8, 1))
    torch.testing.assert_close(
        value(at, "window_mass")[..., :10], by_page(slice(CONTEXT - 64, CONTEXT), 10), atol=1e-4, rtol=0
    )
    assert bool((value(at, "window_mass")[..., 10:] == -1.0).all())


def test_mass_of_all_queries() -> None:
    at = session("h2o")
    torch.testing.assert_close(value(at, "attention_mass"), by_page(slice(0, CONTEXT), 10), atol=1e-3, rtol=0)
    decode(at, TOKENS[CONTEXT : CONTEXT + 2])
    at.extend(TOKENS[CONTEXT + 2 :])
    torch.testing.assert_close(value(at, "attention_mass"), by_page(slice(0, CONTEXT + STEPS)), atol=1e-3, rtol=0)


def test_mass_of_the_last_step() -> None:
    at = session("tova")
    torch.testing.assert_close(value(at, "last_mass"), by_page(slice(CONTEXT - 1, CONTEXT), 10), atol=1e-4, rtol=0)
    decode(at, TOKENS[CONTEXT:])
    torch.testing.assert_close(value(at, "last_mass"), by_page(slice(CONTEXT + STEPS - 1, None)), atol=1e-4, rtol=0)


def test_moving_average() -> None:
    at = session("attention_ema")
    expected = by_page(slice(CONTEXT - 64, CONTEXT)) / 64
    for step in range(STEPS):
        torch.testing.assert_close(value(at, "attention_ema"), expected[..., : at.cache.pages], atol=1e-4, rtol=0)
        decode(at, [TOKENS[CONTEXT + step]])
        expected = 0.9 * expected + 0.1 * by_page(slice(CONTEXT + step, CONTEXT + step + 1))
    torch.testing.assert_close(value(at, "attention_ema"), expected, atol=1e-4, rtol=0)


def test_last_access() -> None:
    at = Run().start(compose_policy("full", ["policy/eviction=lru"]), TOKENS[:CONTEXT])
    assert bool((value(at, "last_access") == -1.0).all())
    expected = torch.full((3, 2, PAGES), -1.0)
    for step in range(STEPS):
        decode(at, [TOKENS[CONTEXT + step]])
        expected[by_page(slice(CONTEXT + step, CONTEXT + step + 1)) > 1.0 / PAGES] = float(step)
    assert torch.equal(value(at, "last_access"), expected)
    assert len(expected.unique()) > 3


def test_query_bound_is_that_of_the_newest_query() -> None:
    at = session("quest")
    decode(at, TOKENS[CONTEXT:])
    seen: list[Tensor] = []  # per layer [Hk, N]
    best: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q[0].unflatten(0, (2, 3))
        newest = grouped[:, :, -1].unsqueeze(2)  # [Hk, G, 1, D]
        pages = k[0].split(PAGE, dim=1)
        low, high = (torch.stack([getattr(p, end)(1) for p in pages], 1).unsqueeze(1) for end in ("amin", "amax"))
        seen.append(torch.maximum(newest * low, newest * high).sum(-1).amax(1))
        best.append(torch.stack([(newest @ p.unsqueeze(1).mT).amax((1, 2, 3)) for p in pages], 1))
        scores = (grouped @ k[0].unsqueeze(1).mT) * decoder().geometry.scale[layer]
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[0].unsqueeze(1)).flatten(0, 1).unsqueeze(0)

    ids = torch.tensor([TOKENS])
    decoder().forward(ids, torch.arange(len(TOKENS)).unsqueeze(0), attend, "none")
    torch.testing.assert_close(value(at, "query_bound"), torch.stack(seen), atol=1e-3, rtol=1e-4)
    assert bool((value(at, "query_bound") >= torch.stack(best) - 1e-3).all())


def test_retrieval_finds_the_page_with_the_words_asked_for() -> None:
    tokens = [token % 40 for token in text(CONTEXT)]
    tokens[70:73] = [90, 91, 92]
    at = Run().start(compose_policy("full", ["policy/predictor=bm25"]), tokens)
    assert bool((value(at, "retrieval") == 0.0).all())  # no turn yet
    at.extend([90, 91, 92])
    scores = value(at, "retrieval")
    assert set(scores[..., :9].argmax(-1).flatten().tolist()) == {70 // PAGE}


def test_head_measures_come_from_the_context() -> None:
    at = Run().start(compose_policy("full", ["policy/classifier=retrieval"]), TOKENS[:CONTEXT])
    assert torch.equal(value(at, "retrieval_score"), measures()["retrieval_score"])


def test_bad_signals_are_named() -> None:
    context = SignalContext(PAGE, lambda: {"other": torch.zeros(3, 2)})
    with pytest.raises(SignalError, match=r"unknown signal 'loudness'; known: attention_ema"):
        build_sources(frozenset({"loudness"}), context)
    with pytest.raises(SignalError, match=r"no measure 'retrieval_score'; it has other"):
        build_sources(frozenset({"retrieval_score"}), context)
    with pytest.raises(SignalError, match=r"unknown key 'signals.attention_ema.deday'; there are: decay"):
        build_sources(frozenset({"attention_ema"}), context, {"attention_ema": {"deday": 0.5}})
    wrong = SignalContext(PAGE, lambda: {"retrieval_score": torch.zeros(4, 2)})
    source = build_sources(frozenset({"retrieval_score"}), wrong)["retrieval_score"]
    at = session("age")
    at.sources = {"retrieval_score": source}
    with pytest.raises(SignalError, match=r"for \(4, 2\) layers x KV heads, the model has \(3, 2\)"):
        at.signal("retrieval_score")
