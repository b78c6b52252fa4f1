"""`python -m testbed.heads recommend MAP budget.fraction=0.25 length=4096 out=DIR`: what to keep of heads for a budget.

Searches splits, windows and formats for the least predicted loss (`testbed.heads.strategies`) and writes them as a
Hydra config, with the classes of every head as a RedKnot map beside it:

    python -m testbed.run --config-dir DIR experiment=recommended
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from policies.base import Head
from testbed.cache.layout import CacheConfig
from testbed.commands import check_output
from testbed.heads.configured import composed
from testbed.heads.formats import to_redknot, write
from testbed.heads.headmap import HeadMap, HeadMapError
from testbed.heads.imported import ImportedMap
from testbed.heads.kept import kept, lines
from testbed.heads.strategies import BLOCK_PAGES, Place, Recommended, Search, Worth, recommend
from testbed.models.base import Decoder
from testbed.results.display import value_text
from testbed.results.record import write_atomically
from testbed.setup import build

NAME = "recommended"


def settings(found: Recommended, heads_path: Path, place: Place, fraction: float) -> dict[str, Any]:
    """The experiment: what overrides the main config.

    Args:
        found: the strategy.
        heads_path: of the classes.
        place: the context length it was found for.
        fraction: of the full cache's bytes.
    """
    strategy = found.strategy
    blocks = {f"{head.name.lower()}_block_pages": pages for head, pages in BLOCK_PAGES.items()}
    windows = {"local_tokens": strategy.local_tokens, "global_tokens": None, "special_tokens": strategy.special_tokens}
    formats = {f"{name}_format": getattr(strategy, f"{name}_format") for name in ("local", "special", "global")}
    return {
        "defaults": [{"override /policy": "redknot"}, {"override /policy/classifier": "file"}],
        "policy": {"name": NAME, "budget": {**windows, **blocks}, "format": formats},
        "budget": {"fraction": fraction},
        "signals": {"head_imported": {"path": str(heads_path)}},
        "workload": {"lengths": [place.length_tokens]},
    }


def write_experiment(
    folder: Path, found: Recommended, classes: Tensor, place: Place, fraction: float, about: Sequence[str]
) -> Path:
    """Writes DIR/experiment/recommended.yaml and the classes beside it.

    Args:
        folder: DIR; made if it is not there.
        found: the strategy.
        classes: [L, Hk] int8 of `Head`.
        place: where it was found.
        fraction: of the full cache's bytes.
        about: lines of comment.

    Raises:
        HeadMapError: the file system refused.
    """
    heads_path = (folder / f"{NAME}-heads.json").resolve()
    path = folder / "experiment" / f"{NAME}.yaml"
    score = (classes != Head.LOCAL).double()
    imported = to_redknot(
        ImportedMap("testbed", NAME, score, None, classes=classes), window_tokens=found.strategy.local_tokens
    )
    body = yaml.safe_dump(settings(found, heads_path, place, fraction), sort_keys=False)
    comment = "".join(f"# {line}\n" for line in about)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(imported, heads_path)
        write_atomically(path, f"# @package _global_\n{comment}{body}")
    except OSError as error:
        raise HeadMapError(f"{folder}: {error.strerror or error}") from error
    return path


def told(found: Recommended, worth: Worth, place: Place, budget_bytes: int) -> list[str]:
    """What is recommended and predicted, in lines."""
    strategy = found.strategy
    local, special, everything = strategy.heads(place.heads)
    nats = "nats" if worth.measure.startswith("head_restrict") else "of the measure's unit"
    return [
        f"heads by {worth.measure}, {place.length_tokens:,} tokens, at most {value_text(budget_bytes, 'bytes')}",
        f"local   {local:4d} heads: the last {strategy.local_tokens} tokens in {strategy.local_format}",
        f"special {special:4d} heads: {strategy.special_tokens} chosen tokens in {strategy.special_format}",
        f"global  {everything:4d} heads: everything in {strategy.global_format}",
        f"predicted: {value_text(found.device_bytes, 'bytes')} on the device, "
        f"{found.device_bytes / place.full_bytes:.1%} of the full cache",
        f"predicted loss: {found.window_loss:.3g} {nats} by windows, head by head, {found.format_loss:.3g} nats by "
        "formats; losses of heads do not add up, so this ranks strategies and is no forecast",
    ]


def caveats(head_map: HeadMap, measure: str) -> list[str]:
    """What must be said of the measure: classifiers that read it alone and did not beat chance."""
    said = {**kept(head_map.fingerprint), **head_map.verdicts}
    read_alone = {
        name: verdict
        for name, verdict in said.items()
        if str(verdict.get("identity")).endswith(f"({measure})") and not verdict["beats_random"]
    }
    return list(lines(read_alone))


def main(args: list[str]) -> None:
    """The command.

    Raises:
        ValueError: what the user can mend.
    """
    words, cfg = composed("heads_recommend", args)
    if len(words) != 1:
        raise HeadMapError("recommend takes one head map: python -m testbed.heads recommend MAP budget.fraction=0.25")
    fraction, length = cfg.budget.fraction, cfg.length
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise HeadMapError(f"budget.fraction={fraction!r}: must be above 0 and at most 1")
    folder = check_output("out", cfg.out, folder=True)
    head_map = HeadMap.read(words[0])
    worth = Worth.of(head_map, cfg.importance)
    search: Search = build(cfg.search, "search")
    cache: CacheConfig = build(cfg.cache, "cache")
    decoder: Decoder = build(cfg.model, "model")
    head_map.check_model(decoder)
    geometry = decoder.geometry
    limit = geometry.max_context_tokens
    if limit is not None and isinstance(length, int) and length > limit:
        raise HeadMapError(f"length={length}: must be at most {limit}, the limit of {decoder.name}")
    place = Place.of(geometry.layers, geometry.kv_heads, geometry.head_dim, cache, length)
    budget_bytes = int(fraction * place.full_bytes)
    found = recommend(worth, place, search, budget_bytes)
    about = [*told(found, worth, place, budget_bytes), *caveats(head_map, worth.measure)]
    print("\n".join(about))
    if folder is not None:
        classes = worth.classes(found.strategy)
        print(f"config: {write_experiment(folder, found, classes, place, float(fraction), about)}")
        print(f"run it: python -m testbed.run --config-dir {folder} experiment={NAME}")
