"""`sightline.jax.dot_product_attention` agrees with the float64 definition and with JAX's function."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradient_checks
import sightline
from jax_kernel import assert_close
from sightline import b, h, i, j, s, table
from sightline.call.kernel import Gradients, Result
from sightline.errors import DtypeError, FormulaError, MaskError, ParameterError, ShapeError, SightlineError
from sightline.jax import dot_product_attention
from sightline.reference.testing import assert_conforms
from strategies import Case

B, T, S, N, K, H = 2, 13, 19, 6, 3, 8
RNG = np.random.default_rng(5)
MASK = RNG.random((B, N, T, S)) < 0.6
MASK[..., :2] = True  # every query attends to something: JAX gives another answer to a query without keys
BIAS = RNG.normal(size=(B, N, T, S)).astype(np.float32)
ROW, COLUMN = np.arange(T)[:, None], np.arange(S)
LENGTHS = np.array([7, 12], np.int32)
BELOW = COLUMN <= ROW
BEFORE = LENGTHS[:, None, None, None] > COLUMN

# the arguments, the mask that they mean, and the bias
CASES = {
    "nothing": ({}, None, None),
    "scale": ({"scale": 0.7}, None, None),
    "causal": ({"is_causal": True}, BELOW, None),
    "a mask": ({"mask": MASK}, MASK, None),
    "a mask of one head": ({"mask": MASK[:, :1]}, MASK[:, :1], None),
    "a mask of one sequence": ({"mask": MASK[1]}, MASK[1], None),
    "a mask of keys": ({"mask": MASK[:, :1, :1]}, MASK[:, :1, :1], None),
    "a bias": ({"bias": BIAS}, None, BIAS),
    "a bias of heads": ({"bias": BIAS[:1, :, :1, :1]}, None, BIAS[:1, :, :1, :1]),
    "a bias of queries and keys": ({"bias": BIAS[0, 0], "is_causal": True}, BELOW, BIAS[0, 0]),
    "lengths of keys": ({"key_value_seq_lengths": LENGTHS}, BEFORE, None),
    "a window": ({"local_window_size": 4}, abs(ROW - COLUMN) <= 4, None),
    "two windows": ({"local_window_size": (5, 2)}, (ROW - COLUMN <= 5) & (COLUMN - ROW <= 2), None),
    "everything": (
        {
            "bias": BIAS,
            "mask": MASK,
            "is_causal": True,
            "key_value_seq_lengths": LENGTHS,
            "local_window_size": (12, 3),
            "scale": -0.4,
        },
        MASK & BELOW & BEFORE & (ROW - COLUMN <= 12),
        BIAS,
    ),
}
WITH_GRADIENTS = ["a bias of heads", "everything"]


theirs = jax.jit(
    jax.nn.dot_product_attention, static_argnames=("scale", "is_causal", "local_window_size", "return_residual")
)


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def as_case(operands, name):
    """Return the call as the dense definition reads it, with heads before positions."""
    given, mask, bias = CASES[name]
    options = {"scale": given["scale"]} if "scale" in given else {}
    options |= {} if mask is None else {"mask": sightline.dense(mask)}
    options |= {} if bias is None else {"score": sightline.bias(bias)}
    return Case(*(np.ascontiguousarray(x.swapaxes(1, 2)) for x in operands), options)


def by_position(*arrays):
    return [jnp.asarray(x).swapaxes(-3, -2) for x in arrays]


# -- the definition ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", CASES)
def test_results_conform_to_the_definition(operands, name):
    def run(problem):
        given = by_position(problem.query, problem.key, problem.value)
        output, lse = dot_product_attention(*given, **CASES[name][0], return_residual=True)
        return Result(np.asarray(output.swapaxes(1, 2)), np.asarray(lse.swapaxes(1, 2)))

    assert_conforms(run, as_case(operands, name).make_problem())


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_conform_to_the_definition(operands, name, monkeypatch):
    def differentiate(problem, d_output, *_):
        options, bias = CASES[name][0], CASES[name][2]

        def loss(query, key, value, bias):
            output = dot_product_attention(query, key, value, **(options | bias))
            return (output * d_output.swapaxes(1, 2)).sum()

        given = *by_position(problem.query, problem.key, problem.value), {} if bias is None else {"bias": bias}
        *found, of_bias = jax.jit(jax.grad(loss, range(4)))(*given)
        tables = [np.asarray(of_bias["bias"]) if table.kind == "float" else None for table in problem.tables]
        return Gradients(*(np.asarray(x.swapaxes(1, 2)) for x in found), sinks=None, tables=tuple(tables))

    seeds_of = gradient_checks.seeds_of  # lse has no gradient here
    without_lse = lambda problem: [[x, 0 * y, z] for x, y, z in seeds_of(problem)]  # noqa: E731
    monkeypatch.setattr(gradient_checks, "seeds_of", without_lse)
    gradient_checks.check(as_case(operands, name), differentiate=differentiate)


# -- JAX's function ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nothing", "two windows", "everything"])
def test_results_are_those_of_jax(operands, name):
    options = CASES[name][0] | {"return_residual": True}
    expected = theirs(*operands, **options)
    assert_close(dot_product_attention(*operands, **options), expected)


@pytest.mark.parametrize("name", ["a mask", "everything"])
def test_gradients_under_transformations_are_those_of_jax(operands, name):
    """The function is mapped over pairs of problems, compiled and differentiated; and called without a batch axis."""
    options = {key: jnp.asarray(x) if isinstance(x, np.ndarray) else x for key, x in CASES[name][0].items()}
    traced = {key: x for key, x in options.items() if isinstance(x, jax.Array)}

    def loss(function, operands, bias, traced):
        output = function(*operands, **(options | traced | bias))
        return (output * jnp.sin(jnp.arange(output.size)).reshape(output.shape)).sum()

    bias = {"bias": traced.pop("bias")} if "bias" in traced else {}
    given = *(jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), tree) for tree in (tuple(operands), bias)), traced
    found, expected = (
        jax.jit(jax.vmap(jax.grad(partial(loss, function), (0, 1)), (0, 0, None)))(*given)
        for function in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert_close(found, expected)


def test_arrays_without_a_batch_axis(operands):
    query, key, value = (x[0] for x in operands)
    options = {"mask": MASK[0], "bias": BIAS[0], "is_causal": True, "key_value_seq_lengths": LENGTHS[:1]}
    for more in ({}, options):
        arguments = query, key, value
        expected = theirs(*arguments, **more, return_residual=True)
        assert_close(dot_product_attention(*arguments, **more, return_residual=True), expected)
    assert_close(dot_product_attention(query, key[None], value[None]), dot_product_attention(query, key, value))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(operands, dtype):
    arrays = [jnp.asarray(x, dtype) for x in operands]
    output, lse = dot_product_attention(*arrays, is_causal=True, return_residual=True)
    by_head = [np.asarray(x.swapaxes(1, 2)) for x in arrays]
    expected, (of_scores,) = sightline.attention(*by_head, mask=i >= j, see=[sightline.lse()])
    assert output.dtype == lse.dtype == dtype
    assert np.array_equal(output.swapaxes(1, 2), expected)
    assert np.array_equal(lse.swapaxes(1, 2), of_scores.astype(dtype))


def test_lse_has_no_gradient(operands):
    for function in (dot_product_attention, theirs):
        of_lse = jax.grad(lambda query, own=function: own(query, *operands[1:], return_residual=True)[1].sum())
        assert not of_lse(operands[0]).any()


def test_a_traced_scale_has_its_gradient(operands):
    found, expected = (
        jax.jit(jax.grad(lambda scale, own=function: (own(*operands, scale=scale) ** 2).sum()))(0.4)
        for function in (dot_product_attention, jax.nn.dot_product_attention)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("implementation", [None, "xla", "cudnn"])
def test_every_implementation_is_the_same_kernel(operands, implementation):
    found = dot_product_attention(*operands, implementation=implementation)
    assert np.array_equal(found, dot_product_attention(*operands))


# -- where the two differ ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_checks")
def test_a_query_without_keys_is_0_here_and_a_mean_in_jax(operands):
    mask = np.ones((B, N, T, S), bool)
    mask[0, :, 3] = False
    found, lse = dot_product_attention(*operands, mask=mask, return_residual=True)
    expected = theirs(*operands, mask=mask)
    assert not found[0, 3].any()
    assert (lse[0, 3] == -jnp.inf).all()
    mean = operands[2][0].mean(0).repeat(N // K, axis=0)
    np.testing.assert_allclose(expected[0, 3], mean, rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda query: dot_product_attention(query, *operands[1:], mask=mask).sum())(operands[0])
    assert not gradient[0, 3].any()
    assert jnp.isfinite(gradient).all()


def test_queries_past_their_length_are_0_as_in_jax(operands):
    options = {"query_seq_lengths": jnp.int32([5, 13]), "key_value_seq_lengths": jnp.int32([19, 3])}
    found = jax.jit(partial(dot_product_attention))(*operands, **options)
    assert_close(found, theirs(*operands, **options))
    assert not found[0, 5:].any()


def test_values_of_another_width(operands):
    query, key, value = operands
    expected = dot_product_attention(query, key, value)[..., :3]
    assert_close(dot_product_attention(query, key, value[..., :3]), expected)


def test_formulas_stand_where_arrays_may(operands):
    slopes = jnp.linspace(0.1, 1, N)
    formula = dot_product_attention(
        *operands, mask=(i >= j) & (j < table(LENGTHS)[b]), bias=-table(slopes)[h] * abs(i - j)
    )
    bias = -np.asarray(slopes)[:, None, None] * abs(ROW - COLUMN)
    assert_close(formula, dot_product_attention(*operands, mask=BELOW & BEFORE, bias=bias))
    flex = dot_product_attention(*operands, mask=lambda b, h, i, j: i >= j, bias=lambda b, h, i, j: (i - j) * 0.5)
    assert_close(flex, dot_product_attention(*operands, is_causal=True, bias=(ROW - COLUMN) * 0.5))
    of_slopes = jax.grad(lambda x: dot_product_attention(*operands, bias=table(x)[h] * (i - j)).sum())(slopes)
    assert of_slopes.any()


# -- errors ------------------------------------------------------------------------------------------------------------

HOSTILE = {
    "another implementation": ({"implementation": "flash"}, ParameterError, "implementation='flash'"),
    "a mask of numbers": ({"mask": jnp.ones((T, S), "float32")}, MaskError, "mask is an array of float32"),
    "a mask with too many axes": ({"mask": MASK[None]}, ShapeError, "mask of shape"),
    "a mask of other keys": ({"mask": MASK[..., :-1]}, ShapeError, "mask of shape"),
    "a mask without heads": ({"mask": MASK[:, 0]}, ShapeError, r"mask\[:, None\] for \(batch, queries, keys\)"),
    "a mask of keys": ({"mask": MASK[:, 0, 0]}, ShapeError, r"mask\[:, None, None\] for \(batch, keys\)"),
    "a mask of key heads": ({"mask": MASK[:, :K]}, ShapeError, "mask of shape"),
    "a text as mask": ({"mask": "causal"}, DtypeError, "mask is a str"),
    "a number as mask": ({"mask": i - j}, MaskError, "which is a number"),
    "a bias of booleans": ({"bias": MASK}, ParameterError, "pass a condition as mask"),
    "a bias of other queries": ({"bias": BIAS[:, :, 1:]}, ShapeError, "bias of shape"),
    "a condition as bias": ({"bias": i >= j}, MaskError, "a condition"),
    "a bias that reads the score": ({"bias": s * 2}, FormulaError, "reads the score"),
    "lengths of another batch": ({"key_value_seq_lengths": np.ones(3, np.int32)}, ShapeError, "key_value_seq_lengths"),
    "lengths of floats": ({"query_seq_lengths": jnp.ones(B, "f4")}, ShapeError, r"float32\n(.|\n)*lengths.astype"),
    "one length": ({"query_seq_lengths": 3}, ShapeError, "query_seq_lengths of shape"),
    "a negative window": ({"local_window_size": (-1, 2)}, ParameterError, "local_window_size"),
    "three windows": ({"local_window_size": (1, 2, 3)}, ParameterError, "local_window_size"),
    "a window of floats": ({"local_window_size": 2.0}, ParameterError, "local_window_size"),
    "an infinite scale": ({"scale": np.inf}, ParameterError, "scale"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bad_arguments_are_errors(operands, name):
    options, error, message = HOSTILE[name]
    with pytest.raises(error, match=message):
        dot_product_attention(*operands, **options)


SHAPES = {
    "two axes": ((T, H), (S, H), (S, H)),
    "five axes": ((1, B, T, N, H), (1, B, S, K, H), (1, B, S, K, H)),
    "another width": ((B, T, N, H), (B, S, K, H + 1), (B, S, K, H)),
    "another batch": ((B, T, N, H), (1, S, K, H), (1, S, K, H)),
    "fewer values": ((B, T, N, H), (B, S, K, H), (B, S - 1, K, H)),
    "heads that do not divide": ((B, T, N, H), (B, S, 4, H), (B, S, 4, H)),
    "no key heads": ((B, T, N, H), (B, S, 0, H), (B, S, 0, H)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_bad_shapes_are_errors(name):
    with pytest.raises(ShapeError, match="query"):
        dot_product_attention(*map(jnp.zeros, SHAPES[name]))


@pytest.mark.parametrize("shape", [(0, T, N, H), (B, 0, N, H)], ids=str)
def test_empty_arrays(shape):
    query, key = jnp.ones(shape), jnp.ones((shape[0], S, K, H))
    assert dot_product_attention(query, key, key, is_causal=True).shape == shape


def test_other_objects_are_errors(operands):
    query, key, value = operands
    with pytest.raises(DtypeError, match="value is a str"):
        dot_product_attention(query, key, "value")
    with pytest.raises(SightlineError, match="dtype"):
        dot_product_attention(query, key.astype(np.float16), value)
    with pytest.raises(SightlineError, match="int32"):
        dot_product_attention(*(x.astype(np.int32) for x in operands))


@pytest.mark.parametrize("derive", ["forward", "backward", "forward derivative"])
def test_a_program_copies_no_array(derive):
    """The custom call reads and writes the arrays where they are, without a transpose."""
    x = jnp.ones((2, 20, 4, 8))
    function = {
        "forward": dot_product_attention,
        "backward": jax.grad(lambda *given: jnp.sum(dot_product_attention(*given) ** 2), argnums=(0, 1, 2)),
        "forward derivative": lambda q, k, v: jax.jvp(dot_product_attention, (q, k, v), (k, v, q)),
    }[derive]
    text = jax.jit(function).lower(x, x, x).compile().as_text()
    assert "sightline_attention" in text
    assert " transpose(" not in text
    assert " copy(" not in text
