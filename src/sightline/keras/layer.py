"""A Keras layer: self-attention of one head with its projections."""

from __future__ import annotations

from typing import Any

import keras

from ..errors import ShapeError, check_count
from .backend_attention import IS_TENSORFLOW, AttentionMask, attend, expand

Shape = tuple[int | None, ...]


@keras.saving.register_keras_serializable(package="sightline")
class ScaledDotProductAttention(keras.layers.Layer):  # type: ignore[misc]
    """Self-attention of one head: softmax(Q Kᵀ / √dk) V with Q = X W_Q + b_Q, K = X W_K + b_K, V = X W_V + b_V.

    The initial kernels W are Glorot normal, the initial biases b are 0.

    Parameters
    ----------
    dk, dv : int
        The width of query and key, and the width of value and output.
    return_attn : bool, default False
        Return (weights, output), in this order, instead of the output alone. The weights take n² memory.
    use_bias : bool, default True
        Add the biases b_Q, b_K and b_V, as `use_bias` of `keras.layers.Dense` does.
    **options
        `name`, `dtype` and the other options of `keras.layers.Layer`.

    Call
    ----
    inputs : (batch, n, d_model) floats
    mask : (batch, n) bool, optional
        True for real tokens; keys of padding are hidden. Keras passes the mask of Embedding and Masking layers. Weights
        and output are 0 for a sequence without real tokens.

    Returns the output (batch, n, dv), or (weights (batch, n, n), output), in the layer's compute dtype.

    Raises
    ------
    ParameterError
        dk or dv is not a whole number of at least 1.
    ShapeError
        The inputs do not have three axes.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1; Glorot and Bengio, "Understanding the difficulty
    of training deep feedforward neural networks", 2010.

    Examples
    --------
    >>> layer = ScaledDotProductAttention(64, 64, return_attn=True)  # doctest: +SKIP
    >>> weights, output = layer(x)  # doctest: +SKIP
    """

    def __init__(self, dk: int, dv: int, return_attn: bool = False, *, use_bias: bool = True, **options: Any) -> None:
        super().__init__(**options)
        dk, dv = check_count("dk={!r}", dk, 1, "dk=64"), check_count("dv={!r}", dv, 1, "dv=64")
        self.dk, self.dv, self.return_attn, self.use_bias = dk, dv, return_attn, use_bias
        self.supports_masking = True
        self.supports_jit = not IS_TENSORFLOW  # in TensorFlow programs, XLA cannot call the kernels
        shared = {"use_bias": use_bias, "kernel_initializer": "glorot_normal", "dtype": self.dtype_policy}
        named = (("query", dk), ("key", dk), ("value", dv))
        self.query, self.key, self.value = (keras.layers.Dense(width, name=name, **shared) for name, width in named)

    def build(self, input_shape: Shape) -> None:
        """Create the weights of the projections for inputs of this shape."""
        if len(input_shape) != 3:
            given = f"inputs of shape {tuple(input_shape)}"
            raise ShapeError(given, "(batch, n, d_model)", "inputs[None] for one sequence")
        for projection in (self.query, self.key, self.value):
            projection.build(input_shape)

    def call(self, inputs: Any, mask: Any = None) -> Any:
        """Return the output, or (weights, output) if `return_attn` is true."""
        heads = [keras.ops.expand_dims(part(inputs), 1) for part in (self.query, self.key, self.value)]
        attention_mask = AttentionMask(() if mask is None else (expand(mask, "bj"),))
        output, weights = attend(*heads, mask=attention_mask, with_weights=self.return_attn, layer=self.path)
        output = keras.ops.squeeze(output, 1)
        return (keras.ops.squeeze(weights, 1), output) if self.return_attn else output

    def compute_output_shape(self, input_shape: Shape) -> Any:
        """Return the shape of the output, or the shapes of (weights, output) if `return_attn` is true."""
        batch, n, _ = input_shape
        output = (batch, n, self.dv)
        return ((batch, n, n), output) if self.return_attn else output

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Return the mask of the inputs, which is also that of the output. With `return_attn`, return (None, mask)."""
        return (None, previous_mask) if self.return_attn else previous_mask

    def get_config(self) -> dict[str, Any]:
        """Return the settings from which `from_config` makes an equal layer."""
        settings = {"dk": self.dk, "dv": self.dv, "return_attn": self.return_attn, "use_bias": self.use_bias}
        return {**super().get_config(), **settings}
