"""Where a score hides a pair: the condition under which it is −∞ whatever s is.

`where(c, s, −inf)` and a bias of −∞ are masks in disguise. As a mask they skip tiles, and NaN under them stays hidden.
"""

from __future__ import annotations

import math

from .bounds import compute_intervals
from .expression import Apply, Constant, Expression, Lookup, walk, where
from .tile_ranges import make_box

__all__ = ["hidden_condition"]


def hidden_condition(score: Expression, extent: tuple[int, int, int, int]) -> Expression | None:
    """The condition under which the score is −∞ for every s; None where there is no such pair."""
    bounds = compute_intervals(score, make_box(extent))
    conditions: dict[int, Expression | None] = {}
    for node in walk(score):
        argument_conditions = [conditions[id(a)] for a in node.arguments]
        condition: Expression | None = None
        if isinstance(node, Constant):
            condition = Constant(True, "bool") if node.value == -math.inf else None
        elif isinstance(node, Lookup) and node.kind == "float":
            condition = node == -math.inf if (bounds[id(node)][0] == -math.inf).any() else None
        elif isinstance(node, Apply) and node.operator in ("add", "minimum"):
            condition = _either(*argument_conditions)
        elif isinstance(node, Apply) and node.operator == "subtract":
            condition = argument_conditions[0]
        elif (
            isinstance(node, Apply)
            and node.operator == "maximum"
            and all(part is not None for part in argument_conditions)
        ):
            condition = argument_conditions[0] & argument_conditions[1]  # type: ignore[operator]
        elif (
            isinstance(node, Apply)
            and node.operator == "where"
            and (argument_conditions[1] is not None or argument_conditions[2] is not None)
        ):
            yes, no = (Constant(False, "bool") if part is None else part for part in argument_conditions[1:])
            condition = where(node.arguments[0], yes, no) if "s" not in node.arguments[0].free_symbols else None
        conditions[id(node)] = condition
    return conditions[id(score)]


def _either(x: Expression | None, y: Expression | None) -> Expression | None:
    if x is None or y is None:
        return y if x is None else x
    return x | y
