"""Command lines of plain words and Hydra overrides, for commands whose settings are a config of their own."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig

from testbed.compose import compose_named


def composed(name: str, args: Sequence[str]) -> tuple[list[str], DictConfig]:
    """What a command was given.

    Args:
        name: of the config, conf/<name>.yaml.
        args: words, and overrides `key=value`.

    Returns:
        The words in order, and the config.

    Raises:
        HydraException: an unknown key or group.
    """
    words = [arg for arg in args if "=" not in arg]
    return words, compose_named(name, [arg for arg in args if "=" in arg])
