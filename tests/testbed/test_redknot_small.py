"""The described memory-saving preset, run by the real command: classes, formats and tiers are those it names."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_run import Place, errors, finish, save_model, save_text, start


def test_the_preset_archives_what_special_heads_have_no_room_for(tmp_path: Path) -> None:
    save_model(tmp_path / "model", positions=1024)
    save_text(tmp_path / "text")
    folder = tmp_path / "run"
    place = Place(tmp_path)
    kept = ("model", "model.path", "model.device", "workload.text", "workload.depths", "wandb", "twin")
    overrides = [each for each in place.overrides if each.partition("=")[0] in kept]
    overrides += ["workload.needles_per_context=1", "workload.samples_per_cell=1", "workload.max_new_tokens=2"]
    overrides += [
        "experiment=redknot-small",
        "workload.lengths=[800]",
        "policy/classifier=stride",  # nothing to measure
        "policy.classifier.local_quantile=0.5",
        "policy.classifier.global_quantile=0.75",
        "policy.budget.special_tokens=128",
        "cache.l2_bytes=24KiB",
    ]
    done = finish(start(folder, *overrides))
    assert done.returncode == 0, errors(done)
    record = json.loads((folder / "record.json").read_text())
    config = record["config"]
    assert (config["cache"]["l3_io"], config["cache"]["swap_threshold"]) == ("mmap", 0.8)
    assert (config["policy"]["budget"]["local_tokens"], config["policy"]["budget"]["global_tokens"]) == (512, 4096)
    assert record["activity"]["heads_by_class"] == {"local": 2, "global": 1, "special": 1, "dense": 0}
    held = {each["name"]: each["value"] for each in record["results"]}
    assert 0 < held["tier.l2_bytes"] <= 24 * 1024
    assert held["tier.l3_bytes"] > 0
    assert held["tier.hit_rate"] < 1  # and pages come back from there
    assert set(record["activity"]["pages_quantised"]) == {"int4"}  # the one global head is in the exact first layers
