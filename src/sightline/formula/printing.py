"""A formula as the mathematics it is: `(i ≥ j) ∧ (i − j < 256)` prints i ≥ j ∧ i − j < 256."""

from __future__ import annotations

import math

from .expression import Apply, Constant, Expression, Lookup, Symbol, walk
from .operators import OPERATORS
from .tables import Table

__all__ = ["mathematics"]

LONGEST = 400  # characters of one part: shared parts could otherwise repeat without end
ATOM = 10  # binds tighter than every operator
NOT_ASSOCIATIVE = {"subtract", "divide", "floor_divide", "remainder", "power"}


def mathematics(formula: Expression) -> str:
    """The formula in one line; tables are t, or t₁, t₂ ... where it reads several."""
    names = _table_names(formula.tables)
    written: dict[int, tuple[str, int]] = {}  # text and how tightly its outermost operator binds
    for node in walk(formula):
        text, precedence = _write(node, [written[id(a)] for a in node.arguments], names)
        written[id(node)] = (text, precedence) if len(text) <= LONGEST else (text[: LONGEST - 1] + "…", ATOM)
    return written[id(formula)][0]


def _table_names(tables: tuple[Table, ...]) -> dict[int, str]:
    if len(tables) == 1:
        return {id(tables[0]): "t"}
    return {id(t): "t" + str(k).translate(_SUBSCRIPTS) for k, t in enumerate(tables, 1)}


def _write(node: Expression, parts: list[tuple[str, int]], names: dict[int, str]) -> tuple[str, int]:
    if isinstance(node, Symbol):
        return node.name, ATOM
    if isinstance(node, Constant):
        text = _number(node.value)
        return text, ATOM if not text.startswith("−") else OPERATORS["negative"].precedence
    if isinstance(node, Lookup):
        return f"{names[id(node.table)]}[{', '.join(text for text, _ in parts)}]", ATOM
    assert isinstance(node, Apply)
    rule = OPERATORS[node.operator]
    if node.operator == "absolute":
        return f"|{parts[0][0]}|", ATOM
    if rule.precedence == 0:
        return f"{rule.symbol}({', '.join(text for text, _ in parts)})", ATOM
    if rule.arity == 1:
        return rule.symbol + _inside(parts[0], rule.precedence), rule.precedence
    left = _inside(parts[0], rule.precedence)
    right = _inside(parts[1], rule.precedence + (node.operator in NOT_ASSOCIATIVE or rule.precedence == 4))
    tight = node.operator in ("multiply", "power")
    own = rule.precedence - (node.operator in ("floor_divide", "remainder"))  # (i mod 3)·2, not i mod 3·2
    return f"{left}{rule.symbol}{right}" if tight else f"{left} {rule.symbol} {right}", own


def _inside(part: tuple[str, int], precedence: int) -> str:
    text, own = part
    return text if own >= precedence else f"({text})"


def _number(value: bool | int | float) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:g}".replace("-", "−") if isinstance(value, float) else str(value).replace("-", "−")


_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
