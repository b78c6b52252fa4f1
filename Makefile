# make run    set up everything on a fresh machine, then run the main job (ARGS="policy=snapkv budget.fraction=0.25")
# make test   set up everything, then lint, types, import contracts and the whole test suite: three processes, since
#             Triton's interpreter must be chosen before Triton is imported, and what it decorates can't be compiled
# make check  compile every GPU kernel for every target, without a GPU; ARGS="--ops attend --record"
# make bench  timings, alone on the machine
# make gpu    on a GPU: kernels' correctness, graphs, bandwidth, in under 8 minutes; elsewhere a dry run
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
GPU_PYTHON ?= $(shell $(PYTHON) -c 'import torch, triton, transformers' 2>/dev/null && echo $(PYTHON) || echo $(BIN)/python)
# Two workers of one thread each: OpenMP's barriers collapse where threads outnumber cores.
TWO    := OMP_NUM_THREADS=1
ARGS   ?= policy=redknot+elastic

.PHONY: run test check lint assets bench gpu clean

run: assets
	$(BIN)/python -m testbed.run $(ARGS)

test: lint assets
	$(TWO) $(BIN)/python -m pytest -n 2 --dist loadfile
	$(TWO) TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m interp tests/kernels
	$(BIN)/python -m pytest -m aot tests/kernels

check: $(STAMP)
	$(BIN)/python -m kernels.check $(if $(filter command%,$(origin ARGS)),$(ARGS))

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

assets: $(STAMP)
	$(BIN)/python -m testbed.assets

bench: assets
	$(BIN)/python -m pytest -m bench --benchmark-only
	$(BIN)/python -m kernels.bench

# With a python that has torch, triton and transformers nothing is installed; without a CUDA device it is a dry run.
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP))
	PYTHONPATH=. $(GPU_PYTHON) -m kernels.bench --device cuda

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip<27'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) outputs multirun .pytest_cache .ruff_cache build *.egg-info
