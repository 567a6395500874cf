"""The generated kernel's own parts: elementary functions, threads, widths, tables far apart."""

import math

import numpy as np
import pytest

import sightline
from elementary_functions import LANES, PROMISED, applied, check_promise, ulps
from sightline import h, i, j, s
from sightline.cpu import Cpu
from sightline.cpu.codegen import math as codegen_math
from sightline.cpu.codegen.render import LLVM_RULES
from sightline.cpu.runtime.machine import host
from sightline.formula.operators import OPERATORS
from sightline.problem import make_problem
from sightline.testing import assert_conforms


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", PROMISED)
def test_elementary_functions_keep_their_promise(name, dtype):
    check_promise(name, dtype)


@pytest.mark.skipif(not host().has_scalef, reason="no AVX-512")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_powers_by_scaling_are_those_by_bits(dtype):
    """Whole vectors of 64 bytes: the same polynomial, so the same numbers wherever the result is normal."""
    x = -np.geomspace(1e-30, 1000 if dtype == np.float64 else 120, 512).astype(dtype)
    x[:6] = 0, -1, -0.5, -np.inf, np.nan, -126.0

    def in_vectors(builder, value):
        lanes = 64 // dtype(0).itemsize
        parts = [value.pick(range(k, k + lanes)) for k in range(0, LANES, lanes)]
        found = [codegen_math.exp2_by_scaling(builder, part) for part in parts]
        return found[0] if len(found) == 1 else found[0].beside(found[1])

    by_bits, by_scaling = applied(codegen_math.exp2_of_negative, x), applied(in_vectors, x)
    assert ulps(by_scaling, np.exp2(x.astype(np.longdouble))) <= PROMISED["exp2_of_negative"]
    np.testing.assert_array_equal(by_scaling[by_bits > 0], by_bits[by_bits > 0])


def test_every_operator_has_a_rule():
    assert set(LLVM_RULES) == set(OPERATORS)


def test_hidden_scores_weigh_exactly_nothing():
    x = np.full(LANES, -np.inf, np.float32)
    np.testing.assert_array_equal(applied(codegen_math.exp2_of_negative, x), np.zeros(LANES, np.float32))


PROBLEMS = {
    "full": {},
    "causal window": {"mask": (i >= j) & (i - j < 33)},
    "a score of whole numbers": {"score": (j - i) // 8},
    "a score of one number": {"score": 3},
    "soft cap": {"score": 5 * np.tanh(s / 5)},
    "slopes": {"score": s - sightline.table(sightline.alibi_slopes(4))[h] * abs(i - j), "mask": i + 3 >= j},
}


def arrays(dtype=np.float32, n=201, m=167):
    rng = np.random.default_rng(5)
    shapes = ((2, 4, n, 20), (2, 2, m, 20), (2, 2, m, 11))
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_any_number_of_threads_gives_the_same_bits(problem):
    q, k, v = arrays(n=1100)
    once = sightline.attention(q, k, v, kernel="cpu", threads=1, **PROBLEMS[problem])
    for threads in (2, 3, 7):
        again = sightline.attention(q, k, v, kernel="cpu", threads=threads, **PROBLEMS[problem])
        np.testing.assert_array_equal(again, once)


def test_widths_beyond_the_stack_are_refused():
    x = np.zeros((1, 1, 2, 4096), np.float32)
    with pytest.raises(sightline.errors.KernelRefusedError, match="stack"):
        sightline.attention(x, x, x, kernel="cpu")
    assert math.isfinite(sightline.attention(x, x, x).sum())


def test_tables_spread_beyond_32_bits_are_read_where_they_lie():
    """A view whose entries lie gigabytes apart: untouched pages of a fresh mapping cost nothing."""
    spread = np.zeros(3 << 28, np.float64)[:: 1 << 28]
    spread[:] = [0.0, 5.0, -5.0]
    q, k, v = arrays(n=3, m=3)
    score = s + sightline.table(spread)[j]
    assert_conforms(Cpu().run, make_problem(q, k, v, score=score))


def test_lse_does_not_lose_with_its_length(rng):
    """A tile of keys repeated: the sum of its weights so many times as large, but for what one rounding takes."""
    times = 1 << 12
    query, key = (rng.normal(size=(1, 1, length, 8)).astype(np.float32) for length in (40, 64))
    keys = np.tile(key, (1, 1, times, 1))
    once, often = (Cpu().run(make_problem(query, x, x)).lse for x in (key, keys))
    assert (abs(np.expm1(often - math.log(times) - once)) <= np.finfo(np.float32).eps / 2).all()
