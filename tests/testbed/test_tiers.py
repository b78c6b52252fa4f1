"""The record's section on tiers against numbers counted by hand, and how it is shown."""

from __future__ import annotations

import dataclasses
import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from testbed import tiers
from testbed.cache.layout import CacheConfig
from testbed.cache.traffic import Traffic
from testbed.decisions import DecisionLog, Header, ModelShape, Step
from testbed.engine.evaluate import Agreement, Answer
from testbed.engine.session import StepTime
from testbed.experiment import Experiment, Outcome
from testbed.results import html, table
from testbed.results import tiers as shown
from testbed.results.names import UNITS
from testbed.results.record import Record
from testbed.results.tracker import read_payload
from testbed.summary import decode_ms
from testbed.workloads.base import Sample

MIB = 2**20


def traffic(hit: int, waited: int, useful: int, issued: int, events: tuple[str, ...] = ()) -> Traffic:
    """What a cache of the tests did."""
    out = Traffic(events=list(events))
    out.lookups = {"attended": hit + waited, "hit": hit, "waited": waited}
    out.prefetch |= {"issued": issued, "useful": useful, "useless": issued - useful, "harmful": 1, "late": useful}
    if waited:
        out.moved("L2>L1", waited, waited * MIB, 0.25)
        out.stalled("demand", 0.5)
    if issued:
        out.moved("L3>L1", issued, issued * MIB, 0.125)
        out.stalled("prefetch_late", 0.25)
    return out


def answered(moved: Traffic, stall_s: tuple[float, float], l1_bytes: int = 10 * MIB) -> Answer:
    """Two runs of a question of one token each, then two decode steps of one second each."""
    shape = ModelShape("m", 1, 1, 1, 16, 1, 1)
    steps = [Step(0, "compress", 0, 32, held_bytes={"L1": 999 * MIB})]
    steps += [
        Step(at, phase, 1, 33 + at, held_bytes={"L0": MIB, "L1": l1_bytes + at * MIB, "L2": 2 * MIB})
        for at, phase in enumerate(("extend", "extend", "decode", "decode"))
    ]
    return Answer(
        tokens=[1],
        logprobs=torch.zeros(1, 4),
        times=[StepTime(1.0, 0.125, stall) for stall in stall_s],
        turn_times=[StepTime(2.0, 0.0, 0.0)],
        log=DecisionLog(Header(shape, 16, "p", 64, 2), tuple(steps)),
        device_bytes=1,
        total_bytes=2,
        full_bytes=3,
        bytes={"L0/compute": MIB, "L1/int8": 8 * MIB, "L1/tables": 100, "L2/int4": 2 * MIB},
        held={"L0": MIB, "L1": 9 * MIB, "L2": 3 * MIB, "L3": 0},
        pages={"L0/compute": 4, "L1/int8": 64, "L2/int4": 32, "dropped": 7},
        traffic=moved,
    )


def experiment(answers: list[Answer], loading: list[Traffic], **cache: Any) -> Experiment:
    settings: Any = SimpleNamespace(seed=0, cache=CacheConfig(**cache))
    decoder: Any = SimpleNamespace(device=torch.device("cpu"))
    progress: Any = None
    outcomes = [
        Outcome(Sample(f"s{at}", f"c{at}", [1], [1], "a"), each, each, Agreement(0, 1, 1, True), 1.0, 1.0, 1.0)
        for at, each in enumerate(answers)
    ]
    return Experiment(settings, decoder, progress, outcomes, loading)


@pytest.fixture
def run() -> Experiment:
    full = "L2 full: of {} pages 3 are dropped"
    first = traffic(hit=90, waited=10, useful=6, issued=8, events=(full.format(10), full.format(12)))
    second = traffic(hit=60, waited=0, useful=0, issued=0)
    loaded = Traffic(events=["L3 switched off after 3 failures in a row: can't read"])
    loaded.failures["read"] = 3
    answers = [answered(first, (0.5, 0.25)), answered(second, (0.0, 0.0), 20 * MIB)]
    return experiment(answers, [loaded], l1_bytes=40 * MIB, l2_bytes="1GiB")


