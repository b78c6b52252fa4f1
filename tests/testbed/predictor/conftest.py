"""The tiny models and tokenizers of tests elsewhere."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("engine", "workloads", ".")]
