"""Saved sessions: they go on bit for bit, damage of any kind is one clear line, a killed save leaves the old file."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CACHE, Run, decode, decoder, hugging_face, measures, text

from policies.base import Head, Role, Tier
from testbed.cache.layout import CacheConfig
from testbed.cache.pool import CacheError
from testbed.cache.saved import PREFIX, VERSION, Reader, SavedError, digest, writing
from testbed.compose import compose_policy
from testbed.decisions import diff
from testbed.engine.batch import Batch, shared_pools
from testbed.engine.prefill import prefill
from testbed.engine.session import Session, SessionConfig
from testbed.engine.signals import SignalContext
from testbed.models import wrap

HERE = Path(__file__).parent
BF16 = {"dtype": "bfloat16"}
CONTEXT = 250
BLOCKS = [f"policy.budget.{head.name.lower()}_block_pages=4" for head in Head]
CASES = (
    ("full", None, ()),
    ("streaming", 0.5, ()),
    ("h2o", 0.5, ()),
    ("quest", 0.5, ("policy.eviction.victim=l2",)),
    ("quest", 0.5, ("policy.eviction.victim=l3",)),
    ("elastic", 0.5, ("policy.every_steps=5",)),
    ("redknot+elastic", 0.6, ("policy.budget.local_tokens=64", "policy.budget.special_tokens=128", *BLOCKS)),
    ("snapkv", 0.4, ()),
)
NAMES = [f"{name}-{number}" for number, (name, _, _) in enumerate(CASES)]


def begin(case: int, **cache: object) -> Session:
    name, fraction, overrides = CASES[case]
    session = Run(fraction=fraction, cache=BF16 | cache).start(compose_policy(name, list(overrides)), text(CONTEXT))
    session.extend(text(20, 1))
    decode(session, text(9, 2))  # amidst a page and between two plans
    return session


def again(path: Path, session: Session, **changes: object) -> Session:
    """Resumed with everything built anew."""
    config = session.config
    cache = CacheConfig(**{key: getattr(config.cache, key) for key in CACHE_KEYS} | changes)  # type: ignore[arg-type]
    case = next(each for each in CASES if each[0] == session.policy.name)
    assert case[0] == session.policy.name
    fresh = SessionConfig(cache, config.budget_fraction, config.kernel, config.seed, config.signals)
    return Session.resume(path, decoder(), session.policy, fresh, SignalContext(16, measures))


CACHE_KEYS = tuple(CacheConfig.__dataclass_fields__)


def go_on(session: Session) -> torch.Tensor:
    logits = decode(session, text(12, 3))
    turn = session.extend(text(30, 4), "all")
    assert turn is not None
    session.park()
    return torch.cat((logits, turn, decode(session, text(10, 5))))


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_a_resumed_session_goes_on_bit_for_bit(case: int, tmp_path: Path) -> None:
    session = begin(case)
    session.save(tmp_path / "talk")
    resumed = again(tmp_path / "talk", session)
    assert torch.equal(resumed.tokens, session.tokens)
    assert torch.equal(resumed.roles, session.roles)
    assert diff(resumed.log(), session.log()) is None
    straight = begin(case)
    right = go_on(straight)
    assert torch.equal(go_on(session), right)  # to be saved changes nothing
    assert torch.equal(go_on(resumed), right)
    assert diff(resumed.log(), straight.log()) is None
    for name in ("score", "last_access", "plans"):
        ours, theirs = (getattr(each.cache.metadata, name) for each in (resumed, straight))
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs)), name
    assert [each.parked_pages for each in resumed.idle] == [each.parked_pages for each in straight.idle]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["talk"]


def test_every_tier_and_kind_of_page_is_in_some_case() -> None:
    """The test above proves something only for what was there."""
    tiers, modes, formats = set(), set(), set()
    for case in range(len(CASES)):
        state = begin(case).cache.state
        alive = state["tier"] != Tier.DROPPED
        tiers |= set(state["tier"].unique().tolist())
        modes |= set(state["mode"].unique().tolist())
        formats |= set(state["format"][alive].unique().tolist())
    assert tiers == {0, 1, 2, 3, 4}
    assert modes == {0, 1, 2, 3}
    assert len(formats) >= 2


def test_a_parked_session_sleeps_in_the_file(tmp_path: Path) -> None:
    session, straight = begin(0), begin(0)
    session.park(Tier.L3)
    session.save(tmp_path / "talk")
    resumed = again(tmp_path / "talk", session)
    assert resumed.pause is not None
    resumed.extend(text(5, 1))
    straight.extend(text(5, 1))
    assert torch.equal(resumed.step(3), straight.step(3))
    assert resumed.idle[0].woken_pages == resumed.idle[0].parked_pages["L3"] > 0


def test_a_session_may_be_resumed_into_a_batch(tmp_path: Path) -> None:
    session, straight = begin(3), begin(3)
    session.save(tmp_path / "talk")
    pools = shared_pools(decoder(), session.config.cache)
    context = SignalContext(16, measures)
    two = [
        Session.resume(tmp_path / "talk", decoder(), session.policy, session.config, context, pools) for _ in range(2)
    ]
    batch = Batch(two)
    for token in text(8, 7):
        logits, right = batch.step([token, token]), straight.step(token)
        assert torch.equal(logits[0], right)
        assert torch.equal(logits[1], right)


def test_saving_again_replaces_the_file(tmp_path: Path) -> None:
    session = begin(1)
    session.save(tmp_path / "talk")
    decode(session, text(5, 9))
    session.save(tmp_path / "talk")
    resumed = again(tmp_path / "talk", session)
    assert resumed.steps == 14
    resumed.save(tmp_path / "talk")  # over the file it came from
    assert again(tmp_path / "talk", session).steps == 14


# --- damage --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, Session]:
    folder = tmp_path_factory.mktemp("saved")
    session = begin(5)
    session.save(folder / "talk")
    return folder, (folder / "talk").read_bytes(), session


def refused(file: tuple[Path, bytes, Session], data: bytes) -> str:
    folder, _, session = file
    path = folder / "bad"
    path.write_bytes(data)
    with pytest.raises(SavedError) as caught:
        again(path, session)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@settings(max_examples=25, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_found(file: tuple[Path, bytes, Session], place: float, bit: int) -> None:
    data = bytearray(file[1])
    at = int(place * len(data))
    data[at] ^= 1 << bit
    said = refused(file, bytes(data))
    assert "damaged" in said or (at < 16 and "is not a saved session" in said)


def test_a_flipped_bit_in_each_byte_of_the_prefix_and_every_part_is_found(file: tuple[Path, bytes, Session]) -> None:
    with Reader(file[0] / "talk") as reader:
        places = [part[2] for part in reader._tensors.values() if part[3]]
    for place in (*range(0, PREFIX.size, 7), *places[::3], len(file[1]) - 1):
        data = bytearray(file[1])
        data[place] ^= 1
        said = refused(file, bytes(data))
        assert "damaged" in said or (place < 16 and "is not a saved session" in said)


@settings(max_examples=15, deadline=None)
@given(keep=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_is_found(file: tuple[Path, bytes, Session], keep: float) -> None:
    said = refused(file, file[1][: int(keep * len(file[1]))])
    assert "cut short" in said or "is not a saved session" in said


def test_more_than_was_written_is_found(file: tuple[Path, bytes, Session]) -> None:
    assert f"it has {len(file[1]) + 1} of {len(file[1])} bytes" in refused(file, file[1] + b"x")


def test_something_else_and_another_version(file: tuple[Path, bytes, Session]) -> None:
    for other in (b"", b"hello", os.urandom(100)):
        assert "is not a saved session" in refused(file, other)
    magic, _, *rest = PREFIX.unpack(file[1][: PREFIX.size])
    blank = PREFIX.pack(magic, VERSION + 1, *rest[:-1], 0)
    prefix = blank[:-8] + struct.pack("<q", digest(torch.frombuffer(bytearray(blank), dtype=torch.uint8)))
    assert f"of version {VERSION + 1}, this testbed has version {VERSION}" in refused(
        file, prefix + file[1][PREFIX.size :]
    )


def test_no_file_no_folder_no_rights(file: tuple[Path, bytes, Session], tmp_path: Path) -> None:
    session = file[2]
    with pytest.raises(SavedError, match="can't read the saved session .*No such file"):
        again(tmp_path / "none", session)
    with pytest.raises(SavedError, match="can't read the saved session .*directory"):
        again(tmp_path, session)
    with pytest.raises(SavedError, match="can't save to .*No such file"):
        session.save(tmp_path / "no" / "talk")
    with pytest.raises(SavedError, match="can't save to .*irectory"):
        session.save(tmp_path)
    with pytest.raises(SavedError, match="in_place=True.*cache.l3_path must name a file"):
        session.save(tmp_path / "talk", in_place=True)
    assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.parent.glob(".*.part")) == []


def test_another_model_policy_or_configuration(file: tuple[Path, bytes, Session]) -> None:
    folder, _, session = file
    path, context, config = folder / "talk", SignalContext(16, measures), session.config

    def says(*said: str, **given_: object) -> None:
        arguments = {"decoder": decoder(), "policy": session.policy, "config": config} | given_
        with pytest.raises(SavedError) as caught:
            Session.resume(path, context=context, **arguments)  # type: ignore[arg-type]
        assert all(each in str(caught.value) for each in (str(path), *said)), caught.value

    says("model tiny-llama", "here it is tiny-qwen2", decoder=decoder("qwen2"))
    says("policy elastic", "here it is full", policy=compose_policy("full"))
    says("policy.every_steps 5", "here it is 6", policy=compose_policy("elastic", ["policy.every_steps=6"]))
    says("budget.fraction 0.5", "here it is 0.6", config=SessionConfig(config.cache, 0.6))
    page = CacheConfig(**(CACHE | BF16 | {"page_tokens": 32, "sink_tokens": 32}))  # type: ignore[arg-type]
    says("cache.page_tokens 16", "here it is 32", config=SessionConfig(page, 0.5))
    float32 = CacheConfig(**CACHE)  # type: ignore[arg-type]
    says("cache.dtype 'bfloat16'", "'float32'", config=SessionConfig(float32, 0.5))


def test_other_weights_are_another_model() -> None:
    one, other = (wrap(hugging_face("llama"), name="tiny-llama") for _ in range(2))
    assert one.fingerprint == other.fingerprint == decoder().fingerprint
    changed = hugging_face("llama")
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight.mul_(1.001)
    assert wrap(changed, name="tiny-llama").fingerprint != one.fingerprint


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "talk"
    path.write_text("before")

    def fail() -> None:
        with writing(path) as writer:
            writer.put("x", torch.zeros(100))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


# --- pages that stay in the page file --------------------------------------------------------------------------------


def kept(tmp_path: Path) -> Session:
    return begin(4, l3_path=str(tmp_path / "pages.kv"))


def test_pages_that_stay_in_their_file_come_back_from_there(tmp_path: Path) -> None:
    session, straight = kept(tmp_path), begin(4)
    whole = begin(4)
    whole.save(tmp_path / "whole")
    session.save(tmp_path / "talk", in_place=True)
    assert (tmp_path / "talk").stat().st_size < (tmp_path / "whole").stat().st_size
    right = go_on(straight)
    assert torch.equal(go_on(session), right)  # which moves pages in and out of L3
    session.close()
    for _ in range(2):  # a resumed session keeps what the file refers to in its place, too
        resumed = again(tmp_path / "talk", session)
        assert torch.equal(go_on(resumed), right)
        assert resumed.cache.traffic.failures["corrupt"] == 0
        resumed.close()


def test_the_page_file_must_be_the_one_meant(tmp_path: Path) -> None:
    session = kept(tmp_path)
    session.save(tmp_path / "talk", in_place=True)
    session.close()
    for other in (str(tmp_path / "other.kv"), None):
        with pytest.raises(SavedError, match=r"its pages are in the page file .*pages\.kv, here cache\.l3_path is"):
            again(tmp_path / "talk", session, l3_path=other)
    again(tmp_path / "talk", session).close()


def test_a_page_lost_from_the_page_file_is_found_and_computed_anew(tmp_path: Path) -> None:
    session, straight = kept(tmp_path), begin(4)
    session.save(tmp_path / "talk", in_place=True)
    session.close()
    with (tmp_path / "pages.kv").open("r+b") as pages:
        size = os.fstat(pages.fileno()).st_size
        pages.seek(4096)  # behind the header, all of it
        pages.write(b"\xff" * (size - 4096))
    resumed = again(tmp_path / "talk", session, on_lost="error")
    with pytest.raises(Exception, match="lost"):
        go_on(resumed)
    resumed.close()
    resumed = again(tmp_path / "talk", session)
    assert torch.isfinite(go_on(resumed)).all()
    assert any("computed again" in event for event in resumed.cache.traffic.events)
    go_on(straight)


# --- killed ---------------------------------------------------------------------------------------------------------

PARENT = """
import os
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_saved as t
t.decoder()
for line in sys.stdin:
    folder, how = Path(line.split()[0]), line.split()[1]
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print("ended", folder, flush=True)
        continue
    in_place = how == "in_place"
    session = t.begin(4, **({"l3_path": str(folder / "pages.kv")} if in_place else {}))
    while True:
        session.save(folder / "talk", in_place)
        print(os.getpid(), folder, flush=True)
        for token in t.text(5, 3):
            if session.steps < 40:
                session.step(token)
