"""What signals may see of a run: hidden states, coming tokens, and the attention that the full cache will pay."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiny import CACHE, Run, decoder, hugging_face, measures, text
from torch import Tensor

from testbed.cache.layout import CacheConfig
from testbed.cache.saved import SavedError
from testbed.compose import compose_policy
from testbed.engine.prefill import prefill
from testbed.engine.session import Session, SessionConfig
from testbed.engine.signals import PrefillChunk, SignalContext, StepView
from testbed.engine.signals.base import Source

CONTEXT, TURN, SAID = text(240, 1), text(9, 2), text(12, 3)


@torch.inference_mode()
def attention(kind: str, tokens: list[int], pages: int) -> Tensor:
    """Of every query, what it gives to each page, mean over the query group: [L, Hk, T, N], by transformers."""
    model = hugging_face(kind)
    maps = torch.stack(model(input_ids=torch.tensor([tokens]), output_attentions=True).attentions)[:, 0]
    heads = decoder(kind).geometry.kv_heads
    padded = torch.nn.functional.pad(maps, (0, pages * 16 - maps.shape[-1]))
    return padded.unflatten(-1, (pages, 16)).sum(-1).unflatten(1, (heads, -1)).mean(2)


def test_the_truth_is_what_transformers_will_attend_to() -> None:
    session = Run(fraction=0.8).start(
        compose_policy("streaming", ["policy/predictor=oracle", "policy/eviction=demote"]), CONTEXT
    )
    tokens = [*CONTEXT, *TURN, *SAID]
    expected = attention("llama", tokens, 17)
    at = len(CONTEXT)
    for part in (TURN, *([token] for token in SAID)):
        session.look_ahead(torch.tensor(part))
        got = session.sources["next_mass"].value(session.observed(17))
        right = expected[:, :, at : at + len(part)].mean(2)
        torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-4)
        at += len(part)


def test_with_the_truth_the_best_pages_are_kept_and_time_is_the_sessions_own() -> None:
    session = Run(fraction=0.8, cache={"hot_tokens": 16}).start(
        compose_policy("streaming", ["policy/predictor=oracle", "policy/eviction=demote", "policy.every_steps=1"]),
        CONTEXT,
    )
    other = session.fork()
    session.step(SAID[0])
    mass = session.sources["next_mass"].value(session.observed())
    tier = session.cache.state["tier"].view(mass.shape)
    away = tier == 2
    assert bool(away.any())
    for layer in range(mass.shape[0]):
        for head in range(mass.shape[1]):
            kept = mass[layer, head][tier[layer, head] == 1]
            assert not len(kept) or kept.min() >= mass[layer, head][away[layer, head]].max()
    assert torch.equal(other.step(SAID[0]), session.fork().step(SAID[1])) is False
    with pytest.raises(SavedError, match="next_mass"):
        session.save("never.session")
    for each in (session, other):
        each.close()


class Looking(Source):
    """Keeps what it is shown."""

    wants_hidden = True

    def __init__(self) -> None:
        self.prefilled: dict[int, list[Tensor]] = {}
        self.stepped: list[Tensor] = []
        self.coming: list[list[int]] = []

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        assert chunk.hidden is not None
        assert chunk.v is not None
        assert chunk.v.shape == chunk.k.shape
        self.prefilled.setdefault(chunk.layer, []).append(chunk.hidden.clone())

    def watch_next(self, tokens: Tensor) -> None:
        self.coming.append(tokens.tolist())

    def watch_step(self, view: StepView) -> None:
        assert view.hidden is not None
        self.stepped.append(view.hidden)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_hidden_states_are_what_transformers_gives_its_attention(kind: str) -> None:
    model, seen = hugging_face(kind), []
    name = {"llama": "LlamaAttention", "gpt2": "GPT2Attention", "bloom": "BloomAttention"}[kind]

    def keep(into: list[Tensor], module: Any, args: Any, options: Any) -> None:
        into.append((args[0] if args else options["hidden_states"])[0])

    for module in model.modules():
        if type(module).__name__ == name:
            module.register_forward_pre_hook(partial(keep, seen), with_kwargs=True)
    with torch.inference_mode():
        model(input_ids=torch.tensor([[*CONTEXT, *TURN, *SAID]]), use_cache=False)
    right = torch.stack(seen)

    looking, config = Looking(), CacheConfig(**CACHE)
    session = Session(decoder(kind), compose_policy("full"), SessionConfig(config), SignalContext(16, measures))
    session.sources["looking"] = looking
    session.wants_hidden = True
    session.start(prefill(decoder(kind), CONTEXT, config.torch_dtype, [looking], 37))
    session.extend(TURN)
    for token in SAID:
        session.step(token)
    got = torch.stack([torch.cat(looking.prefilled[layer]) for layer in range(len(right))])
    torch.testing.assert_close(got, right[:, : len(CONTEXT)], atol=2e-3, rtol=2e-3)
    ends = [len(CONTEXT) + len(TURN) - 1, *range(len(CONTEXT) + len(TURN), right.shape[1])]
    torch.testing.assert_close(torch.stack(looking.stepped, 1), right[:, ends], atol=2e-3, rtol=2e-3)
    assert looking.coming == [TURN, *([token] for token in SAID)]
    width = decoder(kind).width
    assert right.shape[2] == width
    embedded = model.get_input_embeddings()(torch.tensor(TURN))
    torch.testing.assert_close(decoder(kind).embed(torch.tensor(TURN)), embedded, atol=1e-6, rtol=1e-6)


def test_the_answer_to_a_turn_begins_with_a_plan() -> None:
    session = Run(fraction=0.8).start(compose_policy("streaming", ["policy.every_steps=50"]), CONTEXT[:225])
    session.extend(TURN)
    planned = [session.step(token) is not None and session.log().steps[-1].planned for token in SAID[:4]]
    assert planned == [True, False, False, False]


def test_locks_are_shown_and_checked() -> None:
    session = Run().start(compose_policy("full"), CONTEXT)
    shown: list[tuple[int, int]] = []

    class Listening(Source):
        def watch_lock(self, begin: int, end: int) -> None:
            shown.append((begin, end))

    session.sources["listening"] = Listening()  # type: ignore[assignment]
    session.lock(3, 9)
    assert shown == [(3, 9)]
    for span in ((-1, 4), (5, 5), (9, 4), (0, len(CONTEXT) + 1)):
        with pytest.raises(ValueError, match="lock"):
            session.lock(*span)
