# ruff: noqa: E402  Keras may not be installed
"""ScaledDotProductAttention: its values, masks, training, saving and loading.

The tests run on the backend that KERAS_BACKEND names: torch here, the others in `test_keras_backends.py`.
"""

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from keras_tensors import numbers, tensor
from sightline.call.problem import make_problem
from sightline.errors import ParameterError, ShapeError
from sightline.keras import ScaledDotProductAttention
from sightline.reference.accuracy import compute_baseline
from sightline.reference.definition import compute_stages
from sightline.reference.testing import assert_within_budget

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # raised by Keras


def check(layer, x, mask=None):
    """Weights and output equal the definition on the layer's own queries, keys and values."""
    weights, output = layer(x, mask=mask)
    allowed = None if mask is None else numbers(mask)[:, None, None, :]
    q, k, v = (numbers(part(x)) for part in (layer.query, layer.key, layer.value))
    problem = make_problem(q, k, v, mask=allowed)
    true, rough = compute_stages(problem), compute_baseline(problem)
    assert_within_budget(numbers(output)[:, None], true.output, rough.output)
    assert_within_budget(numbers(weights)[:, None], true.weights, rough.weights)
    return weights, output


def test_weights_then_output(rng):
    layer = ScaledDotProductAttention(16, 24, return_attn=True)
    x = tensor(rng.normal(size=(3, 11, 32)))
    weights, output = check(layer, x)
    assert weights.shape == (3, 11, 11)
    assert output.shape == (3, 11, 24)
    assert ScaledDotProductAttention(4, 5)(x).shape == (3, 11, 5)


def test_projections_are_three_dense_layers_of_glorot_normal():
    layer = ScaledDotProductAttention(64, 64)
    layer.build((None, 10, 512))
    assert [tuple(w.shape) for w in layer.weights] == [(512, 64), (64,)] * 3
    for kernel in (layer.query.kernel, layer.key.kernel, layer.value.kernel):
        assert 0.9 < float(numbers(kernel).std()) / (2 / (512 + 64)) ** 0.5 < 1.1
    bare = ScaledDotProductAttention(64, 64, use_bias=False)
    bare.build((None, 10, 512))
    assert len(bare.weights) == 3


def test_a_mask_hides_padding(rng):
    layer = ScaledDotProductAttention(16, 16, return_attn=True)
    x = tensor(rng.normal(size=(2, 6, 8)))
    mask = tensor([[True] * 4 + [False] * 2, [False] * 6], "bool")
    weights, output = check(layer, x, mask)
    assert not numbers(weights)[0, :, 4:].any()
    assert not numbers(output)[1].any()


def test_a_mask_comes_from_an_embedding_and_goes_on(rng):
    tokens = keras.Input((5,), dtype="int32")
    embedded = keras.layers.Embedding(7, 8, mask_zero=True)(tokens)
    weights, output = ScaledDotProductAttention(4, 4, return_attn=True)(embedded)
    assert weights.shape == (None, 5, 5)
    assert output.shape == (None, 5, 4)
    pooling = keras.layers.GlobalAveragePooling1D()  # averages the real tokens if the mask is passed on
    model = keras.Model(tokens, [weights, output, pooling(output)])
    found, rows, pooled = map(numbers, model(np.array([[3, 1, 2, 0, 0], [1, 2, 3, 4, 5]])))
    assert not found[0, :, 3:].any()
    assert found[1].all()
    np.testing.assert_array_max_ulp(pooled, np.stack([rows[0, :3].mean(0), rows[1].mean(0)]), maxulp=8)


def test_training_lowers_the_loss(rng):
    keras.utils.set_random_seed(0)
    x = rng.normal(size=(64, 6, 8)).astype(np.float32)
    y = x.mean(axis=(1, 2), keepdims=False)[:, None]
    model = keras.Sequential(
        [
            keras.Input((6, 8)),
            ScaledDotProductAttention(8, 8),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse")
    layer = model.layers[0]
    before = [numbers(part.kernel) for part in (layer.query, layer.key, layer.value)]
    losses = model.fit(x, y, epochs=5, batch_size=16, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    for part, kernel in zip((layer.query, layer.key, layer.value), before, strict=True):
        assert (numbers(part.kernel) != kernel).all()


def test_saved_and_loaded(rng, tmp_path):
    inputs = keras.Input((6, 8))
    model = keras.Model(inputs, ScaledDotProductAttention(4, 5, return_attn=True, use_bias=False, name="heart")(inputs))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    x = rng.normal(size=(2, 6, 8)).astype(np.float32)
    for before, after in zip(model(x), again(x), strict=True):
        assert np.array_equal(numbers(before), numbers(after))
    config = again.get_layer("heart").get_config()
    assert {key: config[key] for key in ("dk", "dv", "return_attn", "use_bias")} == {
        "dk": 4,
        "dv": 5,
        "return_attn": True,
        "use_bias": False,
    }


@pytest.mark.parametrize("wrong", [{"dk": 0, "dv": 4}, {"dk": 4, "dv": 2.5}])
def test_invalid_widths_are_errors(wrong):
    with pytest.raises(ParameterError, match="at least 1"):
        ScaledDotProductAttention(**wrong)


def test_inputs_have_three_axes():
    with pytest.raises(ShapeError, match=r"\(batch, n, d_model\)"):
        ScaledDotProductAttention(4, 4)(np.zeros((5, 4), np.float32))
