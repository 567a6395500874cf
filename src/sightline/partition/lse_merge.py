"""Merge attention over disjoint sets of keys into attention over their union."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..arrays.operations import accumulator, check_float_dtype, device, dtype_name, framework, namespace, resolve_dtype
from ..errors import DeviceError, DtypeError, ParameterError, ShapeError

CURE = "merge([(out, lse), (out, lse)]), as attention(..., see=[lse()]) returns them"


def merge(parts: Iterable[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Merge attention over disjoint sets of keys into attention over their union; the formula is exact.

        lse = ln Σ_p exp(lse_p)        out = Σ_p exp(lse_p − lse) out_p

    A part p is the result of attention over one set of keys. The factors exp(lse_p − lse) are normalised by their own
    sum, not by the rounded lse, so they add up to 1 however large lse is.

    Each key must belong to exactly one part. Formulas count the keys of every part from 0: if a part begins at key
    1000, write i ≥ j + 1000 for i ≥ j. A sink must count only once, so pass sinks to one part alone. Dropout depends on
    (b, h, i, j), and j starts at 0 in each part, so give every part its own seed.

    Parameters
    ----------
    parts : iterable of (out, lse), at least one pair
        out is an array (..., n, d_v) of float16, bfloat16, float32 or float64, of NumPy, torch or JAX. lse is an array
        (..., n), in nats, in the accumulator's dtype (float64 if out is float64, else float32) or in float64. Shapes
        and dtypes must be equal in all parts; nothing is broadcast. An lse of −∞ means that the query sees no key of
        the part. The query's row of out is ignored if the factor of the part is 0, because the lse is −∞ or the factor
        underflows. The tuple (lse,) that `attention(..., see=[lse()])` returns is accepted in place of lse.

    Returns
    -------
    out : (..., n, d_v)
        The merged output, in the dtype of the parts' out; 0 for a query that sees no key in any part.
    lse : (..., n)
        The merged lse, in the dtype of the parts' lse; −∞ for a query that sees no key in any part.

    In torch and JAX, out and lse have gradients of any order. A part's gradients are 0 where a query sees no key of the
    part.

    Raises
    ------
    ShapeError
        Shapes differ between parts, or the shape of lse is not the shape of out without its last axis.
    DtypeError
        out or lse is no array of floats, dtypes differ between parts, or lse has a dtype that is not allowed for out.
    DeviceError
        Parts come from different libraries or lie on different devices.
    ParameterError
        `parts` is no iterable, there is no part, or a part is not a pair.

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
    with np.errstate(all="ignore"):  # ∞ and NaN in the parts propagate without warnings
        return _combine(outs, lses)


def _combine(outs: list[Any], lses: list[Any]) -> tuple[Any, Any]:
    """Merge parts by plain array operations, which torch can differentiate and compile."""
    xp, out_dtype, lse_dtype = namespace(outs[0]), outs[0].dtype, lses[0].dtype
    acc_dtype = resolve_dtype(xp, accumulator(dtype_name(outs[0])))
    detached = [lse.detach() if hasattr(lse, "detach") else lse for lse in lses]  # the shift cancels: no gradient
    largest = xp.max(xp.stack(detached), axis=0)
    is_empty = largest == -math.inf
    shift = xp.where(is_empty, xp.zeros_like(largest), largest)
    shares = [xp.exp(lse - shift) for lse in lses]
    total = sum(shares[1:], start=shares[0])
    total = xp.where(is_empty, xp.ones_like(total), total)
    weights = [xp.astype(share / total, acc_dtype)[..., None] for share in shares]
    # A part of weight 0 adds nothing, even if its out is NaN or ∞. If its lse is −∞, its out may hold anything.
    visible = [xp.where(weight == 0, xp.zeros_like(out), out) for weight, out in zip(weights, outs, strict=True)]
    terms = [weight * xp.astype(out, acc_dtype) for weight, out in zip(weights, visible, strict=True)]
    out = sum(terms[1:], start=terms[0])
    lse = xp.where(is_empty, xp.full_like(total, -math.inf), shift + xp.log(total))
    return xp.astype(out, out_dtype), xp.astype(lse, lse_dtype)


def _validate(parts: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Check the parts. Return (list of their outputs, list of their lses)."""
    try:
        iterator = iter(parts)
    except TypeError as error:
        raise ParameterError(f"merge of a {type(parts).__name__}", "an iterable of pairs (out, lse)", CURE) from error
    outs, lses = [], []
    for index, part in enumerate(iterator):
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
    if framework(array) not in ("numpy", "torch", "jax") or not hasattr(array, "dtype"):
        raise DtypeError(f"{what} is a {type(array).__name__}", "arrays of NumPy, torch or JAX", CURE)
    check_float_dtype(what, array)


def _check_alike(outs: list[Any], lses: list[Any]) -> None:
    """Raise if a part differs from the first part in library, device, shape or dtype."""
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for name, array, first in (("out", out, outs[0]), ("lse", lse, lses[0])):
            what = f"{name} of part {index}"
            if (framework(array), device(array)) != (framework(outs[0]), device(outs[0])):
                raise DeviceError(
                    f"{what} is {framework(array)} on {device(array)}",
                    f"{framework(outs[0])} on {device(outs[0])}, as out of part 0 is",
                    "convert or move the array first",
                )
            if dtype_name(array) != dtype_name(first):
                raise DtypeError(
                    f"{what} has dtype {dtype_name(array)}, {name} of part 0 has {dtype_name(first)}",
                    "one dtype for all parts",
                    f"cast {name} of every part to one dtype",
                )
            if tuple(array.shape) != tuple(first.shape):
                raise ShapeError(
                    f"{what} has shape {tuple(array.shape)}, {name} of part 0 has {tuple(first.shape)}",
                    "one shape for all parts",
                    "use the same queries and heads in every part",
                )
    lse_dtype_name = accumulator(dtype_name(outs[0]))
    if dtype_name(lses[0]) not in (lse_dtype_name, "float64"):
        raise DtypeError(
            f"lse has dtype {dtype_name(lses[0])}, out has dtype {dtype_name(outs[0])}",
            lse_dtype_name if lse_dtype_name == "float64" else f"{lse_dtype_name} or float64",
            "pass lse as attention(..., see=[sightline.lse()]) returns it",
        )
