"""`python -m testbed.heads analyse [model=...] [output=map.json]`: every head measured once, with the evidence.

What is finished is kept ($TESTBED_CACHE/headmaps), so a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from omegaconf import DictConfig

from testbed.assets import AssetError
from testbed.commands import check_keys, check_output, check_some, set_threads
from testbed.heads import show
from testbed.heads.calibration import CalibrationConfig, CalibrationError
from testbed.heads.configured import composed
from testbed.heads.evidence import evidence, longer
from testbed.heads.headmap import HeadMap, HeadMapError, Measured
from testbed.heads.kept import locked
from testbed.heads.library import Group, Progress, group_path, groups, measure_group
from testbed.models.base import Decoder
from testbed.results.progress import Progress as Bar
from testbed.setup import build
from testbed.workloads.base import check_distinct, check_whole


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        groups: of measures, by name.
        lengths: of needle texts, beside those of the calibration settings.
        seeds: beside the one of the calibration settings.
        seed_groups: groups that are measured with those seeds too.
    """

    groups: tuple[str, ...]
    lengths: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    seed_groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Names must be known, numbers whole."""
        known = groups()
        for key in ("groups", "seed_groups"):
            for name in getattr(self, key):
                if name not in known:
                    raise CalibrationError(f"{key}: {name!r} is no group of measures; there are {', '.join(known)}")
        if not self.groups:
            raise CalibrationError(f"groups=[]: name at least one of {', '.join(known)}")
        for key, least in (("lengths", 64), ("seeds", 0)):
            for value in getattr(self, key):
                check_whole(f"evidence.{key}", value, least)
            check_distinct(f"evidence.{key}", getattr(self, key))

    @staticmethod
    def of(cfg: DictConfig) -> Plan:
        """From conf/heads.yaml."""
        slow = check_some("slow", cfg.slow)
        chosen = (
            [name for name in groups() if name not in slow] if cfg.groups is None else check_some("groups", cfg.groups)
        )
        given = check_keys("evidence", cfg.evidence, ("lengths", "seeds", "seed_groups"))
        return Plan(tuple(map(str, chosen)), **{key: check_some(f"evidence.{key}", given[key]) for key in given})


@dataclass(frozen=True)
class Job:
    """One group under some settings."""

    group: Group
    config: CalibrationConfig
    what: str


@dataclass(frozen=True)
class Found:
    """What the jobs gave: measures of the groups, of other lengths and seeds, and what could not be measured."""

    measures: dict[str, Measured]
    lengths: list[Mapping[str, Measured]]
    seeds: list[Mapping[str, Measured]]
    left_out: dict[str, str]


def analyse(decoder: Decoder, config: CalibrationConfig, plan: Plan, progress: Progress) -> HeadMap:
    """The head map of a model.

    Args:
        decoder: the model.
        config: what heads are measured on.
        plan: which groups, lengths and seeds.
        progress: told what is done.

    Raises:
        CalibrationError: a group can't be measured as asked.
    """
    known = groups()
    base = [Job(known[name], config, name) for name in plan.groups]
    lengths = [Job(known["needle"], longer(config, length), f"needle, {length} tokens") for length in plan.lengths]
    seeds = [
        Job(known[name], replace(config, seed=seed), f"{name}, seed {seed}")
        for seed in plan.seeds
        for name in plan.seed_groups
    ]
    jobs = [*base, *seeds, *lengths]
    found = Found({}, [], [], {})
    for at, job in enumerate(jobs):
        said = f"measuring heads: {job.what} ({at + 1} of {len(jobs)})"
        measures = _measured(decoder, job, lambda _, part, said=said: progress(said, part), found, job in base)
        if job in base:
            found.measures.update(measures)
        elif measures:
            (found.lengths if job in lengths else found.seeds).append(measures)
    if not found.measures:
        raise CalibrationError("; ".join(f"{name}: {why}" for name, why in found.left_out.items()))
    settings = {"calibration": asdict(config), "torch": torch.__version__, "python": sys.version.split()[0]}
    proof = evidence(found.measures, found.seeds, found.lengths)
    return HeadMap.of(decoder, found.measures, settings).with_evidence({**proof, "left_out": found.left_out})


def _measured(decoder: Decoder, job: Job, progress: Progress, found: Found, needed: bool) -> Mapping[str, Measured]:
    """The measures of a job; none if its text can't be had, or if only the evidence is beyond the model's limit."""
    try:
        return measure_group(decoder, job.config, job.group, progress).measures
    except AssetError as error:
        found.left_out[job.what] = str(error)
    except CalibrationError as error:
        if needed:
            raise
        found.left_out[job.what] = str(error)
    return {}


def main(args: list[str]) -> None:
    """The command.

    Raises:
        ValueError: what the user can mend.
    """
    words, cfg = composed("heads", args)
    if words:
        raise CalibrationError(f"analyse takes key=value, and was given {words[0]!r}")
    plan, config = Plan.of(cfg), build(cfg.calibration, "calibration")
    output = check_output("output", cfg.output)
    set_threads(cfg.threads)
    with Bar() as bar:
        bar.start("loading the model")
        decoder = build(cfg.model, "model")
        path = output or default_path(decoder, config)
        replaced(path)  # what is no head map is told now, not after the measuring
        try:
            head_map = analyse(decoder, config, plan, bar.fraction)
        except KeyboardInterrupt:
            bar.note("interrupted; groups of measures that were finished are kept, the same command goes on from there")
            raise
    with locked():
        before = replaced(path)
        if before is not None and before.fingerprint == head_map.fingerprint:
            head_map = replace(head_map, verdicts=before.verdicts)
        head_map.write(path)
    show.show(head_map, sys.stdout)
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30:.2f} GiB")
    print(f"head map: {path}")


def default_path(decoder: Decoder, config: CalibrationConfig) -> Path:
    """Where a map goes that nobody named a place for."""
    return group_path(decoder, config, groups()["text"]).parent / "map.json"


def replaced(path: Path) -> HeadMap | None:
    """The map that a new one will replace; None where there is none.

    Raises:
        HeadMapError: there is another file.
    """
    try:
        return HeadMap.read(path) if path.exists() else None
    except HeadMapError as error:
        raise HeadMapError(f"output: {error}; name another file, this one is no head map to replace") from error
