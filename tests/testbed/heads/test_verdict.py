"""Maps tried side by side against a float64 model with masks; verdicts against closed forms; the command itself."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tiny_heads as tiny
import torch
from scipy import stats
from tiny_run import save_model, save_text

from policies.base import Head, PolicyError
from policies.classifiers.by_measure import ByMeasure
from testbed.cache.layout import CacheConfig, Hot
from testbed.compose import compose_policy
from testbed.engine.signals import SignalContext
from testbed.heads import kept, trial, verdict
from testbed.heads.headmap import HeadMap, HeadMapError
from testbed.heads.judge import further_map, judge, reason
from testbed.heads.trial import Trial, TrialConfig
from testbed.models import load
from testbed.workloads.base import Sample, WorkloadError

CACHE = CacheConfig(dtype="float32", sink_tokens=16, hot_tokens=32, slab_pages=4)
WINDOW = 64
POLICY = compose_policy(
    "redknot",
    [
        f"policy.budget.local_tokens={WINDOW}",
        "policy.format.local_format=compute",
        "policy.format.global_format=compute",
    ],
)
CLASSES = torch.tensor([[0, 1], [1, 0], [0, 0]], dtype=torch.int8)


def sample(name: str, context: int, question: int, answer: int) -> Sample:
    ids = tiny.tokens(context + question + answer, seed=7)
    return Sample(
        id=name,
        context_id=name,
        context_tokens=ids[:context],
        question_tokens=ids[context : context + question],
        answer="x" if question else "",
        continuation_tokens=ids[context + question :],
    )


def by_hand(asked: Sample, classes: torch.Tensor) -> torch.Tensor:
    """Log-probabilities before the answer's tokens, float64: cut heads see hot pages and those of their window."""
    ids = [*asked.context_tokens, *asked.question_tokens, *asked.continuation_tokens]
    context, total = len(asked.context_tokens), len(ids) - 1
    hot = Hot(CACHE.page_tokens, CACHE.sink_tokens, CACHE.hot_tokens).mask(total)
    page = torch.arange(len(hot))
    touched = ((page + 1) * CACHE.page_tokens).clamp(max=total) > total - WINDOW
    kept = (hot | touched).repeat_interleave(CACHE.page_tokens)[:total]
    model = tiny.build().double()
    for index, layer in enumerate(model.model.layers):
        mask = torch.full((1, tiny.HQ, total, total), -torch.inf, dtype=torch.float64).triu(1)
        for head in range(tiny.HQ):
            if classes[index, head // tiny.G] == Head.LOCAL:
                mask[0, head, context:, ~kept] = -torch.inf
        layer.self_attn.register_forward_pre_hook(
            lambda _module, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}), with_kwargs=True
        )
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0]
    first = len(asked.question_tokens) or 1
    return logits[context + first - 1 :].log_softmax(-1)


def test_a_map_costs_what_masks_in_a_float64_model_cost() -> None:
    asked = [sample("a", 150, 12, 5), sample("b", 130, 0, 20)]
    everything = torch.ones_like(CLASSES)
    context = SignalContext(CACHE.page_tokens, dict)
    maps = {"cut": CLASSES, "whole": everything}
    trials = trial.run(tiny.tiny(), maps, POLICY, CACHE, asked, context)
    assert [(each.map, each.context_id, each.task) for each in trials] == [
        ("cut", "a", "needle"),
        ("whole", "a", "needle"),
        ("cut", "b", "text"),
        ("whole", "b", "text"),
    ]
    by_sample = {one.id: (one, by_hand(one, everything)) for one in asked}
    for each in trials:
        one, full = by_sample[each.context_id]
        mine = full if each.map == "whole" else by_hand(one, CLASSES)
        said = torch.tensor(one.continuation_tokens if one.question_tokens else one.continuation_tokens[1:])
        rows = torch.arange(len(said))
        assert each.kl == pytest.approx(float((full.exp() * (full - mine)).sum(-1).mean()), rel=2e-3, abs=1e-6)
        assert each.loss == pytest.approx(-float(mine[rows, said].mean()), rel=1e-4)
        assert each.loss_full == pytest.approx(-float(full[rows, said].mean()), rel=1e-4)
    assert trials[0].kl > 0.01  # cutting heads does something to this model
    assert trials[1].kl < 1e-6
    assert trials[0].device_bytes < trials[1].device_bytes