def test_numbers_are_ratios_of_sums(run: Experiment) -> None:
    found = {number.name: number for number in tiers.numbers(run)}
    assert {name: number.unit for name, number in found.items()} == {name: UNITS[name] for name in found}
    assert all(number.kind == "measured" for number in found.values())
    value = {name: number.value for name, number in found.items()}
    assert value == {
        "tier.hit_rate": 150 / 160,
        "tier.stall_share": pytest.approx(0.75 / 8.0),
        "tier.stall_ms_per_token": pytest.approx(1e3 * 0.75 / 8),
        "tier.moved_bytes_per_token": 18 * MIB / 8,
        "tier.l0_bytes": MIB,
        "tier.l1_bytes": (11.5 + 21.5) / 2 * MIB,
        "tier.l2_bytes": 2 * MIB,
        "tier.l3_bytes": 0.0,
        "tier.prefetch_useful": 0.75,
        "tier.prefetch_late": 0.75,
        "tier.prefetch_late_ms": pytest.approx(1e3 * 0.25 / 6),
        "tier.prefetch_useless": 0.25,
        "tier.prefetch_harmful": pytest.approx(2 / 8),
    }
    low, high = found["tier.hit_rate"].ci or (0, 0)
    assert low == pytest.approx(0.9)
    assert high == 1.0


def test_nothing_is_said_where_nothing_was_moved() -> None:
    def quiet() -> Answer:
        each = answered(traffic(5, 0, 0, 0), (0.0, 0.0))
        return Answer(**{**each.__dict__, "pages": {"L0/compute": 4, "L1/int8": 64}})

    still = experiment([quiet()], [Traffic()])
    assert (tiers.numbers(still), tiers.section(still), tiers.sample_keys(still)) == ([], {}, [{}])
    assert tiers.section(experiment([], [])) == {}
    assert tiers.section(experiment([quiet()], [Traffic()], l1_bytes=MIB))["capacity_bytes"]["L1"] == MIB
    no_prefetch = {number.name for number in tiers.numbers(experiment([quiet()], [], l1_bytes=MIB))}
    assert "tier.hit_rate" in no_prefetch
    assert not any("prefetch" in name for name in no_prefetch)


def record_of(run: Experiment) -> Record:
    made = Record(
        "r", {"policy": {"name": "elastic"}}, {}, 0, results=tuple(tiers.numbers(run)), tiers=tiers.section(run)
    )
    return Record.from_dict(json.loads(json.dumps(made.to_dict())))


def test_section_survives_json_and_says_everything(run: Experiment) -> None:
    section = record_of(run).tiers
    assert section["capacity_bytes"] == {"L1": 40 * MIB, "L2": 2**30, "L3": None}
    assert section["at_end"]["L1/int8"] == {"bytes": 8 * MIB, "pages": 64}
    assert section["at_end"]["L1/tables"] == {"bytes": 100}
    assert section["at_end"]["dropped"] == {"pages": 7}
    assert section["held_at_end_bytes"] == {"L0": MIB, "L1": 9 * MIB, "L2": 3 * MIB, "L3": 0}
    assert section["mean_held_bytes"] == {"L0": MIB, "L1": 16.5 * MIB, "L2": 2 * MIB, "L3": 0}
    assert section["links"]["L2>L1"] == {"pages": 10, "bytes": 10 * MIB, "busy_s": 0.25, "busy_share": 0.25 / 8}
    assert section["failures"] == {"read": 3, "write": 0, "corrupt": 0}
    assert section["stall_s"] == {"demand": 0.5, "prefetch_late": 0.25, "room": 0.0}
    assert section["events"] == {
        "L3 switched off after 3 failures in a row: can't read": 1,
        "L2 full: of 10 pages 3 are dropped": 2,
    }
    assert tiers.sample_keys(run) == [
        {"tier_hits": 90, "tier_lookups": 100, "stall_s": 0.75, "step_s": 4.0},
        {"tier_hits": 60, "tier_lookups": 60, "stall_s": 0.0, "step_s": 4.0},
    ]


