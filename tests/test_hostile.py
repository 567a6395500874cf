"""Problems that once gave wrong numbers or crashed the process."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import sightline
from sightline import i, j, s, table, where
from sightline.call.problem import make_problem
from sightline.reference.testing import assert_conforms
from strategies import ON_HOST

FLOAT_MAX = float(np.finfo(np.float32).max)


def make(**options):
    rng = np.random.default_rng(0)
    return make_problem(*(rng.normal(size=(1, 2, 70, 8)).astype(np.float32) for _ in range(3)), **options)


def table_with_infinity():
    entries = np.arange(70.0)
    entries[3] = -np.inf
    return table(entries)


PROBLEMS = {
    "conditions are ordered": {"mask": (i >= j) < (j > 3)},
    "conditions from tables are ordered": {
        "mask": table(np.arange(70) % 2 == 0)[i] <= table(np.arange(70) % 3 == 0)[j]
    },
    "a mask of the least float": {"score": s + where(i < 5, -FLOAT_MAX, 0.0)},
    "a sink beyond base 2": {"sinks": np.array([3e38, 0], np.float32)},
    "a part hidden, then clipped": {"score": np.clip(where(i >= j, s, -np.inf), -80, 80)},
    "a guarded read of a table that hides": {"score": s + table_with_infinity()[i - j], "mask": i >= j},
    "a table without entries": {"mask": where(i < 0, table(np.zeros(0, bool))[i], i >= j)},
    "a score of whole numbers": {"score": -(i - j)},
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("kernel", ON_HOST, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("name", PROBLEMS)
def test_kernels_still_conform(name, kernel):
    assert_conforms(kernel.run, make(**PROBLEMS[name]))


def test_equal_formulas_with_swapped_tables_are_different_kernels():
    first, second = table(np.arange(70) % 7 * 1.0), table(np.arange(70) % 5 * 0.3)
    for one, other in ((first, second), (second, first)):
        assert_conforms(ON_HOST[0].run, make(mask=first[i] < 5, score=s + one[i] - other[j]))


@pytest.mark.parametrize("size", [1e6, 1e10, 1e18])
@pytest.mark.parametrize("mask", [None, i >= j], ids=["all", "causal"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_scores_beyond_the_exponent_range_of_base_2(dtype, mask, size):
    """If a score's last place exceeds the exponent range, 2^(s − m) with a rounded m once overflowed."""
    rng = np.random.default_rng(0)
    size = size**2 if dtype == np.float64 else size
    q, k, v = ((rng.normal(size=(1, 2, 70, 8)) * scale).astype(dtype) for scale in (size, 1, 1))
    assert_conforms(ON_HOST[0].run, make_problem(q, k, v, mask=mask))


def test_gradients_of_huge_scores_are_finite():
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 70, 8, generator=generator) for _ in range(3))
    q = q * 1e12
    given = [x.requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(sightline.attention(*given).sum(), given)
    assert all(torch.isfinite(x).all() for x in found)
    assert round(found[2].sum().item()) == 2 * 70 * 8  # the weights of every query sum to 1


SMALL_STACK = """
import threading, numpy as np, sightline
from sightline import attention, i, j, s, table
x, long, bias = np.ones((1, 2, 70, 256)), np.ones((1, 2, 600, 256)), table(np.ones((70, 70)))[i, j]
def call():
    attention(x, x, x, mask=i >= j, score=s + bias, see=[sightline.entropy(), sightline.mass(bias > 0)])
    attention(x, x, x, see=[sightline.received(), sightline.top_k(256), sightline.pooled(3, 3)])
    attention(x[:, :, :1], long, long)
    sightline.attention_vjp(x, x, x)[2](x)
    print(sightline.attention_tangent(x, x, x, {"query": x})[0].shape)
threading.stack_size(2**17)
thread = threading.Thread(target=call); thread.start(); thread.join()
"""


def test_every_kernel_runs_on_a_small_stack():
    """A kernel with its scratch on a stack of 128 KiB, that of threads of musl, once ended the process."""
    found = subprocess.run([sys.executable, "-c", SMALL_STACK], capture_output=True, text=True, check=False)
    assert found.stdout == "(1, 2, 70, 256)\n", found.stderr
