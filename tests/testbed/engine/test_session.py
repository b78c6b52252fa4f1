"""Sessions on tiny models: `full` equals Hugging Face, every policy acts, repeats itself and keeps its budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import CACHE, MODELS, WINDOW, Run, decode, decoder, text, truth
from torch import Tensor

from policies.base import Head, PolicyError, Tier
from testbed.compose import compose_policy
from testbed.decisions import DecisionLog, diff
from testbed.engine.prefill import ContextError
from testbed.engine.session import Session

POLICIES = sorted(path.stem for path in Path("conf/policy").glob("*.yaml")) + ["redknot+elastic"]
ACTING = [name for name in POLICIES if name != "full"]
CONTEXT, TURN, ANSWER = 300, 20, 12
# redknot's windows are longer than a context of this suite, and its pools grow by more pages than a stream has.
BLOCKS = [f"policy.budget.{head.name.lower()}_block_pages=4" for head in Head]
SHORT = {"redknot": ["policy.budget.local_tokens=64", "policy.budget.special_tokens=128", *BLOCKS]}
BF16 = {"dtype": "bfloat16"}


def begin(name: str, fraction: float | None = 0.5, seed: int = 0, context: int = CONTEXT, **changes: object) -> Session:
    overrides = [x for part in name.split("+") for x in SHORT.get(part, [])]
    return Run(fraction=fraction, seed=seed, cache=BF16 | changes).start(compose_policy(name, overrides), text(context))


def go_on(session: Session, seed: int = 1) -> Tensor:
    """A turn and an answer: logits [TURN + ANSWER, V]."""
    turn = session.extend(text(TURN, seed), "all")
    assert turn is not None
    return torch.cat((turn, decode(session, text(ANSWER, seed + 1))))


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_full_cache_equals_hugging_face(kind: str, kernel: str) -> None:
    tokens = text(150 + 45 + 25)
    assert len(tokens) > WINDOW
    session = Run(kind, kernel=kernel).start(compose_policy("full"), tokens[:150])
    # Longer than the hot window of 32, so that it is run in parts.
    turn = session.extend(tokens[150:195], "all")
    assert turn is not None
    ours = torch.cat((turn, decode(session, tokens[195:])))
    expected = truth(kind, tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours, expected[150:], atol=1e-4, rtol=0)


def test_window_is_seen_at_all() -> None:
    """The mistral case proves something only if its window changes the result."""
    tokens = text(150)
    inside = truth("mistral", tokens)[-1]
    session = Run("mistral").start(compose_policy("full"), text(3, seed=9) + tokens[3:149])
    torch.testing.assert_close(session.step(tokens[149]), inside, atol=1e-4, rtol=0)  # 146 tokens ago: out of sight
    session = Run("mistral").start(compose_policy("full"), tokens[:146] + text(3, seed=9))
    assert (session.step(tokens[149]) - inside).abs().max() > 1e-2


def test_prefill_in_any_chunks_is_the_same() -> None:
    logits = [
        Run(chunk_tokens=chunk).start(compose_policy("full"), text(150)).step(7) for chunk in (1, 16, 37, 149, 512)
    ]
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], atol=1e-4, rtol=0)


def test_a_session_may_end_on_any_token() -> None:
    tokens = text(70)
    expected = truth("llama", tokens)
    for length in (1, 15, 16, 17, 48, 64, 65):
        session = Run().start(compose_policy("full"), tokens[:length])
        ours = decode(session, tokens[length : length + 4])
        torch.testing.assert_close(ours, expected[length : length + 4], atol=1e-4, rtol=0)


def test_extend_in_one_call_equals_token_by_token() -> None:
    one = Run().start(compose_policy("full"), text(100))
    several, steps = one.fork(), one.fork()
    turn = text(40, seed=3)
    at_once = one.extend(turn, "all")
    assert at_once is not None
    each = [several.extend([token], "last") for token in turn]
    assert all(x is not None for x in each)
    torch.testing.assert_close(at_once, torch.cat([x for x in each if x is not None]), atol=1e-4, rtol=0)
    torch.testing.assert_close(at_once, decode(steps, turn), atol=1e-4, rtol=0)
    torch.testing.assert_close(one.step(5), steps.step(5), atol=1e-4, rtol=0)


def test_last_logits_are_the_last_of_all() -> None:
    session = Run().start(compose_policy("full"), text(100))
    other = session.fork()
    every, last = session.extend(text(40, seed=3), "all"), other.extend(text(40, seed=3), "last")
    assert every is not None
    assert last is not None
    assert last.shape == (1, every.shape[1])
    torch.testing.assert_close(every[-1], last[0], atol=1e-4, rtol=0)
    assert session.extend([1], "none") is None


@pytest.mark.parametrize("name", POLICIES)
def test_same_seed_same_bits_same_decisions(name: str) -> None:
    first, second = begin(name), begin(name)
    assert torch.equal(go_on(first), go_on(second))
    assert diff(first.log(), second.log()) is None
    assert len(first.log().decode) == ANSWER


def test_seed_reaches_policies_that_draw() -> None:
    first, second = begin("random", seed=0), begin("random", seed=1)
    assert diff(first.log(), second.log()) is not None


@pytest.mark.parametrize("name", POLICIES)
def test_fork_goes_on_as_its_origin_would_have(name: str) -> None:
    session = begin(name)
    session.extend(text(TURN, 1))
    alone = session.fork()
    disturber = session.fork()
    assert not torch.equal(go_on(disturber, seed=50), go_on(alone, seed=20))
    disturber.close()
    straight = begin(name)
    straight.extend(text(TURN, 1))
    assert torch.equal(go_on(session, seed=20), go_on(straight, seed=20))
    assert diff(session.log(), straight.log()) is None
    assert diff(alone.log(), straight.log()) is None


@pytest.mark.parametrize("fraction", [0.33, 0.6])
@pytest.mark.parametrize("name", ACTING)
def test_budget_is_kept_at_every_step(name: str, fraction: float) -> None:
    if name == "redknot-small":  # three formats in three arenas: in so small a model their slack alone is that much
        fraction = max(fraction, 0.45)
    session = begin(name, fraction)
    seen = []

    def check() -> None:
        # K and V in bf16 of 3 layers, 2 KV heads, 16 channels.
        budget = int(fraction * session.cache.length_tokens * 2 * 2 * 3 * 2 * 16)
        used = session.cache.ledger().used_bytes
        # Slots that pages have left are named apart: they are free once the copies are done.
        planned = sum(count for name, count in used.items() if name[:2] in ("L0", "L1") and name != "L1/in_flight")
        assert planned <= budget
        seen.append(planned / budget)

    check()
    for part in (text(TURN, 1), text(3, 2)):
        session.extend(part)
        check()
    for token in text(18, 3):  # more than a page
        session.step(token)
        check()
    assert max(seen) > 0.4  # and the bytes granted are used


@pytest.mark.parametrize("name", ACTING)
def test_policy_does_something(name: str) -> None:
    session, full = begin(name), begin("full", None)
    logits, exact = go_on(session), go_on(full)
    assert not torch.equal(logits, exact)
    steps = session.log().steps
    moved = sum(move.pages for step in steps for move in step.moves)
    assert moved > 0
    assert session.cache.ledger().used_device_bytes < full.cache.ledger().used_device_bytes
    if "redknot" in name:
        assert session.classes is not None
        assert {Head(int(x)) for x in session.classes.unique()} == {Head.LOCAL, Head.SPECIAL, Head.GLOBAL}


def test_full_cache_moves_nothing() -> None:
    session = begin("full", None)
    go_on(session)
    last = session.log().steps[-1]
    hot = {"L0", "L1"}
    assert all({move.source, move.target} <= hot for step in session.log().steps for move in step.moves)
    assert last.pages["exact"] == session.cache.streams * session.cache.pages
    assert sum(count for mode, count in last.pages.items() if mode != "exact") == 0


def test_no_limit_and_the_whole_budget_are_the_same_for_an_eviction_policy() -> None:
    """With a budget that holds everything, an exact policy is the full cache, bit for bit."""
    whole = begin("streaming", None)
    assert torch.equal(go_on(whole), go_on(begin("full", None)))


def test_budget_too_small_for_sinks_and_window() -> None:
    with pytest.raises(PolicyError, match=r"budget of \d+ bytes can't hold sinks, recent window.*budget.fraction"):
        begin("streaming", 0.1)


def test_context_beyond_the_model_is_refused_before_and_in_a_session() -> None:
    with pytest.raises(ContextError, match="641 tokens .*limit of 640"):
        begin("full", None, context=641)
    session = begin("full", None, context=638)
    with pytest.raises(ContextError, match="limit of 640"):
        session.extend([1, 2, 3])
    session.extend([1, 2])


@pytest.mark.parametrize("victim", ["l2", "l3"])
def test_pages_in_host_memory_or_file_give_the_same_text(victim: str, tmp_path: Path) -> None:
    overrides = [f"policy.eviction.victim={victim}"]
    run = Run(fraction=0.35, cache=BF16 | {"l3_path": str(tmp_path)})
    session = run.start(compose_policy("quest", overrides), text(CONTEXT))
    reference = Run(fraction=0.35, cache=BF16).start(compose_policy("quest"), text(CONTEXT))
    assert torch.equal(go_on(session), go_on(reference))
    away = int((session.cache.state["tier"] == Tier[victim.upper()]).sum())
    assert away > 0
    assert _promotions(session.log()) > 0
    assert session.cache.ledger().held_bytes[victim.upper()] > 0
    assert not list(tmp_path.iterdir())  # the page file has no name, so that it ends with the run whatever ends it
    session.close()
    assert not list(tmp_path.iterdir())


def _promotions(log: DecisionLog) -> int:
    return sum(move.pages for step in log.steps for move in step.moves if move.source in ("L2", "L3"))


def test_cold_start_is_the_full_cache_until_it_ends() -> None:
    policy = compose_policy("elastic", ["policy.every_steps=1"])
    assert policy.cold_start_tokens == 100
    short = Run(fraction=0.8, cache=BF16).start(policy, text(70))
    full = Run(cache=BF16).start(compose_policy("full"), text(70))
    ours, exact = decode(short, text(60, 4)), decode(full, text(60, 4))
    before = 100 - 70 - 1  # the plan of the step that makes it 100 tokens is the first real one
    assert torch.equal(ours[:before], exact[:before])
    assert not torch.equal(ours[before], exact[before])
    dense = [all(step.pages[mode] == 0 for mode in step.pages if mode != "exact") for step in short.log().decode]
    assert all(dense[:before])
    assert not all(dense[before:])


def test_plans_come_every_k_steps_and_at_each_new_page() -> None:
    policy = compose_policy("streaming", ["policy.every_steps=6"])
    session = Run(fraction=0.5, cache=BF16).start(policy, text(CONTEXT))
    decode(session, text(40, 2))
    planned = {step.step - 1 for step in session.log().decode if step.planned}  # a step is logged once it is done
    expected, last = set(), -1  # the context's own plan is the first
    for step in range(40):
        if step - last == 6 or (CONTEXT + step) % 16 == 0:
            expected.add(step)
            last = step
    assert planned == expected


def test_log_counts_what_the_cache_holds() -> None:
    session = begin("redknot+elastic")
    go_on(session)
    log, last = session.log(), session.log().steps[-1]
    assert [step.length_tokens for step in log.steps] == [
        CONTEXT,
        CONTEXT + TURN,
        *range(CONTEXT + TURN + 1, CONTEXT + TURN + ANSWER + 1),
    ]
    session.cache.settle()  # the log is of the plan, the ledger of what is still held too
    assert dict(last.held_bytes) == session.cache.ledger().held_bytes
    assert sum(last.pages.values()) == session.cache.streams * session.cache.pages
    geometry = decoder().geometry
    assert log.header.full_bytes_per_token == 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * 2
    assert session.full_bytes(10) == 10 * log.header.full_bytes_per_token
    assert len(session.times) == ANSWER
    assert all(0.0 <= time.plan_s <= time.total_s for time in session.times)
    assert CACHE["hot_tokens"] >= TURN  # or the turn would be logged in parts