def test_terminal_page_and_tracker_show_it(run: Experiment, tmp_path: Any) -> None:
    record = record_of(run)
    out = io.StringIO()
    table.show(record, out)
    text = out.getvalue()
    page = html.render(html.record_page(record))
    lines = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    for line in (
        "L1 64 8.00 MiB 9.00 MiB 16.50 MiB 40.00 MiB with L0",
        "int8 64 8.00 MiB",
        "L2 32 2.00 MiB 3.00 MiB 2.00 MiB 1.00 GiB",
        "dropped 7",
        "L2 → L1 10 10.00 MiB 3.1 %",
        "warning: L2 full: of 10 pages 3 are dropped (2 times)",
        "warning: failures of the archive: 3 read",
        "hits: 150 of 160 pages attended exactly were there before (93.8 % [90.0, 100.0 %])",
        "prefetched pages: 8: 6 useful, 6 late, 2 useless, 2 harmful",
    ):
        assert line in lines
    assert any(line.startswith("waiting for pages – 93.8 ms/token") and "9.4 %" in line for line in lines)
    assert "(pages asked for 0.5 s, late prefetches 0.25 s)" in text
    for part in ("L2 → L1", "10.00 MiB", "L2 full: of 10 pages 3 are dropped (2 times)", "tier.hit_rate"):
        assert part in page
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record.to_dict()))
    payload = read_payload(path)
    assert payload.summary["tiers"] == record.tiers
    assert payload.metrics["tier.hit_rate"] == 150 / 160


def test_a_record_from_before_the_bytes_held_at_the_end_is_shown(run: Experiment) -> None:
    made = record_of(run).to_dict()
    del made["tiers"]["held_at_end_bytes"], made["tiers"]["at_end"]["dropped"]
    residency = shown.sheets(Record.from_dict(made))[0]
    assert [row for row in residency.rows if row[0] == "L1"] == [
        ("L1", "64", "8.00 MiB", "–", "16.50 MiB", "40.00 MiB with L0")
    ]
    assert all(len(row) == len(residency.columns) for row in residency.rows)
    assert "dropped" not in [row[0] for row in residency.rows]


def test_events_and_failures_of_the_turns_before_the_question_stay(run: Experiment) -> None:
    before = Traffic(events=["L2 full: of 9 pages 4 are dropped"])
    before.failures["write"] = 2
    before.moved("L1>L2", 5, 5 * MIB, 1.0)
    run.outcomes[0] = dataclasses.replace(
        run.outcomes[0], policy=dataclasses.replace(run.outcomes[0].policy, history_traffic=before, first_step=3)
    )
    section = tiers.section(run)
    assert section["events"]["L2 full: of 9 pages 4 are dropped"] == 3
    assert section["failures"] == {"read": 3, "write": 2, "corrupt": 0}
    assert "L1>L2" not in section["links"]
    moved = next(number for number in tiers.numbers(run) if number.name == "tier.moved_bytes_per_token")
    assert moved.value == 18 * MIB / (2 + 4)  # of the first sample's four tokens two are of question and answer


def test_a_record_without_tiers_shows_none_of_it() -> None:
    record = Record("r", {"policy": "full"}, {}, 0)
    out = io.StringIO()
    table.show(record, out)
    assert "ier" not in out.getvalue()
    assert (shown.sheets(record), shown.lines(record), shown.warnings(record)) == ([], [], [])


def test_waiting_is_not_hidden_by_the_median() -> None:
    """Of 16 steps one waits a second: the median step never does."""
    times = [StepTime(0.010, 0.0, 0.0)] * 15 + [StepTime(1.010, 0.0, 1.0)]
    each = answered(Traffic(), (0.0, 0.0))
    answer = Answer(**{**each.__dict__, "times": times})
    assert decode_ms(answer) == pytest.approx(10.0 + 1000.0 / 16)