def made(kl: dict[str, list[float]], contexts: list[str], task: str = "needle") -> list[Trial]:
    return [
        Trial(name, task, context, value, 2 * value + 1, 1.0, 1000)
        for name, values in kl.items()
        for context, value in zip(contexts, values, strict=True)
    ]


CONTEXTS = [f"c{at // 2}" for at in range(12)]
CHANCE = {f"random {at}": [1.0 + 0.1 * at + 0.01 * each for each in range(12)] for at in range(19)}


def test_a_map_better_than_all_on_all_contexts_beats_random() -> None:
    mine = [0.1 + 0.01 * each for each in range(12)]
    found = judge(made({"mine": mine, **CHANCE}, CONTEXTS), "mine", list(CHANCE), CLASSES, "because")
    assert found.beats_random
    assert found.difference == pytest.approx(0.1 - (1.0 + 0.9))
    assert found.low == pytest.approx(found.difference) == found.high  # the difference is the same everywhere
    assert found.p == pytest.approx(0.5**6)
    assert found.p_map == pytest.approx(1 / 20)
    assert (found.kl, found.kl_random) == pytest.approx((np.mean(mine), np.mean(mine) + 1.8))
    assert (found.loss, found.loss_random) == pytest.approx((2 * found.kl, 2 * found.kl_random))
    assert (found.samples, found.contexts, found.random_maps) == (12, 6, 19)
    assert found.heads == {"local": 4, "global": 2, "special": 0, "dense": 0}
    assert math.isnan(found.text_kl)
    assert found.why.endswith("better than all of them; because")


def test_a_random_map_of_luck_does_not_beat_random() -> None:
    """Better than the mean of all maps, significantly and in every context, and yet one of them."""
    found = judge(made(CHANCE, CONTEXTS), "random 1", [name for name in CHANCE if name != "random 1"], CLASSES)
    assert found.high < 0
    assert found.p < 0.05
    assert found.p_map == pytest.approx(2 / 19)
    assert not found.beats_random
    assert "a further random map is as good with a probability of 0.11" in found.why


def test_a_map_that_wins_in_half_of_the_contexts_does_not_beat_random() -> None:
    chance = {name: [2.0] * 12 for name in CHANCE}
    mine = [1.0 if at < 8 else 2.5 for at in range(12)]
    found = judge(made({"mine": mine, **chance}, CONTEXTS), "mine", list(chance), CLASSES)
    assert found.p == pytest.approx(stats.binomtest(4, 6, alternative="greater").pvalue)
    assert found.low < found.difference < found.high
    assert not found.beats_random


def test_text_is_told_apart_from_needles() -> None:
    kl = {"mine": [0.5] * 12, **CHANCE}
    text = made({name: [0.25 if name == "mine" else 0.125] for name in kl}, ["t"], "text")
    found = judge(made(kl, CONTEXTS) + text, "mine", list(CHANCE), CLASSES)
    assert (found.kl, found.text_kl, found.text_kl_random) == (0.5, 0.25, 0.125)


def test_the_table_says_what_nobody_could_tell() -> None:
    kl = {"mine": [0.5], **{name: [1.0] for name in CHANCE}}
    text = made({name: [0.25] for name in kl}, ["t"], "text")
    shown = []
    for trials in (made(kl, ["a"]), made(kl, ["a"]) + text, made({n: x * 2 for n, x in kl.items()}, ["a", "b"])):
        found = verdict.Judged(CLASSES, "x", judge(trials, "mine", list(CHANCE), CLASSES))
        sheet = verdict.sheet({"mine": found})
        cells = dict(zip(sheet.columns, sheet.rows[0], strict=True))
        shown.append((sheet.title.split(", ")[1].split(";")[0], cells["difference"], cells["KL on text / random"]))
    assert shown == [
        ("1 needle in 1 context", "-0.500 [–]", "–"),
        ("1 needle in 1 context", "-0.500 [–]", "0.2500 / 0.2500"),
        ("2 needles in 2 contexts", "-0.500 [-0.500, -0.500]", "–"),
    ]


