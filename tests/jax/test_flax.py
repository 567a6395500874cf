"""`sightline.flax.dot_product_attention` in the layers of Linen and NNX gives what Flax's own function gives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import sightline
from jax_kernel import assert_close
from jax_training import VOCABULARY, WIDTH, assert_trains_alike, loss_of, make_task, train
from sightline import i, j
from sightline.errors import DtypeError, ParameterError, ShapeError
from sightline.flax import dot_product_attention

BATCH, LENGTH, HEADS, FEATURES = 3, 7, 2, 8
CAUSAL = np.tril(np.ones((LENGTH, LENGTH)))  # numbers, as Flax's functions of masks return


@pytest.fixture
def inputs():
    return jax.random.normal(jax.random.key(0), (BATCH, LENGTH, FEATURES))


def linen_layers(**options):
    """Return a layer with our function and the same layer with Flax's."""
    make = linen.MultiHeadDotProductAttention
    return make(HEADS, attention_fn=dot_product_attention, **options), make(HEADS, **options)


def nnx_layers(**options):
    options = {"num_heads": HEADS, "in_features": FEATURES, "decode": False, **options}
    ours = nnx.MultiHeadAttention(attention_fn=dot_product_attention, rngs=nnx.Rngs(0), **options)
    return ours, nnx.MultiHeadAttention(rngs=nnx.Rngs(0), **options)


# -- the function ------------------------------------------------------------------------------------------------------

SHAPES = {
    "no batch": ((7, 4, 8), (9, 4, 8), (4, 7, 9)),
    "two batch axes": ((2, 3, 7, 4, 8), (2, 3, 9, 4, 8), (3, 4, 7, 9)),
}


@pytest.mark.usefixtures("without_checks")
@pytest.mark.parametrize("name", SHAPES)
def test_results_are_those_of_flax(rng, name):
    query_shape, key_shape, scores_shape = SHAPES[name]
    query, key, value = (rng.normal(size=shape).astype(np.float32) for shape in (query_shape, key_shape, key_shape))
    mask, bias = rng.integers(0, 2, scores_shape), rng.normal(size=scores_shape).astype(np.float32)
    mask[..., 0] = 1  # every query attends to something: Flax gives another answer to a query without keys

    @partial(jax.jit, static_argnums=0)
    def differentiate(function, *given):
        return jax.value_and_grad(lambda *x: (function(*x, mask) ** 2).sum(), range(4))(*given)

    given = query, key, value, bias
    assert_close(differentiate(dot_product_attention, *given), differentiate(linen.dot_product_attention, *given))


def test_grouped_heads_and_is_causal_are_those_of_nnx(rng):
    query, key = (rng.normal(size=(2, 7, heads, 8)).astype(np.float32) for heads in (4, 2))
    found = dot_product_attention(query, key, key, is_causal=True)
    assert_close(found, nnx.dot_product_attention(query, key, key, is_causal=True))


@pytest.mark.sampled(one_in=3)
@pytest.mark.usefixtures("without_checks")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", None])
def test_dtypes_are_promoted_as_in_flax(rng, dtype):
    query, key, value = rng.normal(size=(3, 2, 7, 4, 8))
    given = jnp.asarray(query, jnp.bfloat16), jnp.asarray(key * 3, jnp.int32), jnp.asarray(value, jnp.float32)
    found = dot_product_attention(*given, dtype=dtype)
    assert found.dtype == linen.dot_product_attention(*given, dtype=dtype).dtype
    assert np.array_equal(found, dot_product_attention(*linen.dtypes.promote_dtype(*given, dtype=dtype)))


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)], ids=["typed", "raw"])
def test_dropout_is_that_of_a_seed_from_the_key(rng, key):
    query, keys, value = rng.normal(size=(3, 2, 7, 4, 8)).astype(np.float32)

    @partial(jax.jit, static_argnames=("rate", "deterministic"))
    def drop(key, rate, deterministic=False):
        options = {"dropout_rng": key, "dropout_rate": rate, "deterministic": deterministic}
        return dot_product_attention(query, keys, value, **options)

    by_head = [x.swapaxes(1, 2) for x in (query, keys, value)]
    expected = sightline.attention(*by_head, dropout=0.4, seed=int(jax.random.bits(key, (), "uint32")))
    assert np.array_equal(drop(key, 0.4).swapaxes(1, 2), expected)
    other = jax.random.split(key)[0]
    assert not np.array_equal(drop(other, 0.4), drop(key, 0.4))
    assert np.array_equal(drop(key, 0.4, deterministic=True), dot_product_attention(query, keys, value))
    assert np.array_equal(drop(key, 0.0), dot_product_attention(query, keys, value))


