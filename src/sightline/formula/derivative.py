"""Derivatives of a score formula with respect to s or to a table entry: `derivative` returns a formula again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, cast

from .expression import SYMBOLS, Apply, Constant, Expression, Lookup, apply, as_expression, fold, intern, walk, where
from .tables import Table

ZERO, ONE = as_expression(0.0), as_expression(1.0)


def derivative(formula: Expression, variable: Expression = SYMBOLS["s"]) -> Expression:
    """Return d formula / d variable, where `variable` is the symbol s or a `Lookup` node of the formula itself.

    Conditions and whole numbers count as constants. If both arguments of min or max are equal, the derivative is that
    of the first argument. The derivative of abs at 0 is 0. The derivatives of floor and ceil are 0 everywhere.
    """

    def visit(node: Expression, inner: list[Expression]) -> Expression:
        if isinstance(node, Apply) and node.kind == "float" and any(term is not ZERO for term in inner):
            return DERIVATIVE_RULES[node.operator](node, *inner)
        return ONE if node is variable else ZERO

    return fold(visit, formula)


def vanishes_with(formula: Expression, variable: Expression) -> bool:
    """True if the form of the formula shows that it is 0 where the variable is 0.

    If the formula divides by the variable, the result is False: p / p is NaN where p is 0.
    """

    def visit(node: Expression, inner: list[bool]) -> bool:
        if not isinstance(node, Apply):
            return node is variable or (isinstance(node, Constant) and node.value == 0)
        match node.operator:
            case "multiply":
                return any(inner)
            case "divide" | "negative":
                return inner[0]
            case "add" | "subtract" | "where":
                return all(inner[-2:])
        return False

    return fold(visit, formula) and not any(_divides_by(node, variable) for node in walk(formula))


def _divides_by(node: Expression, variable: Expression) -> bool:
    """True if the node divides by a formula of the variable, or raises it to another power than a positive number."""
    if not isinstance(node, Apply) or node.operator not in ("divide", "floor_divide", "remainder", "power"):
        return False
    x, y = node.arguments
    is_root = node.operator == "power" and not (isinstance(y, Constant) and y.value > 0)
    return any(each is variable for each in walk(x if is_root else y))


def score_tangent(score: Expression | None, tangents: Mapping[Table, Any]) -> Expression | None:
    """Return the directional derivative of a score along tangents of its tables, as a formula; None if it is 0.

    `tangents` has an array of the table's shape for each table, or None for a tangent of 0.
    """
    terms = []
    tables = {table: Table(array, table.axes) for table, array in tangents.items() if array is not None}
    for node in () if score is None else walk(score):
        if isinstance(node, Lookup) and node.kind == "float" and node.table in tables:
            slope = derivative(cast(Expression, score), node)
            if slope is not ZERO:
                terms.append(_times(intern(Lookup(tables[node.table], node.arguments)), slope))
    return reduce(_plus, terms) if terms else None


def _plus(x: Expression, y: Expression) -> Expression:
    return y if x is ZERO else x if y is ZERO else x + y


def _minus(x: Expression, y: Expression) -> Expression:
    return x if y is ZERO else -y if x is ZERO else x - y


def _times(x: Expression, y: Expression) -> Expression:
    """Return the product of a derivative x and a factor y, simplified if x is `ZERO` or `ONE`."""
    return ZERO if x is ZERO else y if x is ONE else x * y


def _chain(factor: Callable[[Expression, Expression], Expression]) -> Callable[[Apply, Expression], Expression]:
    """Return the derivative rule factor(f(x), x) · dx of a function f of one argument."""
    return lambda node, dx: _times(dx, factor(node, node.arguments[0]))


def _product(node: Apply, dx: Expression, dy: Expression) -> Expression:
    x, y = node.arguments
    return _plus(_times(dx, y), _times(dy, x))


def _quotient(node: Apply, dx: Expression, dy: Expression) -> Expression:
    x, y = node.arguments
    return _minus(dx if dx is ZERO else dx / y, ZERO if dy is ZERO else _times(dy, x / (y * y)))


def _remainder(node: Apply, dx: Expression, dy: Expression) -> Expression:
    x, y = node.arguments
    return _minus(dx, _times(dy, apply("floor", x / y)))


def _power(node: Apply, dx: Expression, dy: Expression) -> Expression:
    x, y = node.arguments
    base = _times(dx, y * apply("power", x, y - 1))
    return _plus(base, ZERO if dy is ZERO else _times(dy, node * apply("log", x)))


def _select_branch(comparison: str) -> Callable[[Apply, Expression, Expression], Expression]:
    return lambda node, dx, dy: where(apply(comparison, *node.arguments), dx, dy)


DERIVATIVE_RULES: dict[str, Callable[..., Expression]] = {
    "add": lambda node, dx, dy: _plus(dx, dy),
    "subtract": lambda node, dx, dy: _minus(dx, dy),
    "multiply": _product,
    "divide": _quotient,
    "remainder": _remainder,
    "negative": lambda node, dx: -dx,
    "power": _power,
    "absolute": _chain(lambda f, x: where(x > 0, 1.0, where(x < 0, -1.0, 0.0))),
    "minimum": _select_branch("less_equal"),
    "maximum": _select_branch("greater_equal"),
    "where": lambda node, dc, dx, dy: where(node.arguments[0], dx, dy),
    "exp": _chain(lambda f, x: f),
    "exp2": _chain(lambda f, x: f * math.log(2)),
    "log": _chain(lambda f, x: 1 / x),
    "log2": _chain(lambda f, x: 1 / (x * math.log(2))),
    "log1p": _chain(lambda f, x: 1 / (1 + x)),
    "sqrt": _chain(lambda f, x: 0.5 / f),
    "tanh": _chain(lambda f, x: 1 - f * f),
    "sin": _chain(lambda f, x: apply("cos", x)),
    "cos": _chain(lambda f, x: -apply("sin", x)),
    **dict.fromkeys(("floor_divide", "floor", "ceil"), lambda *_: ZERO),
}
