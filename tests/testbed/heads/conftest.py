"""Lets these tests use the helpers of tests/testbed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
