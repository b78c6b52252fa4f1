"""The core-token predictor: its data, its training, its evaluation; `python -m testbed.predictor ...`."""
