# ruff: noqa: E402  Keras may not be installed
"""MultiHeadAttention next to Keras's layer: results, gradients, masks, dropout, training, files.

The tests run on the backend that KERAS_BACKEND names: torch here, the others in `test_keras_backends.py`.
"""

import numpy as np
import pytest

keras = pytest.importorskip("keras")
torch = pytest.importorskip("torch")

from keras_tensors import gradients, numbers, tensor
from sightline.errors import KernelRefusedError, ParameterError, ShapeError
from sightline.keras import MultiHeadAttention
from sightline.reference.testing import assert_within_budget

BACKEND = keras.backend.backend()
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # raised by Keras


def pair(query, value, heads=2, key_dim=8, **options):
    """Keras's layer and ours with the same random weights, biases included."""
    keras.utils.set_random_seed(0)
    theirs = keras.layers.MultiHeadAttention(heads, key_dim, bias_initializer="normal", **options)
    ours = MultiHeadAttention(heads, key_dim, bias_initializer="normal", **options)
    for layer in (theirs, ours):
        layer.build(query.shape, value.shape)
    ours.set_weights(theirs.get_weights())
    return theirs, ours


def define(layer, query, value, allowed=None):
    """Output and weights of a layer in float64, for inputs (batch, n, width) and a mask (batch, H, n, m)."""
    matrices = [torch.tensor(np.float64(x)) for x in layer.get_weights()]
    kernels, biases = matrices[::2], matrices[1::2]
    q, k, v = (
        torch.einsum("bnw,whd->bhnd", torch.as_tensor(x).double(), kernel) + bias[:, None]
        for x, kernel, bias in zip((query, value, value), kernels, biases, strict=False)
    )
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if allowed is not None:
        scores = scores.masked_fill(~torch.tensor(np.array(allowed)), -torch.inf)
    weights = scores.softmax(-1)
    return torch.einsum("bhnd,hdw->bnw", weights @ v, kernels[3]) + biases[3], weights


def draw(rng, n=7, m=9):
    return (rng.normal(size=(3, length, 16)).astype(np.float32) for length in (n, m))


def assert_equal_to(ours, theirs, true):
    """Our error against the definition is within the budget whose plain computation is Keras's layer."""
    for own, other, exact in zip(ours, theirs, true, strict=True):
        assert_within_budget(numbers(own), exact.numpy(), numbers(other))


def causal(n, m):
    return np.tri(n, m, dtype=bool)[None, None]


