# The main commands are `make demo` and `make test`. Both create .venv if it does not exist.
# `make demo EXTRAS=plot` does not install torch, transformers and the encoder's weights.
PYTHON ?= python3
EXTRAS ?= demo
BIN := .venv/bin

.PHONY: demo test test-all soak wheel-test docs

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Sightline needs Python 3.11 or newer; run make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

.venv/extras-$(EXTRAS): .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@

# pip compiles bytecode on one core, compileall on all cores. Some packages contain files that do not compile.
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
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The site has an environment of its own, with every framework: the examples and commands of the pages run first.
.venv-docs/done: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --upgrade pip
	.venv-docs/bin/python -m pip install --quiet --editable '.[docs]'
	@touch $@

docs: .venv-docs/done
	.venv-docs/bin/python -m pytest docs README.md
	.venv-docs/bin/python docs/extensions/commands.py docs/command-line.md
	.venv-docs/bin/python -m sphinx --quiet -E -W --keep-going -d docs/_build/doctrees docs docs/_build/html
	@echo 'Open docs/_build/html/index.html in a browser.'

# TensorFlow takes more than 1 GB, so the tests that need it have an environment of their own.
.venv-all/done: pyproject.toml
	$(PYTHON) -m venv .venv-all
	.venv-all/bin/python -m pip install --quiet --upgrade pip
	.venv-all/bin/python -m pip install --quiet --editable '.[dev,tensorflow]'
	@touch $@

test-all: test .venv-all/done
	KERAS_BACKEND=jax .venv-all/bin/python -m pytest tests/keras
	KERAS_BACKEND=tensorflow .venv-all/bin/python -m pytest tests/keras

soak: .venv/dev
	$(BIN)/python -m pytest -n 2 -m soak

# Builds the sdist and the wheel, and checks the wheel in an empty environment.
wheel-test: .venv/dev
	$(BIN)/python .ci/wheel/check.py
