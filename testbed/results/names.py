"""The names of results and their units, in one place.

A record may hold other names too (a new metric needs no edit here), but a name listed here always has this
unit, so that the final table, the plots and `testbed.compare` read every record alike.
"""

from __future__ import annotations

UNITS: dict[str, str] = {
    "context.tokens": "tokens",
    "task.score": "fraction",
    "task.score_full": "fraction",
    "quality.kept": "fraction",
    "kl.mean": "nats",
    "top1.agreement": "fraction",
    "kv.device_bytes": "bytes",
    "kv.device_bytes_full": "bytes",
    "kv.total_bytes": "bytes",
    "kv.full_bytes": "bytes",
    "kv.device_saved": "fraction",
    "kv.total_saved": "fraction",
    "prefill.s": "s",
    "decode.ms_per_token": "ms/token",
    "decode.ms_per_token_full": "ms/token",
    "decode.speedup": "ratio",
    "policy.share": "fraction",
    "tier.hit_rate": "fraction",
    "tier.stall_share": "fraction",
    "tier.stall_ms_per_token": "ms/token",
    "tier.moved_bytes_per_token": "bytes",
    "tier.l0_bytes": "bytes",
    "tier.l1_bytes": "bytes",
    "tier.l2_bytes": "bytes",
    "tier.l3_bytes": "bytes",
    "tier.prefetch_useful": "fraction",
    "tier.prefetch_late": "fraction",
    "tier.prefetch_late_ms": "ms",
    "tier.prefetch_useless": "fraction",
    "tier.prefetch_harmful": "fraction",
    "guard.quality": "fraction",
    "guard.share": "fraction",
    "guard.bytes": "bytes",
    "sim.local.ms_per_token": "ms/token",
    "sim.h200.ms_per_token": "ms/token",
    "sim.local.ms_per_token_full": "ms/token",
    "sim.h200.ms_per_token_full": "ms/token",
}

HIGHER_IS_BETTER = frozenset(
    {
        "task.score",
        "task.score_full",
        "quality.kept",
        "top1.agreement",
        "kv.device_saved",
        "kv.total_saved",
        "decode.speedup",
        "tier.hit_rate",
        "tier.prefetch_useful",
        "guard.quality",
    }
)
