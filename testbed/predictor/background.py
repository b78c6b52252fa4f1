"""Offsets of the background state, learned per head, and what they buy on other text.

    python -m testbed.predictor background                                        # learn, judge on held-out documents
    python -m testbed.predictor background offsets=testbed/predictor/weights      # and write the weights
    python -m testbed.predictor background what=stand_ins record=stand_ins.json   # `testbed.predictor.stand_ins`

For skipped pages a stream has one state: mean key, mean value, log of the tokens. A head's offsets change its logit by
a constant, its value by a factor and an addend (`testbed.cache.offsets`); they are found on training documents

* by ridge regression: the attention output is linear in small changes of the offsets, so their least squares on the
  relative error of the output is solved in closed form, `ROUNDS` times around what the last round gave (Gauss-Newton);
* by gradient: Adam on the same error.

The judge sees other documents. Beside nothing, the plain mean and both offsets it has a bound that no offset learned on
other text can be expected to reach: key, logit and value fitted to the judged queries themselves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from testbed.cache.offsets import BackgroundOffsets, packaged
from testbed.commands import check_keys, check_output, set_threads
from testbed.compose import compose_named
from testbed.models.base import Decoder
from testbed.predictor.corpus import SOURCES, Amounts, Document, Part, corpus_hash, documents
from testbed.predictor.skipping import (
    LOG2_E,
    WARM_QUERIES,
    Choice,
    Context,
    LeftOut,
    Pages,
    capture,
    left_out,
    sample_blocks,
)
from testbed.predictor.stand_ins import Prepared, compared, stand_in_table
from testbed.results.record import write_atomically
from testbed.setup import build
from testbed.workloads.base import WorkloadError, check_distinct, check_fraction, check_list, check_whole

ROUNDS = 4
RIDGE = 0.01  # share of each unknown's own curvature
LARGEST_STEP = 1.5  # of the logit offset a round, in powers of two: beyond it the error is not linear any more
STEPS, LEARNING_RATE, DECAY = 100, 0.05, 1e-3
GRADIENT_ROWS = 1500  # of the training rows, evenly: more change nothing that shows
CLOSED_RIDGE = 0.1
RESAMPLES = 2000
TAIL_TOKENS = 33
LEARNED = ("ridge", "gradient")
METHODS = ("skipped", "mean", *LEARNED, "closed")


class BackgroundError(ValueError):
    """Settings that can't be worked with."""


@dataclass(frozen=True)
class BackgroundConfig:
    """Built from conf/background.yaml.

    Attributes:
        length_tokens: of the longest documents.
        train, test: documents of each kind.
        keeps: shares of the pages that are read exactly.
        predictors: that choose them.
        blocks: of 16 sample queries in each document.
        seed: of the corpus.
    """

    length_tokens: int
    train: Amounts
    test: Amounts
    keeps: tuple[float, ...]
    predictors: tuple[str, ...]
    blocks: int
    seed: int

    def __post_init__(self) -> None:
        """Refuses what nothing can be learned with."""
        for key, least in (("length_tokens", 1), ("blocks", 1), ("seed", 0)):
            check_whole(f"background.{key}", getattr(self, key), least)
        for key in ("keeps", "predictors"):
            object.__setattr__(self, key, check_list(f"background.{key}", getattr(self, key)))
            check_distinct(f"background.{key}", getattr(self, key))
        for keep in self.keeps:
            check_fraction("background.keeps", keep)
        self.choices()  # refuses unknown predictors

    def choices(self) -> list[Choice]:
        """Every predictor with every share."""
        return [Choice(predictor, keep) for predictor in self.predictors for keep in self.keeps]


# --- learning --------------------------------------------------------------------------------------------------------