REAL = np.arange(9) < np.array([[9], [4], [2]])  # tokens that are no padding
PAIRS = np.random.default_rng(1).random((3, 2, 7, 9)) < 0.6
PAIRS[..., 0] = True
CASES = {  # arguments of a call, and the pairs that they allow
    "no mask": ({}, None),
    "causal": ({"use_causal_mask": True}, causal(7, 9)),
    "value mask": ({"value_mask": REAL}, REAL[:, None, None]),
    "value, key": ({"value_mask": REAL, "key_mask": REAL[[0, 2, 1]]}, (REAL & REAL[[0, 2, 1]])[:, None, None]),
    "n, m": ({"attention_mask": PAIRS[0, 0]}, PAIRS[:1, :1]),
    "batch, n, m": ({"attention_mask": PAIRS[:, 0]}, PAIRS[:, :1]),
    "batch, heads, n, m": ({"attention_mask": PAIRS}, PAIRS),
    "integers": ({"attention_mask": PAIRS[:, 0].astype("int32")}, PAIRS[:, :1]),
    "all": (
        {"attention_mask": PAIRS[:, 0], "use_causal_mask": True, "value_mask": REAL},
        PAIRS[:, :1] & causal(7, 9) & REAL[:, None, None],
    ),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("case", CASES)
def test_output_and_weights_equal_those_of_keras(rng, case):
    query, value = draw(rng)
    options, allowed = CASES[case]
    theirs, ours = pair(query, value)
    options = options | {"return_attention_scores": True}
    true = define(theirs, query, value, allowed)
    assert_equal_to(ours(query, value, **options), theirs(query, value, **options), true)
    alone = ours(query, value, **(options | {"return_attention_scores": False}))
    assert_equal_to([alone], [theirs(query, value, **options)[0]], true[:1])


def test_options_of_the_constructor(rng):
    query, value = draw(rng)
    options = {"value_dim": 5, "output_shape": 11, "use_bias": False, "use_gate": True, "sliding_window": 3}
    theirs, ours = pair(query, value, **options)
    expected, found = (layer(query, value, return_attention_scores=True) for layer in (theirs, ours))
    assert found[0].shape == (3, 7, 11)
    near = abs(np.arange(7)[:, None] - np.arange(9)) < 3
    assert np.array_equal(numbers(found[1]) > 0, np.broadcast_to(near, (3, 2, 7, 9)))
    for own, other in zip(found, expected, strict=True):
        assert_within_budget(numbers(own), np.float64(numbers(other)), numbers(other) * (1 - 2**-22))
    assert ours.get_config().keys() == theirs.get_config().keys()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("axes", [None, (1, 2), (2,), (-2,)])
def test_attention_along_other_axes(rng, axes, masked):
    """Attention along one axis of two, or along both, is that of a batch or of a sequence of (n₁ · n₂) positions."""
    along_last = axes in ((2,), (-2,))
    query, value = (rng.normal(size=(2, *lengths, 16)).astype(np.float32) for lengths in ((3, 4), (3, 5)))
    theirs, ours = pair(query, value, attention_axes=axes)
    shape = (2, 3, 4, 5) if along_last else (2, 3, 4, 3, 5)
    allowed = rng.random(shape) < 0.6
    allowed[..., 0] = True
    options = {"return_attention_scores": True} | ({"attention_mask": allowed} if masked else {})
    merged = [x.reshape((6, -1, 16) if along_last else (2, -1, 16)) for x in (query, value)]
    exact = define(
        theirs, *merged, allowed.reshape(len(merged[0]), 1, *(x.shape[1] for x in merged)) if masked else None
    )
    expected, found = (layer(query, value, **options) for layer in (theirs, ours))
    assert found[1].shape == expected[1].shape
    true = [one.reshape(tuple(other.shape)) for one, other in zip(exact, expected, strict=True)]
    assert_equal_to(found, expected, true)


def test_attention_along_the_batch_is_refused(rng):
    query, _ = draw(rng)
    with pytest.raises(ParameterError, match="the batch"):
        MultiHeadAttention(2, 4, attention_axes=(0,))(query, query)


def test_a_mask_of_a_wrong_shape_is_an_error(rng):
    """Keras makes errors of `call` anew, with their class and their message."""
    query, value = draw(rng)
    with pytest.raises(ShapeError, match="axis 3 of length 8 stands for j"):
        MultiHeadAttention(2, 4)(query, value, attention_mask=np.ones((3, 7, 8), bool))
    with pytest.raises(ShapeError, match=r"the axes \(b, j\)"):
        MultiHeadAttention(2, 4)(query, value, value_mask=np.ones((3, 1, 9), bool))


@pytest.mark.parametrize("case", ["causal", "all"])
def test_gradients_equal_those_of_keras(rng, case):
    """The loss reads output and weights."""
    query, value = draw(rng)
    factors = [tensor(rng.normal(size=shape)) for shape in ((3, 7, 16), (3, 2, 7, 9))]
    options = {name: x if x is True else tensor(x, "bool") for name, x in CASES[case][0].items()}
    theirs, ours = pair(query, value)

    def differentiate(layer, order, **options):
        """The gradients, with the keys in this order."""

        def loss(query, value):
            value = keras.ops.take(value, tensor(order, "int32"), axis=1)
            output, weights = layer(query, value, return_attention_scores=True, **options)
            weights = keras.ops.take(weights, tensor(np.argsort(order), "int32"), axis=3)
            return keras.ops.sum(output * factors[0]) + keras.ops.sum(weights * factors[1])

        return gradients(loss, query, value)

    orders = [rng.permutation(9) for _ in range(4)]
    allowed = np.broadcast_to(CASES[case][1], (3, 1, 7, 9))
    found = differentiate(ours, np.arange(9), **options)
    baselines = [differentiate(theirs, x, attention_mask=tensor(allowed[..., x], "bool")) for x in orders]
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (query, value)]
    results = define(theirs, *leaves, allowed)
    sum((x * torch.tensor(numbers(factor))).sum() for x, factor in zip(results, factors, strict=True)).backward()
    for own, leaf, *others in zip(found, leaves, *baselines, strict=True):
        # the array is one row: gradients of single positions may cancel to almost 0
        assert_within_budget(own.ravel(), leaf.grad.numpy().ravel(), np.stack(others).reshape(len(orders), -1))


def test_a_query_without_keys_and_hidden_nan(rng):
    """The attention of such a query is 0; Keras gives the mean of all values. Hidden NaN reaches nothing."""
    query, value = draw(rng)
    value[1, 4:] = np.nan
    allowed = np.broadcast_to(np.arange(9) < 4, (3, 7, 9)).copy()
    allowed[:, 2] = False
    layer = MultiHeadAttention(2, 8)
    layer.build(query.shape, value.shape)
    options = {"attention_mask": tensor(allowed, "bool")}
    output, weights = (numbers(x) for x in layer(query, value, return_attention_scores=True, **options))
    assert not output[:, 2].any()  # the bias of the projection is 0
    assert not weights[:, :, 2].any()
    assert np.isfinite(output).all()
    d_query, d_value = gradients(lambda q, v: keras.ops.sum(layer(q, v, **options) ** 2), query, value)
    assert not d_query[:, 2].any()
    assert d_query[:, 3].any()
    assert not d_value[:, 4:].any()
    assert np.isfinite(d_value).all()


