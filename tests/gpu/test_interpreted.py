"""Runs the test files of `interpreted/` in new processes in which triton interprets the kernels.

The files are divided among two tests, so that two test workers can run them in parallel. On a machine whose torch finds
a GPU, pytest collects these files directly and runs them on the GPU.
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
@pytest.mark.parametrize("files", [FILES[::2], FILES[1::2]], ids=lambda files: " ".join(file.stem for file in files))
def test_interpreted(files):
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
