"""What the learned predictor looks at: BM25 and embeddings that grow, tool calls, locked spans, features of pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import bm25s
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Run, decode, decoder, hugging_face, text
from torch import Tensor

from policies.base import Role
from testbed.compose import compose_policy
from testbed.engine.prefill import prefill
from testbed.engine.session import Session
from testbed.engine.signals import Observed, PrefillChunk, SignalContext, SignalError, StepView
from testbed.engine.signals.core import FLOOR, LIGHT, NAMES, CoreFeatures
from testbed.engine.signals.embedding import Embedding
from testbed.engine.signals.history import DECAYS, History
from testbed.engine.signals.locked import Locked
from testbed.engine.signals.retrieval import Retrieval
from testbed.engine.signals.tool_call import ToolCall
from testbed.models.base import Decoder

PAGE = 16
PIECES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=40), min_size=1, max_size=6)


def at(pages: int, layers: int = 1, heads: int = 1) -> Observed:
    return Observed((layers, heads, pages), PAGE, lambda: (torch.zeros(0), torch.zeros(0)))


# --- BM25 ------------------------------------------------------------------------------------------------------------


def from_scratch(tokens: list[int], turn: list[int], near: int) -> Tensor:
    """The library's own index of all pages."""
    words = [str(token) for token in tokens]
    pages = [words[max(0, s - near) : s + PAGE + near] for s in range(0, len(words), PAGE)]
    asked = [word for word in dict.fromkeys(map(str, turn)) if word in set(words)]
    if not asked:
        return torch.zeros(len(pages))
    index = bm25s.BM25(backend="numpy")
    index.index(pages, show_progress=False)
    return torch.from_numpy(index.get_scores(asked)).float()


