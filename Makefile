# Two commands for people (serve, test), one for contributors (lint).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-compile -c constraints.txt

# Installing without compiling every module halves the wait; what is used is compiled once, when first imported.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: serve test lint install clean

$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e .[demo]
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(INSTALL) -e .[demo,test,dev]
	touch $@

install: $(VENV)/.base

serve: $(VENV)/.base
	$(BIN)/python -m serve_app $(ARGS)

test: $(VENV)/.test lint
	$(BIN)/python -m pytest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
