"""Parts of a problem of attention, and the merge of attention over disjoint sets of keys into that over their union."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from ...arrays import operations as arrays
from ...errors import DeviceError, DtypeError, ParameterError, ShapeError
from ...formula.expression import SYMBOLS, Expression, Offset, as_expression, intern
from ...statistics import KeyPart, Statistic, arrays_of, weigh
from ..problem import Problem

CURE = "merge([(out, lse), (out, lse)]), as attention(..., see=[lse()]) returns them"


def part_of(
    problem: Problem,
    query: Any,
    key: Any,
    value: Any,
    *,
    first_head: int = 0,
    first_row: int | Expression | None = None,
    first_key: int | Expression | None = None,
    see: tuple[Statistic, ...] = (),
) -> Problem:
    """Return the problem of some consecutive queries, keys and heads of `problem`.

    `sightline.merge` joins the results of parts. A part has no sinks, since a sink counts once. A kernel counts the
    heads h, queries i and keys j of a part from 0. So the formulas of the part read h + first_head, i + first_row and
    j + first_key instead; n and m stay the lengths of `problem`. Numbers become `Offset`s, which a kernel receives as
    arguments. So one compiled kernel serves all parts.

    Parameters
    ----------
    problem : the whole problem; only the shapes of its arrays are read
    query, key, value : the arrays of the part, with a head axis and the batch axes of `problem`
    first_head, first_row, first_key : the positions h, i and j in `problem` of the part's first head, query and key;
        `first_row` is None if the part has all queries, and `first_key` is None if it has all keys. Without dropout
        they may be formulas.
    see : the statistics of the part, with formulas for the whole problem

    Raises
    ------
    ParameterError
        The problem has dropout, which counts keys in groups of 4, and `first_key` is no multiple of 4.
    """
    if problem.dropout and (first_key or 0) % 4:
        given = f"dropout on a part whose keys begin at {first_key}"
        raise ParameterError(given, "parts whose keys begin at multiples of 4", "divide the keys at multiples of 4")
    symbols: dict[str, Expression] = {"n": as_expression(problem.n), "m": as_expression(problem.m)}
    for name, first in (("i", first_row), ("j", first_key)):
        if first is not None:
            offset = first if isinstance(first, Expression) else intern(Offset(first, "int", name=name))
            symbols[name] = SYMBOLS[name] + offset
    if first_head:
        symbols["h"] = SYMBOLS["h"] + first_head
    part = replace(problem, query=query, key=key, value=value, sinks=None, see=see)
    part = part.map_formulas(lambda f: f.rewrite(symbols) if symbols.keys() & f.free_symbols else f)
    if not problem.dropout:
        return part
    b, h, i, j = problem.dropout_origin
    return replace(part, dropout_origin=(b, h + first_head, i + (first_row or 0), j + (first_key or 0)))


def merge(parts: Iterable[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Merge attention over disjoint sets of keys into attention over their union; the formula is exact.

        lse = ln Σ_p exp(lse_p)        out = Σ_p exp(lse_p − lse) out_p

    A part p is the result of attention over one set of keys. The factors exp(lse_p − lse) are normalised by their own
    sum, not by the rounded lse, so they add up to 1 however large lse is.

    Each key must belong to exactly one part. Formulas count the keys of every part from 0: if a part begins at key
    1000, write i ≥ j + 1000 in place of i ≥ j. A sink must count once, so pass sinks to one part. Dropout depends on
    (b, h, i, j), and j starts at 0 in each part, so give every part its own seed.

    Parameters
    ----------
    parts : iterable of (out, lse), at least one pair
        out is an array (..., n, d_v) of float16, bfloat16, float32 or float64, of NumPy, torch or JAX. lse is an array
        (..., n), in nats, in the accumulator's dtype (float64 if out is float64, else float32) or in float64. Shapes
        and dtypes must be equal in all parts; nothing is broadcast. An lse of −∞ means that the query sees no key of
        the part. The query's row of out is ignored if the part's factor is 0 for this query. The tuple (lse,) that
        `attention(..., see=[lse()])` returns is accepted in place of lse.

    Returns
    -------
    out : (..., n, d_v)
        The merged output, in the dtype of the parts' out; 0 for a query that sees no key in any part.
    lse : (..., n)
        The merged lse, in the dtype of the parts' lse; −∞ for a query that sees no key in any part.

    In torch and JAX, out and lse have gradients of any order. If a query attends to no key of a part, the
    gradients of its out and lse in this part are 0.

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
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 8, 500, 64))
    >>> halves = [slice(0, 250), slice(250, 500)]
    >>> parts = [sightline.attention(q, k[:, half], v[:, half], see=[sightline.lse()]) for half in halves]
    >>> out, lse = sightline.merge(parts)
    >>> bool(np.allclose(out, sightline.attention(q, k, v)))
    True
    """
    outs, lses = _validate(parts)
    if not isinstance(outs[0], np.ndarray):
        return _merge(outs, lses)
    with np.errstate(all="ignore"):  # ∞ and NaN in the parts propagate without warnings
        return _merge(outs, lses)


