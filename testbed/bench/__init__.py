"""Benchmarks of the testbed itself: `python -m testbed.bench` (see `__main__.py`); a case is one file with `run`."""
