"""DuoAttention's gates: which KV heads need all of the context, learned with the model frozen (arXiv 2410.10819).

Every KV head's output is alpha * full + (1 - alpha) * streaming, streaming being attention to sinks and a window, from
the first token on. The gates alpha start at 1 and are trained on texts with several needles, each asked for at the
end: the mean squared error of the last hidden states of questions and answers against the model's own, plus
`SPARSITY` times the sum of all gates. `head_gate` is alpha after training: 1 = needs all, 0 = sinks and window do.

As published: AdamW without weight decay, warm-up and decay over a fifth of the steps each, gates kept within [0, 1],
weight .05 of the sum. Not as published, to end in minutes on 2 cores: `calibration.gate_steps` steps (2,000), a rate of
.05 (.02, so that a gate can get from 1 to 0 in fewer steps), texts of `calibration.gate_tokens` tokens (1,000 to
32,000), sinks and window of the calibration (128 and 256), numbers of 7 digits for passkeys of 32 words.

Same seed, same threads: same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor

from testbed.heads.calibration import CalibrationConfig, CalibrationError, Tick
from testbed.heads.differentiable import Differentiable
from testbed.heads.headmap import Measured
from testbed.heads.restrict import Cut, Rows, cut
from testbed.heads.texts import CalibrationText, copying
from testbed.models.base import Attend, Decoder
from testbed.workloads.needle import Needle

DEPTHS = (0.05, 0.2, 0.35, 0.5, 0.65)  # beyond, the window sees the needle from the first question
RATE = 0.05
SPARSITY = 0.05


def measure(decoder: Decoder, config: CalibrationConfig, tick: Tick) -> dict[str, Measured]:
    """`head_gate`: one training, so it has no interval.

    Args:
        decoder: the model, of transformers' modules.
        config: steps, length, sinks and window.
        tick: told the share done.

    Raises:
        CalibrationError: the texts are no longer than the window.
    """
    if config.gate_tokens <= config.sink_tokens + config.local_window_tokens:
        raise CalibrationError(
            f"calibration.gate_tokens={config.gate_tokens}: must be above sink_tokens + local_window_tokens="
            f"{config.sink_tokens + config.local_window_tokens}, or streaming heads see all"
        )
    texts = passkeys(decoder, config.gate_tokens, config.gate_steps, config.seed)
    gates = train(decoder, texts, config.sink_tokens, config.local_window_tokens, RATE, SPARSITY, tick)
    return {"head_gate": Measured.of([gates.unsqueeze(-1)], "needle", "score", [config.gate_tokens], config.seed)}


def passkeys(decoder: Decoder, length_tokens: int, samples: int, seed: int) -> list[CalibrationText]:
    """Essays with a needle at each of `DEPTHS`, then every question with its right answer."""
    work = Needle(
        (length_tokens,), DEPTHS, samples_per_cell=samples, needles_per_context=len(DEPTHS), split="calibration"
    )
    drawn = work.samples(decoder.encode, decoder.decode, seed)
    return [copying(decoder, list(group)) for _, group in groupby(drawn, key=lambda sample: sample.context_id)]


def train(
    decoder: Decoder,
    texts: list[CalibrationText],
    sink_tokens: int,
    window_tokens: int,
    rate: float,
    sparsity: float,
    tick: Tick = lambda done: None,
) -> Tensor:
    """One step a text.

    Args:
        decoder: the model.
        texts: in the order of training.
        sink_tokens: first tokens that streaming attention sees.
        window_tokens: keys that it sees besides, the query's own included.
        rate: the highest one of AdamW.
        sparsity: weight of the sum of the gates.
        tick: told the share done.

    Returns:
        Gates [L, Hk] in [0, 1].
    """
    geometry = decoder.geometry
    model = Differentiable(decoder)
    gates = torch.ones(geometry.layers, geometry.kv_heads, device=decoder.device, requires_grad=True)
    optimizer = torch.optim.AdamW([gates], lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, trapezoid(len(texts)))
    with torch.enable_grad():
        for step, text in enumerate(texts):
            whole = cut(decoder, text.tokens, 0, text.asks["retrieval_score"].rows)
            loss = distillation(model, whole, text.context_tokens, gates, sink_tokens, window_tokens)
            optimizer.zero_grad()
            (loss + sparsity * gates.sum()).backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                gates.clamp_(0.0, 1.0)
            tick((step + 1) / len(texts))
    return gates.detach().cpu()


def trapezoid(steps: int) -> Callable[[int], float]:
    """The published schedule: up over a fifth of the steps, down over the last fifth, a tenth of the rate at least."""
    ramp = max(1, steps // 5)
    return lambda step: min(1.0, max((step + 1) / ramp, 0.1), max((steps - step) / ramp, 0.1))


def distillation(
    model: Differentiable, text: Cut, context_tokens: int, gates: Tensor, sink_tokens: int, window_tokens: int
) -> Tensor:
    """Mean squared error of the hidden states after the context, of gated against full attention.

    Args:
        model: the model.
        text: cut before its first token.
        context_tokens: where questions begin.
        gates: [L, Hk].
        sink_tokens: first tokens that streaming attention sees.
        window_tokens: keys that it sees besides, the query's own included.
    """
    rows = Rows(text, model.geometry, sink_tokens, window_tokens)
    with torch.no_grad():
        teacher = model.hidden(text.rest, text.positions, rows.full)[0, context_tokens:]
    student = model.hidden(text.rest, text.positions, gated(rows, gates))[0, context_tokens:]
    return (student - teacher).square().mean()


def gated(rows: Rows, gates: Tensor) -> Attend:
    """The `Attend` that mixes full and streaming attention by gates [L, Hk]."""
    of_query_heads = gates.repeat_interleave(rows.geometry.group, 1)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        full, streaming = rows.both(layer, q, k, v)
        return torch.lerp(streaming, full, of_query_heads[layer].view(1, -1, 1, 1).expand_as(full))

    return attend
