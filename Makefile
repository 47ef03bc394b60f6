# make demo   plan, rewrite and check the example GPT at 60 % of its peak
# make test   the tests
# make lint   ruff: rules and format
# make types  pyright, strict, on the packages as they are installed
#
# Each makes .venv if it is missing. Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
BUDGET ?= 60%
MODEL ?= examples/gpt.py:factory
PYTEST_ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MANIFESTS := pyproject.toml constraints.txt

.PHONY: demo test lint types clean

demo: .venv/.core
	$(BIN)/remat run $(MODEL) --budget $(BUDGET)

test: .venv/.dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	rm -rf build
	$(PIP) install --quiet --no-deps --target build/installed .
	$(BIN)/pyright

clean:
	rm -rf build .venv

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "remat needs Python 3.11 or newer; $(PYTHON) is" \
	    "$$($(PYTHON) --version 2>&1 || echo missing). Try: make $(MAKECMDGOALS) PYTHON=python3.11"; \
	  exit 1; }
	$(PYTHON) -m venv .venv

.venv/.core: $(MANIFESTS) | .venv/bin/python
	$(PIP) install --quiet -c constraints.txt -e .
	@touch $@

.venv/.dev: $(MANIFESTS) | .venv/bin/python
	$(PIP) install --quiet -c constraints.txt -e ".[dev]"
	@touch $@ .venv/.core