"""


@pytest.fixture(scope="module")
def parent() -> Iterator[subprocess.Popen[str]]:
    """A process that forks one that saves without end for each line it is given; importing all takes seconds."""
    pipe, environment = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PARENT, str(HERE)]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def killed(parent: subprocess.Popen[str], folder: Path, how: str, delay_s: float) -> None:
    """A process that saves into a folder is killed so long after its first save."""
    assert parent.stdin is not None
    assert parent.stdout is not None
    print(folder, how, file=parent.stdin, flush=True)
    child, _ = parent.stdout.readline().split()
    time.sleep(delay_s)
    os.kill(int(child), signal.SIGKILL)
    while not parent.stdout.readline().startswith("ended"):
        pass


@pytest.mark.parametrize("how", ["in_place", "whole"])
@pytest.mark.parametrize("delay_s", [0.0, 0.03])
def test_killed_in_the_middle_of_anything_a_whole_session_is_there(
    parent: subprocess.Popen[str], tmp_path: Path, how: str, delay_s: float
) -> None:
    killed(parent, tmp_path, how, delay_s)
    straight = begin(4)
    changes = {"l3_path": str(tmp_path / "pages.kv")} if how == "in_place" else {}
    resumed = again(tmp_path / "talk", straight, **changes)
    done = resumed.steps - straight.steps
    assert done % 5 == 0
    for token in (text(5, 3) * 8)[:done]:
        straight.step(token)
    assert torch.equal(resumed.tokens, straight.tokens)
    assert torch.equal(go_on(resumed), go_on(straight))
    assert resumed.cache.traffic.failures["corrupt"] == 0
    assert {path.name for path in tmp_path.iterdir()} <= {"talk", "pages.kv"}


# --- lost pages while decoding ---------------------------------------------------------------------------------------


def spoil(session: Session, path: Path) -> None:
    """Overwrites all pages of an archive behind the cache's back."""
    with torch.inference_mode():
        session.cache.flights.drain()
    with path.open("r+b") as pages:
        size = os.fstat(pages.fileno()).st_size
        pages.seek(4096)
        pages.write(os.urandom(size - 4096))


