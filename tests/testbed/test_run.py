"""The main command from start to end, its interruptions, and every kind of bad input."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import transformers as tf
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from tiny_run import Place, errors, finish, left_behind, save_model, save_text, start, start_cold

from testbed import summary
from testbed.commands import MENDABLE, describe
from testbed.compose import register
from testbed.decisions import DecisionLog
from testbed.engine.session import Session
from testbed.results.names import UNITS
from testbed.results.record import Record, config_hash, load
from testbed.run import run
from testbed.setup import setup

PART_9 = [
    "task.score",
    "task.score_full",
    "quality.kept",
    "kl.mean",
    "top1.agreement",
    "kv.device_bytes",
    "kv.total_bytes",
    "kv.full_bytes",
    "kv.device_saved",
    "kv.total_saved",
    "prefill.s",
    "decode.ms_per_token",
    "decode.ms_per_token_full",
    "decode.speedup",
    "policy.share",
    "sim.local.ms_per_token",
    "sim.h200.ms_per_token",
]
MANY = "workload.samples_per_cell=400"  # a run that nobody waits for


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("tiny")
    save_model(root / "model")
    save_text(root / "text")
    return Place(root)


def configured(overrides: Sequence[str]) -> DictConfig:
    register()
    with initialize_config_module("conf", version_base="1.3"):
        return compose("config", overrides=list(overrides))


def check_sound(record: Record, folder: Path) -> None:
    """What holds for every complete or partial record."""
    assert record.config_hash == config_hash(record.config)
    names = {number.name for number in record.results}
    assert len(names) == len(record.results)
    for number in record.results:
        assert number.unit == UNITS.get(number.name, number.unit)
        assert number.kind == ("simulated" if number.name.startswith("sim.") else "measured")
    logs = sorted((folder / "decisions").glob("*.jsonl"))
    assert len(logs) == len(record.samples)
    for path in logs:
        log = DecisionLog.read(path)
        assert log.header.policy == record.config["policy"]["name"]
        assert log.steps[0].phase == "compress"
        assert log.decode
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.assets
def test_the_main_job_on_the_real_model(tmp_path: Path) -> None:
    small = ["workload.lengths=[512]", "workload.needles_per_context=1", "workload.depths=[0.5]"]
    done = finish(start_cold(tmp_path / "out", "policy=quest", "budget.fraction=0.5", *small))
    assert done.returncode == 0, done.stderr
    record = load(tmp_path / "out")
    check_sound(record, tmp_path / "out")
    assert record.status == "complete"
    assert [name for name in PART_9 if record.get(name) is None or record[name].value is None] == []
    assert record["task.score_full"].value == 1.0
    assert record["quality.kept"].value == record["task.score"].value
    assert 0.0 < (record["kv.device_saved"].value or 0.0) < 1.0
    held, full = record["kv.device_bytes"].value, record["kv.full_bytes"].value
    assert held is not None
    assert full is not None
    assert record["kv.device_saved"].value == pytest.approx(1.0 - held / full)
    tokens = full / (2 * 30 * 3 * 64 * 2)
    assert 512 < tokens <= 512 + 40
    assert record.samples[0]["answer_full"].strip().startswith(record.samples[0]["right_answer"])
    assert "wandb" in record.config
    assert list((tmp_path / "out" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert not record.notes
    page = (tmp_path / "out" / "report.html").read_text()
    assert "quest" in page
    for word in ("task score", "KV bytes on the device", "predicted, H200", "mean KL to full"):
        assert word in done.stdout
    assert f"record: {tmp_path / 'out' / 'record.json'}" in done.stdout


def test_full_policy_is_the_full_cache(place: Place, tmp_path: Path) -> None:
    run(configured(place.changed("policy=full", "budget.fraction=null")), tmp_path)
    record = load(tmp_path)
    check_sound(record, tmp_path)
    assert record.activity["identical_to_full"] is True
    assert record["kl.mean"].value == 0.0
    assert record["top1.agreement"].value == 1.0
    assert record["kv.device_bytes"].value == record["kv.device_bytes_full"].value


def test_runs_repeat_themselves(place: Place, tmp_path: Path) -> None:
    more = ["workload.samples_per_cell=2", "policy=random"]
    records = []
    for name in ("a", "b", "c"):
        folder = tmp_path / name
        folder.mkdir()
        run(configured(place.changed(*more, f"seed={1 if name == 'c' else 0}")), folder)
        records.append(load(folder))
    same, again, other = records
    timed = {"ms_per_token", "ms_per_token_full", "prefill_s"}
    plain = [[{k: v for k, v in row.items() if k not in timed} for row in record.samples] for record in records]
    assert plain[0] == plain[1]
    assert plain[0] != plain[2]
    assert same.activity == again.activity
    assert same.activity["same_decisions_digest"] != other.activity["same_decisions_digest"]
    for name in ("kv.device_bytes", "sim.h200.ms_per_token"):
        assert same[name] == again[name]


def test_sweep(place: Place, tmp_path: Path) -> None:
    """Four jobs, one after the other; one can't work, which stops no other."""
    done = place.run(tmp_path, "policy=full,streaming", "budget.fraction=0.01,0.5", flags=["-m"])
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "job 2 (" in done.stderr
    assert errors(done)[-1].startswith("error: the device budget of")
    assert left_behind(tmp_path / "2") == []
    records = [load(tmp_path / str(job)) for job in (0, 1, 3)]
    assert [record.config["policy"]["name"] for record in records] == ["full", "full", "streaming"]
    assert [record.config["budget"]["fraction"] for record in records] == [0.01, 0.5, 0.5]
    assert len({record.run_id for record in records}) == 3
    for job, record in zip((0, 1, 3), records, strict=True):
        check_sound(record, tmp_path / str(job))
        assert record.status == "complete"


