"""Interval arithmetic: bounds of the values of a formula, over many rectangles of (i, j) at once.

An interval is a pair (low, high) of float64 arrays with one number for each rectangle. In a condition, True counts as 1
and False as 0: low = 1 means that the condition is certainly True, and high = 0 that it is certainly False. The
endpoints of + − · / √ are rounded as the formula itself is. Rounding is monotone, so the intervals of these operators
are exact. The intervals of transcendental functions are widened by a few units in the last place.

The rules call the functions of a namespace `xp`. The namespace is NumPy, or an object with NumPy's functions for
another kind of number: `cpu.codegen.render_bounds` renders the same rules into generated code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np

from .expression import Apply, Constant, Expression, Lookup, Symbol, walk

Interval = tuple[Any, Any]  # NumPy arrays, or numbers of another namespace

EPSILON = float(np.finfo(np.float64).eps)
LIBRARY_ERROR = 8 * EPSILON  # relative error of math libraries in exp, exp2, log, log2, log1p, tanh and power
SMALLEST = 5e-324  # the smallest positive float64, for results near 0


def compute_intervals(
    formula: Expression,
    box: Mapping[str, Interval],
    read_table: Callable[[Lookup, list[Interval]], Interval] | None = None,
) -> dict[int, Interval]:
    """Return the interval (low, high) of every node of the formula, by the id of the node.

    Parameters
    ----------
    box : the interval of every symbol, by its name; both ends of an interval are included
    read_table : (lookup, intervals of its indices) → interval of its entries; by default `TableBounds.over`
    """
    bounds: dict[int, Interval] = {}
    with np.errstate(all="ignore"):
        for node in walk(formula):
            bounds[id(node)] = compute_interval(node, bounds, box, np, read_table or _read_table)
    return bounds


def compute_interval(
    node: Expression,
    bounds: Mapping[int, Interval],
    box: Mapping[str, Interval],
    xp: Any,
    read_table: Callable[[Lookup, list[Interval]], Interval],
) -> Interval:
    """Return the interval of one node; `bounds` has the intervals of its arguments. See `compute_intervals`.

    `xp` is NumPy, or an object with the functions of NumPy for another kind of number.
    """
    if isinstance(node, Symbol):
        return box[node.name]
    if isinstance(node, Constant):
        return (xp.float64(node.value),) * 2
    inputs = [bounds[id(argument)] for argument in node.arguments]
    if isinstance(node, Lookup):
        return _unbound_nan(xp, read_table(node, inputs))
    assert isinstance(node, Apply)
    return _apply(xp, node, inputs)


def _read_table(node: Lookup, indices: list[Interval]) -> Interval:
    return node.table.bounds.over(indices)


def _apply(xp: Any, node: Apply, inputs: list[Interval]) -> Interval:
    if node.kind == "float":
        low, high = _unbound_nan(xp, BOUND_RULES[node.operator](xp, *inputs))
    else:
        low, high = (WHOLE_RULES.get(node.operator) or BOUND_RULES[node.operator])(xp, *inputs)
    if node.operator != "where":
        for argument, (a, z) in zip(node.arguments, inputs, strict=True):
            if argument.kind == "float":  # an unbounded argument may be NaN, and NaN propagates
                unknown = (a == -np.inf) & (z == np.inf)
                if xp.any(unknown):
                    widest = (0.0, 1.0) if node.kind == "bool" else (-np.inf, np.inf)
                    low, high = _replace_where(xp, unknown, (low, high), widest)
    return low, high


def _replace_where(xp: Any, condition: Any, interval: Interval, other: Any = (-np.inf, np.inf)) -> Interval:
    return xp.where(condition, other[0], interval[0]), xp.where(condition, other[1], interval[1])


def _unbound_nan(xp: Any, interval: Interval) -> Interval:
    """Return the interval, with (−∞, ∞) where an end is NaN, the value of ∞ − ∞, 0 · ∞ and ln of negative numbers."""
    unknown = xp.isnan(interval[0]) | xp.isnan(interval[1])
    return _replace_where(xp, unknown, interval) if xp.any(unknown) else interval


def _hull(xp: Any, *candidates: Any) -> Interval:
    return reduce(xp.minimum, candidates), reduce(xp.maximum, candidates)


def _multiply(xp: Any, x: Interval, y: Interval) -> Interval:
    return _hull(xp, *(a * b for a in x for b in y))


def _divide(xp: Any, x: Interval, y: Interval) -> Interval:
    return _replace_where(xp, (y[0] <= 0) & (y[1] >= 0), _hull(xp, *(a / b for a in x for b in y)))


def _floor_divide(xp: Any, x: Interval, y: Interval) -> Interval:
    low, high = _divide(xp, x, y)
    return xp.floor(low), xp.floor(high)


def _remainder(xp: Any, x: Interval, y: Interval) -> Interval:
    """Return the interval of x − ⌊x / y⌋ y, which lies between 0 and y, up to rounding."""
    rounding = xp.maximum(xp.abs(x[0]), xp.abs(x[1])) * EPSILON
    unknown = ((y[0] <= 0) & (y[1] >= 0)) | xp.isinf(rounding) | xp.isinf(y[0]) | xp.isinf(y[1])
    return _replace_where(xp, unknown, (xp.minimum(y[0], 0.0) - rounding, xp.maximum(y[1], 0.0) + rounding))


def _whole_quotient(xp: Any, x: Interval, y: Interval) -> Interval:
    """Return the interval of ⌊x / y⌋ for integers, where |⌊x / y⌋| ≤ |x| and x // 0 = 0."""
    low, high = _hull(xp, *(a / b for a in x for b in y))
    limit = xp.maximum(xp.abs(x[0]), xp.abs(x[1]))
    return _replace_where(xp, (y[0] <= 0) & (y[1] >= 0), (xp.floor(low), xp.floor(high)), (-limit, limit))


