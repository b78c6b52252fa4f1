"""The engine beside transformers (`make bench`): decode, prefill, planning share, peak memory.

Ratios come from one run in which the contenders take turns, so that a noisy machine hits both; of many tries the
shortest counts. Targets are those of the first issue; a missed one is said, not raised: a timing is no test. Peak
memory does not depend on the machine's mood, and is asserted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Transformers, context

from testbed.cache.layout import CacheConfig
from testbed.compose import compose_policy
from testbed.engine.prefill import DenseKV, prefill
from testbed.engine.session import Session, SessionConfig
from testbed.engine.signals import SignalContext
from testbed.heads.calibration import CalibrationConfig
from testbed.heads.library import head_measures
from testbed.models import load
from testbed.models.hf import HfDecoder

pytestmark = [pytest.mark.bench, pytest.mark.assets, pytest.mark.usefixtures("threads")]
Note = Callable[..., None]
TOKENS, CHUNK_TOKENS, MEMORY_TOKENS = 4096, 512, 8192
DECODE_ROUNDS, PREFILL_ROUNDS, PLAN_STEPS = 60, 3, 48
TURN = "\n\nWhat does the author say about startups?"
POLICIES = ("full", "streaming", "random", "snapkv", "h2o", "quest", "redknot", "elastic", "redknot+elastic")


@cache
def decoder() -> HfDecoder:
    from testbed.assets import model_path

    return load(model_path("smollm2"), name="smollm2-135m-instruct")


@cache
def transformers_model() -> Transformers:
    return Transformers()


def session(policy_name: str) -> Session:
    """A session of a named policy, with its own byte budget."""
    policy = compose_policy(policy_name)
    config = SessionConfig(CacheConfig(), policy.budget_fraction)
    measures = CalibrationConfig()
    return Session(decoder(), policy, config, SignalContext(16, lambda: head_measures(decoder(), measures)))


def ours(sessions: list[Session]) -> DenseKV:
    """One prefill that the signal sources of all sessions watch."""
    sources = [source for each in sessions for source in each.sources.values()]
    return prefill(decoder(), context(decoder(), TOKENS), torch.bfloat16, sources, CHUNK_TOKENS)


def test_bench_decode_full_beside_transformers(benchmark: Any, note: Note) -> None:
    theirs, mine = transformers_model(), session("full")
    theirs.prefill(context(decoder(), TOKENS))
    mine.start(ours([mine]), free_source=True)
    turn = decoder().encode(TURN)
    mine.extend(turn)
    their_s: list[float] = []

    def their_step() -> None:
        their_s.append(theirs.step())

    benchmark.pedantic(lambda: mine.step(turn[0]), setup=their_step, rounds=DECODE_ROUNDS, warmup_rounds=2)
    best_ms, their_ms = 1e3 * benchmark.stats["min"], 1e3 * min(their_s)
    ratio = best_ms / their_ms
    benchmark.extra_info.update(transformers_ms=round(their_ms, 2), ratio=round(ratio, 3))
    note("decode 4k / transformers", ratio, "x", 0.6, ours_ms=round(best_ms, 1), transformers_ms=round(their_ms, 1))
    mine.close()


def test_bench_prefill_beside_transformers(benchmark: Any, note: Note) -> None:
    tokens, theirs = context(decoder(), TOKENS), transformers_model()
    their_s: list[float] = []
    their_cpu_s, our_cpu_s = [], []  # rounds are too long to find a quiet moment; of these, others take less

    def their_prefill() -> None:
        started = time.process_time()
        their_s.append(theirs.prefill(tokens))
        their_cpu_s.append(time.process_time() - started)

    def mine() -> None:
        # Ours leaves the last token's logits to the turn that follows: a token of it is run with logits here.
        started = time.process_time()
        each = session("full")
        each.start(prefill(decoder(), tokens[:-1], torch.bfloat16, (), CHUNK_TOKENS), free_source=True)
        each.step(tokens[-1])
        each.close()
        our_cpu_s.append(time.process_time() - started)

    benchmark.pedantic(mine, setup=their_prefill, rounds=PREFILL_ROUNDS)
    best_s, their_best_s = benchmark.stats["min"], min(their_s)
    ratio = best_s / their_best_s
    benchmark.extra_info.update(transformers_s=round(their_best_s, 2), ratio=round(ratio, 3))
    details = {"ours_s": round(best_s, 2), "transformers_s": round(their_best_s, 2)}
    note("prefill 4k / transformers", ratio, "x", 1.0, **details)
    details = {"ours_s": round(min(our_cpu_s), 2), "transformers_s": round(min(their_cpu_s), 2)}
    note("the same, processor time", min(our_cpu_s) / min(their_cpu_s), "x", 1.0, **details)


@cache
def prefilled() -> tuple[dict[str, Session], DenseKV]:
    sessions = {name: session(name) for name in POLICIES}
    return sessions, ours(list(sessions.values()))


@pytest.mark.parametrize("name", POLICIES)
def test_bench_planning(benchmark: Any, note: Note, name: str) -> None:
    sessions, dense = prefilled()
    mine = sessions[name]
    mine.start(dense)
    turn = decoder().encode(TURN)
    mine.extend(turn)
    benchmark.pedantic(lambda: mine.step(turn[0]), rounds=PLAN_STEPS)
    share = sum(step.plan_s for step in mine.times) / sum(step.total_s for step in mine.times)
    benchmark.extra_info.update(plan_share=round(share, 4))
    note(f"planning share 4k, {name}", share, "", 0.05, step_ms=round(1e3 * benchmark.stats["min"], 1))
    mine.close()


def test_bench_peak_memory_of_a_prefill(benchmark: Any, note: Note) -> None:
    script = Path(__file__).with_name("peak_memory.py")
    command = [sys.executable, str(script), str(MEMORY_TOKENS), str(CHUNK_TOKENS)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}

    def measure() -> dict[str, int]:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert not done.returncode, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    found = benchmark.pedantic(measure, rounds=1)
    held = found["weights"] + found["kv"] + found["activations"]
    megabytes = {key + "_mb": round(value / 1e6) for key, value in found.items()}
    benchmark.extra_info.update(megabytes)
    note("peak memory of an 8k prefill", found["prefill_peak"] / held, "x", 1.3, **megabytes)
    note("the same, loading included", found["peak"] / held, "x", 1.3)
    assert found["prefill_peak"] <= 1.3 * held, megabytes
