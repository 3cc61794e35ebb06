# `make demo` and `make test` each do everything on a fresh machine: they create .venv, install and run.
# They need only Python 3.11 or newer; choose one with `make demo PYTHON=python3.12`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint benchmark clean

demo: $(INSTALLED)
	$(BIN)/ep demo

test: lint
	$(BIN)/python -m pytest -n 2

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Not part of the tests: it takes long and wants an idle machine. Writes benchmarks/results.md.
benchmark: $(INSTALLED)
	$(BIN)/python benchmarks/corpus.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, and $(PYTHON) is older or missing: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot create $(VENV): on Debian and Ubuntu, apt install python3-venv"; exit 1; }
	@echo "Installing into $(VENV): this takes some minutes the first time."
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
