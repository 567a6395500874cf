"""Attention over a sequence that is divided among devices, in processes with four devices of the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.wide

FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


@pytest.mark.parametrize("marked", ["not soak", pytest.param("soak", marks=pytest.mark.soak)])
def test_on_several_devices(marked):
    """The number of devices is fixed when JAX starts. A device that waits forever ends by the time limit."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    folder = Path(__file__).with_name("on_devices")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marked, str(folder)]
    environment["XLA_FLAGS"] = FLAGS
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
