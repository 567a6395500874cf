"""The printing of formulas in mathematical notation: `(i >= j) & (i - j < 256)` prints as i ≥ j ∧ i − j < 256."""

from __future__ import annotations

import math
from typing import Any

from .expression import Apply, Constant, Expression, Lookup, Symbol, fold
from .operators import OPERATORS

MAX_PART_LENGTH = 400  # characters of one subexpression; the text of shared nodes could otherwise grow exponentially
ATOM_PRECEDENCE = 10  # above the precedence of every operator
NOT_ASSOCIATIVE = {"subtract", "divide", "floor_divide", "remainder", "power"}


def format_formula(formula: Expression) -> str:
    """Return the formula as one line of text. A single table is named t; several are named t₁, t₂, and so on."""
    tables = formula.tables
    names = {id(t): "t" + (str(k).translate(_SUBSCRIPTS) if len(tables) > 1 else "") for k, t in enumerate(tables, 1)}

    def visit(node: Expression, parts: list[tuple[str, int]]) -> tuple[str, int]:
        """Return the text of the node, and the precedence of its outermost operator."""
        text, precedence = _format_node(node, parts, names)
        if len(text) > MAX_PART_LENGTH:
            return text[: MAX_PART_LENGTH - 1] + "…", ATOM_PRECEDENCE
        return text, precedence

    return fold(visit, formula)[0]


def format_as_code(formula: Any) -> str:
    """Return a formula for a cure that can be pasted: the name of a symbol, and "formula" for any other formula."""
    return formula.name if isinstance(formula, Symbol) else "formula"


def _format_node(node: Expression, parts: list[tuple[str, int]], names: dict[int, str]) -> tuple[str, int]:
    if isinstance(node, Symbol):
        return node.name, ATOM_PRECEDENCE
    if isinstance(node, Constant):
        text = _format_number(node.value)
        return text, ATOM_PRECEDENCE if not text.startswith("−") else OPERATORS["negative"].precedence
    if isinstance(node, Lookup):
        return f"{names[id(node.table)]}[{', '.join(text for text, _ in parts)}]", ATOM_PRECEDENCE
    assert isinstance(node, Apply)
    rule = OPERATORS[node.operator]
    if node.operator == "absolute":
        return f"|{parts[0][0]}|", ATOM_PRECEDENCE
    if rule.precedence == 0:
        return f"{rule.sign}({', '.join(text for text, _ in parts)})", ATOM_PRECEDENCE
    if rule.arity == 1:
        return rule.sign + _parenthesize(parts[0], rule.precedence), rule.precedence
    left = _parenthesize(parts[0], rule.precedence)
    right = _parenthesize(parts[1], rule.precedence + (node.operator in NOT_ASSOCIATIVE or rule.precedence == 4))
    is_unspaced = node.operator in ("multiply", "power")
    own_precedence = rule.precedence - (node.operator in ("floor_divide", "remainder"))  # prints (i mod 3)·2
    return f"{left}{rule.sign}{right}" if is_unspaced else f"{left} {rule.sign} {right}", own_precedence


def _parenthesize(part: tuple[str, int], precedence: int) -> str:
    text, own_precedence = part
    return text if own_precedence >= precedence else f"({text})"


def _format_number(value: bool | int | float) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:g}".replace("-", "−") if isinstance(value, float) else str(value).replace("-", "−")


_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