def fit_ridge(rows: LeftOut, ridge: float = RIDGE, rounds: int = ROUNDS) -> BackgroundOffsets:
    """Offsets of S streams by least squares on the relative error of the output; rows of all training documents."""
    streams, _, dim = rows.mean_value.shape
    truth = rows.truth
    weight = 1 / truth.square().sum(2).clamp(min=1e-12)
    now = torch.zeros(streams, 2 + dim, dtype=torch.float64)  # logit, factor - 1, addend
    for _ in range(rounds):
        offsets = _as_offsets(now)
        value, lse = offsets.moved(rows.mean_value, rows.mean_lse)
        share = torch.sigmoid((lse - rows.kept_lse) / LOG2_E)
        slopes = (
            (share * (1 - share) / LOG2_E)[..., None] * (value - rows.kept_out),
            share[..., None] * rows.mean_value,
        )
        rest = truth - rows.mixed(value, lse)
        normal = torch.zeros(streams, 2 + dim, 2 + dim, dtype=torch.float64)
        right = torch.zeros(streams, 2 + dim, dtype=torch.float64)
        for i, one in enumerate(slopes):
            for j, other in enumerate(slopes):
                normal[:, i, j] = ((one * other).sum(2) * weight).sum(1)
            normal[:, i, 2:] = normal[:, 2:, i] = (one * (weight * share)[..., None]).sum(1).double()
            right[:, i] = ((one * rest).sum(2) * weight).sum(1)
        values = torch.arange(2, 2 + dim)
        normal[:, values, values] = (weight * share.square()).sum(1, keepdim=True).double()
        right[:, 2:] = (rest * (weight * share)[..., None]).sum(1)
        pull = ridge * normal.diagonal(dim1=1, dim2=2) + 1e-9
        step = torch.linalg.solve(normal + torch.diag_embed(pull), (right - pull * now)[..., None])[..., 0]
        step[:, 0] = step[:, 0].clamp(-LARGEST_STEP, LARGEST_STEP)
        now = now + step
    return _as_offsets(now)


