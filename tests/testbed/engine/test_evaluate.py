"""Answers, forced texts and their comparison; sampling from known distributions."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import VOCAB, Run, decoder, text, truth

from testbed.compose import compose_policy
from testbed.engine.evaluate import agreement, answer, force, generate
from testbed.engine.sample import greedy, sampled

CONTEXT = text(90)
FULL = compose_policy("full")


def greedy_truth(tokens: list[int], steps: int) -> list[int]:
    """Greedy decoding by transformers alone, the whole text again at each step."""
    out: list[int] = []
    for _ in range(steps):
        out.append(int(truth("llama", tokens + out)[-1].argmax()))
    return out


@pytest.mark.parametrize("question", [text(6, 2), text(1, 2)])
def test_greedy_answer_and_distributions_are_those_of_transformers(question: list[int]) -> None:
    right = greedy_truth(CONTEXT + question, 5)
    # Once the continuation is what greedy decoding says, once another text that has to be forced.
    for continuation in (right, text(5, 8)):
        got = answer(Run().start(FULL, CONTEXT), question, continuation, max_new_tokens=5)
        assert got.tokens == right
        expected = truth("llama", CONTEXT + question + continuation).log_softmax(-1)
        torch.testing.assert_close(got.logprobs, expected[len(CONTEXT) : -1], atol=1e-4, rtol=0)
        assert len(got.times) == 5  # the last question token and all but the last answer token
        assert got.full_bytes == 2 * 3 * 2 * 16 * 2 * (len(CONTEXT) + len(question) + 4)


def test_text_without_a_question() -> None:
    continuation = text(9, 3)
    got = answer(Run().start(FULL, CONTEXT), [], continuation, max_new_tokens=9, wants_answer=False)
    expected = truth("llama", CONTEXT + continuation).log_softmax(-1)
    torch.testing.assert_close(got.logprobs, expected[len(CONTEXT) : -1], atol=1e-4, rtol=0)
    assert got.tokens == []


def test_generation_ends_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    question = text(6, 2)
    right = greedy_truth(CONTEXT + question, 4)
    monkeypatch.setattr(type(decoder()), "eos_ids", frozenset({right[2]}))
    tokens, logits = generate(Run().start(FULL, CONTEXT), question, 10)
    assert tokens == right[: right.index(right[2])]
    assert len(logits) == len(question) + len(tokens)


def test_force_runs_all_but_the_last_token() -> None:
    session = Run().start(FULL, CONTEXT)
    logits = force(session, text(4, 2), text(5, 3))
    assert logits.shape == (8, VOCAB)
    assert session.cache.length_tokens == len(CONTEXT) + 8


def test_agreement_in_closed_form() -> None:
    full = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    policy = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    got = agreement(policy, full)
    assert got.kl == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2)
    assert (got.top1, got.positions, got.identical) == (0.5, 2, False)
    # The full cache is the truth: the other way round the divergence is another one.
    skewed = torch.tensor([[0.9, 0.05, 0.05], [0.1, 0.8, 0.1]]).log()
    expected = (0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.25 / 0.05)) / 2
    assert agreement(skewed, full).kl == pytest.approx(expected)
    same = agreement(full, full.clone())
    assert (same.kl, same.top1, same.identical) == (0.0, 1.0, True)


def test_sampled_tokens_follow_the_distribution() -> None:
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    draws, temperature = 4_000, 2.0
    sampler = sampled(temperature, seed=1)
    logits = p.log() * temperature
    counts = torch.bincount(torch.tensor([sampler(logits) for _ in range(draws)]), minlength=4)
    sigma = (draws * p * (1 - p)).sqrt()
    assert bool(((counts - draws * p).abs() < 4 * sigma).all()), counts


def test_nucleus_is_the_smallest_set_with_the_mass() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    for top_p, allowed in ((0.39, {1}), (0.41, {1, 3}), (0.71, {1, 2, 3}), (1.0, {0, 1, 2, 3})):
        sampler = sampled(1.0, top_p, seed=2)
        assert {sampler(logits) for _ in range(400)} == allowed


def test_sampling_is_seeded() -> None:
    question = text(6, 2)
    texts = [generate(Run().start(FULL, CONTEXT), question, 12, sampled(1.5, seed=seed))[0] for seed in (3, 3, 4)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    cold = generate(Run().start(FULL, CONTEXT), question, 5, sampled(1e-4, seed=5))[0]
    assert cold == greedy_truth(CONTEXT + question, 5)
    assert greedy(torch.tensor([0.0, 2.0, 2.0])) == 1


@pytest.mark.parametrize(
    ("temperature", "top_p", "said"),
    [(0.0, 1.0, "temperature=0.0"), (-1.0, 1.0, "temperature"), (math.nan, 1.0, "temperature=nan")]
    + [(math.inf, 1.0, "temperature=inf"), (1.0, 0.0, "top_p=0.0"), (1.0, 1.1, "top_p=1.1"), (1.0, math.nan, "top_p")],
)
def test_bad_sampling(temperature: float, top_p: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sampled(temperature, top_p)


def test_a_token_that_both_rule_out_adds_nothing_to_kl() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    logits[:, 2] = -torch.inf
    same = logits.log_softmax(-1)
    assert agreement(same, same).kl == 0.0
