"""Seeded bugs that the suite must catch: each is put into a copy of kernels/, where the named tests must then fail.

They must fail by an assertion: a mutant that does not compile or import proves nothing. Once, all the named tests run
on an unchanged copy and must pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mutant_bench import Bench, Parts, check_table
from mutants import MUTANTS, Mutant


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("mutants"), Parts(("kernels", "tests/kernels"), native=True))
    yield made
    made.close()


@pytest.mark.parametrize("interp", [False, True], ids=["native and torch", "triton"])
def test_the_chosen_tests_pass_without_a_mutant(bench: Bench, interp: bool) -> None:
    bench.check_unchanged(tuple(dict.fromkeys(t for m in MUTANTS if m.interp == interp for t in m.tests)), interp)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mutant_is_caught(bench: Bench, mutant: Mutant) -> None:
    bench.check_caught(mutant)


def test_the_table_is_sound() -> None:
    check_table(MUTANTS, 14)
