"""Sightline for Flax: attention as the `attention_fn` of the layers of Linen and NNX.

The import loads JAX, and raises MissingExtraError if JAX is not installed. Flax is loaded only if a layer stores its
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import MissingExtraError, ParameterError, ShapeError

try:
    import jax
except ImportError as error:
    raise MissingExtraError(
        "sightline.flax without JAX", "JAX 0.7 to 0.10", 'pip install "sightline-attention[flax]"'
    ) from error

import jax.numpy as jnp

from .formula.expression import Expression
from .formula.library import causal
from .jax.functional import attend_by_position, read_array
from .statistics import weights

__all__ = ["dot_product_attention"]


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    *,
    is_causal: bool = False,
    promote_dtype: Callable[..., Any] | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
) -> Any:
    """Return softmax(Q Kᵀ / √H + bias) V. The arguments are those of `dot_product_attention` in Flax's Linen and NNX.

    The letters are T queries, S keys, N query heads, K key heads, width H. All leading axes are equal.

    Parameters
    ----------
    query : (..., T, N, H) real numbers
    key : (..., S, K, H)
        N is a multiple of K. Query head h attends to key head h // (N / K).
    value : (..., S, K, H_v)
    bias : array broadcastable to (..., N, T, S), or formula of b, h, i and j, optional
        Logits that are added to the scaled scores. A bias array is differentiable.
    mask : array broadcastable to (..., N, T, S), or formula of b, h, i and j, optional
        True, or any number except 0, lets a query attend to a key.
    broadcast_dropout : bool, default True
        Without effect: each sequence and head drops its own weights, as in Flax with broadcast_dropout=False.
    dropout_rng : key of jax.random, required if weights are dropped
    dropout_rate : float, default 0
        The probability that a weight is dropped.
    deterministic : bool, default False
        True drops no weights.
    dtype : dtype, optional
        The dtype to which query, key and value are converted; by default the one to which JAX promotes them.
    precision : optional
        Without effect: products of float32 have the precision of float32.
    force_fp32_for_softmax : bool, default False
        True converts 16-bit arrays to float32, so that the stored weights and the output are float32, as in Flax.
        Without it, the softmax has the precision of float32, and its results are rounded.
    module : flax.linen.Module or flax.nnx.Module, optional
        The layer in which the weights (..., N, T, S) before dropout are stored, under the name "attention_weights".
        They take O(T S) memory.
    is_causal : bool, default False
        Hide key j from query i if i < j.
    promote_dtype : function, optional
        The function of NNX that converts (query, key, value) to one dtype.
    einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum : optional
        Only None is allowed, because this library makes no separate matrix products that they could replace.

    Returns
    -------
    output : (..., T, N, H_v)
        If a query attends to no key, its output is 0. In Flax, its output is the mean of all values of that head.

    Raises
    ------
    ParameterError
        Weights are dropped and there is no `dropout_rng`, an einsum is given, or `module` is not a module of Flax.
    ShapeError
        The shapes do not fit the letters above.
    SightlineError
        The other errors of `sightline.jax.dot_product_attention`.

    Examples
    --------
    >>> from flax import nnx
    >>> from sightline.flax import dot_product_attention
    >>> layer = nnx.MultiHeadAttention(
    ...     num_heads=2, in_features=8, decode=False, attention_fn=dot_product_attention, rngs=nnx.Rngs(0)
    ... )
    >>> layer(jax.numpy.ones((3, 5, 8)), is_causal=True).shape
    (3, 5, 8)
    """
    for name, function in (
        ("einsum_dot_general", einsum_dot_general),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if function is not None:
            raise ParameterError(f"{name}={function!r}", "None", "use Flax's own attention_fn for quantized products")
    operands = _promote([query, key, value], dtype, promote_dtype)
    if force_fp32_for_softmax:
        operands = [x.astype(jnp.float32) if x.dtype.itemsize < 4 else x for x in operands]
    if any(x.ndim < 3 for x in operands):
        given = "query, key and value of shapes " + ", ".join(str(x.shape) for x in operands)
        raise ShapeError(given, "(..., positions, heads, width)", "x[:, None] for arrays of one head")
    conditions = [_read_mask(mask), causal() if is_causal else None]
    options = {} if deterministic or not dropout_rate else _read_dropout(dropout_rate, dropout_rng)
    see = [] if module is None else [weights()]
    output, seen = attend_by_position(operands, bias, conditions, see=see, **options)
    if module is not None:
        _store_weights(module, seen[0].astype(output.dtype))
    return output


def _promote(arrays: list[Any], dtype: Any, promote: Callable[..., Any] | None) -> list[Any]:
    """Return query, key and value in one dtype, as Flax's `promote_dtype` does."""
    if promote is not None:
        return list(promote(tuple(arrays), dtype=dtype))
    read = [read_array(name, x) for name, x in zip(("query", "key", "value"), arrays, strict=True)]
    common = jnp.result_type(*read) if dtype is None else dtype
    if not jnp.issubdtype(common, jnp.inexact):
        common = jnp.promote_types(common, jnp.float32)
    return [x.astype(common) for x in read]


def _read_mask(mask: Any) -> Any:
    """Return a mask array of Flax as a bool array, True where its numbers are not 0; return other masks unchanged."""
    if mask is None or isinstance(mask, Expression) or callable(mask):
        return mask
    return read_array("mask", mask) != 0


def _read_dropout(rate: float, key: Any) -> dict[str, Any]:
    if key is None:
        raise ParameterError(
            f"dropout_rate={rate} and no dropout_rng", "a key of jax.random", "dropout_rng=jax.random.key(0)"
        )
    return {"dropout": rate, "seed": jax.random.bits(key, (), jnp.uint32)}


def _store_weights(module: Any, array: Any) -> None:
    """Store the weights in the layer `module`, in the same place as Flax's own `dot_product_attention`."""
    from flax import linen, nnx

    if isinstance(module, linen.Module):
        module.sow("intermediates", "attention_weights", array)
    elif isinstance(module, nnx.Module):
        module.sow(nnx.Intermediate, "attention_weights", array)
    else:
        raise ParameterError(
            f"module is a {type(module).__name__}", "a module of flax.linen or flax.nnx", "leave module=None"
        )
