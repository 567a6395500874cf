"""The CPU kernel as a program of JAX calls it."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

import sightline
from sightline.call.kernel import Result
from sightline.cpu import Cpu

if hasattr(jax, "enable_x64"):
    enable_x64 = jax.enable_x64
else:
    from jax.experimental import enable_x64  # its place in JAX 0.7


def run_eager(problem):
    """Run a problem of NumPy arrays outside of `jit`. The tables of its formulas stay arrays of NumPy."""
    wide = enable_x64(True) if problem.dtype == "float64" else contextlib.nullcontext()
    with wide:
        arrays = [jnp.asarray(x) for x in (problem.query, problem.key, problem.value)]
        return check_bits(problem, attend(problem, *arrays))


def run_jit(problem):
    """Run a problem of NumPy arrays as a compiled program. Every array is an argument of the program, tables too."""
    tables = [table.array for table in problem.tables]

    @jax.jit
    def program(query, key, value, tables):
        return attend(problem.with_tables(tables), query, key, value)

    with enable_x64(True):  # else tables of float64 were rounded
        return check_bits(problem, program(problem.query, problem.key, problem.value, tables))


def attend(problem, query, key, value):
    """Return (output, seen) of `sightline.attention` for JAX arrays and the other arguments of a problem."""
    names = ("mask", "score", "scale", "dropout", "seed", "see")
    sinks = None if problem.sinks is None else jnp.asarray(problem.sinks)
    options = {name: getattr(problem, name) for name in names}
    return sightline.attention(query, key, value, sinks=sinks, kernel="cpu", **options)


def check_bits(problem, answer):
    """Return the answer, whose first statistic is lse, as a result. It must have the bits of the kernel's result."""
    output, seen = jax.tree.map(np.asarray, answer)
    expected = Cpu().run(problem)
    for x, right in zip((output, *seen), (expected.output, *expected.seen), strict=True):
        assert x.shape == right.shape, f"the shape {x.shape} is not {right.shape}"
        assert x.dtype == right.dtype
        assert np.array_equal(x, right, equal_nan=True), "the result does not have the bits of NumPy's"
    return Result(output, seen[0], seen)


RUNS = {"jax": run_eager, "compiled jax": run_jit}


def assert_close(found, expected):
    for x, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, right, rtol=2e-5, atol=2e-5, strict=True)
