"""Timings of the kernels beside their rivals, in one run: `python -m kernels.bench` (see `__main__.py`)."""