def _merge(outs: list[Any], lses: list[Any]) -> tuple[Any, Any]:
    """Merge parts by plain array operations, which torch can differentiate and compile."""
    xp = arrays.namespace(outs[0])
    dtype = arrays.resolve_dtype(xp, arrays.accumulator(arrays.dtype_name(outs[0])))
    detached = [lse.detach() if hasattr(lse, "detach") else lse for lse in lses]  # the shift cancels: no gradient
    parts = [Sums(lse, 1.0, 1.0, xp.astype(out, dtype), []) for out, lse in zip(outs, lses, strict=True)]
    merged = add_parts(parts, (), normalize=True, shift=reduce(xp.maximum, detached))
    return xp.astype(merged.output, outs[0].dtype), xp.astype(merged.shift, lses[0].dtype)


class Sums(NamedTuple):
    """Attention over some keys as sums over the weights exp(S − shift), which are not normalised. S is the score.

    In the result of attention over these keys, the shift is the lse, and the total is 1.

    shift : (..., H, n)
    total : (..., H, n), or a number for every query: the sum of the weights, the sink's weight included
    keys : like `total`, without the sink's weight
    output : (..., H, n, d_v)
    seen : the arrays of each statistic
    """

    shift: Any
    total: Any
    keys: Any
    output: Any
    seen: list[list[Any]]

    @property
    def arrays(self) -> list[Any]:
        return [*self[:4], *[array for own in self.seen for array in own]]

    def rows(self, rows: slice) -> Sums:
        """Return the sums of these queries, as views."""
        shift, total, keys, output = [array[self._index(rows)] for array in self[:4]]
        seen = [[array[self._index(rows)] for array in own] for own in self.seen]
        return Sums(shift, total, keys, output, seen)

    def store(self, rows: slice, found: Sums) -> None:
        """Write `found`, the sums of these queries, into the arrays."""
        for array, new in zip(self.arrays, found.arrays, strict=True):
            array[self._index(rows)] = new

    def _index(self, rows: slice) -> tuple[slice, ...]:
        return *[slice(None)] * (self.shift.ndim - 1), rows


def start(problem: Problem, output: Any, sinks: Any, dtype: Any) -> Sums:
    """Return the sums before the first key. A sink has a weight, but no row of V.

    Parameters
    ----------
    problem : its `see` names the statistics that the sums have
    output : (..., H, n, d_v) zeros
    sinks : array that broadcasts to (..., H, n), or None
    dtype : the dtype of all floats except the output
    """
    xp, (*outer, n) = arrays.namespace(output), output.shape[:-1]

    def full(value: float, shape: tuple[int, ...] = output.shape[:-1]) -> Any:
        return xp.full(shape, value, dtype=dtype if isinstance(value, float) else None, **arrays.device_option(output))

    seen = [list(map(full, each.fill_values, each.shapes(problem, tuple(outer), n))) for each in problem.see]
    shift = full(-math.inf) if sinks is None else full(0.0) + xp.astype(sinks, dtype)
    return Sums(shift, full(1.0), full(0.0), output, seen)


