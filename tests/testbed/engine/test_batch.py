"""Sessions in a batch: every row bit for bit what it is alone, whatever the batch, its order, who joins or leaves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CACHE, decoder, hugging_face, measures, text
from torch import Tensor

from policies.base import Tier
from testbed.cache.layout import CacheConfig
from testbed.cache.pool import CacheError
from testbed.cache.pools import Pools
from testbed.compose import compose_policy
from testbed.decisions import diff
from testbed.engine.batch import Batch, shared_pools
from testbed.engine.prefill import ContextError, prefill
from testbed.engine.session import Session, SessionConfig
from testbed.engine.signals import SignalContext
from testbed.models import wrap

# Name, overrides, budget, context: lengths at and beside page ends, plans of every kind. Budgets are of the cache in
# bf16, so 1 is half of this one.
ROWS = (
    ("full", (), None, 100),
    ("streaming", (), 0.8, 240),
    ("quest", (), 0.8, 241),
    ("h2o", (), 0.8, 255),
    ("elastic", ("policy.every_steps=3",), 0.9, 210),
    ("snapkv", ("policy.eviction.victim=l2",), 0.9, 223),
    ("quest", ("policy.eviction.victim=l2", "policy.every_steps=2"), 0.7, 270),
    ("full", (), None, 17),
)
STEPS = 20  # over a page's end in every row


def start(
    row: int, pools: Pools | None = None, kind: str = "llama", changes: dict[str, object] | None = None
) -> Session:
    name, overrides, fraction, context = ROWS[row]
    config = CacheConfig(**(CACHE | (changes or {})))  # type: ignore[arg-type]
    session = Session(
        decoder(kind),
        compose_policy(name, list(overrides)),
        SessionConfig(config, fraction),
        SignalContext(config.page_tokens, measures),
        pools,
    )
    sources = list(session.sources.values())
    session.start(prefill(decoder(kind), text(context, row), config.torch_dtype, sources, chunk_tokens=37))
    return session


def alone(row: int, steps: int = STEPS, kind: str = "llama") -> tuple[Tensor, Session]:
    session = start(row, kind=kind)
    return torch.stack([session.step(token) for token in text(steps, 50 + row)]), session


@pytest.fixture(scope="module")
def references() -> list[tuple[Tensor, Session]]:
    return [alone(row) for row in range(len(ROWS))]


def together(rows: Sequence[int], kind: str = "llama") -> tuple[Tensor, list[Session]]:
    pools = shared_pools(decoder(kind), CacheConfig(**CACHE))  # type: ignore[arg-type]
    sessions = [start(row, pools, kind) for row in rows]
    batch = Batch(sessions)
    tokens = torch.tensor([text(STEPS, 50 + row) for row in rows])
    return torch.stack([batch.step(tokens[:, at]) for at in range(STEPS)], 1), sessions


@settings(max_examples=4, deadline=None)
@given(rows=st.lists(st.integers(0, len(ROWS) - 1), min_size=1, max_size=len(ROWS), unique=True))
def test_a_row_is_bitwise_what_it_is_alone(references: list[tuple[Tensor, Session]], rows: list[int]) -> None:
    logits, sessions = together(rows)
    for index, row in enumerate(rows):
        right, session = references[row]
        assert torch.equal(logits[index], right), f"row {row} in {rows}"
        assert diff(sessions[index].log(), session.log()) is None
        assert sessions[index].times[-1].plan_s <= sessions[index].times[-1].total_s


def test_all_rows_at_once_and_the_rows_differ(references: list[tuple[Tensor, Session]]) -> None:
    logits, sessions = together(range(len(ROWS)))
    assert all(torch.equal(logits[row], references[row][0]) for row in range(len(ROWS)))
    assert len({session.cache.length_tokens for session in sessions}) == len(ROWS)
    assert len({session.log().steps[-1].digest for session in sessions}) == len(ROWS)  # no two plans alike
    moved = [any(move.target == "L2" for step in session.log().steps for move in step.moves) for session in sessions]
    assert any(moved)


def test_rows_of_a_model_that_mixes_them_run_one_by_one() -> None:
    assert not decoder("gpt2").batches
    assert decoder("llama").batches
    logits, _ = together([0, 3], "gpt2")
    for index, row in enumerate((0, 3)):
        assert torch.equal(logits[index], alone(row, kind="gpt2")[0])


@pytest.mark.parametrize("rows", [2, 16, 17, 70])
def test_weights_kept_in_bf16_give_every_row_its_own_bits(rows: int) -> None:
    model = hugging_face("llama").bfloat16().float()
    packed = wrap(model)
    assert packed.lean is not None
    assert packed.lean.layers[0].qkv.dtype == torch.bfloat16
    tokens = torch.tensor(text(rows, 3)).unsqueeze(1)
    positions = torch.arange(rows).unsqueeze(1) * 7

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + (k + v).repeat_interleave(3, dim=1) / (layer + 1)

    every = packed.forward(tokens, positions, attend)
    assert every is not None
    for row in range(rows):
        alone_ = packed.forward(tokens[row : row + 1], positions[row : row + 1], attend)
        assert alone_ is not None
        assert torch.equal(every[row], alone_[0])


@pytest.mark.parametrize("kind", ["mistral", "qwen3"])
def test_windows_and_normed_heads(kind: str) -> None:
    logits, _ = together([1, 4, 0], kind)
    for index, row in enumerate((1, 4, 0)):
        assert torch.equal(logits[index], alone(row, kind=kind)[0])


def test_sequences_join_leave_and_take_turns_between_steps(references: list[tuple[Tensor, Session]]) -> None:
    pools = shared_pools(decoder(), CacheConfig(**CACHE))  # type: ignore[arg-type]
    first, second = start(1, pools), start(4, pools)
    batch = Batch([first])
    token = {session: iter(text(STEPS, 50 + row)) for session, row in ((first, 1), (second, 4))}
    out: dict[Session, list[Tensor]] = {first: [], second: []}

    def run(steps: int) -> None:
        for _ in range(steps):
            logits = batch.step([next(token[session]) for session in batch.sessions])
            for session, row in zip(batch.sessions, logits, strict=True):
                out[session].append(row)

    run(3)
    batch.join(second)
    run(7)
    batch.leave(first)
    run(2)
    out[first].append(first.step(next(token[first])))
    batch.join(first)
    run(5)
    for session, row in ((first, 1), (second, 4)):
        assert torch.equal(torch.stack(out[session]), references[row][0][: len(out[session])])
    turned = batch.sessions[0]
    turned.extend(text(21, 3))  # a turn of one between steps of all
    before = turned.cache.length_tokens
    batch.step([1, 2])
    assert turned.cache.length_tokens == before + 1
    first.close()
    batch.leave(first)
    batch.step([3])
    second.close()


def test_forks_share_pages_until_they_part() -> None:
    session = start(5)
    pages = session.cache.pools.stores[Tier.L2, 0].used_pages  # type: ignore[index]
    assert pages > 0
    fork = session.fork()
    assert session.cache.pools.stores[Tier.L2, 0].used_pages == pages  # type: ignore[index]
    straight = start(5)
    batch, pairs = Batch([session, fork]), zip(text(STEPS, 7), text(STEPS, 8), strict=True)
    logits = torch.stack([batch.step(pair) for pair in pairs])
    assert torch.equal(logits[:, 0], torch.stack([straight.step(token) for token in text(STEPS, 7)]))
    assert not torch.equal(logits[:, 0], logits[:, 1])
    assert list(fork.tokens) == text(223, 5) + text(STEPS, 8)


@pytest.mark.parametrize("rows", [[], [0, 0]])
def test_no_session_and_one_twice(rows: list[int]) -> None:
    session = start(7)
    with pytest.raises(CacheError, match="at least one" if not rows else "a cache twice"):
        Batch([session for _ in rows])


def test_what_can_not_run_together() -> None:
    one, other = start(7), start(7)
    with pytest.raises(CacheError, match="share their pools"):
        Batch([one, other])
    batch = Batch([one])
    with pytest.raises(CacheError, match="share their pools"):
        batch.join(other)
    assert batch.sessions == (one,)
    with pytest.raises(CacheError, match="2 tokens for a batch of 1"):
        batch.step([1, 2])
    with pytest.raises(CacheError, match="same model"):
        Batch([one, start(7, kind="qwen2")])
    with pytest.raises(CacheError, match="can't share"):
        start(0, one.cache.pools, changes={"slab_pages": 8})


def test_a_row_at_the_models_limit_stops_the_batch_before_anything_moves() -> None:
    pools = shared_pools(decoder(), CacheConfig(**CACHE))  # type: ignore[arg-type]
    short, long = start(7, pools), start(0, pools)
    long.extend(text(540, 3))
    batch = Batch([short, long])
    with pytest.raises(ContextError, match="limit of 640"):
        batch.step([1, 2])
    assert short.cache.length_tokens == 17
    assert short.steps == 0
