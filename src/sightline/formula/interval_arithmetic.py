"""Interval arithmetic: bounds of what a formula can be, over many rectangles of (i, j) at once.

An interval is a pair (low, high) of float64 arrays with one number for each rectangle. In a condition, True counts as 1
and False as 0: low = 1 means that the condition is certainly True, and high = 0 that it is certainly False. The
endpoints of + − · / √ are rounded as the formula itself is. Rounding is monotone, so the intervals of these operators
are exact. The intervals of transcendental functions are widened by a few units in the last place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .expression import Apply, Constant, Expression, Lookup, Symbol, walk

__all__ = ["BOUND_RULES", "Interval", "compute_intervals"]

Array = np.ndarray[Any, np.dtype[np.float64]]
Interval = tuple[Array, Array]


def compute_intervals(formula: Expression, box: Mapping[str, Interval]) -> dict[int, Interval]:
    """Return the interval (low, high) of every node of the formula, by the id of the node.

    `box` has the interval of every symbol, by its name. Both ends of an interval are included.
    """
    bounds: dict[int, Interval] = {}
    with np.errstate(all="ignore"):
        for node in walk(formula):
            if isinstance(node, Symbol):
                bounds[id(node)] = box[node.name]
            elif isinstance(node, Constant):
                value = np.float64(node.value)
                bounds[id(node)] = (value, value)  # type: ignore[assignment]
            elif isinstance(node, Lookup):
                bounds[id(node)] = _unbound_nan(node.table.bounds.over([bounds[id(a)] for a in node.arguments]))
            elif isinstance(node, Apply):
                bounds[id(node)] = _apply(node, [bounds[id(a)] for a in node.arguments])
    return bounds


def _apply(node: Apply, inputs: list[Interval]) -> Interval:
    low, high = _unbound_nan(BOUND_RULES[node.operator](*inputs))
    if node.kind == "int" and node.operator in ("floor_divide", "remainder"):
        # Whole numbers: |x // y| ≤ |x| and |x mod y| ≤ |y|; division by 0 gives 0.
        first, last = inputs[node.operator == "remainder"]
        limit = np.maximum(np.abs(first), np.abs(last))
        low, high = np.maximum(np.ceil(low), -limit), np.minimum(np.floor(high), limit)
    if node.operator != "where":
        for argument, (a, z) in zip(node.arguments, inputs, strict=True):
            if argument.kind == "float":  # an unbounded argument may be NaN, and NaN propagates
                unknown = (a == -np.inf) & (z == np.inf)
                if unknown.any():
                    widest = (0.0, 1.0) if node.kind == "bool" else (-np.inf, np.inf)
                    low, high = _replace_where(unknown, (low, high), widest)
    return low, high


def _replace_where(condition: Any, interval: Interval, other: Any = (-np.inf, np.inf)) -> Interval:
    return np.where(condition, other[0], interval[0]), np.where(condition, other[1], interval[1])


def _unbound_nan(interval: Interval) -> Interval:
    """Return the interval, with (−∞, ∞) wherever an end is NaN, as from ∞ − ∞, 0 · ∞ or ln of a negative number."""
    unknown = np.isnan(interval[0]) | np.isnan(interval[1])
    return _replace_where(unknown, interval) if unknown.any() else interval


def _hull(*candidates: Array) -> Interval:
    arrays = np.broadcast_arrays(*candidates)
    return np.minimum.reduce(arrays), np.maximum.reduce(arrays)


def _multiply(x: Interval, y: Interval) -> Interval:
    return _hull(*(a * b for a in x for b in y))


def _divide(x: Interval, y: Interval) -> Interval:
    return _replace_where((y[0] <= 0) & (y[1] >= 0), _hull(*(a / b for a in x for b in y)))


def _floor_divide(x: Interval, y: Interval) -> Interval:
    low, high = _divide(x, y)
    return np.floor(low), np.floor(high)


def _remainder(x: Interval, y: Interval) -> Interval:
    """Return the interval of x − ⌊x / y⌋ y.

    For positive y the value lies in [0, y], up to rounding. If the quotient is one constant c, the value is x − c y.
    """
    low, high = _floor_divide(x, y)
    is_constant = (low == high) & (y[0] == y[1]) & np.isfinite(low)
    shift = np.where(is_constant, low, 0) * np.where(is_constant, y[0], 0)
    size = np.maximum(np.abs(x[0]), np.abs(x[1]))
    rounding = size * np.finfo(np.float64).eps
    unknown = ((y[0] <= 0) & (y[1] >= 0)) | np.isinf(size) | np.isinf(y[0]) | np.isinf(y[1])
    wide = np.minimum(y[0], 0) - rounding, np.maximum(y[1], 0) + rounding
    return _replace_where(unknown, _replace_where(is_constant, wide, (x[0] - shift, x[1] - shift)))


def _absolute(x: Interval) -> Interval:
    low, high = _hull(np.abs(x[0]), np.abs(x[1]))
    return np.where((x[0] <= 0) & (x[1] >= 0), 0.0, low), high


def _equal(x: Interval, y: Interval) -> Interval:
    same = (x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0])
    return _to_float(same), _to_float((x[0] <= y[1]) & (y[0] <= x[1]))


def _to_float(condition: Any) -> Array:
    return np.asarray(condition, np.float64)


def _less(x: Interval, y: Interval) -> Interval:
    return _to_float(x[1] < y[0]), _to_float(x[0] < y[1])


def _less_equal(x: Interval, y: Interval) -> Interval:
    return _to_float(x[1] <= y[0]), _to_float(x[0] <= y[1])


def _logical_not(x: Interval) -> Interval:
    return 1 - x[1], 1 - x[0]


def _xor(x: Interval, y: Interval) -> Interval:
    known = (x[0] == x[1]) & (y[0] == y[1])
    value = np.abs(x[0] - y[0])
    return np.where(known, value, 0.0), np.where(known, value, 1.0)


def _where(c: Interval, x: Interval, y: Interval) -> Interval:
    low = np.where(c[0] == 1, x[0], np.where(c[1] == 0, y[0], np.minimum(x[0], y[0])))
    high = np.where(c[0] == 1, x[1], np.where(c[1] == 0, y[1], np.maximum(x[1], y[1])))
    return low, high


def _monotone(function: Callable[..., Any], ulps: int = 0) -> Callable[..., Interval]:
    """Return the rule of a function that does not decrease in any argument.

    `ulps` widens the interval at both ends, to cover the rounding error of the math library.
    """

    def rule(*inputs: Interval) -> Interval:
        low, high = function(*(low for low, _ in inputs)), function(*(high for _, high in inputs))
        for _ in range(ulps):
            low, high = np.nextafter(low, -np.inf), np.nextafter(high, np.inf)
        return low, high

    return rule


def _sinusoid(x: Interval) -> Interval:
    reach = np.where(np.isinf(x[0]) | np.isinf(x[1]), np.inf, 1.0)  # sin(±∞) is NaN
    return -reach, reach


def _power(x: Interval, y: Interval) -> Interval:
    """Return the interval of x^y. It is (−∞, ∞) unless x > 0, where x^y = exp(y ln x) is monotone in each argument."""
    low, high = _hull(*(np.power(a, b) for a in x for b in y))
    return np.where(x[0] > 0, low * (1 - 1e-15), -np.inf), np.where(x[0] > 0, high * (1 + 1e-15), np.inf)


BOUND_RULES: dict[str, Callable[..., Interval]] = {
    "add": _monotone(np.add),
    "subtract": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "multiply": _multiply,
    "divide": _divide,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "negative": lambda x: (-x[1], -x[0]),
    "power": _power,
    "absolute": _absolute,
    "minimum": _monotone(np.minimum),
    "maximum": _monotone(np.maximum),
    "less": _less,
    "less_equal": _less_equal,
    "greater": lambda x, y: _less(y, x),
    "greater_equal": lambda x, y: _less_equal(y, x),
    "equal": _equal,
    "not_equal": lambda x, y: _logical_not(_equal(x, y)),
    "logical_not": _logical_not,
    "logical_and": _monotone(np.minimum),
    "logical_xor": _xor,
    "logical_or": _monotone(np.maximum),
    "where": _where,
    "exp": _monotone(np.exp, 4),
    "exp2": _monotone(np.exp2, 4),
    "log": _monotone(np.log, 4),
    "log2": _monotone(np.log2, 4),
    "sqrt": _monotone(np.sqrt),
    "tanh": _monotone(np.tanh, 4),
    "sin": _sinusoid,
    "cos": _sinusoid,
    "floor": _monotone(np.floor),
    "ceil": _monotone(np.ceil),
}
