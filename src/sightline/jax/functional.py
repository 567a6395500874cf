"""A replacement for `jax.nn.dot_product_attention` with the same signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from ..call.problem import Options
from ..call.validation import read_mask
from ..errors import DtypeError, FormulaError, MaskError, ParameterError, ShapeError
from ..formula import library
from ..formula.expression import SYMBOLS, Expression, conjoin, walk
from ..formula.from_function import to_formula
from ..formula.tables import table
from ..statistics import lse
from .dispatch import run

CAUSAL = library.causal()
SHAPES = "query (..., T, N, H), key (..., S, K, H), value (..., S, K, H_v) with equal leading axes, N a multiple of K"
b, i, j, s = (SYMBOLS[name] for name in "bijs")


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> Any:
    """Return softmax(Q Kᵀ · scale + bias) V, with the arguments of `jax.nn.dot_product_attention`.

    The letters are those of JAX: batch B, T queries, S keys, N query heads, K key heads, width H.

    Parameters
    ----------
    query : (B, T, N, H) or (T, N, H) float16, bfloat16, float32 or float64
    key : (B, S, K, H) or (S, K, H), the dtype of query
        N is a multiple of K. Query head h attends to key head h // (N / K).
    value : (B, S, K, H_v) or (S, K, H_v), the dtype of query
        JAX allows only H_v = H.
    bias : array broadcastable to (B, N, T, S), or formula of b, h, i and j, optional
        Logits that are added to the scaled scores. An entry of −∞ hides the pair. JAX can differentiate by an array.
    mask : bool array broadcastable to (B, N, T, S), or formula of b, h, i and j, optional
        True: the query attends to the key. A formula is faster than an array, because hidden tiles are skipped.
    scale : float or array of one number, default 1/√H
        JAX can differentiate by an array.
    is_causal : bool, default False
        If True, hide key j from query i where i < j, also if T ≠ S.
    query_seq_lengths : (B,) integers, optional
        The number of real queries of each sequence. The output of the other queries is 0.
    key_value_seq_lengths : (B,) integers, optional
        The number of real keys of each sequence. The other keys are hidden.
    local_window_size : int or (int, int), optional
        (left, right): query i sees only the keys i − left ≤ j ≤ i + right. One number w stands for (w, w).
    implementation : {"xla", "cudnn"}, optional
        The argument exists because JAX's function has it. Every value runs the same code.
    return_residual : bool, default False
        If True, return (output, lse). lse has no gradient, as in JAX. The lse of `sightline.attention` has one.

    Returns
    -------
    output : (B, T, N, H_v) or (T, N, H_v), the dtype of query
        0 for a query without allowed keys. JAX returns the mean of the head's values for such a query.
    lse : (B, T, N) or (T, N), the dtype of query, only with `return_residual`
        The logarithm of the sum of exp(score) over the allowed keys. −∞ for a query without allowed keys.

    Raises
    ------
    ShapeError
        The shapes do not fit the letters above.
    MaskError
        `mask` is no condition, or the formula `bias` is a condition.
    FormulaError
        The formula `bias` reads the score s.
    ParameterError
        `implementation` or `local_window_size` is none of the values above, or `bias` is an array of booleans.
    SightlineError
        Any other error that `sightline.attention` raises.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, equation 1.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from sightline.jax import dot_product_attention
    >>> x = jnp.eye(2)[:, None, :]  # two positions, one head
    >>> dot_product_attention(x, x, x, is_causal=True)[0]  # the first position attends to itself alone
    Array([[1., 0.]], dtype=float32)
    """
    if implementation not in (None, "xla", "cudnn"):
        raise ParameterError(
            f"implementation={implementation!r}", 'None, "xla" or "cudnn"', "leave implementation=None"
        )
    operands = [read_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    if any(x.ndim not in (3, 4) for x in operands):
        given = ", ".join(str(x.shape) for x in operands)
        raise ShapeError(
            f"query, key and value of shapes {given}",
            "three or four axes: (batch, positions, heads, width) or (positions, heads, width)",
            "x[:, None] for one head; sightline.attention for more axes",
        )
    batch = operands[0].shape[0] if operands[0].ndim == 4 else 1
    conditions = [mask, CAUSAL if is_causal else None, _read_window(local_window_size)]
    for name, symbol, lengths in (
        ("query_seq_lengths", i, query_seq_lengths),
        ("key_value_seq_lengths", j, key_value_seq_lengths),
    ):
        if lengths is not None:
            conditions.append(symbol < _read_lengths(name, lengths, batch))
    see = [lse()] if return_residual else []
    output, seen = attend_by_position(operands, bias, conditions, scale=scale, see=see)
    results = [output, *(jax.lax.stop_gradient(x.swapaxes(-1, -2).astype(output.dtype)) for x in seen)]
    return tuple(results) if return_residual else results[0]


def attend_by_position(
    operands: Sequence[Any], bias: Any = None, conditions: Sequence[Any] = (), **options: Any
) -> tuple[Any, tuple[Any, ...]]:
    """Compute `sightline.attention` on arrays whose axis of positions comes before the axis of heads.

    Parameters
    ----------
    operands : query (..., T, N, H), key (..., S, K, H) and value (..., S, K, H_v)
    bias : array broadcastable to (..., N, T, S), formula or None
    conditions : arrays broadcastable to (..., N, T, S), formulas or None; a pair is visible if all of them are True
    **options : scale, dropout, seed and see, as in `sightline.attention`

    Returns
    -------
    output : (..., T, N, H_v)
    seen : the results of the statistics `see`, with the axis of heads before the axis of queries
    """
    has_batch = operands[0].ndim > 3
    operands = [x[None] if x.ndim == 3 else x for x in operands]
    scores_shape = _check_shapes(*operands)
    mask: Any = None
    for condition in conditions:
        if condition is not None:
            mask = conjoin(mask, _read_condition(condition, scores_shape))
    score = None if bias is None else _read_bias(bias, scores_shape)
    query, key, value = (x.swapaxes(-3, -2) for x in operands)
    output, seen = run(query, key, value, Options(mask, score, by_position=True, **options))
    output = output.swapaxes(-3, -2)
    return (output, seen) if has_batch else (output[0], tuple([x[0] for x in seen]))


def read_array(name: str, value: Any) -> jax.Array:
    """Return the value as a JAX array; raise DtypeError if JAX cannot read it."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise DtypeError(
            f"{name} is a {type(value).__name__}", "arrays", f"{name}=jax.numpy.asarray({name})"
        ) from error


