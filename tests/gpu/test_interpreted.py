"""Runs the test files of `interpreted/` in a new process in which triton interprets the kernels.

On a machine whose torch finds a GPU, pytest collects these files directly and runs them on the GPU.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FILES = sorted(Path(__file__).parent.glob("interpreted/test_*.py"))


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="pytest runs these files directly on the GPU")
def test_interpreted():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, FILES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
