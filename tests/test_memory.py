"""Memory is O(n): with 65,536 positions and one head, at most 64 MB beyond inputs and output."""

import subprocess
import sys

import pytest

LIMIT = 64 * 2**20
PROGRAM = """
import numpy as np, sightline
from sightline import i, j

def resident_peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

n, kernel, mask = 65_536, {kernel!r}, {mask}
rng = np.random.default_rng(0)
query, key, value = (rng.standard_normal((n, {d}), np.float32) for _ in range(3))
sightline.attention(query[:99], key[:99], value[:99], mask=mask, kernel=kernel)  # libraries, and the kernel's code
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")  # reset the peak
before = resident_peak()
output = sightline.attention(query, key, value, mask=mask, kernel=kernel)
print(resident_peak() - before - output.nbytes)
"""


def extra_bytes(**what):
    """Return the peak bytes of a call beyond inputs and output."""
    result = subprocess.run([sys.executable, "-c", PROGRAM.format(**what)], capture_output=True, text=True, check=True)
    return int(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own accounting")
@pytest.mark.parametrize(
    ("kernel", "mask"),
    [
        ("cpu", "None"),
        pytest.param("cpu", "i >= j", marks=pytest.mark.soak),
        ("cpu", "(i >= j) & (i - j < 256)"),
        ("streaming", "(i >= j) & (i - j < 256)"),
    ],
)
def test_peak_memory(kernel, mask):
    assert extra_bytes(kernel=kernel, mask=mask, d=16) < LIMIT


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own accounting")
def test_the_definition_exceeds_the_limit():
    """The measurement finds n² memory: the dense form exceeds the limit at a sixteenth of the length."""
    program = PROGRAM.replace("65_536", "4_096").format(kernel="reference", mask="None", d=16)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(result.stdout) > LIMIT
