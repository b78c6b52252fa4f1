"""A GGUF written from a transformers llama turns back into that llama."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers as tf
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from numpy.typing import NDArray

from testbed.assets import essays
from testbed.models import load
from testbed.models.gguf import GgufError, convert
from testbed.models.probe import Dense

HEADS, KV_HEADS, LAYERS = 4, 2, 2
GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def alphabet() -> list[str]:
    """The 256 printable characters of byte-level BPE, then merged tokens and one control token."""
    from tokenizers import pre_tokenizers

    return ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġthe", "42"]


def permute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp's own (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def gguf_name(name: str) -> str:
    [part] = [part for part in GGUF_NAMES if part in name]
    words = name.split(".")
    prefix = f"blk.{words[2]}." if "layers" in words else ""
    return f"{prefix}{GGUF_NAMES[part]}.weight"


def write_gguf(path: Path, model: tf.LlamaForCausalLM, architecture: str = "llama", pre: str = "smollm") -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = alphabet()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["t h", "th e", "Ġ the", "4 2"])
    writer.add_eos_token_id(0)
    for name, weight in model.state_dict().items():
        array = weight.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            array = permute(array, HEADS if "q_proj" in name else KV_HEADS)
        # Norms stay float32, the rest is stored packed, as in real files.
        packed = array.ndim == 2 and "down" not in name
        kind = gguf.GGMLQuantizationType.BF16 if packed else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def llama() -> tf.LlamaForCausalLM:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=len(alphabet()),
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=64,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    model = tf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_((torch.randn_like(weight) * 0.3).bfloat16())  # what bf16 holds without rounding
    return model


def test_the_converted_model_is_the_one_that_was_written(llama: tf.LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", llama)
    folder = tmp_path / "folder"
    folder.mkdir()
    steps: list[tuple[int, int]] = []
    convert(tmp_path / "model.gguf", folder, lambda done, total: steps.append((done, total)))
    tokens = torch.randint(0, 200, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        truth = llama(input_ids=tokens, use_cache=False).logits
    decoder = load(folder)
    ours = decoder.forward(tokens, torch.arange(20)[None], Dense(decoder.geometry), "all")
    assert ours is not None
    assert float((ours - truth).abs().max()) < 1e-4
    assert steps[-1] == (len(llama.state_dict()), len(llama.state_dict()))
    assert decoder.geometry.max_context_tokens == 64
    assert decoder.eos_ids == {0}


def test_the_tokenizer_merges_splits_digits_and_knows_control_tokens(
    llama: tf.LlamaForCausalLM, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", llama)
    convert(tmp_path / "model.gguf", tmp_path)
    decoder = load(tmp_path)
    tokens = alphabet()
    text = "the the 42 naïve\n"
    ids = decoder.encode(text)
    assert [tokens[index] for index in ids[:5]] == ["the", "Ġthe", "Ġ", "4", "2"]
    assert decoder.decode(ids) == text
    assert decoder.encode("<|end|>") == [0]
    assert decoder.decode([0, *ids]) == text


@pytest.mark.parametrize(("architecture", "pre"), [("qwen2", "smollm"), ("llama", "llama-bpe")])
def test_other_kinds_of_files_are_refused(
    llama: tf.LlamaForCausalLM, tmp_path: Path, architecture: str, pre: str
) -> None:
    write_gguf(tmp_path / "model.gguf", llama, architecture, pre)
    with pytest.raises(GgufError, match=architecture if pre == "smollm" else pre):
        convert(tmp_path / "model.gguf", tmp_path)


@pytest.mark.assets
def test_smollm2_knows_paris_and_reads_its_essays() -> None:
    with initialize_config_module("conf", version_base="1.3"):
        config = compose(overrides=["+model=smollm2"])
    decoder = instantiate(config.model)
    assert decoder.name == "smollm2-135m-instruct"
    assert (decoder.geometry.layers, decoder.geometry.query_heads, decoder.geometry.kv_heads) == (30, 9, 3)
    assert decoder.geometry.max_context_tokens == 8192
    text = "\n".join(essays().values())
    ids = decoder.encode(text)
    assert len(ids) == pytest.approx(154_000, rel=0.01)
    assert decoder.decode(ids) == text
    prompt = torch.tensor([decoder.encode("The capital of France is")])
    logits = decoder.forward(prompt, torch.arange(prompt.shape[1])[None], Dense(decoder.geometry))
    assert logits is not None
    assert decoder.decode([int(logits[0, 0].argmax())]) == " Paris"
    # English prose costs a language model of this size about 3 nats a token; a scrambled one 10.
    window = torch.tensor([ids[2000:2256]])
    every = decoder.forward(window, torch.arange(256)[None], Dense(decoder.geometry), "all")
    assert every is not None
    loss = torch.nn.functional.cross_entropy(every[0, 32:-1], window[0, 33:])
    assert 2.0 < float(loss) < 3.8
