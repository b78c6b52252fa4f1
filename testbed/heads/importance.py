"""What a head is worth: what is lost when it alone keeps no more than sinks and a window.

The context is prefilled under full attention (`testbed.heads.restrict`), then the rest runs with one KV head cut down
to the first `sink_tokens` and the last `local_window_tokens`, all others seeing everything. On needle text the loss is
taken where the answers are written, on plain text at every token of the last `TEXT_ROWS`.

* `head_restrict_kl`, `head_restrict_loss`: KL(full || restricted) of the next token and rise of its loss, nats, mean
  over the answers' tokens; `..._text` on plain text. One KV head is one unit: there is no maximum over the group.
* `head_gradient`: the first-order estimate of the same. With o = full + g (restricted - full) for every head,
  |d loss / d g| at g = 0: the gradient of the loss with respect to the head's output, times what cutting it changes.
  All heads in one backward pass.
* `head_gradient_activation`: |d loss / d o . o|, as if the head's output were removed (after Michel et al. 2019,
  arXiv 1905.10650), from the same pass.

Cost of a text: its prefill, L Hk runs of the rest from the restricted layer on (the layers before are run once), which
is about half of L Hk runs, and one run with gradients.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from testbed.heads.calibration import CalibrationConfig, Tick
from testbed.heads.differentiable import Differentiable
from testbed.heads.headmap import Measured
from testbed.heads.restrict import Cut, Rows, cut_text, kl_nats, loss_nats, needle_texts
from testbed.heads.texts import CalibrationText, texts
from testbed.models.base import Decoder

TEXT_ROWS = 64  # tokens of a plain text that are run restricted
BATCH_HEADS = 4  # heads restricted at once, one a sequence: bounds the logits held


def measure(decoder: Decoder, config: CalibrationConfig, tick: Tick) -> dict[str, Measured]:
    """The measures of this module, on needle text and plain text.

    Args:
        decoder: the model, of transformers' modules.
        config: lengths, samples, sinks and window.
        tick: told the share done.

    Raises:
        CalibrationError: a text is beyond the model's limit.
    """
    model = Differentiable(decoder)
    found = needle_texts(decoder, config) + texts("text", decoder, config.text_tokens, config.text_samples, config.seed)
    samples = _Samples(config.seed)
    for at, text in enumerate(found):
        piece = cut_text(decoder, text, TEXT_ROWS)

        def part(share: float, at: int = at) -> None:
            tick((at + share) / len(found))

        kl, loss = restricted_losses(model, piece, config.sink_tokens, config.local_window_tokens, part)
        suffix = "" if text.task == "needle" else f"_{text.task}"
        samples.add(f"head_restrict_kl{suffix}", text, kl)
        samples.add(f"head_restrict_loss{suffix}", text, loss)
        if text.task == "needle":
            by_cut, by_output = gate_gradients(model, piece, config.sink_tokens, config.local_window_tokens)
            samples.add("head_gradient", text, by_cut)
            samples.add("head_gradient_activation", text, by_output)
    return samples.measured()


class _Samples:
    """Values of every measure, text by text."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._each: dict[str, list[tuple[CalibrationText, Tensor]]] = {}

    def add(self, name: str, text: CalibrationText, value: Tensor) -> None:
        """One text's value [L, Hk], or signed derivatives [L, Hk, G] of a KV head's query heads."""
        self._each.setdefault(name, []).append((text, value))

    def measured(self) -> dict[str, Measured]:
        """A derivative counts by the size of its sum over the group; `mean` is the mean size of its query heads'."""
        out = {}
        for name, pairs in self._each.items():
            values = [
                value.unsqueeze(-1) if value.dim() == 2 else value.sum(-1, keepdim=True).abs() for _, value in pairs
            ]
            lengths = [text.context_tokens for text, _ in pairs]
            out[name] = Measured.of(values, pairs[0][0].task, "nats", lengths, self._seed)
            if pairs[0][1].dim() == 3:
                sizes = torch.stack([value.abs().mean(-1) for _, value in pairs])
                out[name] = replace(out[name], mean=sizes.mean(0))
        return out


@torch.no_grad()
def restricted_losses(
    model: Differentiable, text: Cut, sink_tokens: int, window_tokens: int, tick: Tick = lambda done: None
) -> tuple[Tensor, Tensor]:
    """KL and rise of the loss when one head alone is restricted.

    Args:
        model: the model.
        text: what is run.
        sink_tokens: first tokens that the head keeps.
        window_tokens: keys that it sees besides, see `Rows`.
        tick: told the share done.

    Returns:
        [L, Hk] nats each, mean over the asked tokens.
    """
    geometry = model.geometry
    rows = Rows(text, geometry, sink_tokens, window_tokens)
    given = text.rest, text.positions
    full = model.logits(*given, rows.full, text.asking)
    states = model.states(*given, rows.full)
    base = loss_nats(full, text.right).mean(-1)
    kl, loss = torch.zeros(2, geometry.layers, geometry.kv_heads)
    for layer in range(geometry.layers):
        for heads in torch.arange(geometry.kv_heads, device=model.device).split(BATCH_HEADS):
            rest, positions = (each.expand(len(heads), -1) for each in given)
            one = _OneHead(rows, layer, heads)
            logits = model.logits_from(layer, states, rest, positions, one, text.asking)
            kl[layer, heads.cpu()] = kl_nats(full, logits).mean(-1).cpu()
            loss[layer, heads.cpu()] = (loss_nats(logits, text.right).mean(-1) - base).cpu()
        tick((layer + 1) / geometry.layers)
    return kl, loss


class _OneHead:
    """The `Attend` that restricts, in sequence b, KV head heads[b] of one layer."""

    def __init__(self, rows: Rows, layer: int, heads: Tensor) -> None:
        self.rows, self.layer = rows, layer
        kv_head = torch.arange(rows.geometry.query_heads, device=heads.device) // rows.geometry.group
        self.cut = (kv_head == heads.unsqueeze(1))[:, :, None, None]  # [B, Hq, 1, 1]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer != self.layer:
            return self.rows.full(layer, q, k, v)
        full, restricted = self.rows.both(layer, q, k, v)
        return torch.where(self.cut, restricted, full)


def gate_gradients(model: Differentiable, text: Cut, sink_tokens: int, window_tokens: int) -> tuple[Tensor, Tensor]:
    """Derivatives of the mean loss of the asked tokens with every head as it is.

    Returns:
        [L, Hk, G] nats each: by g of full + g (restricted - full), and by a of (1 + a) full.
    """
    geometry = model.geometry
    rows = Rows(text, geometry, sink_tokens, window_tokens)
    shape = (geometry.layers, geometry.query_heads, 1, 1)
    by_cut, by_output = (torch.zeros(shape, device=model.device, requires_grad=True) for _ in range(2))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        full, restricted = rows.both(layer, q, k, v)
        return (1 + by_output[layer]) * full + by_cut[layer] * (restricted - full)

    with torch.enable_grad():
        logits = model.logits(text.rest, text.positions, attend, text.asking)
        loss = loss_nats(logits[0], text.right).mean()
        found = torch.autograd.grad(loss, (by_cut, by_output))
    first, second = (grad.view(geometry.layers, geometry.kv_heads, geometry.group).cpu() for grad in found)
    return first, second
