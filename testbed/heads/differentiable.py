"""A decoder whose forward keeps gradients: what an `Attend` puts in may be trained, the weights stay frozen.

`Decoder.forward` runs without gradients, on weights that may be packed in bf16. Here transformers' own modules run, on
float32 weights: the model's own where all are float32, else a copy (4 bytes a weight, as long as this object lives).
Activations are kept for the backward pass, attention matrices are not where attention is torch's flash kernel: about
1.2 MB a token for SmolLM2-135M, so 1.2 GB for 1,024 tokens.

    model = Differentiable(decoder)
    loss = model.logits(tokens, positions, attend, keep).square().mean()
    loss.backward()                                    # into whatever `attend` read
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from testbed.models.base import Attend, Decoder, ModelError
from testbed.models.hf import HfDecoder
from testbed.models.interface import handling


class Differentiable:
    """Runs a transformers decoder in float32 under autograd."""

    def __init__(self, decoder: Decoder) -> None:
        """Takes the decoder's modules, or a float32 copy of them.

        Raises:
            ModelError: not a decoder of transformers' modules.
        """
        if not isinstance(decoder, HfDecoder):
            raise ModelError(
                f"model {decoder.name}: gradients need transformers' modules (testbed.models.load or wrap)"
            )
        self.geometry, self.device = decoder.geometry, decoder.device
        wide = all(weight.dtype == torch.float32 for weight in decoder.model.parameters())
        self.model: Any = decoder.model if wide else copy.deepcopy(decoder.model).float().requires_grad_(False)
        self._takes_positions = "position_ids" in signature(self.model.forward).parameters
        self._layers = _decoder_layers(self.model)

    def logits(self, tokens: Tensor, positions: Tensor, attend: Attend, keep: Tensor) -> Tensor:
        """Logits of some positions.

        Args:
            tokens: [B, T] int64.
            positions: [B, T] int64.
            attend: as in `Decoder.forward`; it sees float32.
            keep: [K] indices into the T tokens.

        Returns:
            [B, K, V] float32.
        """
        with handling(_handler(attend)):
            return self.model(**self._inputs(tokens, positions), logits_to_keep=keep).logits.float()

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[B, T, C] float32, what the head that makes logits is given (after the last norm)."""
        with handling(_handler(attend)):
            return self.model.base_model(**self._inputs(tokens, positions)).last_hidden_state

    def states(self, tokens: Tensor, positions: Tensor, attend: Attend) -> list[Any]:
        """What every layer answers, for `logits_from`; without gradients."""
        kept: list[Any] = []
        hooks = [layer.register_forward_hook(lambda _module, _given, out: kept.append(out)) for layer in self._layers]
        try:
            with torch.no_grad():
                self.hidden(tokens, positions, attend)
        finally:
            for hook in hooks:
                hook.remove()
        return kept

    def logits_from(
        self, layer: int, states: list[Any], tokens: Tensor, positions: Tensor, attend: Attend, keep: Tensor
    ) -> Tensor:
        """`logits`, with the layers before `layer` not run: their answers are taken from `states` of one sequence."""
        with _standing_in(self._layers[:layer], states, len(tokens)):
            return self.logits(tokens, positions, attend, keep)

    def _inputs(self, tokens: Tensor, positions: Tensor) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        return {**inputs, "position_ids": positions} if self._takes_positions else inputs


def _handler(attend: Attend) -> Any:
    def handler(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, _mask: Tensor | None, _options: Mapping[str, Any]
    ) -> Tensor:
        return attend(module.testbed_layer, q, k, v)  # pyright: ignore[reportArgumentType]

    return handler


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The entries of a list that hold the attention modules: "model.layers.3" for "model.layers.3.self_attn"."""
    modules = dict(model.named_modules())
    found: dict[int, nn.Module] = {}
    for name, module in modules.items():
        if hasattr(module, "testbed_layer"):
            parts = name.split(".")
            number = max(at for at, part in enumerate(parts) if part.isdigit())
            found[module.testbed_layer] = modules[".".join(parts[: number + 1])]  # pyright: ignore[reportArgumentType]
    return [found[layer] for layer in sorted(found)]


def _answer(answer: Any, *_given: Any, **_options: Any) -> Any:
    return answer


@contextmanager
def _standing_in(layers: list[nn.Module], states: list[Any], batch: int) -> Iterator[None]:
    """Within the block, these layers answer what they answered for one sequence, for each of `batch`."""

    def widened(state: Any) -> Any:
        if isinstance(state, tuple):
            return tuple(map(widened, state))
        return state.expand(batch, *state.shape[1:]) if isinstance(state, Tensor) else state

    for layer, state in zip(layers, states, strict=False):
        layer.forward = partial(_answer, widened(state))
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
