"""Ready names for the masks and scores people use. Each is one function that writes a formula."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from ..arrays import namespace, to_numpy
from ..errors import ParameterError, ShapeError
from .expression import SYMBOLS, Constant, Expression, Lookup, apply
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

b, h, i, j, s = (SYMBOLS[name] for name in "bhijs")
n, m = SYMBOLS["n"], SYMBOLS["m"]


def causal(align: Literal["upper left", "lower right"] = "upper left") -> Expression:
    """i ≥ j: no query sees a later key.

    Parameters
    ----------
    align : {"upper left", "lower right"}
        Which corner the diagonal starts from when n ≠ m: "upper left" is i ≥ j (torch's is_causal), "lower right" is
        i + (m − n) ≥ j (the last query sees every key, as in decoding with a cache; FlashAttention's).

    Raises
    ------
    ParameterError
        Any other word.
    """
    if align == "upper left":
        return i >= j
    if align == "lower right":
        return i + (m - n) >= j
    raise ParameterError(f"align={align!r}", '"upper left" or "lower right"', 'causal("lower right") for decoding')


def window(left: int, right: int = 0) -> Expression:
    """−right ≤ i − j < left: the `left` keys up to and including the query's own, and `right` after it.

    `window(256)` is a causal window of 256 keys, the same as (i ≥ j) ∧ (i − j < 256).

    Parameters
    ----------
    left : int
        Keys, the query's own counted.
    right : int, default 0
        Keys after the query's own.

    Raises
    ------
    ParameterError
        left below 1, or right below 0.
    """
    if not (_is_integer(left) and _is_integer(right) and left >= 1 and right >= 0):
        raise ParameterError(
            f"window({left!r}, {right!r})", "whole numbers, left ≥ 1 and right ≥ 0", "window(1) sees the own key alone"
        )
    return (i - j < left) & (j - i <= right)


def padding(lengths: Any) -> Expression:
    """j < lengths[b]: keys past the end of a sequence are hidden.

    Parameters
    ----------
    lengths : (B,) integers
        Real keys of each sequence, `b` counting all leading axes in C order. Give `[length]` for a single one.

    Raises
    ------
    ShapeError
        Lengths of other axes than one, or no integers. When attention is asked: neither one length nor B of them.
    """
    table = None if np.ndim(lengths) == 0 else Table(lengths, axes=("b",))
    if table is None or table.ndim != 1 or table.kind != "int":
        raise ShapeError(f"lengths {table or lengths}", "(B,) integers, one length per sequence", "padding([7, 20])")
    return j < table[b]


def documents(ids: Any = None, *, lengths: Any = None, key_lengths: Any = None) -> Expression:
    """Sequences packed on one axis see only themselves: id[i] = id[j].

    Tiles between different documents are skipped: the cost is that of the documents one by one, Σ length². Numbers in
    order along the axis keep it so; a document scattered over the axis makes tiles partial that hold none of it.

    Parameters
    ----------
    ids : (n,) or (B, n) integers
        A document number for every position.
    lengths : (documents,) integers
        Instead: how long each document is, in order along the axis; their sum is n. One of 0 is an empty document.
    key_lengths : (documents,) integers, optional
        With `lengths`: how long each document is among the keys, where it is not as long as among the queries, as in
        cross-attention; their sum is m. Queries of a document without keys see nothing.

    Raises
    ------
    ParameterError
        ids and lengths both or neither, key_lengths without lengths.
    ShapeError
        Arrays that are not as above. When attention is asked: key_lengths given, and sums other than n and m.

    Examples
    --------
    >>> import sightline
    >>> sightline.documents(lengths=[2, 1]).array(3).astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    >>> sightline.documents(lengths=[2, 1], key_lengths=[1, 3]).array(3, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 0, 0, 0],
           [0, 1, 1, 1]])
    """
    if (ids is None) == (lengths is None):
        raise ParameterError(
            "documents with ids and lengths both or neither", "one of them", "documents(lengths=[3, 5])"
        )
    if key_lengths is not None and lengths is None:
        raise ParameterError(
            "documents with key_lengths and no lengths", "both", "documents(lengths=[3, 5], key_lengths=[7, 2])"
        )
    if key_lengths is not None:
        query_ids, key_ids = _document_ids("lengths", lengths), _document_ids("key_lengths", key_lengths)
        if len(lengths) != len(key_lengths):
            raise ShapeError(
                f"{len(lengths)} lengths and {len(key_lengths)} key_lengths",
                "one of each to a document",
                "a length of 0 where a document has no queries or no keys",
            )
        return apply("equal", Table(query_ids, axes=("i",))[i], Table(key_ids, axes=("j",))[j])
    if lengths is not None:
        ids = _document_ids("lengths", lengths)
    table = Table(ids, axes=(None,) if np.ndim(ids) == 1 else ("b", None))
    if table.ndim not in (1, 2) or table.kind != "int":
        raise ShapeError(f"document ids {table}", "(n,) or (B, n) integers", "documents(ids) or documents(lengths=...)")
    batch_index = () if table.ndim == 1 else (b if table.shape[0] != 1 else 0,)
    return apply("equal", table[(*batch_index, i)], table[(*batch_index, j)])


def _document_ids(name: str, lengths: Any) -> Any:
    """The number of its document for every position."""
    lengths_array = to_numpy(lengths) if hasattr(lengths, "dtype") else np.asarray(lengths)
    if (
        lengths_array.ndim != 1
        or lengths_array.dtype.kind not in "iu"
        or (lengths_array.size and lengths_array.min() < 0)
    ):
        raise ShapeError(f"{name} {lengths!r}", "one axis of whole numbers ≥ 0", "documents(lengths=[3, 5])")
    return np.repeat(np.arange(lengths_array.size), lengths_array)


def prefix(length: int) -> Expression:
    """j < length: keys every query sees; `causal() | prefix(64)` is a prefix language model.

    Parameters
    ----------
    length : int
        Keys, from the first.

    Raises
    ------
    ParameterError
        length no whole number of at least 0.
    """
    if not (_is_integer(length) and length >= 0):
        raise ParameterError(f"prefix({length!r})", "a whole number ≥ 0", "prefix(0) is empty")
    return j < length


def dense(array: Any) -> Expression:
    """A mask given in full: array[b, h, i, j], True attends.

    Parameters
    ----------
    array : (..., n, m) bool
        Right-aligned to (B, H, n, m); axes of length 1 broadcast; more than four axes count their leading ones as B.

    Raises
    ------
    MaskError
        An array that is not boolean.
    ShapeError
        When attention is asked: an axis of another length than 1 or its own.
    """
    table = _broadcast_table(array)
    if table.kind != "bool":
        from ..errors import MaskError

        raise MaskError(
            f"dense({table})",
            "a boolean array, True attends",
            "dense(array != 0) for integers; score=sightline.bias(array) for numbers to be added to the scores",
        )
    return _lookup(table)


def bias(array: Any) -> Expression:
    """s + array[b, h, i, j]; −∞ hides the pair.

    Parameters
    ----------
    array : (..., n, m) real numbers, in logits
        Right-aligned to (B, H, n, m); axes of length 1 broadcast; more than four axes count their leading ones as B.
        Its gradient reaches it.

    Raises
    ------
    ParameterError
        A boolean array, which is a mask.
    ShapeError
        When attention is asked: an axis of another length than 1 or its own.
    """
    table = _broadcast_table(array)
    if table.kind == "bool":
        raise ParameterError(f"bias({table})", "numbers to be added", "pass a condition as mask=")
    return s + _lookup(table)


def alibi_slopes(heads: int) -> Any:
    """The slopes of ALiBi for a number of heads: 2^(−8k/heads), k = 1, ..., heads.

    For heads that are no power of two, the slopes of the power below, then every other one of twice that power (Press,
    Smith and Lewis, "Train short, test long", 2022, section 3 and the authors' code).

    Parameters
    ----------
    heads : int

    Returns
    -------
    numpy.ndarray
        (heads,) float64, in logits for each position of distance

    Raises
    ------
    ParameterError
        heads no whole number of at least 1.
    """
    if not (_is_integer(heads) and heads >= 1):
        raise ParameterError(f"alibi_slopes({heads!r})", "a whole number of heads, at least one", "alibi_slopes(8)")
    power_of_two = 1 << (int(heads).bit_length() - 1)

    def slopes(count: int) -> Any:
        return 2.0 ** (-8.0 * np.arange(1, count + 1) / count)

    return np.concatenate([slopes(power_of_two), slopes(2 * power_of_two)[0::2][: heads - power_of_two]])


def alibi(slopes: Any) -> Expression:
    """s − slope[h] (i − j): linear biases by distance (Press, Smith and Lewis, 2022).

    Parameters
    ----------
    slopes : int or (H,) floats
        A number of heads, for `alibi_slopes`, or the slopes themselves. Use it with `causal()`: later keys would gain.
        In a model that looks both ways write s - table(slopes)[h] * abs(i - j).

    Raises
    ------
    ParameterError
        A number of heads below 1.
    ShapeError
        Slopes of other axes than one. When attention is asked: neither one slope nor H of them.
    """
    table = Table(alibi_slopes(slopes) if np.ndim(slopes) == 0 else slopes, axes=("h",))
    if table.ndim != 1:
        raise ShapeError(f"slopes {table}", "(H,) floats, or a number of heads", "alibi(8)")
    return s - table[h] * (i - j)


def softcap(t: float) -> Expression:
    """t tanh(s / t): scores held within ±t (Gemma 2 report, 2024, section 2).

    Parameters
    ----------
    t : float
        In logits.

    Raises
    ------
    ParameterError
        t not positive and finite.
    """
    if not (isinstance(t, int | float | np.integer | np.floating) and math.isfinite(t) and t > 0):
        raise ParameterError(f"softcap({t!r})", "a finite cap above 0", "softcap(30.0)")
    return apply("tanh", s / float(t)) * float(t)


def relative_bias(table: Any) -> Expression:
    """s + table[h, clip(j − i + w, 0, 2w)]: a learned number per head and distance, as far as w either way.

    Parameters
    ----------
    table : (H, 2w + 1) or (2w + 1,) floats, in logits
        Entry w is distance 0; distances beyond w share the last entry (Shaw, Uszkoreit and Vaswani, 2018, equation 5's
        clipping; Raffel et al., 2020, section 2.1, for scalars added to the scores). Its gradient reaches it.

    Raises
    ------
    ShapeError
        An even number of distances, or more than two axes. When attention is asked: neither one row nor H of them.
    """
    wrapped = Table(table, axes=(None,) if np.ndim(table) == 1 else ("h", None))
    if wrapped.ndim > 2 or wrapped.shape[-1] % 2 == 0:
        raise ShapeError(
            f"relative_bias({wrapped})", "(H, 2w + 1) or (2w + 1,)", "an odd number of distances, 0 in the middle"
        )
    if wrapped.ndim == 2:
        wrapped.axes = ("h", None)
    max_distance = wrapped.shape[-1] // 2
    distance = apply("minimum", apply("maximum", j - i + max_distance, 0), 2 * max_distance)
    return s + wrapped[distance if wrapped.ndim == 1 else (h, distance)]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _broadcast_table(array: Any) -> Table:
    """A table whose axes stand for the last of b, h, i, j; leading axes beyond four become one."""
    if not hasattr(array, "shape"):
        array = np.asarray(array)
    if array.ndim > 4:
        array = namespace(array).reshape(array, (-1, *array.shape[-3:]))
    return Table(array, axes=tuple("bhij"[4 - array.ndim :]))


def _lookup(table: Table) -> Expression:
    """The table at its axes' own symbols; an axis of length 1 is read at 0."""
    names = "bhij"[4 - table.ndim :]
    return Lookup(
        table,
        tuple(
            Constant(0, "int") if length == 1 else SYMBOLS[name]
            for name, length in zip(names, table.shape, strict=True)
        ),
    )
