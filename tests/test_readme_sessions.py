"""README's "From Python", run to the letter on the real model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_session_example_runs_as_it_stands(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text().split("## From Python\n")[1]
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    checks = """
alone = again.fork()
assert torch.equal(alone.step(5), again.step(5))
assert "L2/compute" in a.cache.ledger().used_bytes
assert logits.shape[0] == 2
assert decoder.decode(tokens).strip()
"""
    (tmp_path / "example.py").write_text(code.group(1) + checks)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "L1>L2" in done.stdout
