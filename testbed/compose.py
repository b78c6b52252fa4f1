"""Composes policies: `policy=redknot+elastic` overlays the slots of two named policies, for any a+b+c.

A named policy (conf/policy/<name>.yaml) states only the slots it fills; a Hydra ConfigSource generates from it
the whole `policy` node, seven slots with a part each, an empty slot with its identity. Generating the list of parts,
instead of merging YAML, is what leaves no argument of a replaced part behind. Every command calls `register()` before
`hydra.main`; tests and scripts call `compose_policy("redknot+elastic")`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import CompactHydraException, InstantiationException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from policies.base import SLOTS, Policy, PolicyError

GROUP = "policy"
IDENTITY = {
    "classifier": "dense",
    "predictor": "age",
    "budget": "unlimited",
    "format": "compute",
    "eviction": "score",
    "attention": "exact",
    "prefetch": "none",
}
SETTINGS: Mapping[str, int | float | None] = {"every_steps": 16, "cold_start_tokens": 0, "budget_fraction": None}
# Ends the name of a part that a second policy also wanted, so that a swap of the slot also ends the conflict.
CONTESTED = "!"


class CompositionError(CompactHydraException, PolicyError):
    """A policy can't be composed as asked. Hydra prints it without a trace."""


@dataclass(frozen=True)
class NamedPolicy:
    """One file: the slots it fills (slot -> part) and the settings it makes."""

    name: str
    parts: Mapping[str, str]
    settings: Mapping[str, int | float | None]

    @property
    def says_something(self) -> bool:
        """False for `full`."""
        return bool(self.parts or self.settings)


@dataclass
class Overlay:
    """The choices of several policies, the later over the earlier, and what they disagree about."""

    chosen: dict[str, tuple[str, Any]] = field(default_factory=dict)  # slot or setting -> (policy, part or value)
    conflicts: dict[str, str] = field(default_factory=dict)

    def add(self, policy: NamedPolicy) -> None:
        """Lays a policy over the others."""
        for key, value in (*policy.parts.items(), *policy.settings.items()):
            before = self.chosen.get(key)
            if before is not None and before[1] != value:
                self.conflicts[key] = f"{before[0]} has {before[1]}, {policy.name} has {value}"
            self.chosen[key] = (policy.name, value)


class PolicySource(ConfigSource):
    """Everything under `policy/` of a package of configs, as `policies://<package>`."""

    @staticmethod
    def scheme() -> str:
        """The scheme of the search path entry."""
        return "policies"

    def available(self) -> bool:
        """Whether the package has policies."""
        return self._folder().is_dir()

    def is_group(self, config_path: str) -> bool:
        """`policy` and its slots."""
        return config_path == GROUP or config_path in {f"{GROUP}/{slot}" for slot in SLOTS}

    def is_config(self, config_path: str) -> bool:
        """Any name in those groups, known or not: that way `load_config` words the error for an unknown one."""
        group, _, name = config_path.rpartition("/")
        return bool(name) and self.is_group(group)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The named policies or parts, and the slots."""
        if not self.is_group(config_path):
            return []
        configs = [] if results_filter == ObjectType.GROUP else self._names(config_path)
        groups = [] if results_filter == ObjectType.CONFIG or config_path != GROUP else list(SLOTS)
        return sorted({*configs, *groups})

    def load_config(self, config_path: str) -> ConfigResult:
        """The generated policy or the part.

        Raises:
            CompositionError: an unknown name, or a file that is no policy or part.
        """
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        content = self._policy(name) if group == GROUP else self._part(group, name)
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create(content),
            header={"package": None},
        )

    def _policy(self, expression: str) -> dict[str, Any]:
        named = [self._named(name, expression) for name in expression.split("+")]
        overlay = Overlay()
        for policy in named:
            overlay.add(policy)
        names = dict.fromkeys(policy.name for policy in named if policy.says_something)
        defaults: list[Any] = []
        for slot in SLOTS:
            _, part = overlay.chosen.get(slot, ("", IDENTITY[slot]))
            defaults.append({slot: part + (CONTESTED if slot in overlay.conflicts else "")})
        settings = {key: overlay.chosen.get(key, ("", value))[1] for key, value in SETTINGS.items()}
        return {
            "defaults": [*defaults, "_self_"],
            "_target_": "policies.base.Policy",
            "name": "+".join(names) or named[0].name,
            "on_conflict": "error",
            "conflicts": overlay.conflicts,
            **settings,
        }

    def _named(self, name: str, expression: str) -> NamedPolicy:
        content = self._read(GROUP, name, "policy", expression)
        where = f"conf/{GROUP}/{name}.yaml"
        parts: dict[str, str] = {}
        for entry in content.pop("defaults", None) or []:
            if not isinstance(entry, dict) or len(entry) != 1 or not set(entry) <= set(SLOTS):
                raise CompositionError(
                    f"{where}: defaults has {entry!r}: must be `slot: part`, slots: {', '.join(SLOTS)}"
                )
            parts.update(entry)
        if not set(content) <= set(SETTINGS):
            wrong = ", ".join(sorted(set(content) - set(SETTINGS)))
            raise CompositionError(
                f"{where}: {wrong}: a policy states slots under defaults and {', '.join(SETTINGS)}, nothing else; "
                "arguments belong in the part's own YAML"
            )
        return NamedPolicy(name, parts, content)

    def _part(self, group: str, name: str) -> dict[str, Any]:
        slot = group.rpartition("/")[2]
        plain = name.removesuffix(CONTESTED)
        content = self._read(group, plain, f"{slot} part", plain)
        if not isinstance(content.get("_target_"), str):
            raise CompositionError(f"conf/{group}/{plain}.yaml: needs `_target_: <module>.<class>` of the part")
        return content | ({"contested": True} if name != plain else {})

    def _read(self, group: str, name: str, what: str, expression: str) -> dict[str, Any]:
        names = self._names(group)
        if name not in names:
            near = get_close_matches(name, names, n=3, cutoff=0.5)
            inside = "" if name == expression else f" in {expression!r}"
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise CompositionError(f"unknown {what} {name!r}{inside}.{hint} There are: {', '.join(names)}")
        file = self._folder(group).joinpath(f"{name}.yaml")
        try:
            content = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")))
        except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
            raise CompositionError(f"conf/{group}/{name}.yaml can't be read: {error}") from error
        if not isinstance(content, dict):
            raise CompositionError(f"conf/{group}/{name}.yaml: must hold keys and values")
        return {str(key): value for key, value in content.items()}

    def _names(self, group: str) -> list[str]:
        entries = self._folder(group).iterdir()
        return sorted(entry.name.removesuffix(".yaml") for entry in entries if entry.name.endswith(".yaml"))

    def _folder(self, group: str = GROUP) -> Traversable:
        return files(self.path).joinpath(*group.split("/"))


class PolicySearchPath(SearchPathPlugin):
    """Puts the policy source before every other place where Hydra looks."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra."""
        search_path.prepend(provider="testbed", path=f"{PolicySource.scheme()}://conf")


