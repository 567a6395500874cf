"""`sightline.equinox.MultiheadAttention` gives what Equinox's layer gives."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sightline
from jax_kernel import assert_close
from jax_training import VOCABULARY, WIDTH, assert_trains_alike, loss_of, make_task, train
from sightline import h, i, j
from sightline.equinox import MultiheadAttention
from sightline.errors import ParameterError, ShapeError

LENGTH, HEADS, FEATURES = 7, 2, 8
SIZES = {"query_size": 8, "key_size": 6, "value_size": 5, "output_size": 9, "qk_size": 4, "vo_size": 3}
KEY = jax.random.key(0)


def layers(**options):
    """Return our layer and Equinox's with the same parameters."""
    options = {"num_heads": HEADS, "query_size": FEATURES, "key": KEY, **options}
    return MultiheadAttention(**options), equinox.nn.MultiheadAttention(**options)


@pytest.fixture
def inputs():
    return jax.random.normal(jax.random.key(1), (LENGTH, FEATURES))


BELOW = np.tri(LENGTH, dtype=bool)
MASKS = {
    "no mask": (None, None),
    "a mask": (BELOW, BELOW),
    "a mask of heads": (np.stack([BELOW, BELOW[::-1, ::-1]]),) * 2,
    "a formula": (
        (i >= j) & (i - j <= h),
        np.stack([np.eye(LENGTH, dtype=bool), BELOW & ~np.tri(LENGTH, k=-2, dtype=bool)]),
    ),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("no mask", "a formula") else pytest.mark.soak) for name in MASKS]
)
def test_results_and_gradients_are_those_of_equinox(inputs, name):
    results = []
    for layer, mask in zip(layers(use_output_bias=True), MASKS[name], strict=True):

        @equinox.filter_jit
        def differentiate(layer, x, mask=mask):
            return equinox.filter_value_and_grad(lambda layer: (layer(x, x, x, mask=mask) ** 2).sum())(layer)

        results.append(jax.tree.leaves(differentiate(layer, inputs)))
    assert_close(*results)


def test_other_widths_and_heads_that_are_processed(inputs):
    ours, theirs = layers(**SIZES)
    given = inputs, jnp.ones((4, 6)).at[1].set(2), jax.random.normal(KEY, (4, 5))
    turn = lambda query, key, value: (query * 2, jnp.flip(key, -1), value + 1)  # noqa: E731
    found, expected = (equinox.filter_jit(layer)(*given, process_heads=turn) for layer in (ours, theirs))
    assert_close(found, expected)


def test_a_mapped_layer_is_one_call(inputs, monkeypatch):
    ours, theirs = layers()
    batch = jnp.stack([inputs, inputs[::-1], -inputs])
    apply = lambda layer: jax.vmap(lambda x: layer(x, x, x))(batch)  # noqa: E731
    monkeypatch.setattr(sightline.jax.primitives, "_compute_in_turn", None)
    assert_close(apply(ours), apply(theirs))


def test_parameters_fit_the_other_layer(inputs):
    ours, _ = layers()
    other = equinox.nn.MultiheadAttention(HEADS, FEATURES, key=jax.random.key(5))
    changed = jax.tree.unflatten(jax.tree.structure(ours), jax.tree.leaves(other))
    assert type(changed) is MultiheadAttention
    assert_close(changed(inputs, inputs, inputs), other(inputs, inputs, inputs))


def test_dropout(inputs):
    layer, plain = layers(dropout_p=0.5)
    apply = equinox.filter_jit(lambda key, **mode: layer(inputs, inputs, inputs, key=key, **mode))
    assert np.array_equal(apply(KEY), apply(KEY))
    assert not np.array_equal(apply(KEY), apply(jax.random.key(1)))
    expected = plain(inputs, inputs, inputs, inference=True)
    assert_close(layer(inputs, inputs, inputs, inference=True), expected)
    assert_close(layer(inputs, inputs, inputs, deterministic=True), expected)
    assert_close(equinox.nn.inference_mode(layer)(inputs, inputs, inputs), expected)
    with pytest.raises(ParameterError, match="and no key"):
        layer(inputs, inputs, inputs)


class Model(equinox.Module):
    first: equinox.nn.Linear
    attention: equinox.nn.MultiheadAttention
    last: equinox.nn.Linear

    def __init__(self, layer):
        keys = jax.random.split(KEY, 3)
        self.first = equinox.nn.Linear(WIDTH, WIDTH, key=keys[0])
        self.attention = layer(HEADS, WIDTH, key=keys[1])
        self.last = equinox.nn.Linear(WIDTH, VOCABULARY, key=keys[2])

    def __call__(self, x, mask):
        x = jax.vmap(self.first)(x)
        return jax.vmap(self.last)(x + self.attention(x, x, x, mask=mask))


@pytest.mark.wide
def test_a_model_trains_as_with_equinox():
    inputs, targets = make_task()
    losses = []
    for layer, mask in ((MultiheadAttention, i >= j), (equinox.nn.MultiheadAttention, np.tri(inputs.shape[1]) > 0)):
        parameters, rest = equinox.partition(Model(layer), equinox.is_inexact_array)

        def loss(parameters, _, rest=rest, mask=mask):
            model = equinox.combine(parameters, rest)
            return loss_of(jax.vmap(lambda x: model(x, mask))(inputs), targets)

        losses.append(train(loss, parameters))
    assert_trains_alike(*losses)


def test_bad_arguments_are_errors(inputs):
    layer, _ = layers()
    with pytest.raises(ShapeError, match="positions, width"):
        layer(inputs[None], inputs, inputs)
    with pytest.raises(ShapeError, match="query"):
        layer(inputs, inputs, inputs[1:])
    with pytest.raises(ShapeError, match="process_heads"):
        layer(inputs, inputs, inputs, process_heads=lambda query, key, value: (query, key[1:], value[1:]))
    with pytest.raises(ShapeError, match="mask of shape"):
        layer(inputs, inputs, inputs, mask=np.ones((LENGTH, LENGTH + 1), bool))