@settings(max_examples=20, deadline=None)
@given(pieces=PIECES, near=st.sampled_from([0, 3, 8, 20]), turns=st.lists(st.integers(0, 12), min_size=1, max_size=4))
def test_bm25_of_a_growing_text_is_that_of_an_index_made_anew(
    pieces: list[list[int]], near: int, turns: list[int]
) -> None:
    source, said = Retrieval(SignalContext(PAGE, dict), neighbour_tokens=near), []
    for piece in pieces:
        source.watch_tokens(torch.tensor(piece))
        said += piece
        source.watch_turn(torch.tensor(turns))
        pages = -(-len(said) // PAGE)
        torch.testing.assert_close(source.value(at(pages))[0, 0], from_scratch(said, turns, near), atol=1e-5, rtol=1e-5)
    counted = source._index
    source.watch_turn(torch.tensor(turns))
    assert source._index is counted  # nothing is counted twice


# --- embeddings ------------------------------------------------------------------------------------------------------


def cosine_by_hand(rows: Sequence[Sequence[Tensor]], asked: Tensor) -> list[float]:
    means = [torch.stack(list(row)).double().mean(0) for row in rows]
    common = torch.stack(means).mean(0)
    return [float(torch.cosine_similarity(mean - common, asked.double() - common, dim=0)) for mean in means]


def test_embeddings_compare_words_before_a_turn_is_run_and_hidden_states_after() -> None:
    model = decoder()
    source = Embedding(SignalContext(PAGE, dict, model), layer=1)
    tokens, turn, width = text(40), text(5, 7), model.width
    hidden = torch.randn(40, width, generator=torch.Generator().manual_seed(1))
    geometry = model.geometry
    for start, stop in ((0, 25), (25, 40)):
        q, k = torch.zeros(6, stop - start, 16), torch.zeros(2, stop, 16)
        for layer in range(3):
            chunk = PrefillChunk(layer, q, q[..., 0], k, start, 40, geometry, hidden=hidden[start:stop] + layer)
            source.watch_prefill(chunk)
    source.watch_tokens(torch.tensor(tokens))
    assert source.score(3).tolist() == [0.0] * 3
    source.watch_turn(torch.tensor(turn))
    words = hugging_face("llama").get_input_embeddings().weight.detach()
    pages = [tokens[begin : begin + PAGE] for begin in range(0, 40, PAGE)]
    asked = words[turn].mean(0)
    expected = cosine_by_hand([[words[token] for token in page] for page in pages], asked)
    assert source.score(3).tolist() == pytest.approx(expected, abs=1e-4)
    state = torch.randn(3, width, generator=torch.Generator().manual_seed(2))
    source.watch_tokens(torch.tensor(turn))
    source.watch_step(StepView(None, None, 5, 0, state))
    seen = [list(part) for part in (hidden + 1).split(PAGE)]
    seen[2].append(state[1])  # of a run of several tokens the last alone is seen
    assert source.score(4).tolist() == pytest.approx([*cosine_by_hand(seen, state[1]), 0.0], abs=1e-4)


# --- rules' signals --------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer whose tokens are letters; 0 is a special token, without text, for `<call>`."""

    def encode(self, text: str) -> list[int]:
        return [0] if text == "<call>" else [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if token)


def calls(said: str, role: int, parts: int = 1) -> list[int]:
    """The signal after each of the tokens; `^` stands for the special token."""
    context = SignalContext(PAGE, dict, cast(Decoder, Letters()))
    source = ToolCall(context, opening=["```sh", "<call>"], closing=["```", "</call>"])
    source.watch_roles(torch.full((6,), int(Role.TOOL), dtype=torch.int8))
    source.watch_tokens(torch.tensor(Letters().encode("```sh ")))  # a context, however it speaks of calls
    out = []
    for letter in said:
        source.watch_roles(torch.tensor([role], dtype=torch.int8))
        source.watch_tokens(torch.tensor([0 if letter == "^" else ord(letter)]))
        out.append(int(source.value(at(2))[1]))
        source = cast(ToolCall, source.fork())
    return out


def test_a_tool_call_lasts_from_marker_to_marker() -> None:
    said = "so ```sh ls | wc ``` and ^f(1)``` </call>."
    inside = said.index("sh") + 2, said.index(" ``` and") + 4, said.index("^") + 1, said.index("</call>") + 7
    expected = [int(inside[0] <= n < inside[1] or inside[2] <= n < inside[3]) for n in range(1, len(said) + 1)]
    assert calls(said, Role.GENERATED) == expected
    assert calls(said, -1) == expected  # nobody said whose the words are
    assert sum(calls(said, Role.USER)) == 0


def test_a_turn_ends_a_call_and_is_none() -> None:
    context = SignalContext(PAGE, dict, decoder=cast(Decoder, Letters()))
    source = ToolCall(context, opening=["<<"], closing=[">>"])
    source.watch_tokens(torch.tensor([1]))
    for letter in "<<f":
        source.watch_tokens(torch.tensor([ord(letter)]))
    assert source.value(at(1)).item() == 1
    again = ToolCall(context, opening=["<<"], closing=[">>"])
    again.restore(source.state())
    assert again.value(at(1)).item() == 1
    source.watch_turn(torch.tensor([60, 60, 60]))
    source.watch_tokens(torch.tensor([60, 60]))
    source.watch_tokens(torch.tensor([60]))
    assert source.value(at(1)).item() == 0
    source.watch_tokens(torch.tensor([60]))
    source.watch_tokens(torch.tensor([60]))
    assert source.value(at(1)).item() == 1


@given(spans=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), max_size=4))
@settings(max_examples=30, deadline=None)
def test_locked_pages_hold_a_locked_token(spans: list[tuple[int, int]]) -> None:
    ends = [(begin, begin + length) for begin, length in spans]
    source = Locked(SignalContext(PAGE, dict), ends[:2])
    for begin, end in ends[2:]:
        source.watch_lock(begin, end)
    expected = [float(any(b <= t < e for b, e in ends for t in range(16 * n, 16 * n + 16))) for n in range(9)]
    assert source.value(at(9)).tolist() == expected


def test_wrong_keys_are_named() -> None:
    context = SignalContext(PAGE, dict, decoder())
    with pytest.raises(SignalError, match=r"locked\.spans: \[5, 5\]"):
        Locked(context, [[5, 5]])
    with pytest.raises(SignalError, match="one closing"):
        ToolCall(context, ["a"], [])
    with pytest.raises(SignalError, match=r"embedding\.layer=3: must be 0 to 2"):
        Embedding(context, 3)
    with pytest.raises(SignalError, match="neighbour_tokens=-1"):
        Retrieval(context, -1)
    for source in (ToolCall, Embedding, CoreFeatures):
        with pytest.raises(SignalError, match="decoder"):
            source(SignalContext(PAGE, dict))


# --- features --------------------------------------------------------------------------------------------------------

CONTEXT, TURN, STEPS = 150, 9, 4
TOKENS = text(CONTEXT + TURN + STEPS + 1)


