"""Composition: a+b, its identities, conflicts, swaps, errors; in one process, in a sweep and in joblib's workers."""

from __future__ import annotations

import itertools
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import warm
from hydra import compose, initialize_config_dir
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from policy_trace import NAMED, PARTS

from policies.base import SLOTS, Policy
from policies.eviction.by_score import ByScore
from policies.eviction.lru import Lru
from policies.predictors.from_signal import FromSignal
from testbed.compose import (
    IDENTITY,
    CompositionError,
    PolicySource,
    compose_config,
    compose_policy,
    full_policy,
    policy_from,
    register,
)

composed = cache(compose_policy)
ROOT = Path(__file__).parents[2]


def parts_of(policy: Policy) -> tuple[object, ...]:
    return (*policy.parts.values(), policy.every_steps, policy.cold_start_tokens, policy.budget_fraction)


@pytest.mark.parametrize("name", NAMED)
def test_full_is_the_identity_on_both_sides(name: str) -> None:
    assert composed(f"{name}+full") == composed(name)
    assert composed(f"full+{name}") == composed(name)
    assert composed(f"{name}+{name}") == composed(name)


def test_full_is_all_identities() -> None:
    full = composed("full")
    assert full.name == "full"
    assert full_policy() == full
    swapped = compose_policy("redknot+elastic", [f"policy/{slot}={part}" for slot, part in IDENTITY.items()])
    assert swapped.parts == full.parts


