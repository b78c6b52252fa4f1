"""The learned predictor: its arithmetic, that it learns a rule it is shown, its file, and a session that uses it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from driven import course, document
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import decoder, text
from torch import Tensor

from policies.base import Tier
from testbed.cache.layout import CacheConfig
from testbed.commands import CommandError
from testbed.compose import compose_policy
from testbed.engine.prefill import prefill
from testbed.engine.session import Session, SessionConfig
from testbed.engine.signals import SignalContext, SignalError
from testbed.engine.signals.core import NAMES
from testbed.models.base import Decoder, Geometry
from testbed.predictor.__main__ import run
from testbed.predictor.network import Network, NetworkShape, layer_groups
from testbed.predictor.recall import caught
from testbed.predictor.recording import SINGLES, Recording, RecordingSettings, record_document
from testbed.predictor.train import TrainingConfig, TrainingError, judge, train
from testbed.predictor.weights import About, WeightsError, load_weights, read_weights, trained_path, write_weights

LAYERS, HEADS, PAGES, FEATURES, CONTEXT = 5, 2, 40, 4, 6
QUICK = TrainingConfig(epochs=6, batch_rows=20, learning_rate=2e-2)


def network(seed: int = 0) -> Network:
    """With every parameter at random, so that none of them can be forgotten."""
    net = Network(NetworkShape(LAYERS, HEADS, 2, FEATURES, CONTEXT, units=7, rank=3), seed)
    chance = torch.Generator().manual_seed(seed)
    for tensor in net.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=chance))
    net.spread.abs_().add_(0.5)
    return net.requires_grad_(False)


def test_scores_are_those_of_plain_float64_arithmetic_and_of_rows() -> None:
    net, chance = network(), torch.Generator().manual_seed(1)
    x = torch.randn(LAYERS, HEADS, PAGES, FEATURES, generator=chance)
    context = torch.randn(2, CONTEXT, generator=chance)
    score = net.score(x, context)
    w = {name: tensor.double() for name, tensor in net.state_dict().items()}
    for layer in range(LAYERS):
        group = layer * 2 // LAYERS
        for head in range(HEADS):
            row = layer * HEADS + head
            z = (x[layer, head].double() - w["mean"]) / w["spread"]
            hidden = z @ w["first"][group] + w["head_bias"][row]
            hidden = hidden + context[group].double() @ w["context_in"][group] @ w["context_out"][group]
            expected = hidden.clamp(min=0) @ w["second"][group] + z @ w["head_skip"][row]
            torch.testing.assert_close(score[layer, head].double(), expected, atol=1e-4, rtol=1e-4)
            one = net.rows(x[layer, head][None], context[group][None], torch.tensor([row]), group)
            torch.testing.assert_close(one[0], score[layer, head], atol=1e-4, rtol=1e-4)
    # The same features one block each, as the signal hands them over.
    blocks = x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    torch.testing.assert_close(net.score(blocks, context), score, atol=1e-4, rtol=1e-4)
    assert layer_groups(LAYERS, 2).tolist() == [0, 0, 0, 1, 1]
    assert net.shape.flops(PAGES) == 10 * PAGES * (2 * 4 * 7 + 2 * 7 + 2 * 4) + 2 * 2 * 3 * (6 + 7)


def recording(seed: int, name: str, steps: int = 40) -> Recording:
    """Rows whose mass follows a rule: feature 0, or how far features 1 and 2 are apart, by head."""
    chance = torch.Generator().manual_seed(seed)
    rows = steps * LAYERS * HEADS
    features = torch.randn(rows, PAGES, FEATURES, generator=chance)
    head = torch.arange(LAYERS * HEADS).repeat(steps)
    wanted = torch.where((head % 2 == 0).view(-1, 1), features[..., 0], (features[..., 1] - features[..., 2]).abs())
    candidate = torch.ones(rows, PAGES, dtype=torch.bool)
    candidate[:, :2] = False
    mass = (3.0 * wanted).masked_fill(~candidate, -torch.inf).softmax(-1)
    single = caught(features[..., 0], mass, candidate).recall.float()
    return Recording(
        document=name,
        kind="essay",
        part="train",
        names=("a", "b", "c", "d"),
        features=features.half(),
        contexts=torch.randn(steps, 2, CONTEXT, generator=chance).half(),
        moment=torch.arange(steps).repeat_interleave(LAYERS * HEADS),
        head=head,
        mass=mass.half(),
        candidate=candidate,
        contribution=torch.zeros(rows, PAGES).bfloat16(),
        has_contribution=torch.zeros(rows, dtype=torch.bool),
        phase=torch.zeros(rows, dtype=torch.long),
        share=torch.where(torch.arange(rows) // (LAYERS * HEADS) % 2 == 0, 1.0, 0.1),
        at=torch.zeros(rows, dtype=torch.long),
        recall={"single": single},
    )


def learnt(config: TrainingConfig = QUICK) -> Network:
    return train([recording(0, "one"), recording(1, "two")], LAYERS, HEADS, config).network


def test_training_finds_what_differs_by_head_and_beats_the_single_signal_on_another_document() -> None:
    held_out = recording(9, "other")
    net = learnt()
    truth = caught(held_out.mass.float(), held_out.mass.float(), held_out.candidate).recall.float().mean(0)
    for case in judge(net, [held_out]).values():
        assert torch.tensor(case["mlp"]).gt(0.9 * truth).all()
        assert case["mlp"][0] > case["single"][0] + 0.1


def test_training_is_the_same_to_the_bit_and_as_it_will_be_kept() -> None:
    torch.manual_seed(1)
    first = learnt(replace(QUICK, epochs=1))
    torch.manual_seed(2)
    torch.rand(5)
    second, other = learnt(replace(QUICK, epochs=1)), learnt(replace(QUICK, epochs=1, seed=1))
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
        assert name in ("mean", "spread") or torch.equal(tensor, tensor.half().float()), name
    assert not torch.equal(first.first, other.first)


def test_contributions_count_as_much_as_they_are_told_to() -> None:
    """Rows whose contributions say the opposite of their mass."""
    told = recording(0, "one")
    told = replace(told, contribution=told.mass.flip(-1).bfloat16(), has_contribution=~told.has_contribution)
    features = told.features.clone()
    features[..., 3] = told.mass.flip(-1)
    told = replace(told, features=features)
    by_mass, by_gain = (
        train([told], LAYERS, HEADS, replace(QUICK, contribution_weight=weight)).network for weight in (0.0, 50.0)
    )
    group = 0
    rows = (told.head < 6).nonzero().squeeze(1)[:200]
    score = [
        net.rows(told.features[rows].float(), told.contexts[told.moment[rows], group].float(), told.head[rows], group)
        for net in (by_mass, by_gain)
    ]
    gain = [caught(each, told.contribution[rows].float(), told.candidate[rows]).recall[:, 1].mean() for each in score]
    assert gain[1] > gain[0] + 0.2


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda: train([], LAYERS, HEADS, QUICK), "no recorded step with attention"),
        (
            lambda: train([replace(recording(0, "x", 2), mass=recording(0, "x", 2).mass * 0)], LAYERS, HEADS, QUICK),
            "no re",
        ),
        (lambda: train([recording(0, "x", 2)], 2, 2, QUICK), "head 9 of a model with 4"),
        (
            lambda: train(
                [recording(0, "x", 2), replace(recording(0, "y", 2), names=("a", "b", "d", "c"))], LAYERS, HEADS, QUICK
            ),
            "recording y: of other features than x",
        ),
        (lambda: TrainingConfig(epochs=0), r"training\.epochs=0"),
        (lambda: TrainingConfig(learning_rate=float("nan")), r"training\.learning_rate=nan"),
        (lambda: TrainingConfig(seed=-1), r"training\.seed=-1"),
        (lambda: NetworkShape(2, 1, 3, 4, 4), r"predictor\.groups=3"),
    ],
)
def test_what_can_not_be_learnt_from_is_refused(broken: Callable[[], object], says: str) -> None:
    with pytest.raises((TrainingError, ValueError), match=says):
        broken()


# --- the file --------------------------------------------------------------------------------------------------------


class Model:
    """As much of a decoder as weights are checked against."""

    name, fingerprint, width = "some/model", "abc", CONTEXT // 2
    geometry = Geometry(LAYERS, HEADS, HEADS, 8, 10, None, (0,) * LAYERS, (1.0,) * LAYERS)


def model(**changes: object) -> Decoder:
    return cast(Decoder, type("Other", (Model,), changes)())


NAMED = ("a", "b", "c", "d")


def written(path: Path, net: Network | None = None, **changes: str) -> Path:
    net = network() if net is None else net
    about = About(
        **{"model": "some/model", "fingerprint": "abc", "names": NAMED, "shape": net.shape, "data": "d1", "seed": 7}
        | changes
    )
    write_weights(path, net, about)
    return path


def test_weights_come_back_as_they_were_kept(tmp_path: Path) -> None:
    net = learnt(replace(QUICK, epochs=1))
    path = written(tmp_path / "folder" / "w.safetensors", net)
    got, about = read_weights(path)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, got.state_dict()[name]), name
    assert (about.data, about.seed, about.names, about.shape) == ("d1", 7, NAMED, net.shape)
    with safe_open(path, "pt") as file:
        assert file.get_tensor("first").dtype == torch.float16
    assert [each.name for each in path.parent.iterdir()] == ["w.safetensors"]


def test_weights_of_anything_else_are_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path / "cache"))
    path = written(tmp_path / "w.safetensors")
    load_weights(model(), NAMED, path)
    with pytest.raises(WeightsError, match=r"no trained weights of model some/model .*predictor train model=.*judges"):
        load_weights(model(), NAMED)
    written(trained_path(model(), NAMED))
    load_weights(model(), NAMED)
    load_weights(model(name="the same under another name"), NAMED)
    with pytest.raises(WeightsError, match="trained on model some/model \\(abc\\), here it is some/model \\(other\\)"):
        load_weights(model(fingerprint="other"), NAMED, path)
    with pytest.raises(WeightsError, match=r"other features \(d, e\)"):
        load_weights(model(), ("a", "b", "c", "e"), path)
    with pytest.raises(WeightsError, match="other features \\(their order\\)"):
        load_weights(model(), ("b", "a", "c", "d"), path)
    with pytest.raises(WeightsError, match="made for layers"):
        load_weights(model(width=4), NAMED, path)
    with pytest.raises(WeightsError, match="no such file"):
        load_weights(model(), NAMED, tmp_path / "none")
    bad = tmp_path / "bad"
    bad.write_bytes(path.read_bytes()[:200])
    with pytest.raises(WeightsError, match="not trained weights"):
        load_weights(model(), NAMED, bad)
    save_file({"first": torch.zeros(1)}, bad, {"about": json.dumps({"schema": 99})})
    with pytest.raises(WeightsError, match="another version"):
        load_weights(model(), NAMED, bad)
    net = network()
    net.second[0, 0] = torch.nan
    with pytest.raises(WeightsError, match="not finite"):
        load_weights(model(), NAMED, written(bad, net))


# --- in a session ----------------------------------------------------------------------------------------------------


def session(weights: Path | None) -> Session:
    signals = {} if weights is None else {"core_score": {"weights": str(weights)}}
    policy = compose_policy("elastic", ["policy/predictor=hybrid", "policy.every_steps=1"])
    config = SessionConfig(CacheConfig(dtype="float32", sink_tokens=16, hot_tokens=32), 0.9, signals=signals)
    made = Session(decoder(), policy, config, SignalContext(16, dict[str, Tensor], decoder()))
    made.start(prefill(decoder(), text(300, 3), torch.float32, list(made.sources.values())))
    return made


def test_elastic_with_trained_weights_attends_exactly_to_what_they_prefer(tmp_path: Path) -> None:
    """Weights that love old pages, then weights that love new ones: the pages on the device are those."""
    geometry = decoder().geometry
    shape = NetworkShape(geometry.layers, geometry.kv_heads, geometry.layers, len(NAMES), 2 * decoder().width)
    kept = []
    for love in (-1.0, 1.0):
        net = Network(shape)
        net.second.data.zero_()
        net.head_skip.data[:, NAMES.index("place")] = love
        about = About(decoder().name, decoder().fingerprint, NAMES, shape, "", 0)
        write_weights(tmp_path / "w", net, about)
        at = session(tmp_path / "w")
        at.step(5)
        tier = at.cache.state["tier"].view(geometry.layers, geometry.kv_heads, -1)
        kept.append((tier == Tier.L1)[..., 1:15])
        at.close()
    # One page fits beside those that are fixed: the oldest of page 1 to 14, then the newest.
    assert bool(kept[0][..., 0].all())
    assert bool(kept[1][..., -1].all())
    assert all(bool((each.sum(-1) == 1).all()) for each in kept)


def test_a_model_without_weights_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_CACHE", str(tmp_path))
    with pytest.raises(SignalError, match=r"signal core_score: no trained weights .* choose policy/predictor=judges"):
        session(None)


def test_a_recorded_session_can_be_learnt_from_and_scored(tmp_path: Path) -> None:
    """From real steps of a tiny model to weights that its sessions read."""
    settings = RecordingSettings(heads_one_in=1, points=0)
    watching = replace(course(frozenset(SINGLES.values())), beside=frozenset({"core_score"}))
    made = record_document(document(), decoder(), settings, watching, None)
    geometry = decoder().geometry
    fewer = made.of(("age", "mass_fast"))
    assert torch.equal(fewer.features[..., 1], made.features[..., made.names.index("mass_fast")])
    assert train([fewer], geometry.layers, geometry.kv_heads, QUICK).network.shape.features == 2
    result = train([made], geometry.layers, geometry.kv_heads, QUICK)
    assert result.losses[-1] < result.losses[0]
    about = About(decoder().name, decoder().fingerprint, made.names, result.network.shape, "", 0)
    write_weights(tmp_path / "w", result.network, about)
    at = session(tmp_path / "w")
    at.step(5)
    assert bool(torch.isfinite(at.signal("core_score")).all())
    at.close()


def test_an_unknown_command_is_named() -> None:
    with pytest.raises(CommandError, match="unknown command 'trian'. Did you mean train"):
        run(["trian"])
