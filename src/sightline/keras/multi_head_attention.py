"""`keras.layers.MultiHeadAttention` computed by this library."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from ..errors import ParameterError
from .backend_attention import IS_TENSORFLOW, AttentionMask, attend, expand


@keras.saving.register_keras_serializable(package="sightline")
class MultiHeadAttention(keras.layers.MultiHeadAttention):  # type: ignore[misc]
    """`keras.layers.MultiHeadAttention` computed by this library, with the same arguments, weights and files.

    The layer computes softmax(Q Kᵀ / √key_dim + M) V for each head, and projects inputs and output. For
    inputs (batch, n, width) memory is O(n), besides an `attention_mask` that the caller passes. Keras's layer builds a
    boolean mask with n² entries for each sequence.

    There are three differences from Keras's layer:

    - For a query without allowed keys the output is the output projection of 0, and its weights and gradients are 0.
      Keras projects the mean of all values, hidden ones included.
    - Hidden keys and values have no effect on output and gradients, even if they contain NaN or ∞.
    - `flash_attention` has no effect, since memory is O(n) in any case. Keras still refuses True with dropout.

    Parameters
    ----------
    num_heads, key_dim, value_dim, dropout, use_bias, output_shape, attention_axes, seed, and the others
        As in `keras.layers.MultiHeadAttention` of the installed Keras.

    Call
    ----
    query : (batch, n, width) floats; further axes with `attention_axes`
    value : (batch, m, width) floats
    key : (batch, m, width) floats, default `value`
    query_mask, value_mask, key_mask : (batch, n) or (batch, m) bool, optional
        True for real tokens. Keras passes the masks of Embedding and Masking layers.
    attention_mask : (batch, n, m), (batch, H, n, m) or (n, m) bool, optional
        True where the query attends to the key.
    return_attention_scores : bool, default False
        Return (output, weights). The weights (batch, H, n, m) before dropout take O(n · m) memory.
    training : bool, optional
        True drops weights with the probability `dropout`.
    use_causal_mask : bool, default False
        Hide keys after the query's own position.

    Returns the output (batch, n, output_shape), or (output, weights), in the layer's compute dtype.

    Raises
    ------
    ParameterError
        `attention_axes` contains 0, the batch axis.
    SightlineError
        `call` failed. Keras raises a new error of the same class, whose message also shows the call's arguments.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.

    Examples
    --------
    >>> layer = MultiHeadAttention(num_heads=8, key_dim=64)  # doctest: +SKIP
    >>> layer(x, x, use_causal_mask=True)  # doctest: +SKIP
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.supports_jit = not IS_TENSORFLOW  # in TensorFlow programs, XLA cannot call the kernels

    def build(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> None:
        """Create the weights for inputs of these shapes."""
        super().build(query_shape, value_shape, key_shape)
        if 0 in self._attention_axes:
            given = f"attention_axes={tuple(self._attention_axes)}"
            raise ParameterError(given, "axes from 1 on; 0 is the batch", "attention_axes=(1,)")

    def _compute_attention_mask(
        self,
        query: Any,
        value: Any,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        use_causal_mask: bool = False,
    ) -> Any:
        """Return an `AttentionMask` for inputs of three axes and attention along axis 1, else Keras's mask or None."""
        if len(query.shape) != 3 or tuple(self._attention_axes) != (1,):
            return super()._compute_attention_mask(
                query, value, query_mask, value_mask, key_mask, attention_mask, use_causal_mask
            )
        masks = (query_mask, "bi"), (value_mask, "bj"), (key_mask, "bj")
        arrays = [expand(mask, axes) for mask, axes in masks if mask is not None]
        if attention_mask is not None:
            attention_mask = ops.convert_to_tensor(attention_mask)
            axes = {2: "ij", 4: "bhij"}.get(len(attention_mask.shape), "bij")
            arrays.append(expand(attention_mask, axes))
        return AttentionMask(tuple(arrays), bool(use_causal_mask), getattr(self, "_sliding_window", None))

    def _compute_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
    ) -> tuple[Any, Any]:
        """Return the output (batch, n, H, value_dim), and the weights (batch, H, n, m) or None.

        `attention_mask` is what `_compute_attention_mask` returned, or a tensor.
        """
        options: dict[str, Any] = {"with_weights": return_attention_scores, "layer": self.path}
        if training and self._dropout > 0:
            seed = keras.random.randint((), 0, 2**31 - 1, seed=self._dropout_layer.seed_generator)
            options |= {"dropout": self._dropout, "seed": seed}
        if isinstance(attention_mask, AttentionMask):
            heads = [ops.swapaxes(x, 1, 2) for x in (query, key, value)]  # (batch, H, n, width)
            output, weights = attend(*heads, mask=attention_mask, **options)
            return ops.swapaxes(output, 1, 2), weights
        return self._attend_along_axes(query, key, value, attention_mask, options)

    def _attend_along_axes(
        self, query: Any, key: Any, value: Any, mask: Any, options: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return the output and the weights of tensors (batch, ..., H, width), with attention along `attention_axes`.

        The axes of attention are moved behind the heads and merged to one axis. `mask` broadcasts to Keras's scores
        (batch, ..., H, query axes, key axes).
        """
        rank, along = len(query.shape), list(self._attention_axes)
        others = [axis for axis in range(rank - 1) if axis not in along]  # batch axes, then the heads
        order, lead = [*others, *along, rank - 1], len(others)
        moved = [ops.transpose(x, order) for x in (query, key, value)]
        leading, query_axes, key_axes = ops.shape(moved[0])[:lead], *(ops.shape(x)[lead:-1] for x in moved[:2])
        merged = [
            ops.reshape(x, (*leading, math.prod(axes), x.shape[-1]))
            for x, axes in zip(moved, (query_axes, key_axes, key_axes), strict=True)
        ]
        parts = () if mask is None else (_merge_axes(mask, lead, query_axes, key_axes),)
        output, weights = attend(*merged, mask=AttentionMask(parts), **options)
        output = ops.reshape(output, (*leading, *query_axes, value.shape[-1]))
        if weights is not None:
            weights = ops.reshape(weights, (*leading, *query_axes, *key_axes))
        return ops.transpose(output, [order.index(axis) for axis in range(rank)]), weights


def _merge_axes(mask: Any, lead: int, query_axes: tuple[Any, ...], key_axes: tuple[Any, ...]) -> Any:
    """Return a mask with its query axes merged to one axis n, and its key axes merged to one axis m.

    The given mask has the axes (leading axes, query axes, key axes). If it has fewer than `lead` leading axes, axes of
    length 1 are inserted before its query axes, as Keras does.
    """
    mask, last = ops.cast(mask, "bool"), len(query_axes) + len(key_axes)
    while len(mask.shape) < lead + last:
        mask = ops.expand_dims(mask, -last - 1)
    if last == 2:
        return mask
    leading = ops.shape(mask)[:lead]
    full = ops.broadcast_to(mask, (*leading, *query_axes, *key_axes))
    return ops.reshape(full, (*leading, math.prod(query_axes), math.prod(key_axes)))
