"""Attention over a sequence that is divided among devices, in processes with four devices of the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.wide

HELPERS = Path(__file__).parents[1] / "helpers"
GROUPS = {
    "results": ("results", "statistics", "ties", "hidden", "errors", "transfers"),
    "gradients": ("gradients", "gradients_of_statistics", "faults"),
    "other gradients": ("second_derivatives", "learned_table"),
}
SOAK = pytest.param("other gradients", marks=pytest.mark.soak)


@pytest.mark.parametrize("group", ["results", "gradients", SOAK])
def test_on_several_devices(group):
    """Every device has a thread that waits for the others, so a deadlock ends by the time limit."""
    command = [sys.executable, str(HELPERS / "sharded_calls.py"), *GROUPS[group]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
