# `make demo` and `make test` are all that a newcomer needs. Both make .venv on their first run
# and fetch nothing on later ones; the demo needs a tenth of what the tests do. `make test` takes
# minutes and runs what a change is likely to break; `make test-all` also runs the rest of every
# table of cases.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
OLD := $(PYTHON) is Python %d.%d, and 3.11 or later is needed: make $(MAKECMDGOALS) PYTHON=python3.13
CHECK := $(PYTHON) -c 'import sys; v = sys.version_info[:2]; v < (3, 11) and sys.exit("$(OLD)" % v)'
# Neighbours in a file share what a module's fixtures have made, and no worker is left waiting.
PYTEST := $(BIN)/pytest -n auto --dist worksteal

.PHONY: demo test test-rest test-all lint types format docs notebooks figures clean

$(STAMP): pyproject.toml
	@$(CHECK)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

# Not compiled ahead: of 10,000 files the demo imports few.
$(DEMO_STAMP): pyproject.toml
	@$(CHECK)
	@echo "Installing what the demo needs into $(VENV) (70 MB, once)."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable ".[cpu]"
	touch $@

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
	$(BIN)/specdec-mlx demo

test: $(STAMP) lint types
	$(PYTEST) -m "not full"

test-rest: $(STAMP)
	$(PYTEST) -m full

test-all: test
	$(PYTEST) -m full

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo

# Two runs, because tests are held to less; each has a processor of its own.
types: $(STAMP)
	$(BIN)/mypy & own=$$!; $(BIN)/mypy --config-file tests/mypy.ini; tests=$$?; wait $$own && exit $$tests

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python docs/generate_help.py
	$(BIN)/python docs/generate_map.py
	$(BIN)/mkdocs build --strict

notebooks: $(STAMP)
	$(BIN)/python notebooks/run.py

figures: $(STAMP)
	$(BIN)/python docs/figures.py

clean:
	rm -rf $(VENV)
