"""Long use: guard pages around every array, and many problems from many threads of one process."""

import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sightline import h, i, j, s, table
from sightline.call.kernel import GivenGradients
from sightline.call.problem import make_problem
from sightline.cpu import Cpu
from sightline.cpu.runtime import compile

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux's pages and accounting")


def with_guards(seed, count, past=0):
    program = Path(__file__).parent / "helpers" / "guard_pages.py"
    command = [sys.executable, str(program), *map(str, (seed, count, past))]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.wide
@linux
@pytest.mark.parametrize(
    ("seed", "count"), [(0, 3), *(pytest.param(seed, 250, marks=pytest.mark.soak) for seed in range(1, 9))]
)
def test_no_access_outside_an_array(seed, count):
    result = with_guards(seed, count)
    assert (result.returncode, result.stdout) == (0, "unharmed\n"), result.stderr


@linux
def test_an_access_outside_is_found():
    """The first problem ends at the forbidden page; that it is a kernel that reads it shows in NumPy's silence."""
    assert with_guards(0, 1, past=1).returncode == -signal.SIGSEGV


# -- many threads ------------------------------------------------------------------------------------------------------


def work(number, formulas, threads=None):
    """Return the bytes of the results of a small problem; every fifth problem has gradients. The output is finite."""
    rng = np.random.default_rng(number)
    n, m = (int(x) for x in rng.integers(1, 150, 2))
    d_k, d_v = (int(x) for x in rng.choice([8, 24], 2))
    dtype = [np.float32, np.float64, np.float16][rng.integers(3)]
    q, k, v = (rng.normal(size=(1, 2, *size)).astype(dtype) for size in ((n, d_k), (m, d_k), (m, d_v)))
    reach = int(rng.integers(1, formulas))  # a constant in a formula gives another kernel
    bias = rng.normal(size=(2, n + m)).astype(np.float32)
    options = [
        {},
        {"mask": i - j < reach},
        {"score": s + table(bias)[h, i - j + m]},
        {"mask": i >= j, "dropout": 0.2, "seed": number},
    ][rng.integers(4)]
    problem, kernel = make_problem(q, k, v, threads=threads, **options), Cpu()
    answer = kernel.run(problem)
    assert np.isfinite(answer.output).all()
    results, tables = [answer.output, answer.lse], range(len(problem.tables))
    if number % 5 == 0:
        given = GivenGradients(answer.output, None, results[:], tables)
        results += kernel.backward(problem, given).flatten(tables, has_sinks=False)
    return [None if array is None else array.tobytes() for array in results]


def resident():
    """The resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@linux
@pytest.mark.parametrize(
    ("count", "formulas", "rounds"), [(8, 2, 1), pytest.param(1000, 12, 10, marks=pytest.mark.soak)]
)
def test_a_crowd_of_threads(count, formulas, rounds, monkeypatch):
    """Problems from eight threads evict kernels. Each result is that of one thread. Memory grows by at most a tenth."""
    monkeypatch.setattr(compile, "MAX_KERNELS_IN_MEMORY", 64)
    used = []
    with ThreadPoolExecutor(8) as threads:
        for turn in range(rounds):
            numbers = range(turn * count, (turn + 1) * count)
            found = list(threads.map(lambda number: work(number, formulas), numbers))
            assert found == [work(number, formulas, threads=1) for number in numbers]
            used.append(resident())
    assert rounds <= 5 or max(used[5:]) <= 1.1 * max(used[:5]), [f"{x >> 20} MiB" for x in used]