def fit_gradient(rows: LeftOut, steps: int = STEPS) -> BackgroundOffsets:
    """The same by gradient, from no offsets. Deterministic."""
    thin = max(1, rows.mean_lse.shape[1] // GRADIENT_ROWS)
    rows = rows.map(lambda x: x[:, ::thin])
    truth = rows.truth
    weight = 1 / truth.square().sum(2).clamp(min=1e-12)
    unit = rows.mean_value.square().mean(1).sqrt().clamp(min=1e-6)
    streams, _, dim = rows.mean_value.shape
    with torch.enable_grad():
        logit, factor = (torch.zeros(streams, requires_grad=True) for _ in range(2))
        addend = torch.zeros(streams, dim, requires_grad=True)
        optimiser = torch.optim.Adam([logit, factor, addend], lr=LEARNING_RATE)
        for _ in range(steps):
            value = rows.mean_value * (1 + factor[:, None, None]) + (addend * unit)[:, None]
            got = rows.mixed(value, rows.mean_lse + logit[:, None])
            loss = ((got - truth).square().sum(2) * weight).mean(1) + DECAY * addend.square().mean(1)
            optimiser.zero_grad()
            loss.sum().backward()
            optimiser.step()
    return BackgroundOffsets(logit.detach(), 1 + factor.detach(), addend.detach() * unit)


def _as_offsets(x: Tensor) -> BackgroundOffsets:
    """X [S, 2 + D] of logit, factor - 1, addend."""
    x = x.float()
    return BackgroundOffsets(x[:, 0], 1 + x[:, 1], x[:, 2:])


def closed_form(rows: LeftOut) -> tuple[Tensor, Tensor]:
    """Value and lse [S, R, D], [S, R] of states whose key, logit and value are fitted to these very rows."""
    share = torch.sigmoid((rows.skipped_lse - rows.kept_lse) / LOG2_E)
    truth = rows.truth.square().sum(2).clamp(min=1e-12)
    weight = (share * (1 - share)).square() * (rows.skipped_out - rows.kept_out).square().sum(2) / truth
    x = torch.cat((rows.query, torch.ones_like(share)[..., None]), 2).double()
    normal = (x * weight[..., None]).transpose(1, 2) @ x
    pull = CLOSED_RIDGE * normal.diagonal(dim1=1, dim2=2).clone()
    pull[:, -1] *= 1e-5
    right = (x * weight[..., None]).transpose(1, 2) @ (rows.skipped_lse - rows.mean_lse).double()[..., None]
    lse = rows.mean_lse + (x @ torch.linalg.solve(normal + torch.diag_embed(pull + 1e-9), right))[..., 0].float()
    by_mass = share.square() / truth
    total = by_mass.sum(1)[:, None].clamp(min=1e-9)
    addend = (by_mass[..., None] * (rows.skipped_out - rows.mean_value)).sum(1) / total
    return rows.mean_value + addend[:, None], lse


# --- judging ---------------------------------------------------------------------------------------------------------


def errors(blocks: Sequence[LeftOut], offsets: Mapping[str, BackgroundOffsets]) -> dict[str, Tensor]:
    """Mean relative error [S] of each method on one document; `closed` is fitted to each block."""
    rows = LeftOut.joined(blocks)
    out = {
        "skipped": rows.error(None, None),
        "mean": rows.error(rows.mean_value, rows.mean_lse),
        "closed": torch.cat([block.error(*closed_form(block)) for block in blocks], 1),
    }
    for name, each in offsets.items():
        out[name] = rows.error(*each.moved(rows.mean_value, rows.mean_lse))
    return {name: value.mean(1) for name, value in out.items()}


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Mean and 95 % bootstrap interval over documents."""
    x = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(x), (RESAMPLES, len(x)))
    low, high = np.quantile(x[drawn].mean(1), [0.025, 0.975])
    return float(x.mean()), float(low), float(high)


# --- the command -----------------------------------------------------------------------------------------------------


def _captured(decoder: Decoder, corpus: Sequence[Document], config: BackgroundConfig) -> list[Context]:
    out = []
    for at, document in enumerate(corpus):
        started = time.perf_counter()
        out.append(capture(decoder, document.tokens, sample_blocks(len(document.tokens), config.blocks)))
        print(f"{at + 1} of {len(corpus)}: {document.name}, {time.perf_counter() - started:.0f} s", flush=True)
    return out


def learn_and_judge(
    train: Sequence[Context],
    test: Sequence[Context],
    choices: Sequence[Choice],
    pages: Pages,
    say: Callable[[str], None],
) -> tuple[dict[str, BackgroundOffsets], dict[Choice, dict[str, Tensor]]]:
    """Offsets by method, and by choice and method the errors [documents, L, Hk] on held-out text."""
    layers = len(train[0].keys)
    learned: dict[str, list[BackgroundOffsets]] = {"ridge": [], "gradient": []}
    judged: dict[Choice, dict[str, list[Tensor]]] = {choice: {name: [] for name in METHODS} for choice in choices}
    for layer in range(layers):
        started = time.perf_counter()
        rows = [block for context in train for blocks in left_out(context, layer, choices, pages) for block in blocks]
        joined = LeftOut.joined(rows)
        here = {"ridge": fit_ridge(joined), "gradient": fit_gradient(joined)}
        for name, offsets in here.items():
            learned[name].append(offsets)
        found = [left_out(context, layer, choices, pages) for context in test]
        for at, choice in enumerate(choices):
            by_document = [errors(blocks[at], here) for blocks in found]
            for name in METHODS:
                judged[choice][name].append(torch.stack([each[name] for each in by_document]))
        say(f"layer {layer}: {time.perf_counter() - started:.0f} s")
    joined_offsets = {
        name: BackgroundOffsets(*(torch.cat([getattr(x, key) for x in each]) for key in ("log2", "scale", "value")))
        for name, each in learned.items()
    }
    stacked = {c: {name: torch.stack(x, 1) for name, x in methods.items()} for c, methods in judged.items()}
    return joined_offsets, stacked


def table(choices: Mapping[Choice, Mapping[str, Tensor]]) -> dict[str, Any]:
    """Mean over documents, layers and heads with intervals over documents, the same by layer, paired differences."""
    out: dict[str, Any] = {}
    for choice, methods in choices.items():
        mean = methods["mean"].mean((1, 2))
        entry: dict[str, Any] = {}
        for name, values in methods.items():
            by_document = values.mean((1, 2))
            entry[name] = {
                "error": interval(by_document.tolist()),
                "less_than_mean": interval(((mean - by_document) / mean).tolist()),
                "by_layer": [interval(layer.tolist()) for layer in values.mean(2).unbind(1)],
                "better_heads": float((values.mean(0) < methods["mean"].mean(0)).float().mean()),
            }
        out[f"{choice.predictor} {choice.keep:g}"] = entry
    return out


def printed(result: Mapping[str, Any]) -> str:
    """The table of one run for people."""
    lines = [f"{'pages chosen by':24}" + "".join(f"{name:>24}" for name in METHODS)]
    for choice, methods in result.items():
        cells = ["{:.4f} [{:.4f}, {:.4f}]".format(*methods[name]["error"]) for name in METHODS]
        lines.append(f"{choice:24}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def configured(cfg: DictConfig) -> BackgroundConfig:
    """The settings of a composed configuration."""
    plain = check_keys("background", cfg.background, [each.name for each in fields(BackgroundConfig)])
    return BackgroundConfig(
        **{**plain, **{part: _amounts(f"background.{part}", cfg.background[part]) for part in SOURCES}}
    )


def _amounts(key: str, node: object) -> Amounts:
    """The amounts at a key of the configuration."""
    given = check_keys(key, node, [each.name for each in fields(Amounts)])
    try:
        return Amounts(**given)
    except WorkloadError as error:
        raise BackgroundError(f"{key}.{error}") from error


def corpus_of(decoder: Decoder, config: BackgroundConfig, parts: Sequence[Part]) -> list[Document]:
    """Whole documents of these parts.

    Raises:
        BackgroundError: one of them has none.
    """
    amounts: Mapping[Part, Amounts] = {
        part: getattr(config, part) if part in parts else Amounts(0, 0, 0, 0) for part in SOURCES
    }
    corpus = documents(decoder, config.length_tokens, config.seed, windows=0, amounts=amounts)
    for part in parts:
        if not any(each.part == part for each in corpus):
            raise BackgroundError(f"background.{part}={asdict(amounts[part])}: there is no such document")
    return corpus


def measure_stand_ins(decoder: Decoder, config: BackgroundConfig, record: Path | None) -> None:
    """KL of every stand-in on the test documents, whose last tokens are run after the rest."""
    geometry, p = decoder.geometry, Pages().page_tokens
    offsets = packaged(decoder.fingerprint, geometry.layers * geometry.kv_heads, geometry.head_dim)
    found = []
    for document in corpus_of(decoder, config, ("test",)):
        first = (len(document.tokens) - TAIL_TOKENS) // p * p
        context = capture(decoder, document.tokens[:first], torch.arange(first - WARM_QUERIES, first))
        rows = compared(decoder, Prepared(context, geometry.scale, Pages()), document.tokens[first:], offsets)
        found += [{"document": document.name, "kind": document.kind} | row for row in rows]
        print(f"{document.name}: {len(rows)} variants", flush=True)
    print(stand_in_table(found))
    if record is not None:
        write_atomically(record, json.dumps(found, indent=1) + "\n")


def main(args: list[str]) -> None:
    """The command `python -m testbed.predictor background key=value ...`."""
    cfg = compose_named("background", args)
    for key, allowed in (("what", ("offsets", "stand_ins")), ("method", LEARNED)):
        if cfg[key] not in allowed:
            raise BackgroundError(f"{key}={cfg[key]!r}: must be {' or '.join(allowed)}")
    set_threads(cfg.threads)
    path, folder = check_output("record", cfg.record), check_output("offsets", cfg.offsets, folder=True)
    config = configured(cfg)
    decoder: Decoder = build(cfg.model, "model")
    if cfg.what == "stand_ins":
        measure_stand_ins(decoder, config, path)
        return
    corpus = corpus_of(decoder, config, ("train", "test"))
    captured = _captured(decoder, corpus, config)
    parts = [each.part for each in corpus]
    train, test = ([x for x, of in zip(captured, parts, strict=True) if of == part] for part in ("train", "test"))
    learned, judged = learn_and_judge(train, test, config.choices(), Pages(), lambda line: print(line, flush=True))
    result = {
        "model": f"{decoder.name} {decoder.fingerprint}",
        "corpus": corpus_hash(corpus),
        "documents": {part: [x.name for x in corpus if x.part == part] for part in ("train", "test")},
        "config": asdict(config),
        "error": table(judged),
    }
    print(printed(result["error"]))
    if path is not None:
        write_atomically(path, json.dumps(result, indent=1) + "\n")
    if folder is not None:
        offsets = folder / f"background-{decoder.fingerprint}.safetensors"
        learned[cfg.method].write(offsets, decoder.fingerprint, {"corpus": result["corpus"], "method": cfg.method})
        print(f"offsets: {offsets}")