def register() -> None:
    """Makes Hydra know composed policies in this process and its workers; calling it twice does nothing more."""
    plugins = Plugins.instance()
    plugins.register(PolicySource)
    plugins.register(PolicySearchPath)


def policy_from(cfg: DictConfig) -> Policy:
    """The policy of a composed config, from its root or its `policy` node.

    Raises:
        CompositionError: two policies fill one slot and `policy.on_conflict` is not `last`, or a part refuses a value.
    """
    node = OmegaConf.to_container(cfg.get(GROUP, cfg), resolve=True)
    if not isinstance(node, dict):
        raise CompositionError(f"policy={node!r}: must be the name of a policy")
    values: dict[str, Any] = {str(key): value for key, value in node.items()}
    on_conflict = values.pop("on_conflict", "error")
    if on_conflict not in ("error", "last"):
        raise CompositionError(f"policy.on_conflict={on_conflict!r}: must be error or last")
    open_conflicts = {
        key: text for key, text in values.pop("conflicts", {}).items() if key in SETTINGS or _contested(values[key])
    }
    if open_conflicts and on_conflict == "error":
        listed = "; ".join(f"policy.{key}: {text}" for key, text in open_conflicts.items())
        raise CompositionError(
            f"policy {values['name']}: {listed}. Choose the part (policy/<slot>=<part>) or let the last policy win "
            "(policy.on_conflict=last)"
        )
    try:
        return instantiate(values)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, PolicyError):
            raise CompositionError(f"policy {values['name']}: {cause}") from error
        raise


def _contested(part: Any) -> bool:
    return isinstance(part, dict) and bool(part.pop("contested", False))


def compose_policy(name: str, overrides: Sequence[str] = ()) -> Policy:
    """A policy outside of a command.

    Args:
        name: of a policy, or several joined by +.
        overrides: as on the command line, e.g. "policy/eviction=lru", "policy.budget.local_tokens=256".

    Raises:
        CompositionError: see `policy_from` and `PolicySource.load_config`.
    """
    return policy_from(compose_config(name, overrides))


def compose_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The config that `compose_policy` builds the policy from."""
    return compose_named(None, [f"+{GROUP}={name}", *overrides])


def compose_named(name: str | None, overrides: Sequence[str] = ()) -> DictConfig:
    """The config conf/<name>.yaml, or an empty one, outside of `hydra.main`.

    Raises:
        HydraException: an unknown key or group.
    """
    register()
    with initialize_config_module("conf", version_base="1.3"):
        return compose(name, overrides=list(overrides))


def full_policy() -> Policy:
    """The full cache: every slot its identity. Needs no composition, so it can be had inside a running command."""
    source = PolicySource(provider="testbed", path="policies://conf")
    parts = {slot: source.load_config(f"{GROUP}/{slot}/{part}").config for slot, part in IDENTITY.items()}
    return Policy("full", **{slot: instantiate(part) for slot, part in parts.items()})
