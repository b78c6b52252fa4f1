"""A session in a file: saved between steps, resumed in another process, with the bits it would have gone on with.

session.save("talk.session")
session = Session.resume("talk.session", decoder, policy, config, context)
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from policies.base import Policy
from testbed.cache.saved import Reader, SavedError, writing
from testbed.cache.snapshot import Pins, load_cache, save_cache, unpin
from testbed.engine.batch import model_id
from testbed.engine.idle import Idle
from testbed.engine.lost import mended
from testbed.engine.story import Story

if TYPE_CHECKING:
    from testbed.engine.session import Session, SessionConfig
    from testbed.models.base import Decoder

# Keys of the cache's configuration that decisions or pages depend on; a resumed session may differ in the others.
CACHE_KEYS = (
    "page_tokens",
    "dtype",
    "sink_tokens",
    "hot_tokens",
    "slab_pages",
    "prototypes",
    "l1_bytes",
    "l2_bytes",
    "l3_bytes",
    "swap_threshold",
)


def identity(decoder: Decoder, policy: Policy, config: SessionConfig) -> dict[str, str]:
    """What must be the same when a session is resumed: name -> value as text, the model and the shape first."""
    geometry = decoder.geometry
    parts = re.sub(r" at 0x[0-9a-f]+", "", repr(policy.parts))
    return {
        "model": model_id(decoder),
        "layers": str(geometry.layers),
        "kv_heads": str(geometry.kv_heads),
        "head_dim": str(geometry.head_dim),
        "policy": policy.name,
        "policy's parts": hashlib.blake2b(parts.encode(), digest_size=8).hexdigest(),
        "policy.every_steps": str(policy.every_steps),
        "policy.cold_start_tokens": str(policy.cold_start_tokens),
        "budget.fraction": str(config.budget_fraction),
        "seed": str(config.seed),
        "signals": repr(sorted((config.signals or {}).items())),
    } | {f"cache.{key}": repr(getattr(config.cache, key)) for key in CACHE_KEYS}


def save(session: Session, path: Path, in_place: bool) -> Pins:
    """Writes a session; see `Session.save`."""
    return mended(session, lambda: _save(session, path, in_place))


def _save(session: Session, path: Path, in_place: bool) -> Pins:
    pins: Pins = []
    file = session.cache.pools.file
    try:
        with writing(path, file.sync if in_place else lambda: None) as writer:
            cache, pins = save_cache(session.cache, writer, in_place)
            writer.put("tokens", session.tokens)
            writer.put("roles", session.roles)
            if session.classes is not None:
                writer.put("classes", session.classes)
            numbers: dict[str, dict[str, int | float]] = {}
            on_device = []
            for name, source in session.sources.items():
                numbers[name] = {}
                for key, value in source.state().items():
                    if isinstance(value, Tensor):
                        writer.put(f"signal/{name}/{key}", value)
                        on_device += [f"signal/{name}/{key}"] if value.device.type != "cpu" else []
                    else:
                        numbers[name][key] = value
            pause = session.pause
            writer.finish(
                {
                    "identity": identity(session.decoder, session.policy, session.config),
                    "cache": cache,
                    "story": session.story.saved(),
                    "signals": numbers,
                    "on_device": on_device,
                    "pause": None if pause is None else asdict(pause),
                }
            )
    except BaseException:
        unpin(pins)
        raise
    return pins


def check(reader: Reader, decoder: Decoder, policy: Policy, config: SessionConfig) -> None:
    """Refuses to go on under another model, policy or configuration.

    Raises:
        SavedError: names what differs, and both values.
    """
    there, here = reader.about["identity"], identity(decoder, policy, config)
    for key, value in here.items():
        if there.get(key) != value:
            raise SavedError(f"{reader.path} was saved with {key} {there.get(key)}, here it is {value}")


def load(session: Session, reader: Reader) -> Pins:
    """Fills a new session; see `Session.resume`."""
    about = reader.about
    pins = load_cache(session.cache, reader, about["cache"])
    device = session.decoder.device
    for name, source in session.sources.items():
        start = f"signal/{name}/"
        tensors = {
            each[len(start) :]: reader.get(each).to(device if each in about["on_device"] else "cpu")
            for each in reader.names(start)
        }
        source.restore(about["signals"][name] | tensors)
    pause = None if about["pause"] is None else Idle(**about["pause"])
    classes = reader.get("classes") if reader.names("classes") else None
    story = Story.resumed(about["story"], reader.get("tokens").to(device), reader.get("roles"))
    session.take_over(story, classes, pause)
    return pins