class Watched:
    """A session of the full cache with the features beside it, a turn and some steps after its context."""

    def __init__(self) -> None:
        run = Run().start(compose_policy("full"), [1])  # for its configuration
        context = SignalContext(PAGE, dict, decoder())
        self.session = Session(decoder(), run.policy, run.config, context, watch=frozenset({"core_score"}))
        dense = prefill(decoder(), TOKENS[:CONTEXT], torch.float32, list(self.session.sources.values()))
        self.session.start(dense)
        self.session.extend(TOKENS[CONTEXT : CONTEXT + TURN])
        decode(self.session, TOKENS[CONTEXT + TURN : -1])
        self.source = cast(CoreFeatures, self.session.sources["core_score"])
        self.source.watch_next(torch.tensor(TOKENS[-1:]))

    def column(self, name: str) -> Tensor:
        return self.source.features(self.session.observed())[..., NAMES.index(name)]


@pytest.fixture(scope="module")
def watched() -> Watched:
    return Watched()


@pytest.fixture(scope="module")
def page_masses() -> Tensor:
    """[T, L, Hk, N] of every query, as transformers attends."""
    with torch.no_grad():
        rows = hugging_face("llama")(input_ids=torch.tensor([TOKENS[:-1]]), output_attentions=True).attentions
    mass = torch.stack([layer[0].unflatten(0, (2, 3)).mean(1) for layer in rows]).permute(2, 0, 1, 3)
    return torch.nn.functional.pad(mass, (0, -mass.shape[-1] % PAGE)).unflatten(-1, (-1, PAGE)).sum(-1)


def log_shares(mass: Tensor) -> Tensor:
    return torch.log(mass * mass.shape[-1] + FLOOR)


def test_masses_are_those_of_the_model(watched: Watched, page_masses: Tensor) -> None:
    steps = page_masses[CONTEXT + TURN :]
    window, turn = page_masses[CONTEXT - 64 : CONTEXT].mean(0), page_masses[CONTEXT : CONTEXT + TURN].mean(0)
    averages = []
    for decay in DECAYS:
        mean = decay**TURN * window + (1 - decay**TURN) * turn
        for step in steps:
            mean = decay * mean + (1 - decay) * step
        averages.append(mean)
    for name, mean in zip(("mass_fast", "mass_mid", "mass_slow"), averages, strict=True):
        torch.testing.assert_close(watched.column(name), log_shares(mean), atol=2e-2, rtol=0)
    last = log_shares(steps[-1])
    torch.testing.assert_close(watched.column("mass_last"), last, atol=2e-2, rtol=0)
    torch.testing.assert_close(watched.column("mass_before")[..., 1:], last[..., :-1], atol=2e-2, rtol=0)
    torch.testing.assert_close(watched.column("mass_after")[..., :-1], last[..., 1:], atol=2e-2, rtol=0)
    torch.testing.assert_close(watched.column("mass_window"), log_shares(window), atol=2e-2, rtol=0)
    layer = log_shares(averages[1].mean(1, keepdim=True)).expand_as(last)
    torch.testing.assert_close(watched.column("mass_layer"), layer, atol=2e-2, rtol=0)


