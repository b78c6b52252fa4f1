"""A tiny document and how tests drive it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tiny import CACHE, text

from policies.base import Role
from policies.predictors.from_signal import FromSignal
from testbed.cache.layout import CacheConfig
from testbed.predictor.corpus import Document
from testbed.predictor.drive import Course

WINDOWS = ((180, 184), (200, 203))


def document(part: str = "train", seed: int = 3) -> Document:
    tokens = text(204, seed)
    roles = [int(Role.DOCUMENT)] * 150 + [int(Role.USER)] * 30 + [int(Role.GENERATED)] * 24
    phases = [0] * 181 + [3] * 4 + [1] * 19
    return Document(f"d{seed}", "code", part, tokens, roles, phases, WINDOWS)  # type: ignore[arg-type]


def measures() -> Mapping[str, torch.Tensor]:
    return {}


def course(watch: frozenset[str] = frozenset(), shares: tuple[float, ...] = (0.25,)) -> Course:
    return Course(FromSignal("query_bound"), watch, shares=shares, cache=CacheConfig(**CACHE), chunk_tokens=64)