def _whole_remainder(xp: Any, x: Interval, y: Interval) -> Interval:
    """Return the interval of x − ⌊x / y⌋ y for integers, where x mod 0 = 0.

    The value lies between 0 and y, without y. If the quotient is one constant c, the value is x − c y.
    """
    low, high = _whole_quotient(xp, x, y)
    shift = low * y[0]
    is_constant = (low == high) & (y[0] == y[1])
    wide = xp.minimum(y[0] + 1.0, 0.0), xp.maximum(y[1] - 1.0, 0.0)
    return _replace_where(xp, is_constant, wide, (x[0] - shift, x[1] - shift))


def _absolute(xp: Any, x: Interval) -> Interval:
    low, high = _hull(xp, xp.abs(x[0]), xp.abs(x[1]))
    return xp.where((x[0] <= 0) & (x[1] >= 0), 0.0, low), high


def _equal(xp: Any, x: Interval, y: Interval) -> Interval:
    same = (x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0])
    return xp.float64(same), xp.float64((x[0] <= y[1]) & (y[0] <= x[1]))


def _less(xp: Any, x: Interval, y: Interval) -> Interval:
    return xp.float64(x[1] < y[0]), xp.float64(x[0] < y[1])


def _less_equal(xp: Any, x: Interval, y: Interval) -> Interval:
    return xp.float64(x[1] <= y[0]), xp.float64(x[0] <= y[1])


def _logical_not(xp: Any, x: Interval) -> Interval:
    return 1 - x[1], 1 - x[0]


def _xor(xp: Any, x: Interval, y: Interval) -> Interval:
    known = (x[0] == x[1]) & (y[0] == y[1])
    value = xp.abs(x[0] - y[0])
    return xp.where(known, value, 0.0), xp.where(known, value, 1.0)


