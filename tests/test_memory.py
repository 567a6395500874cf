"""Memory is O(n): at 65,536 positions, one head, at most 64 MB above inputs and output."""

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
    reset.write("5")  # the peak starts anew
before = resident_peak()
output = sightline.attention(query, key, value, mask=mask, kernel=kernel)
print(resident_peak() - before - output.nbytes)
"""


def above(**what):
    """Bytes a call took at its peak beyond inputs and output."""
    result = subprocess.run([sys.executable, "-c", PROGRAM.format(**what)], capture_output=True, text=True, check=True)
    return int(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own accounting")
@pytest.mark.parametrize(
    ("kernel", "mask"),
    [
        ("cpu", "None"),
        ("cpu", "i >= j"),
        ("cpu", "(i >= j) & (i - j < 256)"),
        ("streaming", "(i >= j) & (i - j < 256)"),
    ],
)
def test_peak_memory(kernel, mask):
    assert above(kernel=kernel, mask=mask, d=16) < LIMIT


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own accounting")
def test_the_definition_would_not_pass():
    """The measurement sees n² memory: the dense form, at a sixteenth of the length, is over the limit."""
    program = PROGRAM.replace("65_536", "4_096").format(kernel="reference", mask="None", d=16)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(result.stdout) > LIMIT
