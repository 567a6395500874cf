# ruff: noqa: E402  Keras may not be installed
"""`sightline.keras.MonitorCallback`: the numbers of `fit` are those of the layers' weights and scores."""

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from keras_tensors import numbers
from sightline.errors import ParameterError
from sightline.keras import MonitorCallback, MultiHeadAttention, ScaledDotProductAttention

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # raised by Keras
X = np.random.default_rng(0).normal(size=(8, 5, 6)).astype("float32")
Y = np.zeros((8, 1), "float32")


def make_model(layer):
    inputs = keras.Input((5, 6))
    attended = layer(inputs, inputs, use_causal_mask=True) if isinstance(layer, MultiHeadAttention) else layer(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(attended)))
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")  # parameters stay
    return model


def test_numbers_are_those_of_keras_weights():
    keras.utils.set_random_seed(0)
    layer = MultiHeadAttention(num_heads=2, key_dim=4)
    model, lines = make_model(layer), []
    x = X[:3]
    callback = MonitorCallback(x, 2, log=lambda *line: lines.append(line))
    history = model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[callback])
    assert [step.number for step in callback.history] == [0, 2, 4]
    weights = numbers(layer(x, x, use_causal_mask=True, return_attention_scores=True)[1]).astype("float64")
    query, key = (numbers(part(x)).astype("float64") for part in (layer._query_dense, layer._key_dense))
    scores = np.einsum("bihd,bjhd->bhij", query, key) / 2
    scores[..., ~np.tri(5, dtype=bool)] = -np.inf
    for step in callback.history:
        (heads,) = step.layers.values()
        np.testing.assert_allclose(heads.max_score, scores.max((0, 2, 3)), rtol=1e-5)
        np.testing.assert_allclose(heads.first_key, weights[..., 0].mean((0, 2)), rtol=1e-5)
        entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
        np.testing.assert_allclose(heads.entropy, entropy.mean((0, 2)), rtol=1e-5)
    assert lines == [(step.summary(), step.number) for step in callback.history]
    name = f"attention/{layer.path}/max_score"
    assert history.history[name] == [step.summary()[name] for step in callback.history]


def test_the_layer_of_one_head_is_recorded_too():
    model = make_model(ScaledDotProductAttention(4, 4))
    callback = MonitorCallback(X[:2])
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
    assert [heads.queries.tolist() for heads in callback.history[0].layers.values()] == [[10.0]]


def test_a_model_without_layers_of_this_library_is_refused():
    model = keras.Sequential([keras.Input((5, 6)), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(loss="mse")
    with pytest.raises(ParameterError, match=r"no layer of sightline\.keras ran"):
        model.fit(X, Y, verbose=0, callbacks=[MonitorCallback(X)])


def test_every_is_a_whole_number():
    with pytest.raises(ParameterError, match="whole number"):
        MonitorCallback(X, 0)
