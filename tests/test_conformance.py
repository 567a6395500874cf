"""Every kernel conforms to the float64 definition on drawn problems, within the budget of `reference.testing`."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings

import jax_kernel
from sample_problems import arrays, serves
from sightline import alibi, bias, causal, dense, documents, i, j, lse, padding, s, softcap, weights, window
from sightline.call.problem import make_problem
from sightline.reference import testing
from sightline.reference.testing import assert_conforms, with_guards
from strategies import DTYPES, LAYOUTS, ON_HOST, Case, cases

pytestmark = pytest.mark.sampled(one_in=5)

TILED = [kernel for kernel in ON_HOST if kernel.name != "reference"]
CPU = next(kernel for kernel in ON_HOST if kernel.name == "cpu")
# drawn problems for each dtype; every one of "cpu" and JAX compiles
EXAMPLES = {"cpu": 5, "streaming": 20, "reference": 10, "jax": 3}
TIMES = pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.soak)])  # as many in the soak
GUARDED = {"cpu": 4}  # the same, for kernels without bounds checks


def each(*frameworks):
    """Parametrize a test with every kernel, every dtype that it supports, and each framework."""
    return pytest.mark.parametrize(
        ("kernel", "dtype", "framework"),
        [
            pytest.param(kernel, dtype, framework, id=f"{kernel.name}-{dtype}-{framework}")
            for kernel in ON_HOST
            for dtype in DTYPES
            for framework in frameworks
            if serves(kernel, dtype)
        ],
    )


def check(kernel, case, framework="numpy"):
    run = jax_kernel.RUNS.get(framework, kernel.run)
    if framework == "torch":
        case = case.as_torch()
    if framework in jax_kernel.RUNS:
        case = Case(*map(np.ascontiguousarray, case.arrays), case.options)  # as JAX stores arrays
    assert_conforms(run, case.make_problem(see=[lse(), weights()]))


@pytest.fixture
def every_kernel(monkeypatch):
    """A check of all kernels that work by tiles, with one computation of the expected values.

    The weights are checked only in float32: they need another kernel, which `test_drawn_problems` compiles for every
    dtype.
    """
    for name in ("compute_stages", "compute_baseline"):
        monkeypatch.setattr(testing, name, cache(getattr(testing, name)))

    def check_all(case, dtype):
        problem = case.make_problem(see=[lse(), weights()] if dtype == "float32" else [lse()])
        for kernel in TILED:
            assert_conforms(kernel.run, problem)

    return check_all


def drawn(kernel, dtype, framework, examples, **options):
    """Check so many drawn problems."""
    options |= {"dropout": serves(kernel, dtype, dropout=0.5, seed=0), "dtypes": (dtype,)}

    @settings(max_examples=examples)
    @given(cases(**options))
    def conforms(case):
        check(kernel, case, framework)

    conforms()


@TIMES
@each("numpy", "torch")
def test_drawn_problems(kernel, dtype, framework, times):
    examples = EXAMPLES.get(kernel.name, 250) // (2 if framework == "torch" and times == 1 else 1)
    drawn(kernel, dtype, framework, times * examples)


@TIMES
@pytest.mark.parametrize("framework", ["jax", "compiled jax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_problems_in_jax(dtype, framework, times):
    """The results have the bits of the CPU kernel's."""
    drawn(CPU, dtype, framework, times * EXAMPLES["jax"])


ODD = {
    "odd lengths": ({"shape": (1, 2, 300, 64), "m": 517}, {}),
    "causal, long": ({"shape": (1, 1, 1031, 32)}, {"mask": causal()}),
    "window, long": ({"shape": (2, 1, 700, 16)}, {"mask": window(100, 3)}),
    "wide heads": ({"shape": (1, 2, 130, 128), "m": 67}, {"mask": causal("lower right")}),
    "latent heads": ({"shape": (1, 4, 33, 576), "groups": 1, "d_v": 512, "m": 201}, {}),
    "decoding": ({"shape": (2, 8, 1, 64), "groups": 2, "m": 4097}, {"mask": padding([4097, 1300])}),
    "one key": ({"shape": (1, 3, 259, 40), "m": 1}, {}),
    "packed": ({"shape": (1, 2, 600, 24)}, {"mask": documents(lengths=[1, 63, 65, 0, 471]) & causal()}),
    "capped, biased": ({"shape": (1, 3, 257, 48), "m": 130}, {"score": softcap(20.0), "mask": (i + j) % 3 != 0}),
    "alibi": ({"shape": (1, 5, 140, 80)}, {"score": alibi(5), "mask": i >= j}),
    "tables by pair": (
        {"shape": (2, 2, 130, 24), "m": 201},
        {
            "mask": dense(np.random.default_rng(1).random((2, 1, 130, 201)) < 0.7),
            "score": bias(np.random.default_rng(2).normal(size=(2, 130, 201)).astype(np.float32)),
        },
    ),
    "large scores": ({"shape": (1, 2, 90, 64)}, {"scale": 2.0, "score": s * 4}),
}


def odd_cases():
    """Return each dtype with each odd problem. Outside of the soak, each dtype has every fourth problem."""
    pairs = [(d + k, dtype, name) for d, dtype in enumerate(DTYPES) for k, name in enumerate(ODD)]
    return [pytest.param(dtype, name, marks=[pytest.mark.soak] if place % 4 else []) for place, dtype, name in pairs]


@pytest.mark.parametrize(("dtype", "name"), odd_cases())
def test_odd_sizes(dtype, name, every_kernel):
    shapes, options = ODD[name]
    every_kernel(Case(*arrays(dtype=dtype, **shapes), options), dtype)


@pytest.fixture
def guards(monkeypatch):
    """NumPy's new arrays are NaN and lie between guard bytes; the fixture checks every guard at the end."""
    checks = []

    def empty(shape, dtype=float, **_):
        array, unharmed = with_guards(np.full(shape, -1).astype(np.int8).astype(dtype))
        np.atleast_1d(array).view(np.uint8)[...] = 0xFF
        checks.append(unharmed)
        return array

    monkeypatch.setattr(np, "empty", empty)
    yield checks
    for unharmed in checks:
        unharmed()


@each("numpy")
def test_no_byte_outside_an_array_is_read_or_written(kernel, dtype, framework, guards):
    options = {"dtypes": (dtype,), "dropout": False, "poison": False, "layouts": ("contiguous",)}

    @settings(max_examples=GUARDED.get(kernel.name, 8))
    @given(cases(**options))
    def conforms(case):
        guarded = [with_guards(x) for x in case.arrays]
        check(kernel, Case(*(array for array, _ in guarded), case.options))
        for _, unharmed in guarded:
            unharmed()

    conforms()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype, layout, every_kernel):
    x = [LAYOUTS[layout](array) for array in arrays((2, 4, 70, 24), dtype, d_v=20, groups=2, m=75)]
    every_kernel(Case(*x, {"mask": causal()}), dtype)


@each("numpy")
def test_equal_bits_in_every_call_and_for_any_number_of_threads(kernel, dtype, framework):
    problem = make_problem(*arrays((2, 3, 333, 32), dtype, m=400), mask=causal("lower right"), see=[lse()])
    first = kernel.run(replace(problem, threads=1))
    for threads in (1, 2, 3, None):
        again = kernel.run(replace(problem, threads=threads))
        assert np.array_equal(again.output, first.output)
        assert np.array_equal(again.lse, first.lse)
