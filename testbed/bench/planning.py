"""What deciding costs beside attending, at 128 k tokens x 32 layers x 8 KV heads and a device budget of 25 %.

A plan comes every `every_steps` steps and costs: what the policy sees (`held`, `hot_mask`), the policy, the kernel's
tables and the numbers of the decision log (`facts`, the ledger in it). The step is only its attention: one layer of
the plan, attended by the real kernel, times the layers; a model's linears would make the share smaller. The cache that
is planned keeps narrow heads of zeros, since planning never looks at K or V.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from policies.base import Phase, Plan, Policy, Signals
from testbed.bench.base import Options, Row, at_most, unjudged
from testbed.cache.layout import CacheConfig
from testbed.cache.paged import PagedCache
from testbed.cache.table import build_tables
from testbed.compose import compose_policy

CASE = "planning"
POLICIES = ("elastic", "redknot+elastic")
KV_HEADS, GROUP, HEAD_DIM, NARROW_DIM = 8, 4, 128, 16
BUDGET, MOST = 0.25, 0.05


def run(options: Options) -> list[Row]:
    """Seconds of each part of a plan, and their sum as a share of the steps between two plans."""
    layers, tokens, rounds = (4, 8192, 1) if options.quick else (32, 131072, 5)
    rows = []
    for name in POLICIES:
        rows += _measure(compose_policy(name), layers, tokens, rounds)
    return unjudged(rows) if options.quick else rows


@torch.inference_mode()
def _measure(policy: Policy, layers: int, tokens: int, rounds: int) -> list[Row]:
    config = CacheConfig()
    cache = PagedCache(layers, KV_HEADS, NARROW_DIM, config)
    try:
        cache.length_tokens = tokens
        signals = _signals(policy, cache, tokens)
        signals = replace(signals, classes=policy.classifier.classify(signals))
        plan = policy.plan(signals)
        cache.length_tokens = 0
        zeros = [torch.zeros(KV_HEADS, tokens, NARROW_DIM, dtype=config.torch_dtype)] * layers
        cache.load(list(zeros), list(zeros), plan)
        signals = replace(signals, phase=Phase.DECODE, step=1, held=cache.held())
        parts: dict[str, Callable[[], object]] = {
            "held and hot mask": lambda: (cache.held(1), cache.hot_mask(1)),
            "policy": lambda: policy.plan(signals),
            "tables": lambda: build_tables(cache),
            "facts and ledger": cache.facts,
        }
        seconds = {part: _least(work, rounds) for part, work in parts.items()}
    finally:
        cache.close()
    attend_s = _attend_s(plan, tokens, rounds) * layers
    total_s = sum(seconds.values())
    rows = [Row(CASE, f"{policy.name}: {part}", 1e3 * took, "ms") for part, took in seconds.items()]
    rows.append(Row(CASE, f"{policy.name}: attention of a step", 1e3 * attend_s, "ms"))
    what = f"{policy.name}: a plan / attention of the {policy.every_steps} steps it holds for"
    return [*rows, at_most(CASE, what, total_s / (attend_s * policy.every_steps), MOST)]


def _signals(policy: Policy, cache: PagedCache, tokens: int) -> Signals:
    """What an executor would hand over; page sizes of the wide heads, so that the budget means what it says."""
    held, chance = cache.held(), torch.Generator().manual_seed(0)
    shape = held.mode.shape
    values = {name: torch.rand(shape, generator=chance) for name in sorted(policy.needs)}
    for name in policy.needs & {"retrieval", "role"}:  # one for all streams
        values[name] = torch.rand(shape[2], generator=chance)
    for name in policy.needs & {"retrieval_score"}:
        values[name] = torch.rand(shape[:2], generator=chance)
    if "role" in values:
        values["role"] = torch.full(shape[2:], -1, dtype=torch.int8)
    full_bytes = tokens * shape[0] * KV_HEADS * HEAD_DIM * 2 * cache.config.torch_dtype.itemsize
    return Signals(
        phase=Phase.COMPRESS,
        step=0,
        length_tokens=tokens,
        page_tokens=cache.config.page_tokens,
        hot=cache.hot_mask(),
        held=held,
        page_bytes=cache.config.page_bytes(HEAD_DIM, with_bounds=False),
        device_budget_bytes=int(BUDGET * full_bytes),
        values=values,
    )


def _attend_s(plan: Plan, tokens: int, rounds: int) -> float:
    """Seconds of attention in the plan's middle layer, by the kernel that suits it."""
    middle = slice(plan.mode.shape[0] // 2, plan.mode.shape[0] // 2 + 1)
    one = Plan(plan.mode[middle], plan.format[middle], plan.tier[middle])
    config = CacheConfig()
    cache = PagedCache(1, KV_HEADS, HEAD_DIM, config)
    try:
        chance = torch.Generator().manual_seed(1)
        k, v = (torch.randn(KV_HEADS, tokens, HEAD_DIM, generator=chance).to(config.torch_dtype) for _ in range(2))
        cache.load([k], [v], one, free_source=True)
        cache.length_tokens -= 1  # the newest token is the one that asks
        cache.begin(1)
        q = torch.randn(KV_HEADS, GROUP, 1, HEAD_DIM, generator=chance).to(config.torch_dtype)
        return _least(lambda: cache.attend(0, q, HEAD_DIM**-0.5), rounds)
    finally:
        cache.close()


def _least(work: Callable[[], object], rounds: int) -> float:
    """Least wall time of some rounds, after one that is not counted."""
    work()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
