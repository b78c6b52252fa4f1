"""README's "Add a policy", followed to the letter: one file and one YAML, and the new policy runs like any other."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEADING = "## Add a policy"

# Runs in a process of its own: the copy's packages take the place of the repository's.
USE = """
import sys
from pathlib import Path

import conf
import policies
import torch
import transformers as tf

root = Path(sys.argv[1])
assert Path(next(iter(conf.__path__))).is_relative_to(root)
assert Path(next(iter(policies.__path__))).is_relative_to(root)

from policies.base import Tier
from testbed.cache.layout import CacheConfig
from testbed.compose import compose_policy
from testbed.decisions import diff
from testbed.engine.prefill import prefill
from testbed.engine.session import Session, SessionConfig
from testbed.engine.signals import SignalContext
from testbed.models import wrap

slot, name = sys.argv[2:]
policy = compose_policy("full", [f"policy/{slot}={name}"])
torch.manual_seed(0)
config = tf.LlamaConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=32, max_position_embeddings=512,
)
decoder = wrap(tf.LlamaForCausalLM(config), name="tiny")
cache = CacheConfig(dtype="bfloat16", sink_tokens=16, hot_tokens=32, slab_pages=4)


def run(policy, fraction):
    session = Session(decoder, policy, SessionConfig(cache, fraction), SignalContext(16, dict))
    tokens = torch.randint(0, 64, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    session.start(prefill(decoder, tokens, torch.bfloat16, list(session.sources.values())))
    session.extend([1, 2, 3])
    for token in range(20):
        logits = session.step(token)
        assert torch.isfinite(logits).all()
        budget = session.device_budget_bytes(session.cache.length_tokens)
        assert budget is None or session.cache.ledger().used_device_bytes <= budget
    return session


part = getattr(policy, slot)
print(type(part).__module__, type(part).__name__)
first, second = run(policy, 0.6), run(policy, 0.6)
assert diff(first.log(), second.log()) is None
print("dropped", int((first.cache.state["tier"] == Tier.DROPPED).sum()))
print("changed", diff(first.log(), run(compose_policy("full"), 0.6).log()) is not None)
"""


def blocks() -> dict[str, str]:
    """Path -> content of the fenced blocks under the heading; each names its path in its first line."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert HEADING in readme, f"README.md has no section {HEADING!r}"
    section = readme.partition(HEADING)[2]
    section = re.split(r"^## ", section, maxsplit=1, flags=re.MULTILINE)[0]
    found = {}
    for language, body in re.findall(r"^```(python|yaml)\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL):
        first = re.match(r"# ((?:policies|conf/policy)/\S+\.(?:py|yaml))\n", body)
        if first:
            assert first[1].endswith(".py" if language == "python" else ".yaml")
            found[first[1]] = body
    return found


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A clone of what a newcomer edits, with the new files in it."""
    for package in ("conf", "policies"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path, body in blocks().items():
        target = tmp_path / path
        assert target.parent.is_dir(), f"{path}: a new part needs no new folder"
        target.write_text(body, encoding="utf-8")
    return tmp_path


def test_one_file_and_one_yaml() -> None:
    paths = sorted(blocks())
    assert len(paths) == 2, f"one file and one YAML, found {paths}"
    conf, code = paths
    assert Path(conf).stem == Path(code).stem


def test_the_file_keeps_the_house_rules(copy: Path) -> None:
    code = next(path for path in blocks() if path.endswith(".py"))
    tree = ast.parse((copy / code).read_text())
    imported = {
        (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else node.names[0].name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported <= {"__future__", "dataclasses", "torch", "policies", "math"}
    checked = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), str(copy / code)],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout


def test_the_new_policy_runs(copy: Path) -> None:
    conf, code = sorted(blocks())
    slot, name = Path(conf).parent.name, Path(conf).stem
    script = copy / "use.py"
    script.write_text(USE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(copy), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, str(script), str(copy), slot, name], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, dropped, changed = done.stdout.splitlines()
    assert first.split()[0] == code.removesuffix(".py").replace("/", ".")
    assert int(dropped.split()[1]) > 0
    assert changed == "changed True"