# -- the layers --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("options", [{}, {"mask": CAUSAL}, {"sow_weights": True}], ids=str)
def test_a_layer_of_linen(inputs, options):
    ours, theirs = linen_layers()
    variables = jax.jit(ours.init)(jax.random.key(1), inputs)
    found, expected = (
        jax.jit(partial(layer.apply, mutable=["intermediates"], **options))(variables, inputs)
        for layer in (ours, theirs)
    )
    assert_close(found, expected)
    assert bool(found[1]) == ("sow_weights" in options)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("options", [{}, {"mask": CAUSAL}, {"is_causal": True}, {"sow_weights": True}], ids=str)
def test_a_layer_of_nnx(inputs, options):
    apply = nnx.capture(lambda layer: layer(inputs, **options), nnx.Intermediate)
    found, expected = map(apply, nnx_layers())
    assert_close(found, expected)
    assert bool(found[1]) == ("sow_weights" in options)


@pytest.mark.sampled(one_in=3)
@pytest.mark.usefixtures("without_checks")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_softmax_in_float32_has_the_dtypes_of_flax(inputs, dtype):
    ours, theirs = linen_layers(dtype=dtype, force_fp32_for_softmax=True)
    variables = ours.init(jax.random.key(1), inputs)
    found, expected = (
        jax.tree.leaves(layer.apply(variables, inputs, sow_weights=True, mutable="intermediates"))
        for layer in (ours, theirs)
    )
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert np.any(found[1] != found[1].astype(dtype)) == (dtype != "float32")


def test_a_mask_may_be_a_formula(inputs):
    ours, theirs = linen_layers()
    variables = jax.jit(ours.init)(jax.random.key(1), inputs)
    window = np.tril(CAUSAL) - np.tril(CAUSAL, -3)
    found = jax.jit(lambda x: ours.apply(variables, x, mask=(i >= j) & (i - j < 3)))(inputs)
    assert_close(found, theirs.apply(variables, inputs, mask=window))
    ours, theirs = nnx_layers()
    assert_close(ours(inputs, mask=(i >= j) & (i - j < 3)), theirs(inputs, mask=window))


def test_the_cache_of_linen(inputs):
    results = []
    for layer in linen_layers(decode=True):
        variables = jax.jit(layer.init)(jax.random.key(1), inputs)
        step = jax.jit(lambda variables, x, layer=layer: layer.apply(variables, x, mutable=["cache"]))
        outputs = []
        for position in range(LENGTH):
            output, cache = step(variables, inputs[:, position : position + 1])
            variables = variables | cache
            outputs.append(output)
        results.append(jnp.concatenate(outputs, axis=1))
    assert_close(*results)
    whole, _ = linen_layers()
    assert_close(results[0], whole.apply({"params": variables["params"]}, inputs, mask=CAUSAL))


def test_the_cache_of_nnx(inputs):
    ours, theirs = nnx_layers()
    expected = theirs(inputs, is_causal=True)
    ours.init_cache(inputs.shape, dtype=inputs.dtype)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    found = [step(ours, inputs[:, position : position + 1]) for position in range(LENGTH)]
    assert_close(jnp.concatenate(found, axis=1), expected)


