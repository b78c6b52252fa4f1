"""Prefix shift against whole matrices of transformers in float64, and the seam where tokens merge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from numpy.typing import NDArray
from tiny_run import save_model

from testbed.engine.prefill import prefill
from testbed.heads.calibration import CalibrationConfig, CalibrationError
from testbed.heads.measures.shift import Kept, Shift, seam
from testbed.heads.tasks import shift_group
from testbed.models import load
from testbed.models.hf import HfDecoder

PREFIX, TEXT = 60, 140


def one_minus_cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    a, b = a.flatten(), b.flatten()
    return float(np.clip(1 - a @ b / np.sqrt((a @ a) * (b @ b)), 0, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with sharper attention, so that what is in front matters."""
    folder = tmp_path_factory.mktemp("shift")
    save_model(folder)
    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(10)
            layer.self_attn.k_proj.weight.mul_(10)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("merged", [0, 3])
def test_shift_is_that_of_whole_matrices(folder: Path, merged: int) -> None:
    """`merged` tokens at the seam are other ones behind the prefix, as a tokenizer may write them."""
    generator = torch.Generator().manual_seed(3)
    prefix, text = (torch.randint(0, 256, (n,), generator=generator).tolist() for n in (PREFIX, TEXT))
    joined = [*prefix, *((token + 1) % 256 for token in text[:merged]), *text[merged:]]
    eager = tf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
    with torch.no_grad():
        alone, behind = (
            torch.stack(eager(input_ids=torch.tensor([ids]), output_attentions=True).attentions)[:, 0].numpy()
            for ids in (text, joined)
        )
    decoder = load(folder, name="tiny")
    kept = Kept(2)
    prefill(decoder, text, torch.float32, [kept], chunk_tokens=48)
    place = seam(text, joined)
    assert place == (PREFIX, merged)
    shift = Shift([kept.whole(layer) for layer in range(2)], *place)
    prefill(decoder, joined, torch.float32, [shift], chunk_tokens=48)
    seen = shift.measures()
    differ = []
    for layer in range(2):
        for head in range(4):
            a, b = alone[layer, head], behind[layer, head, PREFIX:, PREFIX:]
            at = (layer, head // 2, head % 2)
            published = one_minus_cosine(a, b)
            assert float(seen["head_prefix_shift_published"][at]) == pytest.approx(published, abs=1e-4)
            a, b = a[merged:, merged:], b[merged:, merged:]
            corrected = one_minus_cosine(a / a.sum(-1, keepdims=True), b / b.sum(-1, keepdims=True))
            assert float(seen["head_prefix_shift"][at]) == pytest.approx(corrected, abs=1e-4)
            differ.append(abs(published - corrected))
    assert max(differ) > 0.01


def test_seam() -> None:
    assert seam([5, 6, 7], [1, 2, 5, 6, 7]) == (2, 0)
    assert seam([5, 6, 7], [1, 9, 6, 7]) == (1, 1)  # 2 and 5 merged into 9
    assert seam([5, 6, 7, 8], [1, 2, 5, 4, 3, 7, 8]) == (3, 2)  # 6 came apart
    for joined in ([1, 2, 5, 6], [5, 6, 7], [7]):
        with pytest.raises(CalibrationError, match="no common end"):
            seam([5, 6, 7], joined)


def test_group_averages_texts_and_prefixes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = {f"essay{at}.txt": " ".join(f"Text {at} says {at * n} in line {n}." for n in range(90)) for at in range(9)}
    monkeypatch.setattr("testbed.assets.essays", lambda: bodies)
    decoder: HfDecoder = load(folder, name="tiny")
    config = CalibrationConfig(shift_tokens=150, prefix_tokens=40, prefixes=2, text_samples=2)
    told: list[float] = []
    made = shift_group(decoder, config, told.append)
    assert set(made) == {"head_prefix_shift", "head_prefix_shift_published"}
    for measured in made.values():
        assert measured.samples == 2
        assert bool(((measured.value > 0) & (measured.value < 1)).all())
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)
    with pytest.raises(CalibrationError, match=r"shift_tokens \+ prefix_tokens: .*limit of 1024"):
        shift_group(decoder, CalibrationConfig(shift_tokens=1000, prefix_tokens=40), told.append)
