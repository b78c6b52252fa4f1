"""Evidence against scipy, and from maps whose agreement is known."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from testbed.heads.calibration import CalibrationConfig
from testbed.heads.evidence import by_length, carry_over, evidence, halves, longer, pair, stability
from testbed.heads.headmap import Measured

L, HK = 10, 4


def map_of(seed: int) -> Tensor:
    return torch.rand(L, HK, generator=torch.Generator().manual_seed(seed))


def measured(*values: Tensor, lengths: tuple[int, ...] = (), task: str = "text") -> Measured:
    return Measured.of([value.unsqueeze(-1) for value in values], task, "share", lengths)


def test_pair_is_scipys_spearman_and_counts_common_heads() -> None:
    a, b = map_of(0), map_of(0) + 0.4 * map_of(1)
    found = pair(a, b)
    assert found["spearman"] == pytest.approx(stats.spearmanr(a.flatten(), b.flatten()).statistic)
    assert found["p"] < 0.05
    for share, taken in (("0.15", 6), ("0.25", 10), ("0.5", 20)):
        tops = [set(x.flatten().argsort(descending=True)[:taken].tolist()) for x in (a, b)]
        expected = len(tops[0] & tops[1]) / len(tops[0] | tops[1])
        assert found["jaccard"][share] == pytest.approx([expected] * 3)  # without ties, no spread


def test_halves_and_lengths() -> None:
    values = [map_of(seed) for seed in range(4)]
    made = measured(*values, lengths=(100, 100, 200, 200))
    first, second = halves(made) or (None, None)
    torch.testing.assert_close(first, (values[0] + values[2]) / 2)
    torch.testing.assert_close(second, (values[1] + values[3]) / 2)
    assert halves(measured(values[0])) is None
    parts = by_length([made, measured(values[3], lengths=(50,)), measured(values[0], lengths=(200,))])
    assert list(parts) == [50, 100, 200]
    torch.testing.assert_close(parts[200], (values[2] + values[3] + values[0]) / 3)


def test_stability_tells_what_repeats_from_what_does_not() -> None:
    truth = map_of(0)
    noise = [0.01 * map_of(seed) for seed in range(1, 7)]
    same = measured(*(truth + each for each in noise[:4]), lengths=(100, 100, 200, 200))
    drawn = measured(*(map_of(seed) for seed in range(11, 15)), lengths=(100, 100, 200, 200))
    seeds = [{"same": measured(truth + noise[4]), "drawn": measured(map_of(21))}]
    lengths = [{"same": measured(truth + noise[5], lengths=(400,))}]
    found = stability({"same": same, "drawn": drawn}, seeds, lengths)
    assert set(found["same"]) == {"texts", "lengths", "seeds"}
    assert set(found["same"]["lengths"]) == {"100 200", "100 400", "200 400"}
    assert set(found["drawn"]["lengths"]) == {"100 200"}
    every = [found["same"]["texts"], *found["same"]["lengths"].values(), *found["same"]["seeds"]]
    assert all(each["spearman"] > 0.98 for each in every)
    other = [found["drawn"]["texts"], *found["drawn"]["lengths"].values(), *found["drawn"]["seeds"]]
    assert all(abs(each["spearman"]) < 0.45 for each in other)
    assert stability({"one": measured(truth)}) == {}


def test_carry_over_between_tasks() -> None:
    truth = map_of(0)
    measures = {
        "head_entropy": measured(truth),
        "head_entropy@code": measured(truth**2, task="code"),
        "head_entropy@needle": measured(-truth, task="needle"),
        "retrieval_score": measured(truth, task="needle"),
        "head_bracket": measured(map_of(3), task="code"),
        "head_prefix_shift": measured(truth),
    }
    found = carry_over(measures)
    assert set(found) == {"head_entropy", "own"}
    pairs = found["head_entropy"]
    assert {tasks: round(each["spearman"], 9) for tasks, each in pairs.items()} == {
        "text code": 1.0,
        "text needle": -1.0,
        "code needle": -1.0,
    }
    assert pairs["text code"]["jaccard"]["0.25"][0] == 1
    assert pairs["text needle"]["jaccard"]["0.25"][0] == 0
    assert set(found["own"]) == {"retrieval_score head_bracket"}


def test_evidence_counts_ties_and_gives_chance() -> None:
    tied = torch.zeros(L, HK)
    tied[0] = 1
    found = evidence({"tied": measured(tied), "head_entropy@code": measured(tied, task="code")})
    assert found["ties"] == {"tied": L * HK}
    assert found["heads"] == L * HK
    exact = sum(float(stats.hypergeom.pmf(common, 40, 10, 10)) * common / (20 - common) for common in range(11))
    assert found["chance"]["0.25"] == pytest.approx(exact)


def test_longer_texts() -> None:
    config = longer(CalibrationConfig(), 8000)
    assert (config.needle_lengths, config.needle_samples_per_cell) == ((8000,), 1)