def test_the_rank_among_random_maps_counts_equals() -> None:
    assert further_map(1.0, [0.5, 1.0, 1.5]) == (3 / 4, 2)
    assert further_map(0.1, [0.5, 1.0, 1.5]) == (1 / 4, 0)


def test_the_reason_is_what_local_heads_carry() -> None:
    score = torch.tensor([[0.5, 0.1], [0.1, 0.1], [0.0, 0.2]])
    assert reason(CLASSES, {"retrieval_score": score, "head_entropy": score}) == (
        "its local heads, 67% of all, carry 80% of the attention that copied answers put on their source"
    )
    assert reason(CLASSES, {}) == ""


def test_dealt_maps_keep_the_number_of_each_class() -> None:
    classes = torch.tensor([[0, 0, 1], [3, 0, 2], [0, 1, 2]], dtype=torch.int8)
    maps = verdict.dealt(classes, 30, seed=3)
    assert {tuple(sorted(each.flatten().tolist())) for each in maps} == {(0, 0, 0, 0, 1, 1, 2, 2, 3)}
    assert len({tuple(each.flatten().tolist()) for each in maps}) > 25
    assert all(torch.equal(*pair) for pair in zip(maps, verdict.dealt(classes, 30, seed=3), strict=True))


def test_classifiers_are_asked_with_the_measures_they_name() -> None:
    part = verdict.classifier_of("retrieval", TrialConfig(local_quantile=0.5, global_quantile=0.5))
    assert part == ByMeasure("retrieval_score", 0.5, 0.5, "low")
    geometry, size = tiny.tiny().geometry, CACHE.page_bytes(8, False)
    score = torch.tensor([[0.9, 0.1], [0.5, 0.2], [0.0, 0.7]])
    classes = verdict.classes_of(part, geometry, {"retrieval_score": score}, size)
    assert classes.tolist() == [[1, 0], [1, 0], [0, 1]]
    with pytest.raises(PolicyError, match="nobody measured 'retrieval_score'"):
        verdict.classes_of(part, geometry, {"head_entropy": score}, size)
    with pytest.raises(PolicyError, match="unknown classifier part 'retreival'"):
        verdict.classifier_of("retreival", TrialConfig())


@pytest.mark.parametrize(
    ("key", "value"), [("random_maps", 18), ("lengths", []), ("continuation_tokens", 1), ("local_quantile", 1.5)]
)
def test_bad_settings_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(WorkloadError, match=f"trial.{key}"):
        TrialConfig(**{key: value})  # type: ignore[arg-type]


def test_the_command_judges_keeps_and_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path / "cache"))
    save_model(tmp_path / "model")
    save_text(tmp_path / "text")
    decoder = load(str(tmp_path / "model"), name="tiny", dtype="float32", device="cpu")
    path = tmp_path / "map.json"
    tiny.scored_map(decoder, "retrieval_score", "head_entropy").write(path)
    given = [*tiny.model_words(tmp_path / "model"), *tiny.trial_words(tmp_path / "text")]
    verdict.main([str(path), "classifiers=[retrieval,stride]", *given])
    out = capsys.readouterr().out
    assert "retrieval: not better than random" in out
    head_map = HeadMap.read(path)
    assert set(head_map.verdicts) == {"retrieval", "stride"}
    found = kept.kept(decoder.fingerprint)
    assert found["retrieval"]["heads"] == {"local": 3, "global": 1, "special": 0, "dense": 0}
    assert json.dumps(found["stride"]["samples"]) == "1"
    # One context can't be better often enough, whatever the map: the label says so wherever the classifier is used.
    part = compose_policy("redknot").classifier
    assert "not better than random" in verdict.label(part, decoder.fingerprint)
    assert verdict.label(compose_policy("redknot", ["policy/classifier=entropy"]).classifier, decoder.fingerprint) == ""
    assert verdict.label(part, "0" * 16) == ""
    other = tmp_path / "other.json"
    data = json.loads(path.read_text())
    other.write_text(json.dumps({**data, "fingerprint": "f" * 16}))
    overrides = ["model=hf", f"model.path={tmp_path / 'model'}", "model.device=cpu"]
    with pytest.raises(HeadMapError, match="other weights"):
        verdict.main([str(other), *overrides])
    with pytest.raises(HeadMapError, match="takes one head map"):
        verdict.main([str(other), str(path)])
