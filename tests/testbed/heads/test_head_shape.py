"""Measures of attention's shape and of mass on spans: closed forms, and a float64 oracle over whole matrices."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_run import save_model
from torch import Tensor

from testbed.engine.prefill import prefill
from testbed.engine.signals import PrefillChunk
from testbed.heads.calibration import CalibrationConfig, CalibrationError
from testbed.heads.measures.copying import SpanMass
from testbed.heads.measures.rows import attention_rows, row_blocks
from testbed.heads.measures.shape import Shape, by_distance, window_of
from testbed.heads.texts import Asking
from testbed.models import Geometry, load

D, G = 4, 2


def geometry(kv_heads: int, layers: int = 1, window: int = 0, slopes: Tensor | None = None) -> Geometry:
    return Geometry(layers, G * kv_heads, kv_heads, D, 10, None, (window,) * layers, (1.0,) * layers, slopes)


def windows(local: int, far: int, edge: int = 30, rows: int = 10_000) -> CalibrationConfig:
    return CalibrationConfig(
        text_tokens=1000,
        rows=rows,
        local_window_tokens=local,
        long_range_tokens=far,
        edge_window_tokens=edge,
        sink_tokens=2,
    )


def chunks(q: Tensor, k: Tensor, size: int, shape: Geometry) -> list[PrefillChunk]:
    """A prefill of q [Hq, T, D] and k [Hk, T, D] in parts."""
    total = q.shape[1]
    return [
        PrefillChunk(0, q[:, at : at + size], torch.zeros(len(q), 0), k[:, : min(at + size, total)], at, total, shape)
        for at in range(0, total, size)
    ]


def watched(q: Tensor, k: Tensor, size: int, config: CalibrationConfig) -> dict[str, Tensor]:
    """Measures of one layer, [Hk, G] each."""
    source = Shape(geometry(len(k)), config, q.shape[1])
    for chunk in chunks(q, k, size, geometry(len(k))):
        source.watch_prefill(chunk)
    return {name: value[0] for name, value in source.measures().items()}


def pointing(targets: list[int]) -> tuple[Tensor, Tensor]:
    """Queries and keys of one KV head where query t puts all its weight on key targets[t]: [G, T, 4], [1, T, 4].

    Keys lie on a circle, and the softmax is sharp enough to be one-hot.
    """
    angle = torch.arange(len(targets)) * (2 * math.pi / len(targets))
    circle = torch.stack((angle.cos(), angle.sin(), torch.zeros_like(angle), torch.zeros_like(angle)), -1)
    return (1e6 * circle[targets]).expand(G, -1, -1), circle.unsqueeze(0)


@pytest.mark.parametrize("size", [7, 128, 500])
def test_uniform_attention_in_closed_form(size: int) -> None:
    total, local, far, edge, sinks = 300, 32, 50, 30, 2
    q, k = torch.zeros(G, total, D), torch.randn(1, total, D, generator=torch.Generator().manual_seed(0))
    seen = watched(q, k, size, windows(local, far, edge))
    lengths = range(far + 1, total + 1)  # shorter rows have nothing far away
    for name, of_a_row in {
        "head_entropy": lambda n: 1.0,
        "head_local_ratio": lambda n: min(local, n) / n,
        "head_long_range": lambda n: (n - far) / n,
        "head_sink_mass": lambda n: sinks / n,
        "head_edge_mass": lambda n: (n - edge - sinks) / n,
    }.items():
        expected = sum(of_a_row(n) for n in lengths) / len(lengths)
        torch.testing.assert_close(seen[name], torch.full((1, G), expected), atol=1e-5, rtol=0)


def test_one_hot_attention_in_closed_form() -> None:
    total, local, far = 200, 16, 40
    distance = 16  # the first that is not near any more
    sharp_q, k = pointing([max(0, t - distance) for t in range(total)])
    near_q, _ = pointing([max(0, t - distance + 1) for t in range(total)])
    far_q, _ = pointing([max(0, t - far) for t in range(total)])
    sink_q, _ = pointing([t % 2 for t in range(total)])
    q = torch.cat((near_q, sharp_q, far_q, sink_q))
    seen = {name: value[:, 0] for name, value in watched(q, k.expand(4, -1, -1), 33, windows(local, far)).items()}
    torch.testing.assert_close(seen["head_entropy"], torch.zeros(4))
    torch.testing.assert_close(seen["head_local_ratio"], torch.tensor([1.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(seen["head_long_range"][:3], torch.tensor([0.0, 0.0, 1.0]))
    torch.testing.assert_close(seen["head_sink_mass"], torch.tensor([0.0, 0.0, 2 / 160, 1.0]))  # rows 40 and 41
    for name in ("90", "95"):
        assert seen[f"head_window{name}"].tolist() == [16, 17, 41, 1]
        assert seen[f"head_window{name}_published"].tolist()[:3] == [16, 17, 41]
    assert float(seen["head_window95_published"][3]) > 180


def test_edge_mass_is_not_diluted_by_rows_inside_the_window() -> None:
    """Every row that can looks 35 back, out of a window of 30: the published mean counts the rows that can't."""
    total = 100
    q, k = pointing([max(t - 35, 5) for t in range(total)])
    config = windows(8, 12)
    seen = watched(q, k, 64, config)
    beyond = range(32, total)  # window and sinks
    reach = [t for t in beyond if t - max(t - 35, 5) >= 30]
    assert float(seen["head_edge_mass"][0, 0]) == pytest.approx(len(reach) / len(beyond))
    assert float(seen["head_edge_mass_published"][0, 0]) == pytest.approx(len(reach) / total)


