"""Parts of generated kernels: elementary functions, numbers of threads, head widths, tables with large strides."""

import math

import numpy as np
import pytest

import sightline
from elementary_functions import LANES, PROMISED, applied, check_promise, ulps
from sightline import h, i, j, s
from sightline.call.problem import make_problem
from sightline.cpu import Cpu
from sightline.cpu.codegen import math as codegen_math
from sightline.cpu.codegen.render_llvm import LLVM_RULES
from sightline.cpu.runtime.machine import host
from sightline.formula.operators import OPERATORS
from sightline.reference.testing import assert_conforms


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", PROMISED)
def test_elementary_functions_keep_their_promise(name, dtype):
    check_promise(name, dtype)


@pytest.mark.skipif(not host().has_scalef, reason="no AVX-512")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_powers_by_scaling_equal_powers_by_bits(dtype):
    """Both functions use the same polynomial, so the results are equal wherever they are normal numbers."""
    x = -np.geomspace(1e-30, 1000 if dtype == np.float64 else 120, 512).astype(dtype)
    x[:6] = 0, -1, -0.5, -np.inf, np.nan, -126.0
    by_bits = applied(codegen_math.exp2_of_negative, x)
    by_scaling = applied(codegen_math.exp2_by_scaling, x, lanes=64 // x.itemsize)
    assert ulps(by_scaling, np.exp2(x.astype(np.longdouble))) <= PROMISED["exp2_of_negative"]
    np.testing.assert_array_equal(by_scaling[by_bits > 0], by_bits[by_bits > 0])


def test_every_operator_has_a_rule():
    assert set(LLVM_RULES) == set(OPERATORS)


def test_hidden_scores_have_weight_exactly_0():
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
    with pytest.raises(sightline.errors.KernelRefusedError, match="widths up to 1024"):
        sightline.attention(x, x, x, kernel="cpu")
    assert math.isfinite(sightline.attention(x, x, x).sum())


def test_tables_with_strides_beyond_32_bits_are_read_in_place():
    """The entries of the table are 2 GiB apart. Pages of a new mapping that are never touched use no memory."""
    spread = np.zeros(3 << 28, np.float64)[:: 1 << 28]
    spread[:] = [0.0, 5.0, -5.0]
    q, k, v = arrays(n=3, m=3)
    score = s + sightline.table(spread)[j]
    assert_conforms(Cpu().run, make_problem(q, k, v, score=score))


def test_quotients_of_vectors_are_those_of_integers():
    """They are divided as float64: 2⁵³ − 1 is the largest integer, and no vector of integers is divided."""
    top = 2**53 - 1
    wide = np.array([[top, -top, top - 1, 1 - top, top // 2, 12345678901234, -7, 7, 0, 5], [top, -top, *range(-4, 4)]])
    query = np.zeros((1, 1, 10, 4))
    for x, y in (wide, (wide[0] % 1001 - 500, wide[1] % 13 - 6)):  # 64 bits, then 32
        with np.errstate(divide="ignore"):
            quotients, remainders = (sightline.table(f(x[:, None], y))[i, j] for f in (np.floor_divide, np.remainder))
        dividend, divisor = sightline.table(x)[i], sightline.table(y)[j]
        options = {"mask": (dividend // divisor == quotients) & (dividend % divisor == remainders), "kernel": "cpu"}
        _, (weights,) = sightline.attention(query, query, query, see=[sightline.weights()], **options)
        assert (weights > 0).all()
        assert "= sdiv <" not in str(sightline.explain(query, query, query, source=True, **options))


def test_error_of_lse_does_not_grow_with_its_length(rng):
    """Keys repeated `times` times give a sum of weights `times` times as large, up to one rounding."""
    times = 1 << 12
    query, key = (rng.normal(size=(1, 1, length, 8)).astype(np.float32) for length in (40, 64))
    keys = np.tile(key, (1, 1, times, 1))
    once, often = (Cpu().run(make_problem(query, x, x)).lse for x in (key, keys))
    assert (abs(np.expm1(often - math.log(times) - once)) <= np.finfo(np.float32).eps / 2).all()
