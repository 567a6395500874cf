"""Interval arithmetic: what a formula can be over many rectangles of (i, j) at once.

Every value is a pair (low, high) of float64 arrays that broadcast over the rectangles; for conditions 1 is True, so
low = 1 means surely True and high = 0 surely False. Endpoints of + − · / √ round as the formula itself does, which is
monotone, so the interval holds exactly; transcendental functions are widened by a few units in the last place.
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
    """(low, high) of every node by its id, over rectangles given as intervals of the symbols, ends included."""
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
    if node.kind == "int" and node.operator in (
        "floor_divide",
        "remainder",
    ):  # 0 for a divisor of 0; else no larger than
        first, last = inputs[node.operator == "remainder"]  # what is divided, or what it is divided by
        max_magnitude = np.maximum(np.abs(first), np.abs(last))
        low, high = np.maximum(np.ceil(low), -max_magnitude), np.minimum(np.floor(high), max_magnitude)
    if node.operator != "where":
        for argument, (a, z) in zip(node.arguments, inputs, strict=True):
            if argument.kind == "float":  # where nothing is known it may be NaN, and so may all that is made of it
                unknown = (a == -np.inf) & (z == np.inf)
                if unknown.any():
                    widest = (0.0, 1.0) if node.kind == "bool" else (-np.inf, np.inf)
                    low, high = np.where(unknown, widest[0], low), np.where(unknown, widest[1], high)
    return low, high


def _unbound_nan(interval: Interval) -> Interval:
    """NaN ends (∞ − ∞, 0 · ∞, ln of a negative) mean nothing is known."""
    low, high = interval
    unknown = np.isnan(low) | np.isnan(high)
    if unknown.any():
        low, high = np.where(unknown, -np.inf, low), np.where(unknown, np.inf, high)
    return low, high


def _hull(*candidates: Array) -> Interval:
    return np.minimum.reduce(np.broadcast_arrays(*candidates)), np.maximum.reduce(np.broadcast_arrays(*candidates))


def _multiply(x: Interval, y: Interval) -> Interval:
    return _hull(*(a * b for a in x for b in y))


def _divide(x: Interval, y: Interval) -> Interval:
    low, high = _hull(*(a / b for a in x for b in y))
    contains_zero = (y[0] <= 0) & (y[1] >= 0)
    return np.where(contains_zero, -np.inf, low), np.where(contains_zero, np.inf, high)


def _floor_divide(x: Interval, y: Interval) -> Interval:
    low, high = _divide(x, y)
    return np.floor(low), np.floor(high)


def _remainder(x: Interval, y: Interval) -> Interval:
    """x − ⌊x / y⌋ y lies in [0, y] for positive y, give or take its rounding, and is x − c y for one quotient c."""
    low, high = _floor_divide(x, y)
    is_constant = (low == high) & (y[0] == y[1]) & np.isfinite(low)
    shift = np.where(is_constant, low, 0) * np.where(is_constant, y[0], 0)
    size = np.maximum(np.abs(x[0]), np.abs(x[1]))
    rounding = size * np.finfo(np.float64).eps
    unknown = ((y[0] <= 0) & (y[1] >= 0)) | np.isinf(size) | np.isinf(y[0]) | np.isinf(y[1])
    wide_low, wide_high = np.minimum(y[0], 0) - rounding, np.maximum(y[1], 0) + rounding
    low, high = np.where(is_constant, x[0] - shift, wide_low), np.where(is_constant, x[1] - shift, wide_high)
    return np.where(unknown, -np.inf, low), np.where(unknown, np.inf, high)


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


def _monotone(function: Callable[[Any], Any], ulps: int = 0) -> Callable[[Interval], Interval]:
    """A rule for a function that never falls; `ulps` widens what the library's own rounding may get wrong."""

    def rule(x: Interval) -> Interval:
        low, high = function(x[0]), function(x[1])
        for _ in range(ulps):
            low, high = np.nextafter(low, -np.inf), np.nextafter(high, np.inf)
        return low, high

    return rule


def _sinusoid(x: Interval) -> Interval:
    reach = np.where(np.isinf(x[0]) | np.isinf(x[1]), np.inf, 1.0)  # NaN at ∞
    return -reach, reach


def _power(x: Interval, y: Interval) -> Interval:
    """Known for positive bases, where x^y = exp(y ln x) is monotone in each argument."""
    low, high = _hull(*(np.power(a, b) for a in x for b in y))
    return np.where(x[0] > 0, low * (1 - 1e-15), -np.inf), np.where(x[0] > 0, high * (1 + 1e-15), np.inf)


BOUND_RULES: dict[str, Callable[..., Interval]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "subtract": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "multiply": _multiply,
    "divide": _divide,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "negative": lambda x: (-x[1], -x[0]),
    "power": _power,
    "absolute": _absolute,
    "minimum": lambda x, y: (np.minimum(x[0], y[0]), np.minimum(x[1], y[1])),
    "maximum": lambda x, y: (np.maximum(x[0], y[0]), np.maximum(x[1], y[1])),
    "less": _less,
    "less_equal": _less_equal,
    "greater": lambda x, y: _less(y, x),
    "greater_equal": lambda x, y: _less_equal(y, x),
    "equal": _equal,
    "not_equal": lambda x, y: _logical_not(_equal(x, y)),
    "logical_not": _logical_not,
    "logical_and": lambda x, y: (np.minimum(x[0], y[0]), np.minimum(x[1], y[1])),
    "logical_xor": _xor,
    "logical_or": lambda x, y: (np.maximum(x[0], y[0]), np.maximum(x[1], y[1])),
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
