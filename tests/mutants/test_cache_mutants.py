"""Seeded bugs of the tiered cache that the suite must catch, each in a copy of its own; see test_mutants.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cache_mutants import CACHE_MUTANTS
from mutant_bench import Bench, Parts, check_table
from mutants import Mutant

PARTS = Parts(("kernels", "policies", "testbed", "conf", "tests/testbed/cache", "tests/policies"))


@pytest.fixture(scope="module")
def cache_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("cache_mutants"), PARTS)
    yield made
    made.close()


def test_the_chosen_tests_of_the_cache_pass_without_a_mutant(cache_bench: Bench) -> None:
    cache_bench.check_unchanged(tuple(dict.fromkeys(test for mutant in CACHE_MUTANTS for test in mutant.tests)))


@pytest.mark.parametrize("mutant", CACHE_MUTANTS, ids=lambda m: m.name)
def test_a_mutant_of_the_cache_is_caught(cache_bench: Bench, mutant: Mutant) -> None:
    cache_bench.check_caught(mutant)


def test_the_cache_table_is_sound() -> None:
    check_table(CACHE_MUTANTS, 12)