def _bitwise_and(xp: Any, x: Interval, y: Interval) -> Interval:
    """Return the interval of x & y for integers x and y.

    If x ≥ 0, then 0 ≤ x & y ≤ x. The same holds for y. If both are negative, then x & y ≥ −2^k, where 2^k is the
    smallest power of 2 that is at least −x and −y. This power is at most 2 max(−x, −y).
    """
    low = xp.where((x[0] >= 0) | (y[0] >= 0), 0.0, 2 * xp.minimum(x[0], y[0]))
    high = xp.maximum(x[1], y[1])
    high = xp.where(x[0] >= 0, xp.minimum(x[1], xp.where(y[0] >= 0, y[1], x[1])), xp.where(y[0] >= 0, y[1], high))
    return low, high


def _where(xp: Any, c: Interval, x: Interval, y: Interval) -> Interval:
    low = xp.where(c[0] == 1, x[0], xp.where(c[1] == 0, y[0], xp.minimum(x[0], y[0])))
    high = xp.where(c[0] == 1, x[1], xp.where(c[1] == 0, y[1], xp.maximum(x[1], y[1])))
    return low, high


def _monotone(name: str) -> Callable[..., Interval]:
    """Return the rule of the function xp.`name`, which does not decrease in any argument."""

    def rule(xp: Any, *inputs: Interval) -> Interval:
        function = getattr(xp, name)
        return function(*(low for low, _ in inputs)), function(*(high for _, high in inputs))

    return rule


def _monotone_inexact(name: str) -> Callable[..., Interval]:
    """Return the rule of a function that does not decrease, widened to cover the rounding error of math libraries."""

    def rule(xp: Any, x: Interval) -> Interval:
        low, high = (getattr(xp, name)(end) for end in x)
        below, above = (xp.abs(end) * LIBRARY_ERROR + SMALLEST for end in (low, high))
        return xp.where(xp.isinf(low), low, low - below), xp.where(xp.isinf(high), high, high + above)

    return rule


def _sinusoid(xp: Any, x: Interval) -> Interval:
    limit = xp.where(xp.isinf(x[0]) | xp.isinf(x[1]), xp.float64(np.inf), 1.0)  # sin(±∞) is NaN
    return -limit, limit


def _power(xp: Any, x: Interval, y: Interval) -> Interval:
    """Return the interval of x^y. It is (−∞, ∞) unless x > 0, where x^y = exp(y ln x) is monotone in each argument."""
    low, high = _hull(xp, *(xp.power(a, b) for a in x for b in y))
    is_positive = x[0] > 0
    low, high = low * (1 - LIBRARY_ERROR), high * (1 + LIBRARY_ERROR)
    return xp.where(is_positive, low, -np.inf), xp.where(is_positive, high, np.inf)


BOUND_RULES: dict[str, Callable[..., Interval]] = {
    "add": _monotone("add"),
    "subtract": lambda xp, x, y: (x[0] - y[1], x[1] - y[0]),
    "multiply": _multiply,
    "divide": _divide,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "negative": lambda xp, x: (-x[1], -x[0]),
    "power": _power,
    "absolute": _absolute,
    "minimum": _monotone("minimum"),
    "maximum": _monotone("maximum"),
    "less": _less,
    "less_equal": _less_equal,
    "greater": lambda xp, x, y: _less(xp, y, x),
    "greater_equal": lambda xp, x, y: _less_equal(xp, y, x),
    "equal": _equal,
    "not_equal": lambda xp, x, y: _logical_not(xp, _equal(xp, x, y)),
    "logical_not": _logical_not,
    "logical_and": _monotone("minimum"),
    "logical_xor": _xor,
    "logical_or": _monotone("maximum"),
    "bitwise_and": _bitwise_and,
    "where": _where,
    "exp": _monotone_inexact("exp"),
    "exp2": _monotone_inexact("exp2"),
    "log": _monotone_inexact("log"),
    "log2": _monotone_inexact("log2"),
    "log1p": _monotone_inexact("log1p"),
    "sqrt": _monotone("sqrt"),
    "tanh": _monotone_inexact("tanh"),
    "sin": _sinusoid,
    "cos": _sinusoid,
    "floor": _monotone("floor"),
    "ceil": _monotone("ceil"),
}
WHOLE_RULES = {"floor_divide": _whole_quotient, "remainder": _whole_remainder}  # of integers, which are never NaN
