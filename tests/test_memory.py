"""Memory is O(n): with 65,536 positions and one head, at most 64 MB beyond inputs and output."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own accounting")
ROOT = Path(__file__).parents[1]  # where Python finds benchmarks
LIMIT = 64 * 2**20
PROGRAM = """
import numpy as np, sightline
from benchmarks.peak_memory import peak_memory
from sightline import i, j

n, kernel, mask, see = 65_536, {kernel!r}, {mask}, {see}
rng = np.random.default_rng(0)
arrays = [rng.standard_normal(({batch}, {heads}, n, {d}), np.float32) for _ in range(3)]
def attend(arrays):
    return sightline.attention(*arrays, mask=mask, see=see, kernel=kernel)
attend([x[:, :, :99] for x in arrays])  # libraries, and the kernel's code
print(peak_memory(attend, lambda: arrays) - arrays[0].nbytes)  # the output is as large as an input
"""


def extra_bytes(program=PROGRAM, batch=1, heads=1, mask="None", see="[]", d=16, **what):
    """Return the peak bytes of a call beyond inputs and output."""
    program = program.format(batch=batch, heads=heads, mask=mask, see=see, d=d, **what)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return int(result.stdout)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize(
    ("kernel", "mask"),
    [
        ("cpu", "None"),
        pytest.param("cpu", "i >= j", marks=pytest.mark.soak),
        ("cpu", "(i >= j) & (i - j < 256)"),
        ("streaming", "(i >= j) & (i - j < 256)"),
        ("gather", "j == sightline.table(np.random.default_rng(1).integers(0, 65_536, (65_536, 2)))[i, j % 2]"),
    ],
)
def test_peak_memory(kernel, mask):
    assert extra_bytes(kernel=kernel, mask=mask) < LIMIT


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "see", ['weights().mean("heads")', 'weights().sum("heads", weights=np.arange(32.0))', 'weights().mean("batch")']
)
def test_a_sum_over_heads_holds_one_matrix(see):
    """The matrices of all 32 heads would take 512 MB, and that of one head takes 16."""
    shape = {"batch": 32} if "batch" in see else {"heads": 32}
    program = PROGRAM.replace("65_536", "2_048")
    assert extra_bytes(program, kernel="cpu", see=f"[sightline.{see}]", **shape) < LIMIT


def test_the_definition_exceeds_the_limit():
    """The measurement finds n² memory: the dense form exceeds the limit at a thirtieth of the length."""
    assert extra_bytes(PROGRAM.replace("65_536", "2_048"), kernel="reference") > LIMIT
