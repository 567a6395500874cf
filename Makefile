# The main commands are `make demo`, `make check` and `make test`. Each creates .venv if it does not exist.
# `make demo EXTRAS=plot` does not install torch, transformers and the encoder's weights.
PYTHON ?= python3
EXTRAS ?= demo
BIN := .venv/bin

.PHONY: demo lint check test test-wide test-switches test-switches-at-once test-all test-versions soak wheel-test release docs

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

# `make check` runs what is fast: linters, types, imports, lines, and tests of each part of the package.
CHECKS := tests/test_structure.py tests/test_imports.py tests/test_public_api.py tests/arrays/test_caching.py \
  tests/api/test_api.py \
  tests/arrays/test_arrays.py tests/cli/test_byte_pair_encoding.py tests/cpu/test_direct_call.py \
  tests/call/test_repeated_calls.py tests/formula/test_bounds.py tests/gpu/test_render_triton.py \
  tests/jax/test_direct_calls.py tests/kv_cache/test_query_positions.py tests/keras/test_keras_layer.py \
  tests/call/partition/test_needed_keys.py tests/call/test_problem.py tests/reference/test_dropout.py \
  tests/statistics/test_statistics.py tests/torch/test_functional.py tests/transformers/test_attention_interface.py \
  tests/view/test_formula_pictures.py
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/lines.py

check: lint
	$(PYTEST) $(CHECKS)

test: lint
	$(PYTEST)

# The products of dtypes, layouts and frameworks, and long programs, that `make test` leaves out.
test-wide: .venv/dev
	$(PYTEST) -m wide

# The tests of JAX under each of its switches for dtypes and debugging, and those of torch under its default devices.
# Left-out files start processes that set what they need.
JAX_SWITCHES := ENABLE_X64=1 NUMPY_RANK_PROMOTION=raise NUMPY_DTYPE_PROMOTION=strict DEBUG_NANS=1 DEBUG_INFS=1 \
  CHECK_TRACER_LEAKS=1
JAX_TESTS := tests/jax --ignore tests/jax/test_distributed.py --ignore tests/jax/test_programs.py
TORCH_TESTS := tests/torch tests/call --ignore tests/torch/distributed
test-switches: .venv/dev
	for switch in $(JAX_SWITCHES); do env JAX_$$switch $(PYTEST) -m 'wide or not wide' $(JAX_TESTS) || exit 1; done
	for device in cpu meta; do DEFAULT_DEVICE=$$device $(PYTEST) $(TORCH_TESTS) || exit 1; done

# What CI runs of them: the tests of `make test` under all switches but x64 at once, and under meta.
test-switches-at-once: .venv/dev
	env $(addprefix JAX_,$(filter-out ENABLE_X64=1,$(JAX_SWITCHES))) $(PYTEST) $(JAX_TESTS)
	DEFAULT_DEVICE=meta $(PYTEST) $(TORCH_TESTS)

# The site has an environment of its own, with every framework: the examples and commands of the pages run first.
.venv-docs/done: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --upgrade pip
	.venv-docs/bin/python -m pip install --quiet --editable '.[docs]'
	@touch $@

docs: .venv-docs/done
	@echo 'Running the examples of the pages.'
	@.venv-docs/bin/python -m pytest docs README.md
	@echo 'Running the commands of docs/installation.md.'
	@.venv-docs/bin/python docs/extensions/commands.py docs/installation.md
	@echo 'Running the notebooks of the course, drawing the pictures and writing the site.'
	@.venv-docs/bin/python -m sphinx --quiet -E -W --keep-going -d docs/_build/doctrees docs docs/_build/html
	@echo 'Open docs/_build/html/index.html in a browser.'

# TensorFlow takes more than 1 GB, so the tests that need it have an environment of their own.
.venv-all/done: pyproject.toml
	$(PYTHON) -m venv .venv-all
	.venv-all/bin/python -m pip install --quiet --upgrade pip
	.venv-all/bin/python -m pip install --quiet --editable '.[dev,tensorflow]'
	@touch $@

test-all: test test-wide test-switches .venv-all/done
	KERAS_BACKEND=jax .venv-all/bin/python -m pytest tests/keras
	KERAS_BACKEND=tensorflow .venv-all/bin/python -m pytest tests/keras

# Runs tests with the oldest and the newest versions of packages, in environments of about 17 GB. NEWEST is the
# interpreter of the newest versions; another one than PYTHON's may have newer ones.
NEWEST ?= $(PYTHON)
test-versions:
	$(PYTHON) .ci/versions.py --newest $(NEWEST) --write

soak: .venv/dev
	$(PYTEST) -m soak

# Builds the sdist and the wheel twice, compares the builds, and checks the wheel in an empty environment.
wheel-test: .venv/dev
	$(BIN)/python .ci/wheel/check.py

# Checks the repository, builds and verifies the archives in dist, and prints the commands that publish them.
release: check
	$(BIN)/python .ci/wheel/release.py
