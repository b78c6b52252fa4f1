"""From the configuration to what a run needs, built and checked before anything costly begins."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from kernels.api import BACKENDS, choose_backend
from policies.base import Policy, Tier
from testbed.cache.archive import check_archive
from testbed.cache.layout import CacheConfig
from testbed.commands import check_threads
from testbed.compose import full_policy, policy_from
from testbed.engine.guard import GuardConfig, check_reference
from testbed.engine.session import SessionConfig
from testbed.heads.calibration import CalibrationConfig
from testbed.results.tracker import Tracker
from testbed.sim import hardware
from testbed.workloads.base import Workload, check_whole

# What the configuration may hold besides the arguments of parts; "" is its root.
KEYS = {
    "": {
        *("policy", "model", "workload", "cache", "calibration", "guard", "wandb"),
        *("seed", "budget", "engine", "twin", "signals"),
    },
    "budget": {"fraction"},
    "engine": {"chunk_tokens", "kernel", "threads"},
}


class ConfigError(ValueError):
    """A value of the configuration that can't be used; names key, value and what is allowed."""


@dataclass(frozen=True)
class Setup:
    """Everything a run needs, built and checked before the model is loaded."""

    policy: Policy
    full: Policy
    workload: Workload
    cache: CacheConfig
    calibration: CalibrationConfig
    guard: GuardConfig
    tracker: Tracker
    budget_fraction: float | None
    chunk_tokens: int
    kernel: str | None
    threads: int | None
    signals: dict[str, dict[str, object]]
    twin: tuple[str, ...]
    seed: int

    @property
    def compresses(self) -> bool:
        """False for the full cache itself, under whatever name."""
        return replace(self.policy, name="", budget_fraction=None) != replace(self.full, name="", budget_fraction=None)

    def session_config(self, full: bool) -> SessionConfig:
        """Of the policy's sessions, or of the full cache's."""
        if full or not self.compresses:  # nothing of the full cache may leave the device
            return SessionConfig(self.cache.unlimited(), None, self.kernel, self.seed, {} if full else self.signals)
        return SessionConfig(self.cache, self.budget_fraction, self.kernel, self.seed, self.signals, self.guard)

    @property
    def archives(self) -> bool:
        """Whether pages may come to L3: the policy sends them there, or to an L2 that may be full."""
        limits = self.session_config(full=False).cache.capacities()
        victim = self.policy.eviction.victim_tier
        may = victim == Tier.L3 or (victim == Tier.L2 and limits.l2_bytes is not None)
        return self.compresses and may and limits.l3_bytes != 0


def build(node: Any, what: str) -> Any:
    """Instantiates a config node; what a part refuses comes out as its own error, without Hydra's wrapping."""
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, (ValueError, RuntimeError)):
            raise error.__cause__ from None
        raise ConfigError(f"{what}: {' '.join(str(error).split())}") from error


def setup(cfg: DictConfig) -> Setup:
    """Checks the whole configuration and builds all that is cheap.

    Raises:
        ValueError: naming key, value and what is allowed.
    """
    _check_keys(cfg)
    policy = policy_from(cfg)
    fraction = cfg.budget.fraction if cfg.budget.fraction is not None else policy.budget_fraction
    ok = isinstance(fraction, (int, float)) and not isinstance(fraction, bool) and math.isfinite(fraction)
    if fraction is not None and (not ok or not 0.0 < fraction <= 1.0):
        raise ConfigError(f"budget.fraction={fraction!r}: must be above 0 and at most 1, or null for no limit")
    check_whole("seed", cfg.seed, 0)
    check_whole("engine.chunk_tokens", cfg.engine.chunk_tokens, 1)
    check_threads("engine.threads", cfg.engine.threads)
    if cfg.engine.kernel is not None and cfg.engine.kernel not in BACKENDS:
        raise ConfigError(
            f"engine.kernel={cfg.engine.kernel!r}: must be one of {', '.join(BACKENDS)}, or null for the fastest here"
        )
    if cfg.engine.kernel is not None:
        try:
            choose_backend(cfg.engine.kernel, str(cfg.model.device).split(":")[0])
        except RuntimeError as error:
            raise ConfigError(f"engine.kernel={cfg.engine.kernel!r}: {error}; or null for the fastest here") from error
    signals: Any = OmegaConf.to_container(cfg.signals, resolve=True)
    cache: CacheConfig = build(cfg.cache, "cache")
    made = Setup(
        policy=policy,
        full=full_policy(),
        workload=build(cfg.workload, "workload"),
        cache=cache,
        calibration=build(cfg.calibration, "calibration"),
        guard=build(cfg.guard, "guard"),
        tracker=build(cfg.wandb, "wandb"),
        budget_fraction=None if fraction is None else float(fraction),
        chunk_tokens=cfg.engine.chunk_tokens,
        kernel=cfg.engine.kernel,
        threads=cfg.engine.threads,
        signals=signals,
        twin=_machines(cfg.twin),
        seed=cfg.seed,
    )
    check_reference(made.guard, made.budget_fraction)
    if cache.l3_path is not None or made.archives:
        check_archive(cache.archive_folder())
    return made


def _check_keys(cfg: DictConfig) -> None:
    """Refuses what `+key=value` added where nothing reads it; parts refuse what they don't know themselves."""
    for where, known in KEYS.items():
        node = OmegaConf.select(cfg, where) if where else cfg
        if not isinstance(node, DictConfig):
            raise ConfigError(f"{where}={node!r}: must hold the keys {', '.join(sorted(known))}")
        unknown = sorted(set(map(str, node)) - known)
        if unknown:
            key = f"{where}.{unknown[0]}" if where else unknown[0]
            raise ConfigError(f"unknown key {key!r}; there are: {', '.join(sorted(known))}")


def _machines(names: object) -> tuple[str, ...]:
    """The twin's machines, looked up now and not after the run."""
    if not isinstance(names, ListConfig) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"twin={names!r}: must be a list of names of conf/hardware, such as [local, h200]")
    for name in names:
        if name != "local":  # measuring this machine waits until the threads are set
            hardware.load(name)
    return tuple(names)
