"""One pass with chosen pages: the full cache where nothing is left out, the definition elsewhere."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers as tf
from tiny_run import save_model

from testbed.cache.offsets import BackgroundOffsets
from testbed.models import load
from testbed.models.base import Decoder
from testbed.predictor.skipping import LOG2_E, Choice, Context, Pages, SkippingError, capture
from testbed.predictor.stand_ins import (
    Prepared,
    StandIn,
    _Attend,
    compared,
    divergence,
    log_probs,
    stand_in_table,
)

T, M, P = 192, 6, 16
PAGES = Pages(recent_pages=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stand_ins") / "model"
    save_model(made)
    return made


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load(folder)


@pytest.fixture(scope="module")
def prepared(decoder: Decoder) -> Prepared:
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (T,), generator=g).tolist()
    return Prepared(capture(decoder, tokens, torch.arange(T - 16, T)), decoder.geometry.scale, PAGES)


TAIL = [7, 200, 31, 5, 90, 12]


def test_the_full_pass_is_the_models_own(folder: Path, decoder: Decoder, prepared: Prepared) -> None:
    """Logits of the whole text in one call, but for keys kept in bfloat16; masses of a layer sum to less than 1."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (T,), generator=g).tolist() + TAIL
    model = tf.LlamaForCausalLM.from_pretrained(folder)
    want = model(torch.tensor([tokens])).logits[0, T:].log_softmax(-1)
    full = log_probs(decoder, prepared, TAIL)
    assert torch.allclose(full.log_probs, want.detach(), atol=2e-3)
    for mass in full.masses:
        assert mass.shape == (2, M, T // P)
        assert bool((mass.sum(-1) < 1).all())
        assert bool((mass > 0).all())


@pytest.mark.parametrize("predictor", ["next_mass", "query_bound", "attention_ema"])
@pytest.mark.parametrize(
    ("keep", "stand_in"), [(1.0, StandIn()), (0.1, StandIn("prototypes", groups=P)), (0.0, StandIn("prototypes", P))]
)
def test_nothing_is_lost_where_nothing_is_left_out(
    decoder: Decoder, prepared: Prepared, predictor: str, keep: float, stand_in: StandIn
) -> None:
    """All pages chosen, or as many prototypes as tokens: the full cache's distributions."""
    keep = min(keep, float(prepared.candidates.float().mean()))
    full = log_probs(decoder, prepared, TAIL)
    some = log_probs(decoder, prepared, TAIL, Choice(predictor, keep), stand_in, full.masses)
    assert torch.allclose(some.log_probs, full.log_probs, atol=1e-4)
    assert float(divergence(some, full).abs().max()) < 1e-5


def spread(layers: int = 1, heads: int = 2, group: int = 2, dim: int = 8) -> Prepared:
    g = torch.Generator().manual_seed(4)
    k, v = (torch.randn(layers, heads, T, dim, generator=g).bfloat16() for _ in range(2))
    q = (torch.randn(layers, heads, group, 8, dim, generator=g) * LOG2_E).half()
    return Prepared(Context(k, v, q, torch.arange(T - 8, T)), [1.0], PAGES)


@pytest.mark.parametrize("kind", ["nothing", "background", "learned", "prototypes"])
def test_attention_is_the_definition(kind: str) -> None:
    """Float64 softmax over the chosen tokens, the new ones and what stands for the others, query by query."""
    context = spread()
    g = torch.Generator().manual_seed(5)
    heads, group, dim = 2, 2, 8
    q = torch.randn(1, heads * group, M, dim, generator=g)
    k, v = (torch.randn(1, heads, M, dim, generator=g) for _ in range(2))
    truth = [torch.rand(heads, M, T // P, generator=g)]
    offsets = BackgroundOffsets(torch.tensor([0.5, -1.0]), torch.tensor([1.5, 0.5]), torch.randn(2, dim, generator=g))
    learned = offsets if kind == "learned" else None
    stand_in = StandIn("background" if learned else kind, 1, learned)
    out = _Attend(context, M, Choice("next_mass", 0.25), stand_in, truth)(0, q, k, v)
    for head in range(heads):
        keys, values = context.keys[0, head].double(), context.values[0, head].double()
        for at in range(M):
            score = truth[0][head, at].masked_fill(~context.candidates, -1)
            chosen = score.argsort(descending=True)[: math.ceil(0.25 * T // P)]
            read = ~context.candidates
            read[chosen] = True
            rest = (~read).nonzero().flatten()
            of_tokens = read.repeat_interleave(P)
            paged_k, paged_v = keys.unflatten(0, (-1, P)), values.unflatten(0, (-1, P))
            more_k, more_v, addend = keys[:0], values[:0], keys[:0, 0]
            if kind == "prototypes":
                more_k, more_v = paged_k[rest].mean(1), paged_v[rest].mean(1)
                addend = torch.full((len(rest),), math.log(P)).double()
            elif kind != "nothing":
                more_k, more_v = paged_k[rest].mean((0, 1))[None], paged_v[rest].mean((0, 1))[None]
                addend = torch.full((1,), math.log(P * len(rest))).double()
                if learned is not None:
                    more_v = more_v * learned.scale[head] + learned.value[head]
                    addend = addend + math.log(2) * learned.log2[head]
            every_k = torch.cat((keys[of_tokens], k[0, head, : at + 1].double(), more_k))
            every_v = torch.cat((values[of_tokens], v[0, head, : at + 1].double(), more_v))
            for g_row in range(group):
                logits = every_k @ q[0, head * group + g_row, at].double()
                logits[len(logits) - len(addend) :] += addend
                want = logits.softmax(0) @ every_v
                assert torch.allclose(out[0, head * group + g_row, at].double(), want, atol=1e-4)


def test_bytes_and_bad_values() -> None:
    """Of 64 pages of 4096 bytes, 4 read; prototypes of 320 bytes for the others; one state of as many bytes."""
    assert StandIn().share_of_full(1 / 16, 64, 16, 64) == 1 / 16
    assert StandIn("background").share_of_full(1 / 16, 64, 16, 64) == pytest.approx((4 * 4096 + 320) / (64 * 4096))
    assert StandIn("prototypes").share_of_full(1 / 16, 64, 16, 64) == pytest.approx((4 * 4096 + 60 * 320) / (64 * 4096))
    with pytest.raises(SkippingError, match="must be one of nothing"):
        StandIn("ghosts")


def test_the_comparison_has_a_row_for_every_variant(decoder: Decoder, prepared: Prepared) -> None:
    """Offsets that change nothing are the plain mean, and a background state costs what the table says."""
    none = BackgroundOffsets(torch.zeros(4), torch.ones(4), torch.zeros(4, 16))
    rows = compared(decoder, prepared, TAIL[:3], none)
    kl = {(row["predictor"], row["keep"], row["stand_in"], row["groups"]): row["kl"] for row in rows}
    assert len(kl) == len(rows) == 3 * 3 * 6 + 3 * 3 * 2
    for (predictor, keep, kind, groups), value in kl.items():
        if kind == "learned background":
            assert value == kl[predictor, keep, "background", groups]
    assert float(kl["query_bound", 0.05, "nothing", 1]) > float(kl["query_bound", 0.05, "prototypes", 4])  # type: ignore[arg-type]
    assert len(stand_in_table(rows).splitlines()) == 1 + len(rows)
