# make train   makes the environment (.venv), then trains a small Llama on two ranks with dtobs on
# make test    makes the environment, then runs all tests
# make check   the quick half of that: formatting, lint, types, architecture, unit tests
# make lint    only formatting, lint and types
# make clean   removes the environment, caches and build output; never runs/
#
# Variables, on the command line or in the environment:
#   NPROC=2        ranks of `make train`
#   ARGS=          flags of runtime.train, e.g. make train ARGS="--steps 50 --preset debug"
#   JOBS=          test files of `make test` and `make check` at a time; default: two more than there are cores
#   PYTEST_ARGS=   flags of pytest, e.g. make test PYTEST_ARGS="tests/unit -k ring"
#   PYTHON=        the interpreter .venv is made from; default: the first Python ≥ 3.11 found
#   OMP_NUM_THREADS=1   threads a rank

NPROC ?= 2
ARGS ?=
PYTEST_ARGS ?=
# Ranks that wait for each other, and tests that wait for them, leave cores idle for two fifths of the time.
JOBS ?= $(shell expr $$(nproc 2>/dev/null || echo 1) + 2)
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v "$$p"; break; }; done)
endif
export OMP_NUM_THREADS ?= 1
# Hundreds of short processes import the same modules: compile them once, whatever the machine's environment says.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help train test check lint clean
.DEFAULT_GOAL := help

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

train: $(STAMP)
	$(BIN)/torchrun --standalone --nproc-per-node $(NPROC) -m runtime.train $(ARGS)

# In the files' own order: those of real ranks take minutes, and the short ones of tests/unit fill what is left.
test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: lint
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not slow and not exhaustive" tests/unit

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# pip's own message follows when the network or the interpreter's venv module is missing.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 found; install one or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11, or does not run; name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find dtobs runtime tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
