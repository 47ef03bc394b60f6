# make demo   plan, rewrite and check the example GPT at 60 % of its peak; build/demo.html shows it
# make test   the tests, side by side on the cores there are; one by one: PYTEST_ARGS="-n 0".
#             Without those marked slow (.ci/run runs them: PYTEST_ARGS="-m slow"), clock, which
#             read a clock and want a quiet machine, and gpu
# make test-versions   a core set of them on the oldest and the newest torch that the package takes,
#             recipes of trainers on the pinned and the newest, a part of the zoo on the newest;
#             on one: TORCH=2.11.0, and then others: PYTEST_ARGS="tests/distributed -x";
#             on the one whose turn it is, and a part of the core set: TURN=7
# make lint   ruff: rules and format
# make types  pyright, strict, on the packages as they are installed
# make notebooks  runs notebooks/ and keeps them, with their outputs, in build/notebooks
# make notebook-files  runs them, and keeps what they show beside their text, in notebooks/*.ipynb
# make docs   the docs site, in build/site
#
# Each makes .venv if it is missing. Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
BUDGET ?= 60%
MODEL ?= examples/gpt.py:factory
PYTEST_ARGS ?=
TORCH ?=
TURN ?=
# By file, whose tests share captures and plans; in order, in which the last files are short.
# A process of tests that dies ends the run: with another in its place, pytest-xdist waits for ever.
SIDE_BY_SIDE := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MANIFESTS := pyproject.toml constraints.txt

.PHONY: demo test test-versions lint types notebooks notebook-files docs clean

demo: .venv/.core
	@mkdir -p build
	$(BIN)/remat run $(MODEL) --budget $(BUDGET) --compare -o build/demo.json
	$(BIN)/remat report build/demo.json -o build/demo.html

test: .venv/.dev
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(PYTEST_ARGS)

test-versions: .venv/.trainers
	PYTEST_ADDOPTS="$(SIDE_BY_SIDE)" $(BIN)/python -m tests.versions \
	  $(if $(TORCH),--torch $(TORCH)) $(if $(TURN),--turn $(TURN)) -- $(PYTEST_ARGS)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	rm -rf build/installed build/lib
	$(PIP) install --quiet --no-deps --target build/installed .
	$(BIN)/pyright

notebooks: .venv/.docs
	rm -rf build/notebooks
	$(BIN)/jupytext --quiet --to ../build/notebooks//ipynb notebooks/*.py
	$(BIN)/python -m pytest --nbmake --overwrite --durations=5 build/notebooks

notebook-files: notebooks
	$(BIN)/python -m docs.generate.notebook_files

docs: .venv/.docs
	$(BIN)/python -m pytest tests/docs_site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

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

.venv/.trainers: $(MANIFESTS) | .venv/bin/python
	$(PIP) install --quiet -c constraints.txt -e ".[dev,trainers]"
	@touch $@ .venv/.dev .venv/.core

.venv/.docs: $(MANIFESTS) | .venv/bin/python
	$(PIP) install --quiet -c constraints.txt -e ".[dev,docs,notebook]"
	@touch $@ .venv/.dev .venv/.core
