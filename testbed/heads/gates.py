"""DuoAttention's gates: which KV heads need all of the context, learned with the model frozen (arXiv 2410.10819).

Every KV head's output is alpha * full + (1 - alpha) * streaming, streaming being attention to sinks and a window. The
gates alpha start at 1 and are trained on texts with several needles, each asked for at the end: the mean squared error
of the last hidden states of questions and answers against the model's own, plus `SPARSITY` times the sum of all gates.
`head_gate` is alpha after training: 1 = needs all, 0 = sinks and window do.

As published: AdamW without weight decay, warm-up and decay over a fifth of the steps each, gates kept within [0, 1],
weight .05 of the sum. Otherwise, to fit the testbed and end in minutes on 2 cores: the context runs once under full
attention, as the testbed's own prefill does, and gates act on questions and answers only (published: on every token; a
step then costs several times as much); `calibration.gate_steps` steps (2,000) over `TEXTS` texts in turn; a rate of .04
(.02: a gate could not get from 1 to 0 in so few steps); contexts of `calibration.gate_tokens` tokens (1,000 to 32,000);
sinks and window of the calibration (128 and 256); numbers of 7 digits for passkeys of 32 words.

Same seed, same threads: same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from testbed.heads.calibration import CalibrationConfig, CalibrationError, Tick
from testbed.heads.differentiable import Differentiable
from testbed.heads.headmap import Measured
from testbed.heads.restrict import Rows, cut_text
from testbed.heads.texts import CalibrationText, copying
from testbed.models.base import Attend, Decoder
from testbed.workloads.needle import Needle

DEPTHS = (0.05, 0.2, 0.35, 0.5, 0.65)  # beyond, the window sees the needle from the first question
TEXTS = 10
RATE = 0.04
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
    texts = passkeys(decoder, config.gate_tokens, min(TEXTS, config.gate_steps), config.seed)
    trainer = Trainer(decoder, texts, config.sink_tokens, config.local_window_tokens, lambda part: tick(0.3 * part))
    gates = trainer.train(config.gate_steps, RATE, SPARSITY, lambda part: tick(0.3 + 0.7 * part))
    return {"head_gate": Measured.of([gates.unsqueeze(-1)], "needle", "score", [config.gate_tokens], config.seed)}


def passkeys(decoder: Decoder, length_tokens: int, samples: int, seed: int) -> list[CalibrationText]:
    """Essays with a needle at each of `DEPTHS`, then every question with its right answer."""
    work = Needle(
        (length_tokens,), DEPTHS, samples_per_cell=samples, needles_per_context=len(DEPTHS), split="calibration"
    )
    drawn = work.samples(decoder.encode, decoder.decode, seed)
    return [copying(decoder, list(group)) for _, group in groupby(drawn, key=lambda sample: sample.context_id)]


class Trainer:
    """Gates of one model on some texts."""

    def __init__(
        self,
        decoder: Decoder,
        texts: Sequence[CalibrationText],
        sink_tokens: int,
        window_tokens: int,
        tick: Tick = lambda done: None,
    ) -> None:
        """Runs every text once under full attention.

        Args:
            decoder: the model.
            texts: with questions and answers.
            sink_tokens: first tokens that streaming attention sees.
            window_tokens: keys that it sees besides, the query's own included.
            tick: told the share of the texts done.
        """
        self.model = Differentiable(decoder)
        self.rows: list[Rows] = []
        self.truths: list[Tensor] = []
        for at, text in enumerate(texts):
            rows = Rows(cut_text(decoder, text, 0), decoder.geometry, sink_tokens, window_tokens)
            with torch.no_grad():
                self.truths.append(self._hidden(rows, rows.full))
            self.rows.append(rows)
            tick((at + 1) / len(texts))

    def train(self, steps: int, rate: float, sparsity: float, tick: Tick = lambda done: None) -> Tensor:
        """Gates [L, Hk] in [0, 1].

        Args:
            steps: one text each, the texts in turn.
            rate: the highest one of AdamW.
            sparsity: weight of the sum of the gates.
            tick: told the share done.
        """
        geometry, device = self.model.geometry, self.model.device
        gates = torch.ones(geometry.layers, geometry.kv_heads, device=device, requires_grad=True)
        optimizer = torch.optim.AdamW([gates], lr=rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, trapezoid(steps))
        with torch.enable_grad():
            for step in range(steps):
                optimizer.zero_grad()
                (self.distillation(step % len(self.rows), gates) + sparsity * gates.sum()).backward()
                optimizer.step()
                schedule.step()
                with torch.no_grad():
                    gates.clamp_(0.0, 1.0)
                tick((step + 1) / steps)
        return gates.detach().cpu()

    def distillation(self, at: int, gates: Tensor) -> Tensor:
        """Mean squared error of text `at`'s hidden states after the context, with gates [L, Hk] against without."""
        rows = self.rows[at]
        return (self._hidden(rows, gated(rows, gates)) - self.truths[at]).square().mean()

    def _hidden(self, rows: Rows, attend: Attend) -> Tensor:
        return self.model.hidden(rows.text.rest, rows.text.positions, attend)


def trapezoid(steps: int) -> Callable[[int], float]:
    """The published schedule: up over a fifth of the steps, down over the last fifth, a tenth of the rate at least."""
    ramp = max(1, steps // 5)
    return lambda step: min(1.0, max((step + 1) / ramp, 0.1), max((steps - step) / ramp, 0.1))


def gated(rows: Rows, gates: Tensor) -> Attend:
    """The `Attend` that mixes full and streaming attention by gates [L, Hk]."""
    of_query_heads = gates.repeat_interleave(rows.geometry.group, 1)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        full, streaming = rows.both(layer, q, k, v)
        return torch.lerp(streaming, full, of_query_heads[layer].view(1, -1, 1, 1).expand_as(full))

    return attend