def test_query_heads_of_a_group_are_told_apart() -> None:
    """One looks near, the other far."""
    total = 120
    near, k = pointing(list(range(total)))
    far, _ = pointing([5] * total)
    seen = watched(torch.cat((near[:1], far[:1])), k, 50, windows(8, 60))
    torch.testing.assert_close(seen["head_local_ratio"], torch.tensor([[1.0, 0.0]]))
    assert float(seen["head_long_range"][0, 0]) == 0
    assert float(seen["head_long_range"][0, 1]) == pytest.approx(55 / 60)  # rows 60 to 64 are nearer


def test_attention_rows_see_window_and_slopes() -> None:
    total = 12
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(G, total, D, generator=generator), torch.randn(1, total, D, generator=generator)
    slopes = torch.tensor([0.5, 0.25])
    shape = geometry(1, window=5, slopes=slopes)
    chunk = PrefillChunk(0, q[:, 4:], torch.zeros(G, 8), k, 4, total, shape)
    rows = torch.tensor([0, 3, 7])
    for first_key in (0, 2):
        p = attention_rows(chunk, rows, first_key)[0]
        for g in range(G):
            for at, row in enumerate((4, 7, 11)):
                keys = range(max(first_key, row - 4), row + 1)
                logits = {t: float(q[g, row] @ k[0, t]) + float(slopes[g]) * (t - row) for t in keys}
                total_mass = sum(math.exp(x) for x in logits.values())
                expected = [math.exp(logits[t]) / total_mass if t in logits else 0.0 for t in range(first_key, total)]
                torch.testing.assert_close(p[g, at], torch.tensor(expected))


@pytest.mark.parametrize("size", [11, 52, 64])
def test_span_mass_of_a_head_that_copies(size: int) -> None:
    total, source_at, asking_at, answer = 64, 20, 50, 5
    copier, k = pointing([t - 30 if t >= asking_at else 0 for t in range(total)])  # 50 + i reads 20 + i
    neighbour, _ = pointing([t - 24 if t >= asking_at else 0 for t in range(total)])  # beside the source
    blind = torch.zeros(G, total, D)
    half = torch.cat((copier[:1], neighbour[:1]))
    asking = Asking(tuple(range(asking_at, asking_at + answer)), (((source_at, source_at + answer),),) * answer)
    watcher = SpanMass(1, 4, G, asking)
    for chunk in chunks(torch.cat((copier, neighbour, blind, half)), k.expand(4, -1, -1), size, geometry(4)):
        watcher.watch_prefill(chunk)
    even = sum(answer / (asking_at + at + 1) for at in range(answer)) / answer
    expected = torch.tensor([[[1.0, 1.0], [0.0, 0.0], [even, even], [1.0, 0.0]]])
    torch.testing.assert_close(watcher.mass, expected)
    assert watcher.share == pytest.approx(even)
    torch.testing.assert_close(watcher.ratio, expected / even)


def test_spans_of_a_row_may_be_several_and_differ_between_rows() -> None:
    q, k = pointing([5] * 18 + [6, 9])
    asking = Asking((17, 18, 19), (((5, 6), (9, 10)), ((5, 6), (9, 10)), ((9, 12), (0, 2))))
    watcher = SpanMass(1, 1, G, asking)
    for chunk in chunks(q, k, 7, geometry(1)):
        watcher.watch_prefill(chunk)
    torch.testing.assert_close(watcher.mass, torch.full((1, 1, G), 2 / 3))
    assert watcher.share == pytest.approx((2 / 18 + 2 / 19 + 5 / 20) / 3)
    with pytest.raises(CalibrationError, match="rows ascending"):
        Asking((3, 2), (((0, 1),), ((0, 1),)))