@pytest.mark.parametrize("how", ["recompute", "drop", "error"])
def test_lost_pages_while_decoding(tmp_path: Path, how: str) -> None:
    session, straight = begin(0, l3_path=str(tmp_path / "pages.kv"), on_lost=how), begin(0)
    session.park(Tier.L3)
    spoil(session, tmp_path / "pages.kv")
    lost = int((session.cache.state["tier"] == Tier.L3).sum())
    assert lost > 0
    if how == "error":
        with pytest.raises(Exception, match=r"pages lost .*cache.on_lost=recompute"):
            session.step(5)
        return
    logits, right = session.step(5), straight.step(5)
    assert int((session.cache.state["tier"] == Tier.DROPPED).sum()) == (lost if how == "drop" else 0)
    assert session.cache.length_tokens == straight.cache.length_tokens
    assert session.tokens.tolist() == straight.tokens.tolist()
    if how == "recompute":  # of the full cache: the same tokens, in other chunks
        torch.testing.assert_close(logits, right, atol=0.1, rtol=0)
        session.step(6, Role.USER)
        assert any("computed again" in event for event in session.cache.traffic.events)
    else:
        assert not torch.equal(logits, right)
        assert any("dropped" in event for event in session.cache.traffic.events)


def test_pages_found_lost_while_saving(tmp_path: Path) -> None:
    session = begin(0, l3_path=str(tmp_path / "pages.kv"), on_lost="error")
    session.park(Tier.L3)
    spoil(session, tmp_path / "pages.kv")
    with pytest.raises(CacheError, match="pages lost"):
        session.save(tmp_path / "talk")
    session.close()
    assert [path.name for path in tmp_path.iterdir()] == ["pages.kv"]
    session, straight = begin(0, l3_path=str(tmp_path / "pages.kv")), begin(0)
    session.park(Tier.L3)
    spoil(session, tmp_path / "pages.kv")
    session.save(tmp_path / "talk")
    resumed = again(tmp_path / "talk", session, l3_path=None)
    torch.testing.assert_close(resumed.step(5), straight.step(5), atol=0.1, rtol=0)


def test_a_row_that_lost_pages_disturbs_no_other(tmp_path: Path) -> None:
    config = CacheConfig(**(CACHE | {"l3_path": str(tmp_path / "pages.kv")}))  # type: ignore[arg-type]
    pools, policy, context = shared_pools(decoder(), config), compose_policy("full"), SignalContext(16, measures)
    sessions = [Session(decoder(), policy, SessionConfig(config), context, pools) for _ in range(2)]
    for seed, session in enumerate(sessions):
        session.start(prefill(decoder(), text(150, seed), config.torch_dtype, chunk_tokens=37))
    sessions[1].park(Tier.L3)
    spoil(sessions[1], tmp_path / "pages.kv")
    logits = torch.stack([Batch(sessions).step([a, b]) for a, b in zip(text(6, 8), text(6, 9), strict=True)])
    for row, seed in enumerate((8, 9)):
        straight = Run().start(policy, text(150, row))
        # The context is prefilled again in the same chunks, so that its pages have the bits they had.
        assert torch.equal(logits[:, row], decode(straight, text(6, seed)))
    assert sessions[0].cache.traffic.events == []
    assert sessions[1].cache.traffic.events
