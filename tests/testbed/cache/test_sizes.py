"""Sizes in every spelling, what is refused, and the memory that shares are of."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.cache.layout import CacheConfig, device_budget
from testbed.cache.pool import CacheError
from testbed.cache.sizes import Capacities, _cgroup_limits, device_memory_bytes, host_memory_bytes, resolve

GIB = 2**30


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (None, None),
        (0, 0),
        (1, 1),
        (4096, 4096),
        (2.0e9, 2_000_000_000),
        ("4096", 4096),
        ("2GiB", 2 * GIB),
        (" 2 gib ", 2 * GIB),
        ("2GB", 2_000_000_000),
        ("1.5 MiB", 3 * 2**19),
        (0.25, 250),
        (1.0, 1000),
        ("25%", 250),
        (" 12.5 % ", 125),
        ("100%", 1000),
    ],
)
def test_spellings(value: Any, size: int | None) -> None:
    assert resolve(value, 1000, "l2_bytes") == size


BAD: list[Any] = [
    -1,
    -0.5,
    1.5,
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
    "",
    "12 apples",
    "many",
    "-5",
    "-5%",
    "0%",
    "101%",
    "x%",
    "nan%",
    "inf%",
    "1e9",
    "9" * 30,
    1e300,
    [1],
    {"a": 1},
]


@pytest.mark.parametrize("value", BAD, ids=repr)
@pytest.mark.parametrize("key", ["l1_bytes", "l2_bytes", "l3_bytes"])
def test_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(CacheError) as caught:
        CacheConfig(**{key: value})
    line = str(caught.value)
    assert line.startswith(f"cache.{key}={value!r}: must be a number of bytes")
    assert "\n" not in line


def test_what_is_none_at_all() -> None:
    with pytest.raises(CacheError, match=r"cache\.l1_bytes=0: .*at least 1"):
        CacheConfig(l1_bytes=0)
    assert CacheConfig(l2_bytes=0, l3_bytes=0).capacities() == Capacities(None, 0, 0)
    for value in (0.5, "50%"):
        with pytest.raises(CacheError, match=r"cache\.l3_bytes=.*must be a number of bytes such as [^,]*, or null"):
            CacheConfig(l3_bytes=value)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.from_regex(r"\d+%")),
    st.integers(1, 2**62),
)
def test_a_size_or_one_line(value: Any, of_bytes: int) -> None:
    """Whatever is given: a size that fits the rules, or the one kind of error."""
    try:
        size = resolve(value, of_bytes, "l1_bytes", 1)
    except CacheError as error:
        said = str(error)
        size = -1
    if size == -1:
        assert said.startswith(f"cache.l1_bytes={value!r}: must be ")
        return
    if value is None:
        assert size is None
    else:
        assert size is not None
        assert 1 <= size < 2**63
        if isinstance(value, float) and value <= 1.0:
            assert abs(size - value * of_bytes) <= max(1.0, 1e-9 * of_bytes)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("swap_threshold", 0.0, "must be above 0 and at most 1"),
        ("swap_threshold", 1.01, "must be above 0 and at most 1"),
        ("swap_threshold", math.nan, "must be above 0 and at most 1"),
        ("swap_threshold", True, "must be above 0 and at most 1"),
        ("swap_threshold", "half", "must be above 0 and at most 1"),
        ("overlap", 1, "must be one of true, false"),
        ("overlap", "yes", "must be one of true, false"),
        ("l3_io", "aio", "must be one of auto, uring, threads, mmap"),
        ("l3_io", None, "must be one of auto, uring, threads, mmap"),
        ("l3_direct", 1, "must be one of auto, true, false"),
        ("l3_direct", "true", "must be one of auto, true, false"),
        ("l3_failures", 0, "must be a whole number of at least 1"),
        ("l3_failures", 2.5, "must be a whole number of at least 1"),
        ("on_lost", "ignore", "must be one of recompute, drop, error"),
        ("l3_path", 3, "must be a folder, a file or null"),
        ("l3_path", " ", "must be a folder, a file or null"),
    ],
)
def test_other_keys(key: str, value: Any, said: str) -> None:
    with pytest.raises(CacheError) as caught:
        CacheConfig(**{key: value})
    assert str(caught.value) == f"cache.{key}={value!r}: {said}"


def test_shares_are_of_memory() -> None:
    host = host_memory_bytes()
    assert 0 < host <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert device_memory_bytes(torch.device("cpu")) == host
    assert CacheConfig(l1_bytes="50%", l2_bytes=0.25).capacities("cpu") == Capacities(host // 2, host // 4, None)


def test_containers(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    (root / "a" / "b").mkdir(parents=True)
    (root / "memory" / "c").mkdir(parents=True)
    assert _cgroup_limits(root, own) == []  # no control groups here
    own.write_text("0::/a/b\n")
    assert _cgroup_limits(root, own) == []
    (root / "a" / "b" / "memory.max").write_text("max\n")
    (root / "a" / "memory.max").write_text("4096\n")
    assert _cgroup_limits(root, own) == [4096]
    own.write_text("0::/only/seen/outside\n")
    (root / "memory.max").write_text("8192\n")
    assert _cgroup_limits(root, own) == [8192]
    own.write_text("5:cpu,memory:/c\n4:cpuset:/a\n")
    (root / "memory" / "c" / "memory.limit_in_bytes").write_text("512\n")
    assert _cgroup_limits(root, own) == [512]


def test_device_budget_is_the_smaller_limit() -> None:
    assert device_budget(CacheConfig(), None, 1000) is None
    assert device_budget(CacheConfig(), 0.25, 1000) == 250
    assert device_budget(CacheConfig(l1_bytes=1000), None, 10**6) == 800
    assert device_budget(CacheConfig(l1_bytes=1000, swap_threshold=0.5), 0.25, 1000) == 250
    assert device_budget(CacheConfig(l1_bytes=100, swap_threshold=1.0), 0.25, 1000) == 100
