"""A sequence's cache in a saved session: every page of every tier, its state, and all that decisions are made from.

Pages of a page file that is kept may stay there: then the session names their slots and checksums, and references keep
the slots from being used again until the next save. Whatever becomes of the file meanwhile is found when a page is
read, as with any page of L3.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from policies.base import Format, Tier
from testbed.cache.archive import CorruptPages, FilePool
from testbed.cache.flights import LostPages
from testbed.cache.pool import PoolFull, SlabPool
from testbed.cache.relocate import READ_BLOCK_PAGES
from testbed.cache.saved import Reader, SavedError, Writer

if TYPE_CHECKING:
    from testbed.cache.paged import PagedCache

STATE = ("mode", "format", "tier")
Pins = list[tuple[FilePool, Tensor]]
"""Slots in the page file that a saved session refers to, one reference each."""


def unpin(pins: Pins) -> None:
    """Lets go of what an older save referred to."""
    for pool, slots in pins:
        pool.free(slots)


def save_cache(cache: PagedCache, writer: Writer, in_place: bool) -> tuple[dict[str, Any], Pins]:
    """Writes a cache; moves under way are ended first.

    Args:
        cache: between steps.
        writer: of the file.
        in_place: leave pages of L3 in the page file, which must be one that is kept.

    Returns:
        What `load_cache` must know beside the tensors, and the slots now referred to.

    Raises:
        LostPages: pages of L3 can't be read; nothing is saved then.
        SavedError: in place, but the page file ends with the run.
    """
    file = cache.pools.file
    if in_place and not file.kept:
        raise SavedError("in_place=True: pages stay in the page file, so cache.l3_path must name a file that is kept")
    cache.flights.drain()
    tensors = {f"state/{name}": cache.state[name] for name in STATE}
    tensors |= {"score": cache.metadata.score, "last_access": cache.metadata.last_access, "arena": cache.arena}
    tensors["ring"] = cache.pools.stores[Tier.L0, Format.COMPUTE].read(cache.hot_slots)
    if cache.keeps_bounds:
        tensors |= dict(zip(("lowest", "highest"), cache.key_bounds(), strict=True))
    book, numbers = {}, {}
    for name, value in vars(cache.prefetches).items():
        if isinstance(value, Tensor):
            book[f"prefetches/{name}"] = value
        elif isinstance(value, int):
            numbers[name] = value
    tensors |= book | _approximations(cache)
    for name, value in tensors.items():
        writer.put(name, value)
    pins: Pins = []
    try:
        _save_pages(cache, writer, in_place, pins)
    except BaseException:
        unpin(pins)
        raise
    return {
        "length_tokens": cache.length_tokens,
        "plans": cache.metadata.plans,
        "prefetches": numbers,
        "traffic": asdict(cache.traffic),
        "blocks": cache.pools.level_1(Format.COMPUTE).slots.block_slabs,
        "archive": {"path": str(file.path), "identity": file.header.identity} if in_place else None,
    }, pins


def _approximations(cache: PagedCache) -> dict[str, Tensor]:
    parts = cache.approximations
    out = {"prototype_slot": parts.slot >= 0, "background_slot": parts.background_slot >= 0}
    for name, pool, slots in (
        ("prototypes", parts.prototypes, parts.slot),
        ("background", parts.background, parts.background_slot),
    ):
        out[name] = pool.read(slots[slots >= 0].long())
    return out if parts._sums is None else out | {"background_sums": parts._sums}


def _save_pages(cache: PagedCache, writer: Writer, in_place: bool, pins: Pins) -> None:
    """Pages outside the ring in the order of the page table, block by block, or where they are in the page file."""
    for (tier, code), store in cache.pools.stores.items():
        at = _at(cache.state, tier, code)
        slots = cache.state["slot"][at[:, 0], at[:, 1]].long()
        if tier == Tier.L0 or not len(at):
            continue
        try:
            if tier == Tier.L3 and in_place:
                archive = cache.pools.archive(code)
                writer.put(f"slots/{code.name}", slots)
                writer.put(f"sums/{code.name}", archive.checksums(slots))
                archive.share(slots)
                pins.append((archive, slots))
                continue
            for index, block in enumerate(slots.split(READ_BLOCK_PAGES)):
                writer.put(f"pages/{tier.name}/{code.name}/{index}", store.read(block))
        except CorruptPages as error:
            raise LostPages(at[torch.isin(slots, error.slots)], str(error)) from error


def _at(state: dict[str, Tensor], tier: Tier, code: Format) -> Tensor:
    """[M, 2] stream and page of a tier and format."""
    return ((state["tier"] == tier) & (state["format"] == code)).nonzero()


def load_cache(cache: PagedCache, reader: Reader, about: dict[str, Any]) -> Pins:
    """Fills a new cache with what was saved.

    Args:
        cache: empty, of the shape that was saved.
        reader: of the file.
        about: what `save_cache` answered.

    Returns:
        The slots in the page file that the saved session refers to.

    Raises:
        SavedError: damaged, another page file, tiers too small.
    """
    state = {name: reader.get(f"state/{name}") for name in STATE}
    pages = state["mode"].shape[1]
    cache.length_tokens = about["length_tokens"]
    cache._grow(pages)
    for name, value in state.items():
        cache.state[name] = value.clone()
    # A page is there once it is placed, so that a load that fails can be closed.
    cache.state["tier"].masked_fill_(state["tier"] != Tier.L0, int(Tier.DROPPED))
    cache.arena = reader.get("arena")
    for arena, slabs in about["blocks"].items():
        for code in Format:
            cache.pools.level_1(code).slots.block_slabs[int(arena)] = slabs
    cache.metadata.score, cache.metadata.last_access = reader.get("score"), reader.get("last_access")
    cache.metadata.plans = about["plans"]
    cache.pools.stores[Tier.L0, Format.COMPUTE].write(cache.hot_slots, reader.get("ring"))
    if cache.keeps_bounds:
        cache._bounds = torch.stack((reader.get("lowest"), reader.get("highest")))
    for name in reader.names("prefetches/"):
        setattr(cache.prefetches, name.partition("/")[2], reader.get(name))
    for name, value in about["prefetches"].items():
        setattr(cache.prefetches, name, value)
    for name, value in about["traffic"].items():
        setattr(cache.traffic, name, value)
    pins: Pins = []
    try:
        _load_in_place(cache, reader, about["archive"], state, pins)
        _load_pages(cache, reader, state)
        _load_approximations(cache, reader)
    except BaseException as error:
        unpin(pins)
        if isinstance(error, PoolFull):
            raise SavedError(f"{reader.path}: its pages find no room here: {error}") from error
        raise
    cache._rebuild()
    return pins


def _load_in_place(
    cache: PagedCache, reader: Reader, archive: dict[str, str] | None, state: dict[str, Tensor], pins: Pins
) -> None:
    """Pages that stayed in the page file; before anything is allocated in it."""
    if archive is None:
        return
    file = cache.pools.file
    if not file.kept or file.header.identity != archive["identity"]:
        raise SavedError(
            f"{reader.path}: its pages are in the page file {archive['path']}, here cache.l3_path is {file.path}; name "
            f"that file"
        )
    for code in Format:
        if not reader.names(f"slots/{code.name}"):
            continue
        pool, at = cache.pools.archive(code), _at(state, Tier.L3, code)
        slots = reader.get(f"slots/{code.name}")
        pool.restore(slots, reader.get(f"sums/{code.name}"))
        pool.share(slots)
        pins.append((pool, slots))
        _placed(cache, at, Tier.L3, slots)


def _placed(cache: PagedCache, at: Tensor, tier: Tier, slots: Tensor) -> None:
    cache.state["slot"][at[:, 0], at[:, 1]] = slots.int()
    cache.state["tier"][at[:, 0], at[:, 1]] = int(tier)


def _load_pages(cache: PagedCache, reader: Reader, state: dict[str, Tensor]) -> None:
    for (tier, code), store in cache.pools.stores.items():
        at, done = _at(state, tier, code), 0
        for name in reader.names(f"pages/{tier.name}/{code.name}/"):
            blobs = reader.get(name)
            block = at[done : done + len(blobs)]
            done += len(blobs)
            for arena, part in cache.by_arena(torch.cat((block, torch.arange(len(block)).unsqueeze(1)), 1), tier):
                slots = store.allocate(len(part), arena)
                store.write(slots, blobs[part[:, 2]])
                _placed(cache, part, tier, slots)


def _load_approximations(cache: PagedCache, reader: Reader) -> None:
    parts = cache.approximations
    for name, table, pool, slots in (
        ("prototypes", "prototype_slot", parts.prototypes, parts.slot),
        ("background", "background_slot", parts.background, parts.background_slot),
    ):
        held, blobs = reader.get(table), reader.get(name)
        _fill(pool, slots, held, blobs)
    if reader.names("background_sums"):
        parts._sums = reader.get("background_sums")


def _fill(pool: SlabPool, slots: Tensor, held: Tensor, blobs: Tensor) -> None:
    fresh = pool.allocate(len(blobs))
    pool.write(fresh, blobs)
    slots[held] = fresh.int()