def test_bounds_lie_around_the_best_key(watched: Watched) -> None:
    """Centre less radius, best key, centre and radius: in this order for one query head a stream."""
    low, high = watched.session.cache.key_bounds()
    q, scale = watched.source.history.queries(), decoder().geometry.scale[0]
    assert q is not None
    newest = q[0] * scale  # [S, G, D]
    centre = torch.einsum("sgd,snd->sgn", newest, (low + high) / 2)
    radius = torch.einsum("sgd,snd->sgn", newest.abs(), (high - low) / 2)
    best = centre.amax(1)
    expected = (best - best.mean(-1, keepdim=True)).view(3, 2, -1)
    torch.testing.assert_close(watched.column("centre_best"), expected.clamp(-30, 30), atol=1e-4, rtol=1e-4)
    for name, part in (("bound_tight", 0.2), ("bound_loose", 0.5)):
        share = (centre + part * radius).softmax(-1).mean(1).view(3, 2, -1)
        torch.testing.assert_close(watched.column(name), log_shares(share), atol=1e-4, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(said=st.lists(st.integers(0, 3), max_size=70), coming=st.lists(st.integers(0, 3), max_size=4))
def test_words_that_came_before_are_found_by_plain_search(said: list[int], coming: list[int]) -> None:
    source = CoreFeatures(SignalContext(PAGE, dict, decoder()))
    source.watch_tokens(torch.tensor(said, dtype=torch.long))
    source.watch_next(torch.tensor(coming, dtype=torch.long))
    pages = max(1, -(-(len(said) + len(coming)) // PAGE))
    whole = said + coming
    found = source._words(at(pages))

    def counts(length: int) -> Tensor:
        wanted = {tuple(whole[n - length + 1 : n + 1]) for n in range(len(said), len(whole)) if n - length + 1 >= 0}
        out = torch.zeros(pages)
        for begin in range(len(said) - length + 1):
            if tuple(said[begin : begin + length]) in wanted:
                out[min(begin + length, len(said) - 1) // PAGE] += 1
        return out

    torch.testing.assert_close(found["after_word"], torch.log1p(counts(1)))
    torch.testing.assert_close(found["after_pair_share"], counts(2) / (counts(2).sum() + 1))
    torch.testing.assert_close(found["after_triple"], torch.log1p(counts(3)))


def test_context_is_the_last_hidden_state_and_the_coming_word(watched: Watched) -> None:
    model = hugging_face("llama")
    normed: list[Tensor] = []
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda module, args, out: normed.append(out[0, -1].detach()))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([TOKENS[:-1]]))
    for hook in hooks:
        hook.remove()
    word = model.get_input_embeddings().weight.detach()[TOKENS[-1]]
    parts = [torch.cat([x / x.square().mean().sqrt() for x in (state, word)]) for state in normed]
    torch.testing.assert_close(watched.source.context(), torch.stack(parts), atol=1e-3, rtol=0)


def test_features_are_finite_and_a_saved_source_goes_on_alike(watched: Watched) -> None:
    observed = watched.session.observed()
    before = watched.source.features(observed)
    assert before.shape == (3, 2, observed.shape[2], len(NAMES))
    assert bool(torch.isfinite(before).all())
    other = CoreFeatures(SignalContext(PAGE, dict, decoder()))
    other.restore(watched.source.state())
    other.watch_next(torch.tensor(TOKENS[-1:]))
    assert torch.equal(other.features(observed), before)
    fork = cast(Any, watched.source.fork())
    fork.watch_tokens(torch.tensor([3, 4]))
    fork.watch_turn(torch.tensor([3]))
    assert torch.equal(watched.source.features(observed), before)
    assert not torch.equal(fork.features(observed), before)


@pytest.mark.parametrize("steps", [0, 3])
def test_light_features_are_the_others_without_bounds(steps: int) -> None:
    run = Run().start(compose_policy("full"), [1])
    sessions = []
    for name in ("core_score", "core_score_light"):
        context = SignalContext(PAGE, dict, decoder())
        session = Session(decoder(), run.policy, run.config, context, watch=frozenset({name}))
        session.start(prefill(decoder(), TOKENS[:CONTEXT], torch.float32, list(session.sources.values())))
        for token in TOKENS[CONTEXT : CONTEXT + steps]:
            session.step(token)
        source = cast(CoreFeatures, session.sources[name])
        source.watch_next(torch.tensor(TOKENS[-1:]))
        sessions.append((session, source, source.features(session.observed())))
    (full, heavy, every), (lean, light, some) = sessions
    assert full.cache.keeps_bounds
    assert not lean.cache.keeps_bounds
    assert not lean.wants_queries
    assert torch.equal(some, every[..., [NAMES.index(name) for name in LIGHT]])
    assert set(NAMES) - set(LIGHT) == {name for name in NAMES if name.startswith(("bound_", "centre_", "radius_"))}
    assert light.flops(100) < heavy.flops(100)
    with pytest.raises(SignalError, match="signal core_score_light: no trained weights"):
        light.value(lean.observed())


def test_before_the_first_step_bounds_are_the_contexts_own() -> None:
    history = History(SignalContext(PAGE, dict))
    model, keys = decoder(), torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(3))
    for layer in range(3):
        history.watch_prefill(
            PrefillChunk(layer, torch.ones(6, 40, 16), torch.zeros(6, 40), keys, 0, 40, model.geometry)
        )
    low, high = history.bounds(at(3, 3, 2))
    pages = keys[:, :32].unflatten(1, (2, 16)).repeat(3, 1, 1, 1)
    assert torch.equal(low, pages.amin(2))
    assert torch.equal(high, pages.amax(2))
