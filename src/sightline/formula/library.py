"""Predefined masks and scores. Each is one function that returns a formula."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from ..arrays.operations import JAX, framework, is_one, is_traced, to_numpy
from ..errors import MaskError, ParameterError, ShapeError, check_count
from .batch_axes import dense_table, read_densely
from .expression import SYMBOLS, Expression, apply
from .parameters import from_template
from .tables import Table

__all__ = [
    "alibi",
    "alibi_slopes",
    "bias",
    "causal",
    "dense",
    "documents",
    "padding",
    "prefix",
    "relative_bias",
    "softcap",
    "window",
]

MAX_GRADIENT_BYTES = 1 << 40  # a table's gradient has one number for every entry, also if entries repeat in memory

b, h, i, j, s, n, m = (SYMBOLS[name] for name in "bhijsnm")


def causal(align: Literal["upper left", "lower right"] = "upper left") -> Expression:
    """Return the mask i ≥ j: a query attends to no later key.

    Parameters
    ----------
    align : {"upper left", "lower right"}
        The corner of the mask through which its diagonal runs, if n ≠ m. "upper left" is i ≥ j, as torch's is_causal.
        "lower right" is i + (m − n) ≥ j, the mask of FlashAttention and of decoding with a cache.

    Raises
    ------
    ParameterError
        align is neither "upper left" nor "lower right".

    Examples
    --------
    >>> import sightline
    >>> sightline.causal("lower right").array(2, 4).astype(int)  # two queries, four keys
    array([[1, 1, 1, 0],
           [1, 1, 1, 1]])
    """
    return _position(align) >= j


def _position(align: str) -> Expression:
    """Return the position of the query among the keys: i, or i + (m − n) if the last query belongs to the last key."""
    if align not in ("upper left", "lower right"):
        raise ParameterError(f"align={align!r}", '"upper left" or "lower right"', 'causal("lower right") for decoding')
    return i if align == "upper left" else i + (m - n)


def window(left: int, right: int = 0, align: Literal["upper left", "lower right"] = "upper left") -> Expression:
    """Return the mask −right ≤ i − j < left: `left` keys up to the query's position, and `right` keys after it.

    Parameters
    ----------
    left : int
        Number of keys up to the query's position, that position included; at least 1.
    right : int, default 0
        Number of keys after the query's position; at least 0.
    align : {"upper left", "lower right"}
        As for `causal`: "lower right" has i + (m − n) in place of i, as in FlashAttention.

    Raises
    ------
    ParameterError
        left is below 1 or right is below 0, or one of them is not a whole number. Or align is none of the two.

    Examples
    --------
    >>> import sightline
    >>> sightline.window(2).array(3).astype(int)  # each query's key, and the key before it
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """
    if not (_is_integer(left) and _is_integer(right) and left >= 1 and right >= 0):
        raise ParameterError(
            f"window({left!r}, {right!r})",
            "whole numbers, left ≥ 1 and right ≥ 0",
            "window(1) allows key i only. FlashAttention's window_size=(left, right) is "
            'window(left + 1, right, "lower right"), (-1, 0) is causal("lower right"), (-1, -1) is no mask',
        )
    position = _position(align)
    # Not `i - j < left`: torch.compile cannot trace a comparison between a formula and a SymInt, its symbolic int.
    return apply("less", position - j, left) & apply("less_equal", j - position, right)


def padding(lengths: Any) -> Expression:
    """Return the mask j < lengths[b]: keys past the end of a sequence are hidden.

    Parameters
    ----------
    lengths : (B,) integers
        Number of real keys of each sequence; b counts all leading axes together, in C order. A list of one length
        serves every sequence. A length above the number of keys hides none.

    Raises
    ------
    ParameterError
        A length in a list or a NumPy array is negative.
    ShapeError
        lengths does not have exactly one axis, or its entries are not integers. When attention is computed: the number
        of lengths is neither 1 nor B.

    Examples
    --------
    >>> import sightline
    >>> sightline.padding([3, 1]).array(1, 4, batch=2)[:, 0, 0].astype(int)  # two sequences
    array([[1, 1, 1, 0],
           [1, 0, 0, 0]])
    """
    table = None if _ndim(lengths) == 0 else Table(lengths, axes=("b",))
    if table is None or table.ndim != 1 or table.kind != "int":
        cure = {
            "bool": "padding(array.sum(-1)) if True marks real keys and these come first; "
            "mask=array[:, None, None] for other masks (B, m)",
            "float": "cast the lengths to integers, as in padding([7, 20])",
        }.get(table.kind if table else "int", "padding([7, 20])")
        raise ShapeError(f"lengths {table or lengths}", "(B,) integers, one length per sequence", cure)
    if isinstance(table.array, np.ndarray) and (table.array < 0).any():
        raise ParameterError(f"padding({lengths!r})", "lengths of at least 0", "padding([7, 20])")
    return from_template(_padding_by, table)


def _padding_by(lengths: Table) -> Expression:
    return j < lengths[_first_index(lengths, b)]


def documents(ids: Any = None, *, lengths: Any = None, key_lengths: Any = None) -> Expression:
    """Return the mask id[i] = id[j]: documents packed on one axis attend only to themselves.

    Kernels skip blocks of pairs of different documents. If the document numbers ascend along the axis, the cost is that
    of attention on each document alone, Σ length². If the positions of documents are scattered, the cost is higher.

    Parameters
    ----------
    ids : (n,) or (B, n) integers
        The document number of every position.
    lengths : (documents,) integers
        In place of ids: the number of positions of each document, in the order of the documents along the axis. The
        lengths sum to n. Without `key_lengths` they hold for the keys too, so m ≤ n. A length may be 0.
    key_lengths : (documents,) integers, optional
        Only with `lengths`, for cross-attention: the number of keys of each document, if it differs from the document's
        number of queries. The key lengths sum to m. Queries of a document without keys attend to nothing.

    Raises
    ------
    ParameterError
        Both or neither of ids and lengths are given, or key_lengths is given without lengths.
    ShapeError
        An array has another shape or dtype. When attention is computed: lengths do not sum to n, or key_lengths to m.

    Examples
    --------
    >>> import sightline
    >>> sightline.documents(lengths=[2, 1]).array(3).astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    >>> sightline.documents(lengths=[1, 1], key_lengths=[1, 3]).array(2, 4).astype(int)
    array([[1, 0, 0, 0],
           [0, 1, 1, 1]])
    """
    if (ids is None) == (lengths is None) or (key_lengths is not None and lengths is None):
        named = ("ids", ids), ("lengths", lengths), ("key_lengths", key_lengths)
        given = [name for name, argument in named if argument is not None]
        raise ParameterError(
            f"documents with {' and '.join(given) or 'no arguments'}",
            "either ids or lengths; key_lengths only with lengths",
            "documents([0, 0, 1]) or documents(lengths=[3, 5], key_lengths=[7, 2])",
        )
    if lengths is not None:
        queries = keys = Table(_document_ids("lengths", lengths), axes=("i",))
        if key_lengths is not None:
            keys = Table(_document_ids("key_lengths", key_lengths), axes=("j",))
            if len(lengths) != len(key_lengths):
                raise ShapeError(
                    f"{len(lengths)} lengths and {len(key_lengths)} key_lengths",
                    "one length and one key length per document",
                    "a length of 0 for a document without queries or without keys",
                )
        return apply("equal", queries[i], keys[j])
    table = Table(ids, axes=(None,) if _ndim(ids) == 1 else ("b", None))
    if table.ndim not in (1, 2) or table.kind != "int":
        raise ShapeError(f"document ids {table}", "(n,) or (B, n) integers", "documents(ids) or documents(lengths=...)")
    return from_template(_documents_by, table)


def _documents_by(ids: Table) -> Expression:
    batch = () if ids.ndim == 1 else (_first_index(ids, b),)
    return apply("equal", ids[(*batch, i)], ids[(*batch, j)])


def _document_ids(name: str, lengths: Any) -> Any:
    """Return the document number of every position, from the length of each document."""
    if framework(lengths) is JAX and is_traced(lengths):
        cure = "documents(jnp.repeat(jnp.arange(len(lengths)), lengths, total_repeat_length=n))"
        raise ShapeError(f"documents({name}=...) that jax.jit traces: their sum is unknown", "known lengths", cure)
    array = to_numpy(lengths) if hasattr(lengths, "dtype") else np.asarray(lengths)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array < 0).any():
        raise ShapeError(f"{name} {lengths!r}", "one axis of whole numbers ≥ 0", "documents(lengths=[3, 5])")
    return np.repeat(np.arange(array.size), array)


def prefix(length: int) -> Expression:
    """Return the mask j < length: every query attends to the first `length` keys.

    Parameters
    ----------
    length : int
        Number of keys, counted from the first; at least 0.

    Raises
    ------
    ParameterError
        length is not a whole number of at least 0.

    Examples
    --------
    >>> import sightline
    >>> (sightline.causal() | sightline.prefix(2)).array(3).astype(int)  # a prefix language model
    array([[1, 1, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """
    if not (_is_integer(length) and length >= 0):
        raise ParameterError(f"prefix({length!r})", "a whole number ≥ 0", "prefix(64), or prefix(0) for no keys")
    return apply("less", j, length)  # see `window`


def dense(array: Any) -> Expression:
    """Return the mask array[b, h, i, j] of an array with an entry for each pair. True lets query i attend to key j.

    Parameters
    ----------
    array : (..., n, m) bool
        The axes are the last ones of (B, H, n, m), and an axis of length 1 broadcasts. An array of more than four axes
        has the axes (..., H, n, m), where the leading axes broadcast to those of query, key and value.

    Raises
    ------
    MaskError
        The array is not boolean.
    ShapeError
        When attention is computed: the length of an axis is neither 1 nor the length that it must have.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> sightline.dense(np.array([[True, False], [True, True]])).sparsity(2)  # hides 1 pair of 4
    0.25
    """
    table = dense_table(array)
    if table.kind != "bool":
        raise MaskError(
            f"dense({table})",
            "a boolean array, True where the query attends",
            "dense(array != 0) for integers; score=sightline.bias(array) for numbers to be added to the scores",
        )
    return from_template(read_densely, table)


def bias(array: Any) -> Expression:
    """Return the score s + array[b, h, i, j]. A bias of −∞ hides the pair.

    Parameters
    ----------
    array : (..., n, m) real numbers, in logits
        The axes are those of `dense`. The array receives its gradient.

    Raises
    ------
    ParameterError
        The array is boolean; a boolean array is a mask.
    ShapeError
        The array requires a gradient of more than 1 TiB, because it was expanded. When attention is computed: the
        length of an axis is neither 1 nor the length that it must have.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> sightline.bias(np.array([[-1, -np.inf]])).array(1, 2, s=5)  # both scores are 5
    array([[  4., -inf]])
    """
    table = dense_table(array)
    if table.kind == "bool":
        raise ParameterError(f"bias({table})", "numbers to be added to the scores", "pass a condition as mask=")
    requires_grad = getattr(table.array, "requires_grad", False)
    size = math.prod(table.shape) * table.array.element_size() if requires_grad else 0
    if size > MAX_GRADIENT_BYTES:
        raise ShapeError(
            f"bias({table}), whose gradient takes {size:,} bytes",
            f"a gradient of at most {MAX_GRADIENT_BYTES:,} bytes",
            "pass the array without expand, because axes of length 1 broadcast",
        )
    return from_template(_bias_by, table)


def _bias_by(array: Table) -> Expression:
    return s + read_densely(array)


def alibi_slopes(heads: int) -> Any:
    """Return the slopes of ALiBi for a number of heads: 2^(−8k/heads), k = 1, ..., heads.

    If the number of heads is not a power of two, the slopes are those of the next lower power of two, followed by every
    other slope of twice that power (Press, Smith and Lewis, "Train short, test long", 2022, section 3 and the authors'
    code). The result is a NumPy array (heads,) of float64, in logits per position of distance.

    Parameters
    ----------
    heads : int
        At least 1.

    Raises
    ------
    ParameterError
        heads is not a whole number of at least 1.

    Examples
    --------
    >>> import sightline
    >>> sightline.alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625])
    """
    heads = check_count("alibi_slopes({!r})", heads, 1, "alibi_slopes(8)")
    power_of_two = 1 << (heads.bit_length() - 1)

    def slopes(count: int) -> Any:
        return 2.0 ** (-8.0 * np.arange(1, count + 1) / count)

    return np.concatenate([slopes(power_of_two), slopes(2 * power_of_two)[0::2][: heads - power_of_two]])


def alibi(slopes: Any) -> Expression:
    """Return the score s − slope[h] (i − j): a bias linear in the distance (Press, Smith and Lewis, 2022).

    Parameters
    ----------
    slopes : int or (H,) floats
        The slopes in logits per position, or the number of heads, for which `alibi_slopes` computes the slopes.
        Combine the score with the mask `causal()`, because the score favours keys after the query. For a bidirectional
        model write s - table(slopes)[h] * abs(i - j).

    Raises
    ------
    ParameterError
        The number of heads is below 1.
    ShapeError
        The slopes do not have exactly one axis. When attention is computed: the number of slopes is neither 1 nor H.

    Examples
    --------
    >>> import sightline
    >>> sightline.alibi([0.5]).array(3, s=0)[-1]  # query 2, on keys 0, 1 and 2
    array([-1. , -0.5,  0. ])
    """
    table = Table(alibi_slopes(slopes) if _ndim(slopes) == 0 else slopes, axes=("h",))
    if table.ndim != 1:
        raise ShapeError(f"slopes {table}", "(H,) floats, or a number of heads", "alibi(8)")
    return from_template(_alibi_by, table)


def _alibi_by(slopes: Table) -> Expression:
    return s - slopes[_first_index(slopes, h)] * (i - j)


def softcap(t: float) -> Expression:
    """Return the score t tanh(s / t), which lies between −t and t (Gemma 2 report, 2024, section 2).

    Parameters
    ----------
    t : float
        The cap, in logits.

    Raises
    ------
    ParameterError
        t is not positive and finite.

    Examples
    --------
    >>> import sightline
    >>> sightline.softcap(30).array(1, 3, s=[[1, 30, 1000]]).round(1)
    array([[ 1. , 22.8, 30. ]])
    """
    is_number = isinstance(t, int | float | np.integer | np.floating) and not isinstance(t, bool)
    if not (is_number and 0 < t < math.inf):  # torch.compile cannot trace `math.isfinite` of a SymFloat
        raise ParameterError(f"softcap({t!r})", "a finite cap above 0", "softcap(30.0)")
    return apply("tanh", s / float(t)) * float(t)


def relative_bias(table: Any) -> Expression:
    """Return the score s + table[h, clip(j − i + w, 0, 2w)]: a learned bias for each head and distance j − i.

    Parameters
    ----------
    table : (H, 2w + 1) or (2w + 1,) floats, in logits
        Entry w is the bias at distance 0. Distances beyond w use the first or the last entry (Shaw, Uszkoreit and
        Vaswani, 2018, equation 5, for the clipping; Raffel et al., 2020, section 2.1, for scalars added to the scores).
        The table receives its gradient.

    Raises
    ------
    ShapeError
        The number of distances is even, or the table has more than two axes. When attention is computed: the table has
        neither one row nor H rows.

    Examples
    --------
    >>> import sightline
    >>> sightline.relative_bias([-2, 0, 1]).array(4, s=0)[1]  # query 1: distances −1, 0, 1, 2
    array([-2.,  0.,  1.,  1.])
    """
    wrapped = Table(table, axes=(None,) if _ndim(table) == 1 else ("h", None))
    if wrapped.ndim > 2 or wrapped.shape[-1] % 2 == 0:
        given = f"relative_bias({wrapped})"
        raise ShapeError(given, "(H, 2w + 1) or (2w + 1,)", "an odd number of distances, distance 0 in the middle")
    max_distance = wrapped.shape[-1] // 2
    distance = apply("minimum", apply("maximum", j - i + max_distance, 0), 2 * max_distance)
    return s + wrapped[distance if wrapped.ndim == 1 else (_first_index(wrapped, h), distance)]


def _first_index(table: Table, symbol: Expression) -> Any:
    """Return the index along the table's first axis: 0 if the axis has length 1, else the symbol."""
    return 0 if is_one(table.shape[0]) else symbol


def _ndim(array: Any) -> int:
    """Return the number of axes of an array or a nested list."""
    return array.ndim if hasattr(array, "ndim") else np.ndim(array)  # torch.compile cannot trace np.ndim of a tensor


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
