# make run    set up everything on a fresh machine, then run the main job (ARGS="policy=snapkv budget.fraction=0.25")
# make test   set up everything, then lint, types, import contracts and the whole test suite
# make bench  timings, alone on the machine
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?= policy=redknot+elastic

.PHONY: run test lint assets bench clean

run: assets
	$(BIN)/python -m testbed.run $(ARGS)

test: lint assets
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

assets: $(STAMP)
	$(BIN)/python -m testbed.assets

bench: assets
	$(BIN)/python -m pytest -m bench --benchmark-only

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip<27'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) outputs multirun .pytest_cache .ruff_cache build *.egg-info