def test_every_slot_has_its_identity_and_every_part_lies_in_a_slot() -> None:
    assert set(IDENTITY) == set(SLOTS)
    assert set(IDENTITY.items()) <= set(PARTS)
    folders = {path.name for path in (ROOT / "conf" / "policy").iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == set(SLOTS)


def test_sum_takes_each_slot_from_whoever_fills_it() -> None:
    both, redknot, elastic = composed("redknot+elastic"), composed("redknot"), composed("elastic")
    for slot in ("classifier", "budget", "format"):
        assert both.parts[slot] == redknot.parts[slot]
    for slot in ("predictor", "eviction", "attention", "prefetch"):
        assert both.parts[slot] == elastic.parts[slot]
    assert both.cold_start_tokens == elastic.cold_start_tokens == 100
    assert both.name == "redknot+elastic"


def test_sum_is_commutative_where_there_is_no_conflict_and_idempotent() -> None:
    source = PolicySource("test", "policies://conf")

    def content(*names: str) -> dict[str, Any]:
        config = OmegaConf.to_container(source.load_config(f"policy/{'+'.join(names)}").config)
        assert isinstance(config, dict)
        return {str(key): value for key, value in config.items()}

    sums = 0
    for a, b in itertools.combinations(NAMED, 2):
        forward, backward = content(a, b), content(b, a)
        assert set(forward["conflicts"]) == set(backward["conflicts"])
        if not forward["conflicts"]:
            sums += 1
            assert forward | {"name": ""} == backward | {"name": ""}
            assert content(a, b, a) == forward
    assert sums >= 12  # full with each other one, redknot with each predictor


def test_a_conflict_names_policies_slot_and_parts() -> None:
    with pytest.raises(CompositionError) as caught:
        composed("snapkv+redknot+quest")
    message = str(caught.value)
    assert "policy.predictor: snapkv has snapkv, quest has quest" in message
    assert "policy.on_conflict=last" in message


def test_the_last_wins_when_asked() -> None:
    last = ["policy.on_conflict=last"]
    assert compose_policy("snapkv+h2o", last).predictor == FromSignal("attention_mass")
    assert compose_policy("h2o+snapkv", last).predictor == composed("snapkv").predictor
    with pytest.raises(CompositionError, match="must be error or last"):
        compose_policy("full", ["policy.on_conflict=first"])


def test_settings_conflict_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = write_package(tmp_path, monkeypatch, {"slow": "every_steps: 8\n", "fast": "every_steps: 2\n"})
    content = package.load_config("policy/slow+fast").config
    assert OmegaConf.to_container(content)["conflicts"] == {"every_steps": "slow has 8, fast has 2"}  # type: ignore[index, call-overload]


def test_a_swap_settles_a_conflict_and_leaves_no_stale_argument() -> None:
    assert compose_policy("snapkv+h2o", ["policy/predictor=quest"]).predictor == FromSignal("query_bound")
    swapped = compose_policy("redknot+elastic", ["policy/eviction=lru", "policy/format=int8"])
    assert swapped.eviction == Lru("l2")
    node = OmegaConf.to_container(compose_config("redknot+elastic", ["policy/format=int8"]).policy.format)
    assert node == {"_target_": "policies.formats.one.One", "format": "int8"}
    assert parts_of(swapped)[5:] == parts_of(composed("redknot+elastic"))[5:]


@pytest.mark.parametrize(("slot", "part"), PARTS, ids=[f"{slot}/{part}" for slot, part in PARTS])
def test_any_part_can_be_swapped_into_any_sum(slot: str, part: str) -> None:
    swapped = compose_policy("redknot+elastic", [f"policy/{slot}={part}"])
    for other in SLOTS:
        if other != slot:
            assert swapped.parts[other] == composed("redknot+elastic").parts[other]


def test_an_argument_reaches_its_part() -> None:
    policy = compose_policy("redknot+elastic", ["policy.budget.local_tokens=256", "policy.every_steps=8"])
    assert policy.budget == replace(composed("redknot").budget, local_tokens=256)  # type: ignore[type-var]
    assert policy.every_steps == 8
    assert compose_policy("snapkv", ["policy.eviction.victim=l3"]).eviction == ByScore("l3")


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("redknott+elastic", [], ["unknown policy 'redknott' in 'redknott+elastic'", "Did you mean redknot", "snapkv"]),
        ("snapkw", [], ["unknown policy 'snapkw'.", "Did you mean snapkv", "streaming"]),
        ("redknot+", [], ["unknown policy '' in 'redknot+'"]),
        ("full", ["policy/eviction=lruu"], ["unknown eviction part 'lruu'", "Did you mean lru", "fifo"]),
        ("redknot", ["policy.budget.local_tokens=abc"], ["PerClass.local_tokens='abc'", "whole number"]),
        ("redknot", ["policy.budget.local_tokens=0"], ["PerClass.local_tokens=0"]),
        ("elastic", ["policy.attention.skip_load=1"], ["must rise"]),
        ("redknot", ["policy.classifier.local_quantile=.9"], ["at most global_quantile"]),
        ("full", ["policy.every_steps=0"], ["policy.every_steps=0"]),
    ],
)
def test_bad_input_is_one_clear_error(name: str, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(CompositionError) as caught:
        compose_policy(name, overrides)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("override", ["policy.budget.local_token=1", "policy/evictoin=lru", "policy.evry_steps=2"])
def test_unknown_keys_are_refused(override: str) -> None:
    with pytest.raises(ConfigCompositionException, match=override.split("=")[0].replace(".", r"\.")):
        compose_policy("redknot", [override])


def write_package(folder: Path, monkeypatch: pytest.MonkeyPatch, policies: dict[str, str]) -> PolicySource:
    """A package of configs with the given policy files and no parts."""
    package = folder / f"conf_{folder.name}"
    (package / "policy" / "format").mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, text in policies.items():
        (package / "policy" / f"{name}.yaml").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    return PolicySource("test", f"policies://{package.name}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defaults: [{formatt: int8}]", "must be `slot: part`"),
        ("defaults: [int8]", "must be `slot: part`"),
        ("budget: {local_tokens: 3}", "budget: a policy states slots"),
        ("- 1", "must hold keys and values"),
        ("a: [", "can't be read"),
    ],
)
def test_a_broken_policy_file_is_named(text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_package(tmp_path, monkeypatch, {"mine": text})
    with pytest.raises(CompositionError, match=r"conf/policy/mine\.yaml") as caught:
        source.load_config("policy/mine")
    assert words in str(caught.value)


def test_a_part_without_a_class_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_package(tmp_path, monkeypatch, {"format/mine": "bits: 3"})
    with pytest.raises(CompositionError, match=r"conf/policy/format/mine\.yaml: needs `_target_"):
        source.load_config("policy/format/mine")


def test_the_source_lists_what_there_is() -> None:
    source = PolicySource("test", "policies://conf")
    assert source.available()
    assert source.list("policy", ObjectType.CONFIG) == NAMED
    assert source.list("policy", ObjectType.GROUP) == sorted(SLOTS)
    assert set(source.list("policy/format", None)) == {name for slot, name in PARTS if slot == "format"}
    assert source.list("model", None) == []
    assert not source.is_config("config")
    assert not source.is_group("policy/format/int8")


def test_a_command_with_its_own_config_composes_too(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("defaults: [policy: redknot+elastic, _self_]\nbudget: 1\n")
    register()
    register()
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        cfg = compose("config", ["policy/predictor=h2o", "budget=2"])
        assert policy_from(cfg).predictor == FromSignal("attention_mass")
        assert policy_from(cfg.policy) == policy_from(cfg)


COMMAND = """
import pathlib
import hydra
from testbed.compose import policy_from, register

@hydra.main(config_path=".", config_name="config", version_base="1.3")
def main(cfg):
    policy = policy_from(cfg)
    pathlib.Path(cfg.out, policy.name + "." + type(policy.eviction).__name__).touch()

if __name__ == "__main__":
    register()
    main()
"""


def run_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "out").mkdir()
    (folder / "command.py").write_text(COMMAND)
    hydra = f"{{sweep: {{dir: {folder}/sweep}}, run: {{dir: {folder}/run}}}}"
    config = f"defaults: [policy: full, _self_]\nout: {folder}/out\nhydra: {hydra}\n"
    (folder / "config.yaml").write_text(config)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(folder), "PATH": "/usr/bin:/bin"}
    return warm.run(["command.py", *arguments], cwd=folder, env=environment)


def test_a_sweep_composes_in_the_workers_of_joblib(tmp_path: Path) -> None:
    sweep = ["-m", "policy=full,redknot+elastic", "policy/eviction=lru", "hydra/launcher=joblib"]
    done = run_command(tmp_path, *sweep, "hydra.launcher.n_jobs=2")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["full.Lru", "redknot+elastic.Lru"]


@pytest.mark.parametrize(
    ("argument", "words"),
    [("policy=redkno", "Did you mean redknot"), ("policy=snapkv+h2o", "snapkv has snapkv, h2o has h2o")],
)
def test_a_command_ends_with_one_error_and_no_trace(argument: str, words: str, tmp_path: Path) -> None:
    done = run_command(tmp_path, argument)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").iterdir())
