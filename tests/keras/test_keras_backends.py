"""Tests of this folder on Keras's other backends. Each backend needs a process of its own.

The suite runs those named in `SELECTED`; `make test-all` runs all, as in `KERAS_BACKEND=jax pytest tests/keras`.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ON_OTHER_BACKENDS = find_spec("keras") is None or os.environ["KERAS_BACKEND"] != "torch"
pytestmark = [pytest.mark.wide, pytest.mark.skipif(ON_OTHER_BACKENDS, reason="starts the tests on other backends")]
SELECTED = "(gradients_equal_those_of_keras and all) or hidden_nan or weights_then_output or keras_weights"


def run(backend, *arguments):
    environment = {**os.environ, "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=500
    )


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_selected_tests_pass(backend):
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    result = run(backend, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", SELECTED, str(Path(__file__).parent))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 passed" in result.stdout


@pytest.mark.parametrize("backend", ["openvino"])
def test_a_backend_that_is_not_served_is_refused_with_a_cure(backend):
    """Installed or not."""
    result = run(backend, "-c", "import sightline.keras")
    assert "ParameterError: Keras" in result.stderr
    assert "KERAS_BACKEND=torch" in result.stderr
