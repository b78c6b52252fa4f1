"""One question to one session: the greedy answer, and the next-token distributions along a fixed text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from policies.base import Role, Tier
from testbed.cache.ledger import Ledger
from testbed.cache.paged import PagedCache
from testbed.cache.traffic import Traffic
from testbed.decisions import DecisionLog
from testbed.engine.divergence import kl_nats
from testbed.engine.guard import Probe
from testbed.engine.reclassify import HeadChange
from testbed.engine.sample import Sampler, greedy
from testbed.engine.session import Session, StepTime
from testbed.workloads.base import Turn


@dataclass(frozen=True)
class Answer:
    """What a session made of a question.

    Attributes:
        tokens: generated, end-of-text left out.
        logprobs: [M, V] log-probabilities (nats) after each token of the fixed text (question, then continuation).
        times: of the decode steps of the generation.
        turn_times: of the runs that took in the question.
        log: all decisions, those of the history too.
        device_bytes, total_bytes, full_bytes: held on the device, held in all tiers, and bf16 for everything, when
            the answer was complete.
        bytes: the ledger then, by tier and format.
        held: what the allocators held then, by tier, slack included; `total_bytes` is their sum.
        pages: pages then, by tier and format; "dropped": those that are in no tier any more.
        arenas: use of the device's pools then, see `Pools.arenas`.
        traffic: what moved between tiers for question and answer, and what waited.
        history_traffic: the same of the turns before the question.
        first_step: index of the question's first step in the log.
        kernels: variant of the attention kernel -> calls, in all layers of all steps.
        probes: what the quality guard saw and did, history included.
        guard_bytes: what its reference held.
        changes: heads that changed their class while decoding, history included.
    """

    tokens: list[int]
    logprobs: Tensor
    times: list[StepTime]
    turn_times: list[StepTime]
    log: DecisionLog
    device_bytes: int
    total_bytes: int
    full_bytes: int
    bytes: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    pages: dict[str, int] = field(default_factory=dict)
    arenas: dict[str, dict[str, int]] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    history_traffic: Traffic = field(default_factory=Traffic)
    first_step: int = 0
    kernels: dict[str, int] = field(default_factory=dict)
    probes: tuple[Probe, ...] = ()
    guard_bytes: int = 0
    changes: tuple[HeadChange, ...] = ()


@torch.inference_mode()
def generate(
    session: Session, turn: Sequence[int], max_new_tokens: int, sampler: Sampler = greedy
) -> tuple[list[int], Tensor]:
    """Takes a turn and decodes until the end of text or `max_new_tokens`.

    Returns:
        The new tokens, and the logits [len(turn) + steps - 1, V] after each token that was run.
    """
    logits = [] if len(turn) == 1 else [_all(session, turn[:-1])]
    logits.append(session.step(turn[-1], Role.USER).unsqueeze(0))
    tokens: list[int] = []
    for index in range(max_new_tokens):
        token = sampler(logits[-1][-1])
        if token in session.decoder.eos_ids:
            break
        tokens.append(token)
        if index + 1 < max_new_tokens:
            logits.append(session.step(token).unsqueeze(0))
    return tokens, torch.cat(logits)


@torch.inference_mode()
def force(session: Session, turn: Sequence[int], continuation: Sequence[int]) -> Tensor:
    """Runs a fixed text step by step: logits [len(turn) + len(continuation) - 1, V] before the text's last token.

    The last token is not run: what follows the text is nobody's answer.
    """
    logits = [] if len(turn) == 1 else [_all(session, turn[:-1])]
    logits.append(session.step(turn[-1], Role.USER).unsqueeze(0))
    logits += [session.step(token).unsqueeze(0) for token in continuation[:-1]]
    return torch.cat(logits)


def _all(session: Session, tokens: Sequence[int]) -> Tensor:
    logits = session.extend(tokens, "all")
    assert logits is not None
    return logits


def say(session: Session, history: Sequence[Turn]) -> None:
    """Takes the turns of a conversation; where it pauses the session is parked."""
    for turn in history:
        session.extend(turn.tokens, role=turn.role)
        if turn.pause:
            session.park()


def answer(
    session: Session,
    question: Sequence[int],
    continuation: Sequence[int],
    max_new_tokens: int,
    wants_answer: bool = True,
    history: Sequence[Turn] = (),
) -> Answer:
    """Asks one question of a session, after the turns before it; the session is used up by it.

    The greedy answer also gives the distributions along question and continuation where the two agree; where they
    do not, the fixed text is run in a fork, step by step as in decoding.
    """
    turn = list(question) or list(continuation[:1])
    rest = list(continuation) if question else list(continuation[1:])
    say(session, history)
    if history:
        session.cache.settle()  # moves under way are the history's, and nobody asks before they are done
    # The spare's pages must not count against the limits of the one that is measured, nor its making as a wait.
    spare = session.fork(own_pools=True) if wants_answer else None
    steps, turns, first_step = len(session.times), len(session.turn_times), len(session.story.steps)
    before = Traffic.merge([session.cache.traffic])
    if spare is not None:
        tokens, logits = generate(session, turn, max_new_tokens)
        if rest and tokens[: len(rest)] != rest:
            logits = force(spare, turn, rest)
        else:
            logits = logits[: len(turn) + max(len(rest), 1) - 1]
        spare.close()
    else:
        tokens, logits = [], force(session, turn, rest)
    traffic = _settled(session).since(before)
    ledger = session.cache.ledger()
    return Answer(
        tokens=tokens,
        logprobs=logits.float().log_softmax(-1),
        times=session.times[steps:],
        turn_times=session.turn_times[turns:],
        log=session.log(),
        device_bytes=ledger.device_bytes,
        total_bytes=ledger.total_bytes,
        full_bytes=session.full_bytes(session.cache.length_tokens),
        bytes=dict(ledger.used_bytes),
        held=dict(ledger.held_bytes),
        pages=_pages(session.cache, ledger),
        arenas=session.cache.pools.arenas(),
        traffic=traffic,
        history_traffic=before,
        first_step=first_step,
        kernels=dict(session.cache.kernel_calls),
        probes=tuple(session.story.probes),
        guard_bytes=session.story.guard_bytes,
        changes=tuple(session.story.changes),
    )


def _pages(cache: PagedCache, ledger: Ledger) -> dict[str, int]:
    """Place -> pages; "dropped" only where there are any."""
    pages = {f"{tier.name}/{code.name.lower()}": count for (tier, code), count in ledger.pages.items()}
    dropped = int((cache.state["tier"] == Tier.DROPPED).sum())
    return pages | ({"dropped": dropped} if dropped else {})


@torch.inference_mode()
def _settled(session: Session) -> Traffic:
    """Ends a run: what is held is what the plan needs, all moves are booked, and no prefetch is of use any more.

    What is waited for here is no step's wait.
    """
    traffic = session.cache.traffic
    stall_s, late_s = dict(traffic.stall_s), traffic.prefetch["late_s"]
    session.cache.settle()
    session.cache.prefetches.finish()
    out = Traffic.merge([traffic])
    out.stall_s, out.prefetch["late_s"] = stall_s, late_s
    return out


@dataclass(frozen=True)
class Agreement:
    """How two sets of next-token distributions compare.

    Attributes:
        kl: mean KL(full || policy) in nats.
        top1: share of positions with the same most likely token.
        positions: positions compared.
        identical: bit for bit.
    """

    kl: float
    top1: float
    positions: int
    identical: bool


def agreement(policy: Tensor, full: Tensor) -> Agreement:
    """Compares log-probabilities [M, V] of the same text."""
    kl = kl_nats(full, policy)
    top1 = (full.argmax(-1) == policy.argmax(-1)).float().mean()
    return Agreement(float(kl.mean().clamp(min=0.0)), float(top1), len(kl), torch.equal(policy, full))
