"""Attention in operations of JAX: the results of the other kernels, and derivatives of every order."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import sightline
from fault_planting import Fault, plant
from jax_kernel import enable_x64
from sample_calls import draw_inputs
from sightline import h, i, j, s, table
from sightline.call.kernel import Result
from sightline.call.problem import make_problem
from sightline.errors import DtypeError
from sightline.jax import array_operations, dispatch
from sightline.reference.testing import assert_conforms
from strategies import cases

pytestmark = pytest.mark.wide

B, H, N, D = 2, 3, 9, 8
STATISTICS = {
    "entropy": sightline.entropy(),
    "mass": sightline.mass(j < 4),
    "sum": sightline.sum(sightline.p * s * abs(i - j), over=j),
    "lse": sightline.lse(),
    "max_score": sightline.max_score(),
    "top_k": sightline.top_k(3),
    "more than m": sightline.top_k(12),
    "received": sightline.received(),
    "mean received": sightline.received("mean"),
    "most received": sightline.received("max"),
    "the last queries": sightline.received(last=3),
    "pooled": sightline.pooled(3, 2),
    "most pooled": sightline.pooled(3, 2, "max"),
    "a cell for each pair": sightline.pooled(64, 64),
    "a part pooled": sightline.pooled(2, 2, within=((1, 8), (2, 7))),
    "weights": sightline.weights(),
    "scores": sightline.scores(),
    "a mean": sightline.entropy().mean("heads"),
    "weighted heads": sightline.weights().sum("heads", weights=[0.5, -2.0, 0.0]),
    "a mean of matrices": sightline.weights().mean("heads").mean("batch"),
}


@pytest.fixture
def operands(rng):
    return [jnp.asarray(rng.normal(size=(B, H, N, D)), jnp.float32) for _ in range(3)]


@pytest.fixture
def by_operations(monkeypatch):
    """Return `sightline.attention` with JAX's operations in place of the kernels, in blocks of four queries."""
    monkeypatch.setattr(array_operations, "BLOCK_ELEMENTS", 4 * B * H * N)

    def attention(*given, **options):
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "bind_attention", array_operations.compute)
            return sightline.attention(*given, **options)

    return attention


def assert_close(found, expected, tolerance=2e-5):
    """Compare every array of two results."""
    found, expected = (jax.tree.leaves(jax.tree.map(np.asarray, answer)) for answer in (found, expected))
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance)


# -- results -----------------------------------------------------------------------------------------------------------


NUMBERS = np.array([0.0, -2.5, math.pi, 1e30, -1e-30, math.inf, 7.0, 1.0, 3.0])
OPTIONS = {
    "statistics": {"mask": i >= j, "see": list(STATISTICS.values())},
    "the same weights dropped": {"dropout": 0.4, "seed": 2**63 + 12345},
    "wide numbers of NumPy": {
        "mask": table(NUMBERS)[i] * table(np.arange(N))[j] > -3,
        "score": s + table(NUMBERS.clip(-9, 9))[j],
    },
}


@pytest.mark.parametrize("name", ["documents", "bias that hides", "sinks", "cap", "mass and means", *OPTIONS])
def test_results(rng, name, operands, by_operations):
    options = OPTIONS.get(name) or draw_inputs(rng, name, B, H, N, N, jnp.asarray)
    assert_close(jax.jit(partial(by_operations, **options))(*operands), sightline.attention(*operands, **options))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drawn_problems(dtype, by_operations):
    """Output and lse are within the error budget that every kernel has; hidden NaN and ∞ are among the values."""

    def run(problem):
        given = [jnp.asarray(x) for x in (problem.query, problem.key, problem.value)]
        options = {name: getattr(problem, name) for name in ("mask", "score", "sinks", "scale")}
        output, (lse,) = by_operations(*given, **options, see=[sightline.lse()])
        return Result(np.asarray(output), np.asarray(lse))

    @settings(max_examples=4)
    @given(cases(dtypes=(dtype,), dropout=False))
    def conforms(case):
        assert_conforms(run, make_problem(*case.arrays, **case.options))

    conforms()


def test_whole_numbers_beyond_32_bits_are_exact_or_an_error(operands, by_operations):
    """The numbers of `large` have the same low word, so the documents would be one if the other word were lost."""
    small = np.arange(N) // 3 - 1
    large = small * 2**40

    def attend(query, numbers):
        return jnp.sum(sightline.attention(query, *operands[1:], mask=table(numbers)[i] == table(numbers)[j]))

    first = jax.grad(attend)(operands[0], small)
    assert np.array_equal(jax.grad(attend)(operands[0], large), first)
    twice = jax.grad(lambda query, numbers: jnp.sum(jax.grad(attend)(query, numbers) ** 2))
    assert_close(twice(operands[0], small), twice(operands[0], jnp.asarray(small)))
    with enable_x64(False), pytest.raises(DtypeError, match="entries of more than 32 bits"):
        twice(operands[0], large)
    with enable_x64(False), pytest.raises(DtypeError, match="entries of more than 32 bits"):
        by_operations(*operands, mask=table(large)[i] == table(large)[j])


# -- derivatives -------------------------------------------------------------------------------------------------------


def define(q, k, v, bias, sinks):
    """Return causal attention with a bias and sinks, its lse and the entropy."""
    scores = q @ jnp.matrix_transpose(k) / math.sqrt(D) + bias
    scores = jnp.where(jnp.tril(jnp.ones((N, N), bool)), scores, -jnp.inf)
    column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
    lse = jax.nn.logsumexp(jnp.concatenate([scores, column], -1), axis=-1)
    weights = jnp.exp(scores - lse[..., None])
    return weights @ v, lse, jnp.sum(-weights * jnp.log(jnp.where(weights > 0, weights, 1)), axis=-1)


