"""The seeded bugs of the tiered cache. Anchors are short and sit on one line, as in mutants.py."""

from __future__ import annotations

from mutants import Mutant

FLIGHT = "tests/testbed/cache/test_flights.py::test_"
FAULTS = "tests/testbed/cache/test_tier_faults.py::test_"
TAKEN = "tests/testbed/cache/test_tier_taken_back.py::test_"
LIMITS = "tests/testbed/cache/test_tier_limits.py::test_"
FILES = "tests/testbed/cache/test_archive_faults.py::test_"
MOVER = "tests/testbed/cache/test_mover.py::test_"
ROWS = "tests/testbed/cache/test_cache_rows.py::test_"
SAVED = f"{ROWS}a_saved_cache_has_every_page_where_it_was[100]"
CASCADE = "tests/policies/test_cascade.py::test_"

KEPT = f"{FLIGHT}a_source_is_kept_until_its_copy_is_done"
FORKS = f"{LIMITS}forks_share_pages_until_one_lets_go"

FLIGHTS = "testbed/cache/flights.py"
SLOTS = "testbed/cache/slots.py"
RELOCATE = "testbed/cache/relocate.py"

CACHE_MUTANTS = (
    # Pages in flight.
    Mutant("flights-source-freed-at-once", FLIGHTS, "        mover.submit(flight.job)",
           "        mover.submit(flight.job)\n        flight.staged or self.cache.pools.stores[flight.source].free("
           "flight.job.source_slots)", (KEPT,)),
    Mutant("flights-taken-back-without-their-slot", FLIGHTS, "flight.job.source_slots[which].int()",
           'cache.state["slot"][at[:, 0], at[:, 1]]', (f"{FAULTS}failing_writes_leave_pages_where_they_were",)),
    Mutant("flights-conversion-taken-back", FLIGHTS, "if converts or bool(keep.any())", "if bool(keep.any())",
           (f"{TAKEN}a_page_is_not_spared_a_conversion_that_has_not_begun",)),
    Mutant("flights-late-pages-not-waited-for", FLIGHTS, "for number in numbers if number in self._open])",
           "for number in numbers[:0]])", (f"{FLIGHT}attention_waits_for_pages_on_their_way",)),
    # Slots.
    Mutant("slots-shared-without-a-reference", SLOTS, "slots, torch.ones(len(slots), dtype=torch.int32)",
           "slots, torch.zeros(len(slots), dtype=torch.int32)", (FORKS,)),
    Mutant("slots-of-another-arena", SLOTS, "& (self.owner == arena).unsqueeze(1)",
           "& (self.owner >= 0).unsqueeze(1)", (f"{LIMITS}arenas_keep_their_pages_together_and_give_blocks_back",)),
    Mutant("slots-freed-with-a-reference-left", SLOTS, "slots[left[slots] == 0]", "slots[left[slots] <= 1]", (FORKS,)),
    # Moves.
    Mutant("compact-moves-pages-in-flight", RELOCATE, " & (cache.flights.pending == 0)", "",
           (f"{FLIGHT}holes_close_around_pages_that_arrive",)),
    Mutant("compact-moves-shared-pages", RELOCATE, "(pool.slots.references[slots] == 1) & ", "",
           (f"{FLIGHT}holes_close_around_pages_that_a_fork_shares",)),
    Mutant("staged-pages-in-the-wrong-order", RELOCATE, "source.read(old))", "source.read(old.flip(0)))",
           (f"{FLIGHT}what_leaves_the_ring_comes_back_as_it_was[2]",)),
    # Tiers that are full.
    Mutant("limits-least-worth-stays", "testbed/cache/limits.py", "descending=True", "descending=False",
           (f"{LIMITS}l2_full_goes_on_to_l3[8]",)),
    Mutant("limits-dropped-instead-of-l2", "testbed/cache/limits.py", "code, 0, len(onward))", "code, 0, 0)",
           (f"{FAULTS}a_full_disk_is_a_full_tier[None]",)),
    Mutant("ledger-without-bytes-in-flight", "testbed/cache/ledger.py", "in cache.flights.source_bytes().items()",
           "in {}.items()", (KEPT,)),
    # The archive.
    Mutant("archive-checksum-not-compared", "testbed/cache/archive/*.py", "sums == self._expected[0]", "sums == sums",
           (f"{FAULTS}a_flipped_byte_is_one_lost_page",)),
    Mutant("archive-keeps-a-stale-checksum", "testbed/cache/archive/*.py", "pool.slots.note(slots, None)", "pass",
           (f"{FILES}a_failed_write_is_said_and_its_pages_are_not_believed[python-5]",)),
    Mutant("archive-never-switched-off", FLIGHTS, "cache.pools.archive_failed(str(error))", "False",
           (f"{FAULTS}failing_writes_leave_pages_where_they_were",)),
    # Order, plans, batches, saved sessions.
    Mutant("mover-demotions-first", "testbed/cache/jobs.py", "return self.priority, self.layer",
           "return -self.priority, self.layer", (f"{MOVER}a_demand_waits_for_one_chunk",)),
    Mutant("cascade-l2-without-a-budget", "policies/filling.py", "stays = left if budget is None",
           "stays = left if budget is None or place == Tier.L2",
           (f"{CASCADE}a_full_first_tier_spills_into_the_second[l2]",)),
    Mutant("batch-first-positions-of-the-first-row", "testbed/cache/batch.py",
           "[place.first_position for place in each]", "[each[0].first_position for place in each]",
           (f"{ROWS}rows_of_different_lengths_are_what_they_are_alone",)),
    Mutant("saved-a-page-too-long", "testbed/cache/snapshot.py", '"length_tokens": cache.length_tokens,',
           '"length_tokens": cache.length_tokens + 16,', (SAVED,)),
    Mutant("saved-pages-one-off", "testbed/cache/snapshot.py", "block = at[done : done + len(blobs)]",
           "block = at.roll(1, 0)[done : done + len(blobs)]", (SAVED,)),
)  # fmt: skip