def read_part(output: Any, lse: Any, results: Sequence[Any], first_key: Any) -> Sums:
    """Return output, lse and results of statistics as `Sums`. `first_key` is added to indices of keys in `results`."""
    xp, seen = arrays.namespace(output), []
    for result in results:
        array, *keys = arrays_of(result)
        seen.append([xp.astype(array, lse.dtype), *[xp.where(key < 0, key, key + first_key) for key in keys]])
    return Sums(lse, 1.0, 1.0, output, seen)


def add_parts(parts: Sequence[Sums], see: Sequence[Statistic], *, normalize: bool = False, shift: Any = None) -> Sums:
    """Return the sums over the keys of all parts. With `normalize`, the weights are divided by their sum.

    `shift` is the shift of the sums before they are normalised, by default the largest shift of the parts. A normalised
    result has lse as its shift. A part whose factor exp(part.shift − shift) is 0 adds nothing, not even NaN or ∞.
    """
    xp, dtype = arrays.namespace(parts[0].output), parts[0].output.dtype
    shift = reduce(xp.maximum, [part.shift for part in parts]) if shift is None else shift
    is_empty = shift == -math.inf
    finite = xp.where(is_empty, 0.0, shift)
    factors = [xp.exp(part.shift - finite) for part in parts]
    total = sum([factor * part.total for factor, part in zip(factors, parts, strict=True)])
    if normalize:
        total = xp.where(is_empty, 1.0, total)
        factors = [factor / total for factor in factors]
        shift, total = xp.where(is_empty, -math.inf, finite + xp.log(total)), xp.ones_like(total)
    weighted = list(zip(factors, parts, strict=True))
    keys: Any = sum([factor * part.keys for factor, part in weighted])
    output: Any = sum([weigh(xp.astype(factor, dtype)[..., None], part.output) for factor, part in weighted])
    seen = [
        statistic.merge([KeyPart(part.seen[k], part.keys, factor) for factor, part in weighted], shift)
        for k, statistic in enumerate(see)
    ]
    return Sums(shift, total, keys, output, seen)


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
        for what, array in ((f"out of part {index}", out), (f"lse of part {index}", lse)):
            if not arrays.framework(array).is_native or not hasattr(array, "dtype"):
                raise DtypeError(f"{what} is a {type(array).__name__}", "arrays of NumPy, torch or JAX", CURE)
            arrays.check_float_dtype(what, array)
        if tuple(lse.shape) != tuple(out.shape[:-1]) or out.ndim < 2:
            given = f"part {index} has out {tuple(out.shape)} and lse {tuple(lse.shape)}"
            raise ShapeError(given, "out (..., n, d_v) and lse (..., n)", "give out and lse of one call")
        outs.append(out)
        lses.append(lse)
    if not outs:
        raise ParameterError("merge of no parts", "at least one part", CURE)
    _check_alike(outs, lses)
    return outs, lses


def _check_alike(outs: list[Any], lses: list[Any]) -> None:
    """Raise DeviceError, ShapeError or DtypeError if a part differs from the first part, or lse is of a wrong dtype."""
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for name, array, first in (("out", out, outs[0]), ("lse", lse, lses[0])):
            what = f"{name} of part {index}"
            if arrays.place(array) != arrays.place(outs[0]):
                raise DeviceError(
                    f"{what} is {arrays.place(array)}",
                    f"{arrays.place(outs[0])}, as out of part 0 is",
                    "convert or move the array first",
                )
            for noun, error, read, cure in (
                ("dtype", DtypeError, arrays.dtype_name, f"cast {name} of every part to one dtype"),
                ("shape", ShapeError, lambda x: tuple(x.shape), "use the same queries and heads in every part"),
            ):
                if read(array) != read(first):
                    given = f"{what} has {noun} {read(array)}, {name} of part 0 has {read(first)}"
                    raise error(given, f"one {noun} for all parts", cure)
    lse_dtype_name = arrays.accumulator(arrays.dtype_name(outs[0]))
    if arrays.dtype_name(lses[0]) not in (lse_dtype_name, "float64"):
        raise DtypeError(
            f"lse has dtype {arrays.dtype_name(lses[0])}, out has dtype {arrays.dtype_name(outs[0])}",
            lse_dtype_name if lse_dtype_name == "float64" else f"{lse_dtype_name} or float64",
            "pass lse as attention(..., see=[sightline.lse()]) returns it",
        )