def attend(q, k, v, bias, sinks):
    see = [sightline.lse(), sightline.entropy()]
    score = s + table(bias)[h, i, j]
    output, (lse, entropies) = sightline.attention(q, k, v, mask=i >= j, score=score, sinks=sinks, see=see)
    return output, lse, entropies


def loss(function):
    """Return a function of the same arguments whose derivatives of every order depend on all results."""
    return lambda *given: sum(jnp.sum(jnp.sin(x) * (k + 1)) for k, x in enumerate(function(*given)))


DERIVATIVES = {
    "jvp under jit": lambda f, x, t: jax.jit(partial(jax.jvp, f))(x, t),
    "linearize": lambda f, x, t: jax.linearize(f, *x)[1](*t),
    "jacfwd": lambda f, x, t: jax.jacfwd(lambda k: f(x[0], k, *x[2:])[0][0, 0, 3])(x[1]),
    "vmap of jvp": lambda f, x, t: jax.vmap(lambda d: jax.jvp(lambda v: f(*x[:2], v, *x[3:]), x[2:3], (d,)))(
        jnp.stack([t[2], 2 * t[2]])
    ),
    "grad of grad": lambda f, x, t: jax.grad(lambda q: jnp.sum(jax.grad(lambda q: loss(f)(q, *x[1:]))(q) * t[0]))(x[0]),
    "jvp of grad": lambda f, x, t: jax.jvp(jax.grad(loss(f), argnums=(0, 1, 2, 3, 4)), x, t)[1],
    "grad of jvp": lambda f, x, t: jax.grad(lambda *x: jnp.sum(jax.jvp(f, x, t)[1][0] ** 2), argnums=(0, 1, 2, 3, 4))(
        *x
    ),
    "jvp of jvp": lambda f, x, t: jax.jvp(lambda *x: jax.jvp(f, x, t)[1], x, t)[1],
}


RARER = "linearize", "jacfwd", "jvp of jvp", "vmap of jvp", "jvp of grad"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name in RARER else []) for name in DERIVATIVES]
)
def test_derivatives(rng, name, operands):
    """The definition is differentiated by JAX in the same way."""
    primals = *operands, *[jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((H, N, N), (H,))]
    directions = tuple(jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in primals)
    derive = DERIVATIVES[name]
    with jax.numpy_rank_promotion("allow"):
        expected = derive(define, primals, directions)
    assert_close(derive(attend, primals, directions), expected, 2e-4)


def test_hidden_values_reach_no_derivative(operands):
    """NaN and ∞ in keys and values that no query sees change neither tangents nor second derivatives.

    The tangent kernel refuses these keys, so streaming computes their tangents, with other roundings.
    """
    q, k, v = operands

    def second(k, v):
        f = partial(sightline.attention, mask=j < N - 2)
        return jax.jvp(jax.grad(lambda q: jnp.sum(f(q, k, v) ** 2)), (q,), (q,))[1], jax.jvp(
            lambda q: f(q, k, v), (q,), (q,)
        )

    k_hidden, v_hidden = k.at[:, :, -1].set(jnp.nan), v.at[:, :, -2].set(jnp.inf)
    assert_close(second(k_hidden, v_hidden), second(k, v))


def test_the_gradient_of_the_operations_is_that_of_the_kernel(operands, by_operations):
    see = [sightline.received("max"), sightline.pooled(2, 2), sightline.max_score(), sightline.mass(j > 3)]

    def differentiate(attention):
        def function(*x):
            output, (received, pooled, largest, mass) = attention(*x, mask=i >= j, see=see)
            return sum(jnp.sum(jnp.sin(x)) for x in (output, received, pooled, largest.score, mass))

        return jax.jit(jax.grad(function, argnums=(0, 1, 2)))(*operands)

    assert_close(differentiate(by_operations), differentiate(sightline.attention))


def test_memory_does_not_grow_with_the_product_of_lengths():
    """The temporary memory of a second derivative, as XLA plans it, is below a quarter of one n × n matrix."""
    length = 16384
    x = jax.ShapeDtypeStruct((1, 1, length, 8), "float32")
    function = jax.jit(
        lambda q, k, v: jax.jvp(jax.grad(lambda q: jnp.sum(sightline.attention(q, k, v) ** 2)), (q,), (q,))
    )
    memory = function.lower(x, x, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * length * length / 4


FAULTS = {
    "queries past the end": (
        Fault(array_operations._Blocks.compute, "jnp.where(i < problem.n, weights, 0)", "weights"),
        "received",
    ),
    "a mean that is a sum": (
        Fault(array_operations._join_blocks, "of.divide(joined[0], problem.n, problem.m)", "joined[0]"),
        "mean received",
    ),
    "a cell too far": (Fault(array_operations._Blocks.pool, "at - start", "at + 1 - start"), "pooled"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(fault, operands, monkeypatch):
    planted, statistic = FAULTS[fault]
    plant(planted, monkeypatch)
    monkeypatch.setattr(array_operations, "BLOCK_ELEMENTS", 4 * B * H * N)
    options = {"see": [STATISTICS[statistic]]}
    expected = sightline.attention(*operands, **options)
    monkeypatch.setattr(dispatch, "bind_attention", array_operations.compute)
    with pytest.raises(AssertionError, match="tolerance"):
        assert_close(sightline.attention(*operands, **options), expected)
