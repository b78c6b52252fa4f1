"""Forks when the archive, the disk or the device can't give what they need: another place, or nothing has changed."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tier_case import P, Pair, check_books, cold, sent
from torch import Tensor

from policies.base import Format, Mode, Tier
from testbed.cache.flights import LostPages
from testbed.cache.paged import PagedCache
from testbed.cache.pool import PoolFull


def archived(folder: Path, l2_bytes: int | None = None) -> tuple[Pair, Tensor]:
    pair = Pair(300, l3_path=str(folder), l3_direct=False, l2_bytes=l2_bytes)
    pages = cold(pair.tiered.pages)
    pair.step(sent(pair.tiered, Tier.L3, pages))
    pair.tiered.settle()
    return pair, pages


def attended(cache: PagedCache, twin: PagedCache, pages: Tensor) -> bool:
    """Whether a fork gives the bits of its flat twin when it calls its pages back."""
    pair = Pair.__new__(Pair)
    pair.tiered, pair.flat, pair.seed = cache, twin, 5
    return torch.equal(*pair.step(sent(cache, Tier.L1, pages)))


def test_a_page_lost_on_the_disk_is_named_and_the_fork_can_be_tried_again(tmp_path: Path) -> None:
    pair, pages = archived(tmp_path)
    cache = pair.tiered
    where = 4096 + int(cache.pools.archive(Format.COMPUTE).offsets(cache.state["slot"][1, 5].view(1).long())[0])
    os.pwrite(cache.pools.file.file, b"other bytes", where)
    with pytest.raises(LostPages) as lost:
        cache.fork(own_pools=True)
    assert lost.value.at.tolist() == [[1, 5]]
    check_books(cache)
    cache.restore_pages(lost.value.at, pair.k[0][1, 5 * P : 6 * P][None], pair.v[0][1, 5 * P : 6 * P][None])
    fork, twin = cache.fork(own_pools=True), pair.flat.fork(own_pools=True)
    assert attended(fork, twin, pages)
    check_books(fork)
    for each in (fork, twin, pair):
        each.close()


@pytest.mark.parametrize("l2_bytes", [None, 0])
def test_a_disk_without_room_for_a_second_file(l2_bytes: int | None, tmp_path: Path) -> None:
    """The pages of a fork with an archive of its own are in memory then, or dropped where none is left."""
    pair, pages = archived(tmp_path, l2_bytes)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        fork, twin = pair.tiered.fork(own_pools=True), pair.flat.fork(own_pools=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    place = fork.state["tier"][:, : len(pages)][:, pages]
    assert (place == (Tier.L2 if l2_bytes is None else Tier.DROPPED)).all()
    assert any("L3 full" in event for event in fork.traffic.events)
    if l2_bytes is None:
        assert attended(fork, twin, pages)
    check_books(fork)
    check_books(pair.tiered)
    for each in (fork, twin, pair):
        each.close()


@pytest.mark.parametrize("short_bytes", [0, 1])
@torch.inference_mode()
def test_a_device_without_room_for_one_more_sequence(short_bytes: int) -> None:
    """Whether the ring or the background finds no room, nobody joins and no reference stays."""
    pair = Pair(300)
    cache = pair.tiered
    plan = sent(cache, Tier.L2, cold(cache.pages))
    plan.mode[0, 0, 4], plan.mode[..., 6] = int(Mode.BACKGROUND), int(Mode.CLUSTER)
    cache.apply(plan, 1)
    cache.settle()
    pools, ring = cache.pools, cache.pools.stores[Tier.L0, Format.COMPUTE].held_bytes
    kept = pools.prototypes.slots.references.clone()
    pools.background.allocate(pools.background.slots.held - pools.background.used_pages)
    pools.limits = replace(pools.limits, l1_bytes=pools.device_bytes + ring * (1 - short_bytes))
    said = "more of proto pages" if short_bytes == 0 else "no room for sinks and recent window of 2 sequences"
    with pytest.raises(PoolFull, match=said):
        cache.fork()
    assert pools.users == [cache]
    assert torch.equal(pools.prototypes.slots.references, kept)
    assert pools.stores[Tier.L0, Format.COMPUTE].held_bytes == ring
    check_books(cache)
    pair.close()
