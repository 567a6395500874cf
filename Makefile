# Two commands do everything: `make demo` and `make test`. Each makes its own .venv if there is none.
# `make demo EXTRAS=plot` does without torch, transformers and the encoder's weights.
PYTHON ?= python3
EXTRAS ?= demo
BIN := .venv/bin

.PHONY: demo test soak

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Sightline needs Python 3.11 or newer; say make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

.venv/extras-$(EXTRAS): .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@

# pip compiles on one core what it installs; compileall on all of them. Some packages carry files no Python can compile.
.venv/dev: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	@$(BIN)/python -W ignore -m compileall -qq -j 0 .venv/lib || true
	@touch $@

demo: .venv/extras-$(EXTRAS)
	$(BIN)/sightline demo

test: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2

soak: .venv/dev
	$(BIN)/python -m pytest -n 2 -m soak
