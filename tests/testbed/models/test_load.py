"""Reading model folders: what is right loads whole, what is broken is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from testbed.models import Geometry, ModelError, load
from testbed.models.probe import Dense


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=[2, 3],
    )
    path = tmp_path / "tiny"
    tf.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_loads_in_the_dtype_asked_for(folder: Path, dtype: str) -> None:
    decoder = load(folder, dtype=dtype)
    expected = getattr(torch, dtype)
    tokens = torch.arange(6)[None]
    logits = decoder.forward(tokens, tokens, Dense(decoder.geometry), "all")
    assert decoder.name == "tiny"
    assert decoder.dtype == expected
    assert logits is not None
    assert logits.dtype == torch.float32
    numbers = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert decoder.weights_bytes == numbers * expected.itemsize
    assert decoder.eos_ids == {2, 3}
    assert decoder.geometry.max_context_tokens == 64


def test_text_needs_a_tokenizer(folder: Path) -> None:
    decoder = load(folder)
    with pytest.raises(ModelError, match=r"model tiny has no tokenizer: .*tokenizer\.json"):
        decoder.encode("some text")


def test_a_missing_weight_is_not_filled_with_random_numbers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing .*layers\.1\.mlp\.up_proj"):
        load(folder)


def test_broken_folders_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere.*no such folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json.*no such folder"):
        load(folder / "config.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="empty.*can't be loaded"):
        load(tmp_path / "empty")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="tiny.*can't be loaded"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="tiny.*can't be loaded"):
        load(folder)


def test_an_encoder_decoder_folder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    tf.T5Config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="encoder-decoder.*supported are"):
        load(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("dtype", "float8"), ("dtype", "int4"), ("device", "gpu0")])
def test_bad_values_name_key_and_choices(folder: Path, key: str, value: str) -> None:
    with pytest.raises(ModelError, match=rf"model\.{key}='{value}': must be"):
        load(folder, **{key: value})


def test_hydra_builds_the_decoder(folder: Path) -> None:
    with initialize_config_module("conf", version_base="1.3"):
        config = compose(overrides=["+model=hf", f"model.path={folder}", "model.device=cpu"])
    decoder = instantiate(config.model)
    assert decoder.name == "tiny"
    assert decoder.geometry.kv_heads == 2


def test_composing_the_default_model_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path / "cache"))
    with initialize_config_module("conf", version_base="1.3"):
        config = compose(overrides=["+model=smollm2", "model.dtype=bfloat16"])
    OmegaConf.to_container(config, resolve=True)
    assert config.model.path._target_ == "testbed.assets.model_path"
    assert not (tmp_path / "cache").exists()


def test_geometry_checks_itself() -> None:
    good = {"layers": 2, "query_heads": 6, "kv_heads": 2, "head_dim": 8, "vocab": 10, "max_context_tokens": None}
    assert Geometry(**good, window_tokens=(0, 4), scale=(1.0, 1.0)).group == 3
    assert Geometry(**good, window_tokens=(0, 4), scale=(1.0, 1.0)).token_bytes(torch.bfloat16) == 2 * 2 * 2 * 8 * 2
    with pytest.raises(ModelError, match=r"query_heads=5.*kv_heads=2"):
        Geometry(**{**good, "query_heads": 5}, window_tokens=(0, 4), scale=(1.0, 1.0))
    with pytest.raises(ModelError, match="window_tokens: has 1 entries"):
        Geometry(**good, window_tokens=(0,), scale=(1.0, 1.0))
    with pytest.raises(ModelError, match="slopes"):
        Geometry(**good, window_tokens=(0, 4), scale=(1.0, 1.0), slopes=torch.ones(2))
