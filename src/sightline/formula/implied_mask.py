"""The mask that a score formula implies: the pairs where the score is −∞ whatever s is are hidden.

An entry of a table in host memory may always be −∞: its entries may change from call to call, and the condition must
not. The entries of a table on a device are read, since the reading is cached (`tensor_cache`).

`where(c, s, −inf)` and a bias of −∞ hide pairs, as a mask does. If such pairs are added to the mask, kernels can skip
tiles, and a NaN at a hidden pair does not reach the output.
"""

from __future__ import annotations

import math

from ..arrays.operations import device
from .expression import Apply, Constant, Expression, Lookup, as_expression, fold, where
from .interval_arithmetic import Interval, compute_intervals
from .tile_ranges import make_box


def hidden_condition(score: Expression, extent: tuple[int, int, int, int]) -> Expression | None:
    """Return a condition that is true only at pairs where the score is −∞ for every s.

    The result is None if no node of the score shows that it is −∞ somewhere.
    """
    bounds = compute_intervals(score, make_box(extent))

    def visit(node: Expression, hidden: list[Expression | None]) -> Expression | None:
        operator = node.operator if isinstance(node, Apply) else None
        if isinstance(node, Constant):
            return as_expression(True) if node.value == -math.inf else None
        if isinstance(node, Lookup) and node.kind == "float":
            return node == -math.inf if _may_be_hidden(node, bounds[id(node)]) else None
        if operator in ("add", "minimum"):
            return _either(*hidden)
        if operator == "subtract":
            return hidden[0]
        if operator == "maximum" and hidden[0] is not None and hidden[1] is not None:
            return hidden[0] & hidden[1]
        if operator == "where" and any(part is not None for part in hidden[1:]):
            yes, no = (as_expression(False) if part is None else part for part in hidden[1:])
            return where(node.arguments[0], yes, no) if "s" not in node.arguments[0].free_symbols else None
        return None

    return fold(visit, score)


def _may_be_hidden(node: Lookup, interval: Interval) -> bool:
    return device(node.table.array) == "cpu" or bool((interval[0] == -math.inf).any())


def _either(x: Expression | None, y: Expression | None) -> Expression | None:
    if x is None or y is None:
        return y if x is None else x
    return x | y
