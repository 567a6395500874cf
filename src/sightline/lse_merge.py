"""Attention over parts of the keys, joined into attention over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from .arrays import FLOATS, accumulator, device, dtype_name, framework, namespace, resolve_dtype
from .errors import DeviceError, DtypeError, ParameterError, ShapeError

__all__ = ["merge"]

CURE = "merge([(out, lse), (out, lse)]), as attention(..., see=[lse()]) answers"


def merge(parts: Iterable[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Attention over disjoint sets of keys, joined into attention over their union; exact.

        lse = log Σ_p exp(lse_p)        out = Σ_p exp(lse_p − lse) out_p

    The weights are normalised by their own sum, not by the rounded lse, so they add up to 1 however large lse is.

    Each key belongs to one part. Formulas count the keys of a part from 0: where a part begins at key 1000, i ≥ j
    becomes i ≥ j + 1000. A sink takes weight once, so give it to one part alone. Dropout is drawn by (b, h, i, j), and
    j begins anew in each part: give the parts different seeds.

    Parameters
    ----------
    parts : iterable of (out, lse), at least one
        out (..., n, d_v) float16, bfloat16, float32 or float64, NumPy or torch; lse (..., n) in the accumulator's dtype
        (float64 for float64, else float32) or in float64, in nats; alike in all parts, nothing broadcasts. Where lse is
        −∞ the part saw nothing and its out is not read. In place of lse, the (lse,) that `attention(..., see=[lse()])`
        answers.

    Returns
    -------
    out : (..., n, d_v), the parts' dtype; 0 for a query that saw nothing in any part
    lse : (..., n), the parts' dtype; −∞ there
        In torch both have gradients to any order, 0 where a part saw nothing.

    Raises
    ------
    ShapeError
        Shapes differ between parts, or lse is not out without its last axis.
    DtypeError
        No floats, or other dtypes in one part than in another.
    DeviceError
        Parts of different libraries or on different devices.
    ParameterError
        No part at all, or parts that are no pairs.

    References
    ----------
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3; Dao, Haziza, Massa and Sizov,
    "Flash-Decoding for long-context inference", 2023.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.normal(size=(8, 500, 64)) for _ in range(3))
    >>> halves = [slice(0, 250), slice(250, 500)]
    >>> parts = [sightline.attention(q, k[:, half], v[:, half], see=[sightline.lse()]) for half in halves]
    >>> out, lse = sightline.merge(parts)
    >>> bool(np.allclose(out, sightline.attention(q, k, v)))
    True
    """
    outs, lses = _validate(parts)
    if framework(outs[0]) == "torch":
        return _combine(outs, lses)
    with np.errstate(all="ignore"):  # ∞ and NaN of the parts go where they must without words
        return _combine(outs, lses)


def _combine(outs: list[Any], lses: list[Any]) -> tuple[Any, Any]:
    """Plain array operations, which torch differentiates and compiles."""
    xp, out_dtype, lse_dtype = namespace(outs[0]), outs[0].dtype, lses[0].dtype
    acc_dtype = resolve_dtype(xp, accumulator(dtype_name(outs[0])))
    largest = xp.max(xp.stack([_detach(lse) for lse in lses]), axis=0)  # a shift that cancels: it needs no gradient
    is_empty = largest == -math.inf
    shift = xp.where(is_empty, xp.zeros_like(largest), largest)
    shares = [xp.exp(lse - shift) for lse in lses]
    total = sum(shares[1:], start=shares[0])
    total = xp.where(is_empty, xp.ones_like(total), total)
    out = sum(
        xp.astype(share / total, acc_dtype)[..., None] * xp.astype(_zero_where_empty(xp, out, lse), acc_dtype)
        for share, out, lse in zip(shares, outs, lses, strict=True)
    )
    lse = xp.where(is_empty, xp.full_like(total, -math.inf), shift + xp.log(total))
    return xp.astype(out, out_dtype), xp.astype(lse, lse_dtype)


def _detach(lse: Any) -> Any:
    return lse.detach() if hasattr(lse, "detach") else lse


def _zero_where_empty(xp: Any, out: Any, lse: Any) -> Any:
    """The output, 0 where the part saw nothing, whatever another library wrote there."""
    return xp.where((lse == -math.inf)[..., None], xp.zeros_like(out), out)


def _validate(parts: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Outputs and normalisers of parts that fit together."""
    outs, lses = [], []
    for index, part in enumerate(parts):
        if not isinstance(part, tuple | list) or len(part) != 2:
            raise ParameterError(f"part {index} is a {type(part).__name__}", "pairs (out, lse)", CURE)
        out, lse = part
        if isinstance(lse, tuple | list) and len(lse) == 1:
            lse = lse[0]
        for name, array in (("out", out), ("lse", lse)):
            _check_array(f"{name} of part {index}", array)
        if tuple(lse.shape) != tuple(out.shape[:-1]) or out.ndim < 2:
            raise ShapeError(
                f"part {index} has out {tuple(out.shape)} and lse {tuple(lse.shape)}",
                "out (..., n, d_v) and lse (..., n)",
                "give out and lse of one call",
            )
        outs.append(out)
        lses.append(lse)
    if not outs:
        raise ParameterError("merge of no parts", "at least one part", CURE)
    _check_alike(outs, lses)
    return outs, lses


def _check_array(what: str, array: Any) -> None:
    if framework(array) not in ("numpy", "torch") or not hasattr(array, "dtype"):
        raise DtypeError(f"{what} is a {type(array).__name__}", "arrays of NumPy or torch", CURE)
    if dtype_name(array) not in FLOATS:
        raise DtypeError(f"{what} has dtype {dtype_name(array)}", ", ".join(FLOATS), "cast it to one of these")


def _check_alike(outs: list[Any], lses: list[Any]) -> None:
    """Raise where parts differ from the first in library, device, shape or dtype."""
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for name, array, first in (("out", out, outs[0]), ("lse", lse, lses[0])):
            what = f"{name} of part {index}"
            if (framework(array), device(array)) != (framework(outs[0]), device(outs[0])):
                raise DeviceError(
                    f"{what} is {framework(array)} on {device(array)}",
                    f"all from {framework(outs[0])} on {device(outs[0])}, as out of part 0",
                    "convert or move it first",
                )
            if dtype_name(array) != dtype_name(first):
                raise DtypeError(
                    f"{what} has dtype {dtype_name(array)}, that of part 0 {dtype_name(first)}",
                    "one dtype for all",
                    f"cast {name} of every part to one dtype",
                )
            if tuple(array.shape) != tuple(first.shape):
                raise ShapeError(
                    f"{what} has shape {tuple(array.shape)}, that of part 0 {tuple(first.shape)}",
                    "one shape for all: parts differ in their keys alone",
                    "attend with the same queries and heads in every part",
                )
    lse_dtype_name = accumulator(dtype_name(outs[0]))
    if dtype_name(lses[0]) not in (lse_dtype_name, "float64"):
        raise DtypeError(
            f"lse of dtype {dtype_name(lses[0])} beside out of {dtype_name(outs[0])}",
            lse_dtype_name if lse_dtype_name == "float64" else f"{lse_dtype_name} or float64",
            "take lse from attention(..., see=[sightline.lse()]) as it is",
        )