def test_sweep_in_parallel(place: Place, tmp_path: Path) -> None:
    more = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    done = place.run(tmp_path, "policy=full,streaming", *more, flags=["-m"])
    assert done.returncode == 0, done.stderr
    for job, policy in enumerate(("full", "streaming")):
        record = load(tmp_path / str(job))
        check_sound(record, tmp_path / str(job))
        assert (record.status, record.config["policy"]["name"]) == ("complete", policy)


def interrupted(place: Place, folder: Path, number: int) -> tuple[int, list[str]]:
    """Exit code and stderr of a long run that got a signal after its third sample."""
    process = start(folder, *place.changed(MANY))
    assert process.stderr is not None
    said: list[str] = []
    while not (said and said[-1].startswith("3/")):
        line = process.stderr.readline()
        assert line, said
        said.append(line)
    process.send_signal(number)
    _, rest = process.communicate(timeout=120)
    return process.returncode, [*said, *rest.splitlines()]


def test_interrupt_keeps_finished_samples(place: Place, tmp_path: Path) -> None:
    code, said = interrupted(place, tmp_path / "out", signal.SIGINT)
    assert code == 130
    assert said[-1] == "interrupted"
    assert not any("Traceback" in line for line in said)
    record = load(tmp_path / "out")
    assert record.status == "partial"
    assert 3 <= len(record.samples) < 400
    assert record.reason == f"interrupted after {len(record.samples)} samples"
    check_sound(record, tmp_path / "out")
    assert record["kv.total_saved"].n == len(record.samples)


