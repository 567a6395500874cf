"""What the form of a formula of the weight p shows: its degree in p, and logarithms of p, which are exact if p is 0."""

from __future__ import annotations

import math
from functools import reduce
from operator import add

from ..formula.derivative import ONE, ZERO
from ..formula.expression import SYMBOLS, Apply, Constant, Expression, Lookup, apply, as_expression, fold, intern

p, LOG_P = SYMBOLS["p"], SYMBOLS["ln p"]
Factors = tuple[float, float, Expression, Expression]  # (k, ln c, y, z) of p^k c y / z, where c is a positive number


def split_logarithms(formula: Expression) -> Expression:
    """Return the formula with the symbol "ln p" in place of the logarithm of p, also in that of a product with p.

    ln(p^k c x) is k ln p + ln c + ln x. The product may underflow where the sum of the logarithms is exact.
    """

    def visit(node: Expression, arguments: list[Expression]) -> Expression:
        if isinstance(node, Apply):
            if node.operator in ("log", "log2") and "p" in arguments[0].free_symbols:
                found = _logarithm(arguments[0])
                return found if node.operator == "log" else found / math.log(2)
            return intern(Apply(node.operator, tuple(arguments), node.kind))
        return intern(Lookup(node.table, tuple(arguments))) if isinstance(node, Lookup) else node

    return fold(visit, formula)


def _logarithm(x: Expression) -> Expression:
    """Return ln x as the sum k ln p + ln c + ln y − ln z of the logarithms of the factors of x."""
    power, constant, above, below = fold(_factorise, x)
    if above is ONE and below is not ONE:
        rest = -apply("log", below)
    else:  # y and z may both be negative
        rest = ZERO if above is ONE else apply("log", above if below is ONE else above / below)
    own = LOG_P if power == 1 else LOG_P * power if power else ZERO
    terms = [term for term in (own, as_expression(constant) if constant else ZERO, rest) if term is not ZERO]
    return reduce(add, terms) if terms else ZERO


def _factorise(node: Expression, inner: list[Factors]) -> Factors:
    """Return the factors of a node from those of its arguments."""
    match node:
        case Apply("multiply" | "divide"):
            sign = 1 if node.operator == "multiply" else -1
            (k, c, y, z), (k1, c1, *rest) = inner
            y1, z1 = rest[::sign]
            return k + sign * k1, c + sign * c1, _product(y, y1), _product(z, z1)
        case Apply("sqrt" | "power"):
            k, c, y, z = inner[0]
            exponent = as_expression(0.5) if node.operator == "sqrt" else node.arguments[1]
            if y is ONE and z is ONE and isinstance(exponent, Constant):
                return k * exponent.value, c * exponent.value, ONE, ONE
        case Constant(value) if value > 0 and value != math.inf:
            return 0.0, math.log(value), ONE, ONE
    return (1.0, 0.0, ONE, ONE) if node is p else (0.0, 0.0, node, ONE)


def _product(x: Expression, y: Expression) -> Expression:
    return y if x is ONE else x if y is ONE else x * y


def is_entropy(pair_formula: Expression) -> bool:
    """True if the formula is −p ln p, a product of these two symbols and numbers in any order."""
    number, others, waiting = 1.0, [], [pair_formula]
    while waiting:
        node = waiting.pop()
        match node:
            case Apply("multiply", factors):
                waiting += factors
            case Apply("negative", factors):
                waiting += factors
                number = -number
            case Constant(value):
                number *= value
            case _:
                others.append(node)
    return number == -1 and {*map(id, others)} == {id(p), id(LOG_P)} and len(others) == 2


def degree_in(formula: Expression, variable: Expression) -> float | None:
    """Return d if the form of the formula shows that x · df/dx = d · f for the variable x, else None.

    By Euler's theorem, f(c x) = c^d f(x) for c > 0 in each interval of x in which all conditions keep their value.
    """

    def visit(node: Expression, inner: list[float | None]) -> float | None:
        if not isinstance(node, Apply):
            return float(node is variable)
        is_zero = [isinstance(x, Constant) and x.value == 0 for x in node.arguments]
        terms = [d for d, zero in zip(inner, is_zero, strict=True) if not zero]
        match node.operator, inner:
            case "multiply", [float(d), float(e)]:
                return d + e
            case "divide", [float(d), float(e)]:
                return d - e
            case "power", [float(d), 0.0] if isinstance(node.arguments[1], Constant):
                return d * node.arguments[1].value
            case "sqrt", [float(d)]:
                return d / 2
            case "negative" | "absolute", [d]:
                return d
            case "where", [_, d, e]:
                terms = terms[1:]  # the condition does not count
            case "add" | "subtract" | "minimum" | "maximum", _:
                pass
            case _:
                return 0.0 if all(d == 0.0 for d in inner) else None
        return terms[0] if terms and all(d == terms[0] for d in terms) else None

    return fold(visit, formula)