def test_dropout_in_training_only(rng):
    """Dropout keeps the mean of the output; its draws differ between calls and repeat with the seed."""
    value = rng.normal(size=(1, 400, 16)).astype(np.float32)
    query = rng.normal(size=(1, 300, 16)).astype(np.float32)
    _, layer = pair(query, value, dropout=0.5, seed=3)
    plain, (first, weights), second = (
        layer(query, value),
        layer(query, value, training=True, return_attention_scores=True),
        layer(query, value, training=True),
    )
    assert np.array_equal(numbers(plain), numbers(layer(query, value, training=False)))
    assert not np.array_equal(numbers(first), numbers(second))
    assert abs(numbers(weights).sum(-1) - 1).max() < 1e-5  # before dropout
    spread = (numbers(first) - numbers(plain)).std()
    assert 0 < abs((numbers(first) - numbers(plain)).mean()) < 5 * spread / np.sqrt(300)  # 16 columns share draws
    again = MultiHeadAttention.from_config(layer.get_config())
    again.build(query.shape, value.shape)
    again.set_weights(layer.get_weights())
    assert np.array_equal(numbers(again(query, value, training=True)), numbers(first))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(rng, policy):
    query, value = draw(rng)
    theirs, ours = pair(query, value, dtype=policy)
    assert [str(w.dtype) for w in ours.weights] == ["float32"] * 8
    expected, found = (keras.ops.cast(layer(query, value, use_causal_mask=True), "float32") for layer in (theirs, ours))
    assert keras.backend.standardize_dtype(ours(query, value).dtype) == policy.removeprefix("mixed_")
    true, _ = define(theirs, query, value, causal(7, 9))
    error, plain_error = (abs(numbers(x) - true.numpy()).max() for x in (found, expected))
    assert error <= 2 * plain_error


def make_model(layer, **options):
    """A model of masked tokens in the range from 1 to 19, with attention by this class of layer."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((None,), dtype="int32")
    embedded = keras.layers.Embedding(20, 16, mask_zero=True)(tokens)
    attended = layer(2, 8, name="attention", **options)(embedded, embedded, use_causal_mask=True)
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Add()([embedded, attended]))
    return keras.Model(tokens, keras.layers.Dense(1)(pooled))


def make_texts(rng):
    """Padded texts, and 1 for a text that has the token 7."""
    tokens = rng.integers(1, 20, (32, 10))
    tokens[np.arange(10) >= rng.integers(3, 11, 32)[:, None]] = 0
    return tokens, (tokens == 7).any(1).astype(np.float32)[:, None]


@pytest.mark.parametrize(
    "dropout", [pytest.param(0.0, marks=pytest.mark.soak), pytest.param(0.2, marks=pytest.mark.wide)]
)
def test_training_reaches_the_loss_of_keras(rng, dropout):
    """200 steps of training from the same weights, with the masks of an Embedding."""
    tokens, targets = make_texts(rng)
    finals = []
    for layer in (keras.layers.MultiHeadAttention, MultiHeadAttention):
        model = make_model(layer, dropout=dropout, seed=1)
        model.compile(keras.optimizers.Adam(0.01), "mse")
        first = model.evaluate(tokens, targets, verbose=0)
        model.fit(*(np.tile(x, (200, 1)) for x in (tokens, targets)), batch_size=32, shuffle=False, verbose=0)
        finals.append(model.evaluate(tokens, targets, verbose=0))
    theirs, ours = finals
    assert theirs < first / 20
    assert ours < first / 20


def test_files_are_exchanged_with_keras(rng, tmp_path):
    """Weights go both ways, and a saved model is loaded with its class."""
    tokens, _ = make_texts(rng)
    theirs, ours = (make_model(layer) for layer in (keras.layers.MultiHeadAttention, MultiHeadAttention))
    for source, target in ((theirs, ours), (ours, theirs)):
        for weight in source.trainable_variables:
            weight.assign(weight + 0.5)
        source.save_weights(tmp_path / "model.weights.h5")
        assert not np.allclose(target.predict(tokens, verbose=0), source.predict(tokens, verbose=0))
        target.load_weights(tmp_path / "model.weights.h5")
        np.testing.assert_allclose(target.predict(tokens, verbose=0), source.predict(tokens, verbose=0), rtol=1e-5)
    ours.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again.get_layer("attention")) is MultiHeadAttention
    assert np.array_equal(again.predict(tokens, verbose=0), ours.predict(tokens, verbose=0))


def test_jit_compile_of_a_model():
    """JAX compiles the model. TensorFlow's XLA cannot, so Keras runs the model without XLA."""
    model = make_model(MultiHeadAttention)
    assert model.jit_compile is (BACKEND == "jax")
    if BACKEND == "tensorflow":
        with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
            model.compile("sgd", "mse", jit_compile=True)
        assert model.jit_compile is False


@pytest.mark.skipif(BACKEND != "tensorflow", reason="about TensorFlow")
def test_second_derivatives_in_tensorflow_are_refused(rng):
    import tensorflow as tf

    query, value = (tensor(x) for x in draw(rng))
    layer = MultiHeadAttention(2, 8)
    with tf.GradientTape() as outer:
        outer.watch(query)
        with tf.GradientTape() as inner:
            inner.watch(query)
            result = keras.ops.sum(layer(query, value) ** 2)
        slope = keras.ops.sum(inner.gradient(result, query) ** 2)
    with pytest.raises(KernelRefusedError, match="second derivatives"):
        outer.gradient(slope, query)