@pytest.mark.parametrize("library", ["Linen", "NNX"])
def test_layers_drop_weights_in_training_alone(inputs, library):
    if library == "Linen":
        layer, plain = linen_layers(dropout_rate=0.5)
        variables = layer.init(jax.random.key(1), inputs, deterministic=True)
        apply = lambda key, **mode: layer.apply(variables, inputs, rngs={"dropout": jax.random.key(key)}, **mode)  # noqa: E731
        expected = plain.apply(variables, inputs, deterministic=True)
    else:
        layer, plain = nnx_layers(dropout_rate=0.5)
        apply = lambda key, **mode: layer(inputs, rngs=nnx.Rngs(key), **mode)  # noqa: E731
        expected = plain(inputs, deterministic=True)
    assert_close(apply(5, deterministic=True), expected)
    assert np.array_equal(apply(5, deterministic=False), apply(5, deterministic=False))
    assert not np.array_equal(apply(5, deterministic=False), apply(6, deterministic=False))


# -- training ----------------------------------------------------------------------------------------------------------


class LinenModel(linen.Module):
    attention_fn: object

    @linen.compact
    def __call__(self, x, mask):
        x = linen.Dense(WIDTH)(x)
        x = x + linen.MultiHeadDotProductAttention(HEADS, attention_fn=self.attention_fn)(x, mask=mask)
        return linen.Dense(VOCABULARY)(x)


@pytest.mark.wide
def test_a_model_of_linen_trains_as_with_flax():
    inputs, targets = make_task()
    masks = {dot_product_attention: i >= j, linen.dot_product_attention: linen.make_causal_mask(targets)}
    losses = []
    for function, mask in masks.items():
        model = LinenModel(function)
        variables = jax.jit(partial(model.init, mask=mask))(jax.random.key(0), inputs)
        losses.append(train(lambda x, _, own=model, mask=mask: loss_of(own.apply(x, inputs, mask), targets), variables))
    assert_trains_alike(*losses)


class NnxModel(nnx.Module):
    def __init__(self, function):
        rngs = nnx.Rngs(0)
        options = {"num_heads": HEADS, "in_features": WIDTH, "decode": False, "attention_fn": function}
        self.first, self.last = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(**options, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        return self.last(x + self.attention(x, is_causal=True))


@pytest.mark.soak  # the model of Linen trains in the suite
def test_a_model_of_nnx_trains_as_with_flax():
    inputs, targets = make_task()
    losses = []
    for function in (dot_product_attention, nnx.dot_product_attention):
        graph, parameters, rest = nnx.split(NnxModel(function), nnx.Param, ...)
        loss = lambda x, _, graph=graph, rest=rest: loss_of(nnx.merge(graph, x, rest)(inputs), targets)  # noqa: E731
        losses.append(train(loss, parameters))
    assert_trains_alike(*losses)


# -- errors ------------------------------------------------------------------------------------------------------------

HOSTILE = {
    "dropout without a key": ({"dropout_rate": 0.1}, ParameterError, "no dropout_rng"),
    "a rate above 1": ({"dropout_rate": 1.5, "dropout_rng": jax.random.key(0)}, ParameterError, "dropout=1.5"),
    "an einsum": ({"qk_attn_weights_einsum": jnp.einsum}, ParameterError, "qk_attn_weights_einsum"),
    "another module": ({"module": object()}, ParameterError, "module is a object"),
    "a text as mask": ({"mask": "causal"}, DtypeError, "mask is a str"),
    "a mask of other keys": ({"mask": np.ones((7, 8))}, ShapeError, "mask of shape"),
    "a bias of other heads": ({"bias": np.ones((3, 7, 7))}, ShapeError, "bias of shape"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bad_arguments_are_errors(name):
    options, error, message = HOSTILE[name]
    x = jnp.ones((2, 7, 4, 8))
    with pytest.raises(error, match=message):
        dot_product_attention(x, x, x, **options)


@pytest.mark.parametrize("shapes", [[(7, 8)] * 3, [(2, 7, 4, 8), (7, 4, 8), (7, 4, 8)]], ids=str)
def test_bad_shapes_are_errors(shapes):
    with pytest.raises(ShapeError, match="query"):
        dot_product_attention(*map(jnp.ones, shapes))


def test_a_quantized_product_of_linen_is_an_error(inputs):
    layer, _ = linen_layers(
        qk_attn_weights_einsum_cls=lambda: jnp.einsum, attn_weights_value_einsum_cls=lambda: jnp.einsum
    )
    with pytest.raises(ParameterError, match="einsum"):
        layer.init(jax.random.key(0), inputs)
