"""Runs the files of `interpreted/` in processes of their own: in Triton's interpreter, and with its compiler alone."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FILES = sorted(Path(__file__).parent.glob("interpreted/test_*.py"))

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="pytest runs these files directly on the GPU"),
]


def run(files, *options, **variables):
    environment = os.environ | variables
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *map(str, files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=() if file.stem == "test_gpu_faults" else pytest.mark.wide)
        for file in FILES
    ],
)
def test_interpreted(file, pytestconfig):
    rules = pytestconfig.getoption("pythonwarnings") or ()
    run([file], *(f"-W{rule}" for rule in rules), TRITON_INTERPRET="1")


@pytest.mark.soak
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_every_kernel_compiles(target):
    """Triton's interpreter accepts programs that its compiler refuses."""
    run(FILES, "-p", "compile_only", COMPILE_FOR=target)
