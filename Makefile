# The project's targets; continuous integration runs the same ones.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# The extra with the CuPy wheel for this machine's driver: cuda12, cuda13 (also for later drivers) or none.
CUDA = $(shell nvidia-smi 2>/dev/null | awk -F 'Version: *' \
	'/CUDA/ { v = int($$NF); print (v > 12 ? ",cuda13" : v == 12 ? ",cuda12" : ""); exit }')
EXTRAS_demo = demo$(CUDA)
# The kernels are compiled without a GPU too, but two wheels of CuPy would break each other.
NVRTC       = ,nvrtc
EXTRAS_dev  = dev$(or $(CUDA),$(NVRTC))
EXTRAS_gpu  = dev$(CUDA)
EXTRAS_bench = bench$(CUDA)

.PHONY: help setup demo test test-all test-gpu format lint types docs bench cubins dist clean
.NOTPARALLEL:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

TOO_OLD = tileattn needs Python 3.11 or later; name one, as in: make $(MAKECMDGOALS) PYTHON=python3.12

# One stamp per set of extras; venv is repeated so that a half-made environment is repaired, and one
# of another Python is made again.
$(VENV)/%.stamp: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(TOO_OLD)" or 0)'
	$(PYTHON) -m venv $$([ "$$($(BIN)/python -V 2>&1)" = "$$($(PYTHON) -V)" ] || echo --clear) $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable ".[$(EXTRAS_$*)]"
	@touch $@

setup: $(VENV)/dev.stamp  ## make .venv with everything that the targets below need
demo: $(VENV)/demo.stamp  ## compare with the plain formula, and train a small GPT (options: ARGS="...")
	$(BIN)/python examples/beside_plain.py
	$(BIN)/python examples/char_gpt.py $(ARGS)

# Neighbouring tests need the same kernels and fixtures: a process takes a run of them. Images of
# Python set PYTHONDONTWRITEBYTECODE: every process that a test starts would compile the package.
# Processes fill the cores, so libraries have one thread. What XLA compiles around a call is small,
# and need not be fast: it takes a third of the time of a test.
PYTEST = OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 JAX_DISABLE_MOST_OPTIMIZATIONS=1 \
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal
test: setup  ## run the quick tests, with a third of the random examples (options: ARGS="...")
	HYPOTHESIS_PROFILE=quick $(PYTEST) -m "not gpu and not slow" $(ARGS)
test-all: setup  ## run every test that needs no GPU (ARGS="--turn 0/5": a fifth of the slow ones)
	$(PYTEST) -m "not gpu" $(ARGS)
test-gpu: $(VENV)/gpu.stamp  ## run the tests that need a GPU, in processes that share it
	$(BIN)/python -m tools.gpu_tests $(ARGS)
format: setup  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
lint: setup  ## check rules, format and docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_docstrings.py
types: setup  ## check the types
	$(BIN)/mypy
docs: setup  ## build the site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
bench: $(VENV)/bench.stamp  ## measure (ARGS="cpu", "gpu --quick", ...; without ARGS: list them)
	$(BIN)/python -m tileattn bench $(ARGS)
cubins: setup  ## compile the CUDA kernels that the wheel brings (options: ARGS="...")
	$(BIN)/python tools/make_cubins.py $(ARGS)
dist: setup  ## build dist/ and check what is in it; the wheel brings what `make cubins` has made
	rm -rf dist
	$(BIN)/python -m build --sdist --wheel --quiet
	$(BIN)/python tools/check_wheel.py dist/*.whl
	$(BIN)/python tools/check_install.py dist/*
clean:  ## remove everything that the targets above made
	rm -rf tileattn/kernels/cuda/cubins $(VENV) dist site char_gpt_output .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
