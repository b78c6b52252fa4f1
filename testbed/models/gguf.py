"""Turns a llama-architecture GGUF file into a folder that `AutoModelForCausalLM.from_pretrained` reads.

The weights are unpacked once by the `gguf` package's own dequantisers and stored as bf16 safetensors, which
load in about two seconds; transformers' own GGUF path takes some thirty. GGUF stores the rows of the query
and key projections in the order of llama.cpp's rotary embedding (pairs side by side), transformers in halves:
they are put back in order here. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


class GgufError(ValueError):
    """A GGUF file of a kind that is not converted here."""


def convert(gguf: Path, folder: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Writes config, weights and tokenizer of `gguf` into the existing `folder`.

    Args:
        gguf: a llama-architecture model with a byte-level BPE tokenizer.
        folder: where config.json, model.safetensors, tokenizer.json, ... go.
        progress: called with (tensors done, tensors in all).

    Raises:
        GgufError: another architecture, tokenizer or an unknown tensor.
    """
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise GgufError(f"{gguf}: architecture {fields.get('general.architecture')!r}; only 'llama' is converted")
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    tensors: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors, 1):
        name = _hf_name(tensor.name)
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if name.endswith("q_proj.weight"):
            weight = _halves(weight, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            weight = _halves(weight, config["num_key_value_heads"])
        tensors[name] = weight.to(torch.bfloat16).contiguous()
        if progress is not None:
            progress(done, len(reader.tensors))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", config)
    _write(folder / "tokenizer_config.json", _tokenizer_config(fields, config["max_position_embeddings"]))
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(folder / "generation_config.json", ids)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        if part in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.{kind}"
    elif stem in _TENSORS:
        return f"{_TENSORS[stem]}.{kind}"
    raise GgufError(f"unknown tensor {name!r} in a llama model")


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Puts the two halves of each head one after the other: weight [H * D, C], rotary pairs side by side."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """The transformers configuration of a llama."""
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE; SmolLM splits digits one by one before anything else."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if (kind, pre) not in {("gpt2", "smollm"), ("gpt2", "gpt-2")}:
        raise GgufError(f"tokenizer {kind!r} with pre-tokenizer {pre!r}; converted are gpt2 with smollm or gpt-2")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, code in zip(tokens, kinds, strict=True)
            if code == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _tokenizer_config(fields: dict[str, Any], context_tokens: int) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {key: fields.get(f"tokenizer.ggml.{name}_token_id") for key, name in named.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
        "chat_template": fields.get("tokenizer.chat_template"),
        **{key: tokens[index] for key, index in ids.items() if index is not None},
    }
