"""The llama family's forward with fewer, larger operations, from the weights of a transformers model.

A decode step of a small model is bound by reading the weights and by the number of operations. Here queries, keys
and values are one product, so are gate and up; both rotations are one; norms are torch's own. On a CPU, float32
matrices whose every number is a bf16 number (a checkpoint in bf16, widened) stay bf16 and are widened as they are used:
the same products, half the bytes (`kernels.gemv`). transformers' modules share the weights, as views of the joined
ones. Whether the result is the same is not assumed but checked at load (`testbed.models.probe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.gemv import gemv_bf16
from testbed.models.base import Attend, Geometry, Logits, Watch

_FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_BLOCK_ROWS = 4096  # compared at once
_BATCH_ROWS = 64  # sequences in one native product; each gets the bits that it would get alone
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer; C is the width of the hidden state, I of the MLP."""

    attention_norm: Tensor  # [C]
    qkv: Tensor  # [(Hq + 2 Hk) D, C]
    qkv_bias: Tensor | None
    qk_norms: tuple[Tensor, Tensor] | None  # [D] each, before the rotation (qwen3)
    out: Tensor  # [C, Hq D]
    out_bias: Tensor | None
    mlp_norm: Tensor  # [C]
    gate_up: Tensor  # [2 I, C]
    down: Tensor  # [C, I]


class LeanLlama:
    """Runs a llama-like transformers model; see `HfDecoder` for who chooses it."""

    def __init__(self, model: Any, geometry: Geometry) -> None:
        """Joins the weights of `model` in place, bf16 where that is exact; ask `fits` first.

        Where that made a matrix bf16, the model's own forward needs `model.float()` first.
        """
        self.geometry = geometry
        self.dtype: torch.dtype = model.dtype
        self.head, self.embed = model.lm_head, model.model.embed_tokens
        self.rotary = model.model.rotary_emb
        self.norm_weight: Tensor = model.model.norm.weight
        self.eps = float(model.config.rms_norm_eps)
        self.layers = [_layer(layer) for layer in model.model.layers]
        _pack_embeddings(self.embed, self.head)

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether the model is of the family, every layer of it in its plain form."""
        if type(model).__name__ not in _FAMILY or model.config.hidden_act != "silu":
            return False
        linears = [getattr(layer.self_attn, name) for layer in model.model.layers for name in _PROJECTIONS]
        for layer in model.model.layers:
            linears += [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
            if layer.mlp.down_proj.bias is not None or layer.mlp.gate_proj.bias is not None:
                return False
        plain = type(model.model.embed_tokens) is nn.Embedding and type(model.lm_head) is nn.Linear
        return plain and all(type(linear) is nn.Linear for linear in linears)

    def run(
        self, tokens: Tensor, positions: Tensor, attend: Attend, logits: Logits, watch: Watch | None = None
    ) -> Tensor | None:
        """As `Decoder.forward`, in the dtype of the weights, without gradients."""
        geometry = self.geometry
        rotated = geometry.query_heads + geometry.kv_heads
        heads = (*tokens.shape, rotated + geometry.kv_heads, geometry.head_dim)
        hidden = self.embed(tokens).to(self.dtype)
        cos, sin = self._rotation(hidden, positions)
        for index, layer in enumerate(self.layers):
            normed = self._norm(hidden, layer.attention_norm)
            if watch is not None:
                watch(index, normed)
            qkv = _linear(normed, layer.qkv, layer.qkv_bias).view(heads).transpose(1, 2)
            qk = qkv[:, :rotated]
            if layer.qk_norms is not None:
                parts = qk.split((geometry.query_heads, geometry.kv_heads), 1)
                qk = torch.cat([self._norm(part, w) for part, w in zip(parts, layer.qk_norms, strict=True)], 1)
            qk = _rotate(qk, cos, sin)
            out = attend(index, qk[:, : geometry.query_heads], qk[:, geometry.query_heads :], qkv[:, rotated:])
            hidden = hidden + _linear(out.transpose(1, 2).flatten(2), layer.out, layer.out_bias)
            gate, up = _linear(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            hidden = hidden + _linear(F.silu(gate).mul_(up), layer.down)
        if logits == "none":
            return None
        if logits == "last":
            hidden = hidden[:, -1:]
        hidden = self._norm(hidden, self.norm_weight)
        if self.head.weight.dtype != self.dtype:
            return _linear(hidden, self.head.weight, self.head.bias)
        one = len(hidden) == 1  # then the module's own call, hooks and all, has the same bits
        return (self.head(hidden) if one else _linear(hidden, self.head.weight, self.head.bias)).float()

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.eps)

    def _rotation(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, [B, 1, T, 2, D / 2] each, by transformers' own rotary module."""
        cos, sin = self.rotary(hidden, positions)
        halves = (*positions.shape, 2, self.geometry.head_dim // 2)
        sin = torch.stack((-sin.view(halves)[..., 0, :], sin.view(halves)[..., 1, :]), -2)
        return cos.view(halves).unsqueeze(1), sin.unsqueeze(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [B, H, T, D] in halves (arXiv 2104.09864, in the order of GPT-NeoX and llama)."""
    halves = x.unflatten(-1, (2, -1))
    return torch.addcmul(halves * cos, halves.flip(-2), sin).flatten(-2)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of x [B, T, C], whichever way the weight is kept; in float32 no sequence changes another's bits."""
    packed = weight.dtype == torch.bfloat16 and x.dtype == torch.float32
    if len(x) == 1:
        return gemv_bf16(x, weight, bias) if packed else F.linear(x, weight, bias)
    if packed and x.shape[1] == 1:
        parts = x.split(_BATCH_ROWS)
        return torch.cat([gemv_bf16(part, weight, bias, native_rows=_BATCH_ROWS) for part in parts])
    if x.dtype == torch.float32:  # a matrix library's sums depend on how many rows there are
        return torch.cat([_linear(row, weight, bias) for row in x.split(1)])
    return F.linear(x, weight, bias)


def _packed(weight: Tensor) -> Tensor:
    """The same numbers in bf16, or the tensor itself where that would change one or win nothing."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return weight
    half = weight.bfloat16()
    pairs = zip(half.split(_BLOCK_ROWS), weight.split(_BLOCK_ROWS), strict=True)
    return half if all(torch.equal(block.float(), original) for block, original in pairs) else weight


def _pack_embeddings(embed: nn.Embedding, head: nn.Linear) -> None:
    """Packs both, once if they are tied."""
    tied = embed.weight.data_ptr() == head.weight.data_ptr()
    embed.weight.data = _packed(embed.weight.detach())
    head.weight.data = embed.weight.detach() if tied else _packed(head.weight.detach())


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    for linear in (attention.o_proj, mlp.down_proj):
        linear.weight.data = _packed(linear.weight.detach())
    norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
    qkv, bias = _join([attention.q_proj, attention.k_proj, attention.v_proj])
    gate_up, _none = _join([mlp.gate_proj, mlp.up_proj])
    return _Layer(
        attention_norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=bias,
        qk_norms=norms,
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        down=mlp.down_proj.weight,
    )


def _join(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases one below the other; the modules' own become views, so nothing is held twice."""
    weight = _packed(torch.cat([linear.weight.detach() for linear in linears]))
    row = 0
    for linear in linears:
        linear.weight.data = weight[row : row + linear.out_features]
        row += linear.out_features
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return weight, torch.cat(biases) if len(biases) == len(linears) else None
