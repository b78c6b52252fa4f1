"""Head maps side by side: what each costs the model, on the same samples, from one prefill a context.

A map is a tensor of classes. Every map gets a session of its own under one policy (budget and format by class), started
from the same prefilled context; question and right answer are run as one turn, and the distributions along the answer
are compared with the full cache's. Two maps with the same number of heads of each class hold the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from policies.base import Policy, Signals
from testbed.cache.layout import CacheConfig
from testbed.compose import full_policy
from testbed.engine.evaluate import agreement
from testbed.engine.prefill import DenseKV, prefill
from testbed.engine.session import Session, SessionConfig
from testbed.engine.signals import SignalContext
from testbed.models.base import Decoder
from testbed.workloads.base import Sample, check_fraction, check_list, check_whole
from testbed.workloads.haystack import Text
from testbed.workloads.needle import Needle
from testbed.workloads.text import Continuation

Tick = Callable[[int], None]


@dataclass(frozen=True)
class TrialConfig:
    """What maps are tried on; built by Hydra from conf/heads_verdict.yaml. Of the calibration split, never of the test.

    Attributes:
        lengths: contexts of the needles, and of plain text.
        depths: where the needles are, outside of the local window; one context holds one of each.
        contexts: contexts of each length with needles.
        texts: stretches of plain text of each length.
        continuation_tokens: what follows such a stretch.
        random_maps: maps dealt by chance that every classifier is held against, 19 or more.
        local_quantile, global_quantile: of all classifiers that have quantiles, so that they share the random maps.
        seed: of samples and random maps; other than the calibration's.
        text: documents by name, a text file or a folder; None for the essays.
    """

    lengths: Sequence[int] = (2048,)
    depths: Sequence[float] = (0.2, 0.5)
    contexts: int = 6
    texts: int = 2
    continuation_tokens: int = 48
    random_maps: int = 20
    local_quantile: float = 0.75
    global_quantile: float = 0.85
    seed: int = 1
    text: Text = None

    def __post_init__(self) -> None:
        """Checks what Hydra's instantiate does not."""
        for key in ("lengths", "depths"):
            object.__setattr__(self, key, check_list(f"trial.{key}", getattr(self, key)))
        for key in ("contexts", "texts", "continuation_tokens"):
            check_whole(f"trial.{key}", getattr(self, key), 1)
        check_whole("trial.continuation_tokens", self.continuation_tokens, 2)
        check_whole("trial.random_maps", self.random_maps, 19)  # fewer can't make a rank rare
        check_whole("trial.seed", self.seed, 0)
        for key in ("local_quantile", "global_quantile"):
            check_fraction(f"trial.{key}", getattr(self, key))

    def samples(self, decoder: Decoder) -> list[Sample]:
        """Needles first, then text; samples of one context follow each other."""
        needle = Needle(
            self.lengths,
            self.depths,
            samples_per_cell=self.contexts,
            needles_per_context=len(self.depths),
            split="calibration",
            text=self.text,
        )
        text = Continuation(self.lengths, self.continuation_tokens, self.texts, "calibration", self.text)
        return [sample for work in (needle, text) for sample in work.samples(decoder.encode, decoder.decode, self.seed)]


@dataclass(frozen=True)
class Trial:
    """One map on one sample.

    Attributes:
        map: its name.
        task: "needle" or "text".
        context_id: samples of one context are not independent.
        kl: mean KL(full || map) in nats over the answer's tokens.
        loss: mean -log p of the answer's tokens, nats.
        loss_full: the same of the full cache.
        device_bytes: what the session's tables and pages take on the device.
    """

    map: str
    task: str
    context_id: str
    kl: float
    loss: float
    loss_full: float
    device_bytes: int


@dataclass(frozen=True)
class Fixed:
    """A classifier that says what it was told."""

    classes: Tensor

    @property
    def needs(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    def classify(self, signals: Signals) -> Tensor:
        """[L, Hk] int8 of `Head`."""
        return self.classes


def run(
    decoder: Decoder,
    maps: Mapping[str, Tensor],
    policy: Policy,
    cache: CacheConfig,
    samples: Sequence[Sample],
    context: SignalContext,
    tick: Tick = lambda tokens: None,
) -> list[Trial]:
    """Every map on every sample.

    Args:
        decoder: the model.
        maps: name -> classes [L, Hk].
        policy: whose classifier gives way to each map.
        cache: of the sessions.
        samples: those of one context follow each other; no histories.
        context: what the policy's signals are built with.
        tick: called with the tokens of each context that is done.
    """
    trials: list[Trial] = []
    for _, group in groupby(samples, key=lambda sample: sample.context_id):
        asked = list(group)
        dense = prefill(decoder, asked[0].context_tokens, cache.torch_dtype)
        full = list(_answers(decoder, full_policy(), cache, dense, asked, context))
        for name, classes in maps.items():
            each = replace(policy, classifier=Fixed(classes))
            for sample, mine, theirs in zip(
                asked, _answers(decoder, each, cache, dense, asked, context), full, strict=True
            ):
                trials.append(
                    Trial(
                        map=name,
                        task="needle" if sample.answer else "text",
                        context_id=sample.context_id,
                        kl=agreement(mine.logprobs, theirs.logprobs).kl,
                        loss=mine.loss,
                        loss_full=theirs.loss,
                        device_bytes=mine.device_bytes,
                    )
                )
        tick(len(asked[0].context_tokens))
    return trials


@dataclass(frozen=True)
class _Answer:
    logprobs: Tensor  # [M, V], before each token of the answer
    loss: float
    device_bytes: int


def _answers(
    decoder: Decoder,
    policy: Policy,
    cache: CacheConfig,
    dense: DenseKV,
    samples: Sequence[Sample],
    context: SignalContext,
) -> Iterator[_Answer]:
    """The right answers, each run in a fork of one session."""
    session = Session(decoder, policy, SessionConfig(cache), context)
    try:
        session.start(dense)
        for sample in samples:
            fork = session.fork()
            try:
                yield _forced(fork, sample)
            finally:
                fork.close()
    finally:
        session.close()


def _forced(session: Session, sample: Sample) -> _Answer:
    """Question and answer as one turn; text without a question begins with its first token."""
    text = [*sample.question_tokens, *sample.continuation_tokens]
    first = len(sample.question_tokens) or 1
    logits = session.extend(text[:-1], "all")
    assert logits is not None
    logprobs = logits[first - 1 :].float().log_softmax(-1)
    said = torch.tensor(text[first:], device=logprobs.device).unsqueeze(1)
    return _Answer(logprobs, -float(logprobs.gather(1, said).mean()), session.cache.ledger().used_device_bytes)