def _check_shapes(query: Any, key: Any, value: Any) -> tuple[int, ...]:
    """Return the shape (..., N, T, S) of the scores; raise ShapeError if the arrays do not fit `SHAPES`."""
    (*lead, queries, heads, width), (*others, keys, key_heads, key_width) = query.shape, key.shape
    fits_value = value.shape[:-1] == key.shape[:-1]
    if lead != others or width != key_width or not fits_value or (heads % key_heads if key_heads else heads):
        given = f"query {query.shape}, key {key.shape}, value {value.shape}"
        raise ShapeError(given, SHAPES, "jnp.swapaxes(x, -3, -2) puts positions before heads")
    return (*lead, heads, queries, keys)


def _read_condition(condition: Any, scores_shape: tuple[int, ...]) -> Expression:
    if isinstance(condition, Expression | bool) or callable(condition):
        return cast(Expression, read_mask(condition))
    array = _align("mask", condition, scores_shape)
    if array.dtype != np.bool_:
        raise MaskError(
            f"mask is an array of {array.dtype}",
            "a boolean array, True where the query attends, or a formula",
            "mask=array != 0 if it holds zeros and ones; numbers that are added to the scores are a bias, not a mask",
        )
    return library.dense(array)


def _read_bias(bias: Any, scores_shape: tuple[int, ...]) -> Expression:
    """Return the score formula s + bias, where `bias` is a formula or an array."""
    if not isinstance(bias, Expression) and not callable(bias):
        return library.bias(_align("bias", bias, scores_shape))
    formula = to_formula(bias, "bias", "b h i j")
    if formula.kind == "bool":
        raise MaskError(f"bias is {formula}, a condition", "a formula of numbers", "pass conditions as mask=")
    if any(node is s for node in walk(formula)):
        raise FormulaError(
            f"bias {formula} reads the score s", "formulas of b, h, i and j", "sightline.attention(..., score=formula)"
        )
    return s + formula


def _align(name: str, value: Any, scores_shape: tuple[int, ...]) -> Any:
    """Return the array in a shape that `library.dense` and `library.bias` align to the axes of the scores.

    These two functions read the first of four axes as all batch axes merged. An array of four axes gets one more axis
    in front if the scores have more than four. ShapeError is raised if the array does not broadcast to the scores.
    """
    array = jnp.atleast_1d(read_array(name, value))
    padded = (1,) * (len(scores_shape) - array.ndim) + array.shape
    if len(padded) > len(scores_shape) or any(x not in (1, y) for x, y in zip(padded, scores_shape, strict=True)):
        raise ShapeError(
            f"{name} of shape {array.shape}",
            f"a shape that broadcasts to {scores_shape}, the shape (batch, heads, queries, keys) of the scores",
            f"{name}[:, None] for (batch, queries, keys), and {name}[:, None, None] for (batch, keys)",
        )
    return array[None] if len(scores_shape) > 4 and array.ndim == 4 else array


def _read_lengths(name: str, lengths: Any, batch: int) -> Expression:
    array = read_array(name, lengths)
    if array.shape != (batch,) or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ShapeError(
            f"{name} of shape {array.shape} and dtype {array.dtype}",
            f"({batch},) integers, one length for each sequence",
            f"{name}=lengths.astype(int) for floats, jnp.full({batch}, length) for one length",
        )
    return table(array)[b]


def _read_window(size: Any) -> Expression | None:
    if size is None:
        return None
    pair = (size, size) if not isinstance(size, tuple | list) else size
    is_integer = [isinstance(x, int | np.integer) and not isinstance(x, bool) for x in pair]
    if len(pair) != 2 or not all(is_integer) or min(pair) < 0:
        raise ParameterError(
            f"local_window_size={size!r}", "a whole number ≥ 0 or a pair of them", "local_window_size=(255, 0)"
        )
    left, right = pair
    return library.window(int(left) + 1, int(right))