def test_interrupt_that_python_drops_stops_after_the_sample(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception raised in a finaliser is lost; the run must end all the same."""

    class Finalised:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)  # the handler runs here

    original = Session.fork
    forks = []

    def fork(session: Session, own_pools: bool = False) -> Session:
        forks.append(1)
        if len(forks) == 4:
            Finalised()
        return original(session, own_pools)

    monkeypatch.setattr(Session, "fork", fork)
    with pytest.raises(KeyboardInterrupt):
        run(configured(place.changed("workload.samples_per_cell=20")), tmp_path)
    record = load(tmp_path)
    assert record.status == "partial"
    assert len(record.samples) == 1


def test_interrupt_while_the_record_is_made_keeps_it(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = summary.record

    def record(*arguments: object, **keys: object) -> Record:
        os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **keys)  # type: ignore[arg-type]

    monkeypatch.setattr(summary, "record", record)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # the record is made first, then a sweep must stop too
        run(configured(place.overrides), tmp_path)
    assert load(tmp_path).status == "complete"
    assert signal.getsignal(signal.SIGINT) == before


def test_kill_leaves_nothing_half_written(place: Place, tmp_path: Path) -> None:
    code, _ = interrupted(place, tmp_path / "out", signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert left_behind(tmp_path / "out") == []


def test_interrupt_before_the_first_sample_leaves_nothing(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "start", lambda *arguments, **keys: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run(configured(place.overrides), tmp_path)
    assert left_behind(tmp_path) == []


def test_terminate_is_like_interrupt(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Session.close

    def close(session: Session) -> None:
        original(session)
        if session.policy.name == "streaming" and session.times:  # the policy's first answer is done
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Session, "close", close)
    with pytest.raises(KeyboardInterrupt):
        run(configured(place.changed("workload.depths=[0.1,0.9]", "workload.needles_per_context=2")), tmp_path)
    assert left_behind(tmp_path) == []  # it came before the sample was whole


# --- bad input: once through the real command for each way an error comes about -----------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["policy=streamin"], ["unknown policy 'streamin'", "Did you mean streaming?", "snapkv"]),
        (["budgt.fraction=0.5"], ["unknown key 'budgt'", "Did you mean budget?", "workload"]),
        (["budget.fraction=1.5"], ["budget.fraction=1.5", "above 0 and at most 1"]),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else None,
)
def test_error_is_one_line(place: Place, tmp_path: Path, overrides: list[str], said: list[str]) -> None:
    done = place.run(tmp_path / "out", *overrides)
    check_refused(done, *said)
    assert left_behind(tmp_path / "out") == []


def check_refused(done: subprocess.CompletedProcess[str], *said: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    lines = errors(done)
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    for part in said:
        assert part in lines[0]


def test_unwritable_run_folder(place: Place, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = place.run(tmp_path / "file" / "out")
    check_refused(done, str(tmp_path / "file"), "Not a directory", "hydra.run.dir")
    assert (tmp_path / "file").read_text() == "in the way"


def test_no_disk_space(place: Place, tmp_path: Path) -> None:
    """A limit on the length of files stands for a full disk."""
    folder = tmp_path / "out"
    done = place.run(folder, "hydra.output_subdir=null", most_file_bytes=2000)
    assert done.returncode == 2
    assert errors(done)[-1].startswith(f"error: {folder / 'record.json'}: cannot write: File too large")
    assert "Traceback" not in done.stderr
    assert left_behind(folder) == []
    assert list(folder.iterdir()) == []


def test_a_policy_that_does_nothing_fails_but_keeps_its_record(place: Place, tmp_path: Path) -> None:
    idle = ["policy=elastic", "policy.cold_start_tokens=100000", "budget.fraction=1.0"]
    line = refusal(lambda: run(configured(place.changed(*idle)), tmp_path))
    assert "policy elastic dropped, demoted, quantised and approximated nothing" in line
    check_sound(load(tmp_path), tmp_path)


# --- bad input: the same pieces in this process ---------------------------------------------------------------------


def refusal(call: Callable[[], object]) -> str:
    """What the command would print of the error."""
    with pytest.raises(MENDABLE) as caught:
        call()
    line = describe(caught.value)
    assert "\n" not in line
    assert len(line) < 500
    return line


WHOLE = "must be a whole number of at least"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("budget.fraction=0", "budget.fraction=0: must be above 0 and at most 1"),
        ("workload=nedle", "Could not find 'workload/nedle' Available options in 'workload': conversation needle"),
        ("budget.fraction=-1", "budget.fraction=-1: must be above 0 and at most 1"),
        ("budget.fraction=nan", "budget.fraction=nan: must be above 0 and at most 1"),
        ("budget.fraction=inf", "budget.fraction=inf: must be above 0 and at most 1"),
        ("budget.fraction=half", "budget.fraction='half': must be above 0 and at most 1"),
        ("budget.fraction=true", "budget.fraction=True: must be above 0 and at most 1"),
        ("seed=-1", f"seed=-1: {WHOLE} 0"),
        ("seed=1.5", f"seed=1.5: {WHOLE} 0"),
        ("engine.chunk_tokens=0", f"engine.chunk_tokens=0: {WHOLE} 1"),
        ("engine.chunk_tokens=null", f"engine.chunk_tokens=None: {WHOLE} 1"),
        ("engine.threads=0", f"engine.threads=0: {WHOLE} 1"),
        ("engine.threads=many", f"engine.threads='many': {WHOLE} 1"),
        ("engine.threads=100000", "engine.threads=100000: this machine has"),
        ("engine.kernel=triton", "engine.kernel='triton': backend='triton': tensors are on the host"),
        ("engine.kernel=cuda9", "engine.kernel='cuda9': must be one of cpu, triton, torch, reference"),
        ("cache.page_tokens=17", "cache.page_tokens=17: must be 16, 32 or 64"),
        ("cache.dtype=int3", "cache.dtype='int3': must be one of bfloat16, float32, float16"),
        ("cache.hot_tokens=0", f"cache.hot_tokens=0: {WHOLE} 1"),
        ("cache.sink_tokens=7", "cache.sink_tokens=7: must be a multiple of cache.page_tokens=16"),
        ("twin=[h2000]", "hardware='h2000': not found; known: a100, h100, h200, local"),
        ("twin=h200", "twin='h200': must be a list"),
        ("wandb.mode=sometimes", "wandb.mode='sometimes': must be one of offline, online, disabled"),
        ("workload.lengths=[0]", f"workload.lengths=0: {WHOLE} 1"),
        ("workload.lengths=300", "workload.lengths=300: must be a list"),
        ("workload.depths=[1.5]", r"workload.depths=1.5: must be a number in [0, 1]"),
        ("workload.needle=lost", "workload.needle='lost': lacks {key} and {number}"),
        ("calibration.text_samples=0", f"calibration.text_samples=0: {WHOLE} 1"),
        ("policy/eviction=lur", "unknown eviction part 'lur'. Did you mean lru?"),
        ("policy.eviction.victim=l9", "ByScore.victim='l9': must be one of l2, l3, dropped"),
        ("policy.every_steps=0", f"policy.every_steps=0: {WHOLE} 1"),
        ("policy.on_conflict=first", "policy.on_conflict='first': must be error or last"),
        ("cache.page_token=16", "unknown key 'cache.page_token'. Did you mean page_tokens?"),
        ("+budget.fractoin=0.5", "unknown key 'budget.fractoin'; there are: fraction"),
        ("+engine.thread=1", "unknown key 'engine.thread'; there are: chunk_tokens, kernel, threads"),
        ("+speed=11", "unknown key 'speed'"),
        ("+workload.depth=0.5", "unexpected keyword argument 'depth'"),
        ("+cache.pages=1", "unexpected keyword argument 'pages'"),
        ("+policy.budget.share=1", "unexpected keyword argument 'share'"),
    ],
)
def test_refused_before_a_model_is_loaded(place: Place, override: str, said: str) -> None:
    assert said in refusal(lambda: setup(configured(place.changed(override))))


def test_conflicting_policies_are_named(place: Place) -> None:
    line = refusal(lambda: setup(configured(place.changed("policy=snapkv+h2o"))))
    assert "policy.predictor: snapkv has snapkv, h2o has h2o" in line


def failing(place: Place, tmp_path: Path, *more: str) -> str:
    """The line of a run that must fail without a trace in its folder and before any prefill."""
    line = refusal(lambda: run(configured(place.changed(*more)), tmp_path / "out"))
    assert left_behind(tmp_path / "out") == []
    return line


@pytest.fixture
def no_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    def costly(*arguments: object) -> None:
        raise AssertionError("the error came after expensive work")

    monkeypatch.setattr("testbed.experiment.prefill", costly)


@pytest.mark.usefixtures("no_prefill")
def test_budget_is_checked_before_the_prefill(place: Place, tmp_path: Path) -> None:
    assert "can't hold sinks" in failing(place, tmp_path, "budget.fraction=0.2", "workload.lengths=[900,300]")


@pytest.mark.usefixtures("no_prefill")
def test_context_beyond_the_limit(place: Place, tmp_path: Path) -> None:
    line = failing(place, tmp_path, "workload.lengths=[300,2000]")
    assert "2000 tokens" in line
    assert "limit of 1024 tokens of model model" in line
    line = failing(place, tmp_path, "workload.lengths=[1000]")  # the question no longer fits
    assert "context of 1000 tokens + " in line


@pytest.mark.usefixtures("no_prefill")
def test_signal_arguments(place: Place, tmp_path: Path) -> None:
    line = failing(place, tmp_path, "+signals.atention_ema.decay=0.5")
    assert "unknown signal 'atention_ema'" in line
    assert "attention_ema" in line.partition("known:")[2]
    assert "decay=2" in failing(place, tmp_path, "policy=elastic", "+signals.attention_ema.decay=2")


@pytest.mark.usefixtures("no_prefill")
def test_texts_that_are_none(place: Place, tmp_path: Path) -> None:
    empty, folder = tmp_path / "empty.txt", tmp_path / "empty"
    empty.write_text(" \n")
    folder.mkdir()
    short = tmp_path / "short.txt"
    short.write_text("Too little.")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, said in (
        (empty, "holds no text"),
        (folder, "holds no text"),
        (tmp_path / "nowhere.txt", "cannot read"),
        (binary, "cannot read"),
    ):
        line = failing(place, tmp_path, f"workload.text={path}")
        assert said in line
        assert str(path) in line
    assert "workload.lengths=" in failing(place, tmp_path, f"workload.text={short}")


def broken_folders(place: Place, root: Path) -> dict[str, Path]:
    """Folders that are no causal decoder, by what the error must say."""
    folders = {}
    for name in ("empty", "json", "weights"):
        (root / name).mkdir()
    (root / "json" / "config.json").write_text("{")
    (root / "weights" / "config.json").write_bytes((place.root / "model" / "config.json").read_bytes())
    (root / "weights" / "model.safetensors").write_bytes(b"garbage")
    folders |= {name: root / name for name in ("empty", "json", "weights", "nowhere")}
    t5 = tf.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    bert = tf.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    tf.T5ForConditionalGeneration(t5).save_pretrained(root / "t5")
    tf.BertForMaskedLM(bert).save_pretrained(root / "bert")
    return folders | {"t5": root / "t5", "bert": root / "bert"}


@pytest.mark.usefixtures("no_prefill")
def test_models_that_are_none(place: Place, tmp_path: Path) -> None:
    assert "model.path" in failing(place, tmp_path, "model.path=???")
    for name, folder in broken_folders(place, tmp_path).items():
        line = failing(place, tmp_path, f"model.path={folder}")
        assert (name if name in ("t5", "bert") else f"model.path='{folder}'") in line
    assert "model.dtype='int8'" in failing(place, tmp_path, "model.dtype=int8")
    assert "model.device='tpu'" in failing(place, tmp_path, "model.device=tpu")
