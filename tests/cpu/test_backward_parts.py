"""The backward pass in parts: the gradients of the whole problem, in memory that does not grow with n."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import sightline
from fault_planting import Fault, assert_found
from gradient_checks import check
from sightline import i, j, table
from sightline.call.kernel import GivenGradients
from sightline.cpu import Cpu
from sightline.cpu.launch import backward
from sightline.cpu.runtime.processor import HOST
from sightline.statistics import StatisticGradients
from strategies import Case

N = 150
STARTS = np.repeat([0, 20, 90], [20, 70, 60])
MASKS = {
    "none": None,
    "causal": i >= j,
    "window, first tokens and documents": (i >= j)
    & (j >= table(STARTS)[i])
    & ((i - j < 9) | (j - table(STARTS)[i] < 2)),
    "by head": (i >= j) & (i - j < 20 * sightline.h + 10),
    "nothing": i < 0,
}


def by_parts(problem, d_output, d_lse, _):
    answer = Cpu().run(problem)
    given = GivenGradients(d_output, d_lse, (answer.output, answer.lse), ())
    return backward.backward_in_parts(replace(problem, threads=2), given, HOST)


@pytest.fixture
def small_parts(monkeypatch):
    for name, size in {"MAX_SUM_BYTES": 1, "MIN_DIVIDED_BYTES": 0, "MAX_KEYS": 24, "KEY_TILE": 16}.items():
        monkeypatch.setattr(backward, name, size)


def case(mask, dtype=np.float32, **options):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(2, heads, N, 8)).astype(dtype) for heads in (4, 2, 2)]
    return Case(*arrays, {"mask": mask} | options)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("name", MASKS)
def test_gradients_are_those_of_the_whole(name, framework, small_parts):
    check(case(MASKS[name]), framework, by_parts)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sinks_and_dropout(dtype, small_parts):
    options = {"sinks": np.arange(4.0), "dropout": 0.3, "seed": 7, "scale": 0.5}
    check(case(i >= j, dtype, **options), differentiate=by_parts)


FAULTS = {
    "keys count from the start of their part": Fault(backward.backward_in_parts, "first_key=keys.start", "first_key=0"),
    "queries count from the start of their part": Fault(
        backward.backward_in_parts, "first_row=rows.start", "first_row=0"
    ),
    "a part replaces the sum": Fault(
        backward.backward_in_parts, "array[..., span, :] += term", "array[..., span, :] = term"
    ),
    "the last keys are in no part": Fault(
        backward._parts, "[*range(start, stop, MAX_KEYS), stop]", "[*range(start, stop, MAX_KEYS)]"
    ),
    "d_lse is left out": Fault(backward.backward_in_parts, "None if d_lse is None else d_lse[..., rows]", "None"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name, small_parts, monkeypatch):
    assert_found(FAULTS[name], monkeypatch, lambda: check(case(MASKS["causal"]), differentiate=by_parts))


def test_only_large_sums_are_divided():
    """Parts serve few heads and many queries in the accumulator's dtype, without gradients of tables."""

    def is_divided(n, heads=1, dtype=np.float32, wanted=(), **added):
        array = np.broadcast_to(np.zeros((), dtype), (1, heads, n, 64))
        problem = Case(array, array, array, {"mask": i >= j}).make_problem()
        return backward.needs_parts(problem, GivenGradients(None, None, (), wanted, StatisticGradients(**added)))

    assert is_divided(1 << 20)
    assert not is_divided(1 << 14)
    assert not is_divided(1 << 20, heads=16)
    assert not is_divided(1 << 20, dtype=np.float16)
    assert not is_divided(1 << 20, wanted=(0,))
    assert not is_divided(1 << 20, weights=sightline.s)


def test_torch_calls_use_parts(small_parts, monkeypatch):
    torch = pytest.importorskip("torch")
    calls, whole = [], backward.backward_in_parts
    monkeypatch.setattr(backward, "backward_in_parts", lambda *given: calls.append(given) or whole(*given))
    leaves = [torch.from_numpy(array).requires_grad_() for array in case(None).arrays]
    sightline.attention(*leaves, mask=i > j).sum().backward()
    assert len(calls) == 1


PROGRAM = """
import sys
from pathlib import Path
import torch, sightline
from sightline import i, j
from benchmarks import peak_memory as module

module.MAX_TRIES = 2

def extra(n):
    leaves = [torch.randn(n, 64, requires_grad=True) for _ in range(3)]
    d_output = torch.randn(n, 64)
    call = lambda output: torch.autograd.grad(output, leaves, d_output)
    peak = module.peak_memory(call, lambda: sightline.attention(*leaves, mask=(i >= j) & (i - j < 64)))
    return peak - 3 * n * 64 * 4

extra(256)
print(*map(extra, (1 << 16, 1 << 17)))
"""


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own accounting")
def test_the_memory_of_the_backward_pass_is_constant():
    """glibc keeps freed memory of some megabytes for later calls, unless a fixed threshold forbids it."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    command = [sys.executable, "-c", PROGRAM]
    root = Path(__file__).parents[2]  # where Python finds benchmarks
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
    short, long = map(int, result.stdout.split())
    assert max(short, long) < 2 * backward.MAX_SUM_BYTES
    assert long < short + (1 << 16) * 2 * 8  # two numbers of each further query