@given(st.integers(1, 9), st.integers(0, 12), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_mass_by_distance(rows: int, first: int, seed: int) -> None:
    p = torch.rand(2, rows, first + rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    p = p.tril(first)
    expected = torch.zeros(2, first + rows, dtype=torch.float64)
    for row in range(rows):
        for key in range(first + row + 1):
            expected[:, first + row - key] += p[:, row, key]
    torch.testing.assert_close(by_distance(p, first), expected)


@given(st.integers(0, 300), st.integers(1, 900), st.integers(1, 600))
@settings(max_examples=80, deadline=None)
def test_row_blocks(first: int, more: int, rows: int) -> None:
    total = first + more
    blocks = list(row_blocks(first, total, rows))
    assert blocks == sorted(blocks)
    assert blocks[-1][1] == total  # the longest rows are always seen
    assert all(first <= begin < end for begin, end in blocks)
    assert all(end <= begin for (_, end), (begin, _) in zip(blocks, blocks[1:], strict=False))
    seen = sum(end - begin for begin, end in blocks)
    assert seen <= max(rows, 128)
    if rows >= more + 256:
        assert seen == more


def test_window_of_mass() -> None:
    mass = torch.tensor([0.5, 0.3, 0.1, 0.1], dtype=torch.float64).expand(4, -1)
    part = torch.tensor([0.5, 0.6, 0.95, -0.2], dtype=torch.float64)
    assert window_of(mass, part).tolist() == [1, 2, 4, 1]


# --- on a model: every measure against whole matrices that transformers computes, in float64 -------------------------


def oracle(p: NDArray[np.float64], config: CalibrationConfig) -> dict[str, float]:
    """Measures of one query head from its whole matrix [T, T], row by row."""
    total, sinks, edge = len(p), config.sink_tokens, config.edge_window_tokens
    rows = range(config.first_row, total)
    out = {name: 0.0 for name in ("head_entropy", "head_local_ratio", "head_long_range", "head_sink_mass")}
    edges, near, plain = [], np.zeros(total), np.zeros(total)
    for row in range(total):
        mass = p[row, : row + 1]
        edges.append(mass[sinks : max(sinks, row - edge + 1)].sum())
        if row in rows:
            some = mass[mass > 0]
            out["head_entropy"] -= (some * np.log(some)).sum() / np.log(row + 1) / len(rows)
            out["head_local_ratio"] += mass[max(0, row + 1 - config.local_window_tokens) :].sum() / len(rows)
            out["head_long_range"] += mass[: row - config.long_range_tokens + 1].sum() / len(rows)
            out["head_sink_mass"] += mass[:sinks].sum() / len(rows)
            inside = np.cumsum(mass[::-1])  # of windows of 1, 2, ... tokens
            inside = np.concatenate((inside, np.full(total - len(inside), inside[-1])))
            plain += inside / len(rows)
            near += inside / len(rows)
            for sink in range(sinks):
                near[: row - sink] += mass[sink] / len(rows)  # these windows end after the sink
    for part in (90, 95, 99):
        out[f"head_window{part}"] = float((near < part / 100 - 1e-9).sum() + 1)
        out[f"head_window{part}_published"] = float((plain < part / 100 - 1e-9).sum() + 1)
    out["head_edge_mass"] = float(np.mean(edges[config.first_row :]))
    out["head_edge_mass_published"] = float(np.mean(edges))
    return out


def sharp(folder: Path) -> None:
    """The tiny model with sharper attention, so that heads differ."""
    save_model(folder)
    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(12)
            layer.self_attn.k_proj.weight.mul_(12)
    model.save_pretrained(folder)


def test_shape_and_span_mass_are_those_of_whole_matrices(tmp_path: Path) -> None:
    sharp(tmp_path)
    eager = tf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").double()
    tokens = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        matrices = eager(input_ids=torch.tensor([tokens]), output_attentions=True).attentions
    config = dataclasses.replace(windows(12, 40), edge_window_tokens=38)
    decoder = load(tmp_path, name="tiny")
    shape = Shape(decoder.geometry, config, len(tokens))
    rows, spans = (100, 101, 110), (((30, 40),), ((5, 7), (90, 95)), ((30, 40),))
    mass = SpanMass(2, 2, G, Asking(rows, spans))
    prefill(decoder, tokens, torch.float32, [shape, mass], chunk_tokens=64)
    seen = shape.measures()
    for layer, matrix in enumerate(matrices):
        for head in range(4):
            p = matrix[0, head].numpy()
            at = (layer, head // G, head % G)
            expected = oracle(p, config)
            assert set(expected) == set(seen)
            for name, value in expected.items():
                assert float(seen[name][at]) == pytest.approx(value, abs=1e-4, rel=1e-4), name
            copied = [sum(p[row, begin:end].sum() for begin, end in spans[at]) for at, row in enumerate(rows)]
            assert float(mass.mass[at]) == pytest.approx(np.mean(copied), abs=1e-5)
    assert float(seen["head_window95"].amax()) > float(seen["head_window95"].amin())  # the heads differ
