"""The joint with transformers: an attention implementation called "testbed" that hands q, k, v to whoever runs.

transformers lets a model look up its attention function by name
(https://huggingface.co/docs/transformers/attention_interface). Ours finds its state in a context variable of
this module, never in transformers' keyword arguments, whose names change between releases. No mask function is
registered under our name, so transformers builds no mask. Models that do not use the interface are led to it by
an adapter: one entry in `ADAPTERS`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

NAME = "testbed"

Handler = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None, Mapping[str, Any]], Tensor]
"""(attention module, q, k, v, mask, options) -> out; shapes as in `testbed.models.base.Attend`."""

_HANDLER: ContextVar[Handler] = ContextVar("testbed_attention")


@contextlib.contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Within the block, attention of models switched to the interface goes to `handler`."""
    token = _HANDLER.set(handler)
    try:
        yield
    finally:
        _HANDLER.reset(token)


@contextlib.contextmanager
def watching(model: nn.Module, watch: Callable[[int, Tensor], None] | None) -> Iterator[None]:
    """Within the block, `watch` is shown (layer, hidden states) as each attention module gets them."""
    hooks = []

    def show(module: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        assert watch is not None
        watch(module.testbed_layer, args[0] if args else options["hidden_states"])  # pyright: ignore[reportArgumentType]

    if watch is not None:
        modules = [module for module in model.modules() if hasattr(module, "testbed_layer")]
        hooks = [module.register_forward_pre_hook(show, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls; answers [B, T, Hq, D], as it expects."""
    return _HANDLER.get()(module, query, key, value, attention_mask, options).transpose(1, 2), None


def switch(model: Any) -> None:
    """Makes `model`, a PreTrainedModel, use the interface; patches it in place where it needs an adapter."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    adapter = ADAPTERS.get(model.config.model_type)
    if adapter is None:
        model.set_attn_implementation(NAME)
        return
    # No backend to set, but this is what keeps transformers from building a mask.
    model.config._attn_implementation = NAME
    module_name, forward = adapter
    for module in model.modules():
        if type(module).__name__ == module_name:
            module.forward = MethodType(forward, module)


def bloom_slopes(heads: int) -> Tensor:
    """[heads] float32 ALiBi slopes (arXiv 2108.12409): a geometric series from the closest power of two."""
    power = 1 << (heads.bit_length() - 1)
    first = 2.0 ** (-8.0 / power)
    series = [first ** (i + 1) for i in range(power)]
    between = 2.0 ** (-4.0 / power)
    series += [between ** (2 * i + 1) for i in range(heads - power)]
    return torch.tensor(series, dtype=torch.float32)


def _bloom(self: Any, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """BloomAttention.forward without alibi, mask and cache: the slopes are in the geometry."""
    batch, tokens, _width = hidden_states.shape
    fused = self.query_key_value(hidden_states).view(batch, tokens, self.num_heads, 3, self.head_dim)
    query, key, value = (fused[..., part, :].transpose(1, 2) for part in range(3))
    out, _none = attention(self, query, key, value, scaling=self.inv_norm_factor)
    return residual + self.dense(out.reshape(batch, tokens, -1)), None


def _gpt_neo(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """GPTNeoSelfAttention.forward without mask and cache; its scores are not scaled."""
    shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
    query, key, value = (
        projection(hidden_states).view(shape).transpose(1, 2) for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    window = self.config.window_size if self.attention_type == "local" else None
    out, _none = attention(self, query, key, value, scaling=1.0, sliding_window=window)
    return self.out_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


ADAPTERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "bloom": ("BloomAttention", _bloom),
    "gpt_neo": ("GPTNeoSelfAttention", _gpt_neo),
}
"""Model type -> (name of its attention module's class, the forward that calls `attention`)."""
