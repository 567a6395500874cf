"""What tests of JAX share. `make test-switches` runs them under each of JAX's switches for dtypes and debugging."""

import os

import jax
import pytest

collect_ignore = [] if "device_count" in os.environ.get("XLA_FLAGS", "") else ["on_devices"]
if jax.config.jax_debug_nans or jax.config.jax_debug_infs:
    collect_ignore += ["test_array_operations.py"]  # its inputs have NaN and ∞


@pytest.fixture
def without_checks():
    """Allow NaN, ∞, and different ranks or dtypes in one operation, for inputs and peers that have them."""
    promotions = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")
    with jax.debug_nans(False), jax.debug_infs(False), promotions[0], promotions[1]:
        yield
