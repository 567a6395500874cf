"""A check of the formulas of a call on a cache.

The row `i` of a query is not the query's position in its sequence if the cache has earlier positions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FormulaError
from ..formula import from_function
from ..formula.expression import SYMBOLS, Apply, Constant, Expression, Lookup, is_compiling, walk

if TYPE_CHECKING:
    from ..formula.tables import Table
    from .cache import KVCache

LINEAR = ("add", "subtract", "negative", "multiply", "divide")
SCORE_STATISTICS = ("lse", "max_score", "scores")
ARGUMENTS = {"mask": "b h i j", "score": "s b h i j"}
NONE, ROW, KEY, PAIR = range(4)  # whether a number depends on the row i, the key j or both


def check_row_positions(cache: KVCache, n: int, mask: Any, score: Any, see: Any = (), has_sinks: bool = False) -> None:
    """Raise FormulaError if a formula uses the row of a query as the query's position, and the two numbers differ.

    The queries of a call are numbered from 0. So in `i >= j` the newest token after 100 others has i = 0, and would see
    the first key alone. A mask of `cache.causal` that was made before the cache changed is an error too.

    Parameters
    ----------
    cache : the cache that the call reads
    n : the number of queries
    mask, score, see : those of `attention`; the conditions of `see` are checked as masks are
    has_sinks : True if `attention` has sinks
    """
    if is_compiling():
        return
    if isinstance(mask, Expression):
        _check_state(cache, mask)
    if cache.rows_are_positions(n):
        return
    needs_lse = has_sinks or any(map(_reads_scores, _listed(see)))
    for name, role, given in (("mask", "mask", mask), ("score", "score", score), *_conditions(see)):
        if given is None or hasattr(given, "dtype") or not (isinstance(given, Expression) or callable(given)):
            continue
        formula = from_function.to_formula(given, role, ARGUMENTS[role])
        if compares_rows(formula, needs_lse, n, _shift(cache, n)) or _counts_from_the_end(formula, cache, n):
            raise _error(name, formula, cache, n)


def _check_state(cache: KVCache, mask: Expression) -> None:
    """Raise FormulaError if `cache.causal` made the mask, or a part of the mask, before the newest change."""
    number, changes = cache._state
    for table in mask.tables:
        if table.cache_state is not None and table.cache_state[0] == number and table.cache_state[1] != changes:
            raise FormulaError(
                f"the mask {mask} has positions of this KVCache from before its newest append or other change",
                "a mask that was made after the change",
                "call cache.causal() after every append",
            )


def _conditions(see: Any) -> list[tuple[str, str, Any]]:
    """Return (name, role, formula) of the condition of each statistic `mass`."""
    found: list[tuple[str, str, Any]] = []

    def collect(condition: Any) -> Any:
        found.append(("condition of mass", "mask", condition))
        return condition

    for statistic in _listed(see):
        if hasattr(statistic, "map_formulas"):  # other objects are refused later
            statistic.map_formulas(collect)
    return found


def _listed(see: Any) -> Any:
    return see if isinstance(see, list | tuple) else (see,)


def _reads_scores(statistic: Any) -> bool:
    """True for the statistics that change if a number is added to all scores of a query; the weights do not change."""
    while hasattr(statistic, "of"):  # a selection or a mean
        statistic = statistic.of
    return getattr(statistic, "name", "") in SCORE_STATISTICS


def _shift(cache: KVCache, n: int) -> float:
    """Return the difference position − row of n queries; ∞ if it is not above 0 or differs between sequences."""
    positions = cache.positions(None if cache.are_newest(n) else n)
    shifts = (positions - np.arange(n))[positions >= 0]
    return float(shifts[0]) if shifts.size and (shifts == shifts[0]).all() and shifts[0] > 0 else math.inf


def compares_rows(formula: Expression, needs_lse: bool = False, n: int | None = None, shift: float = math.inf) -> bool:
    """True if the formula compares the row i of a query with the key j, or computes with both in any way but a sum.

    A score that is linear in i − j, such as that of `alibi`, has the same weights if i is shifted by a constant,
    because the shift adds the same number to all scores of a query. Only the lse differs, so the result for such a
    score is `needs_lse`.

    In three cases the formula already computes with positions. It adds to the row a whole number that comes from m or
    from a table, or that is at least `shift`, the result of `_shift`. Its comparison reads m. It uses the row as the
    index of a table's axis with n entries, one for each row.
    """
    uses: dict[int, int] = {id(SYMBOLS["i"]): ROW, id(SYMBOLS["j"]): KEY}
    for node in walk(formula):
        use = uses.get(id(node), NONE)
        for place, argument in enumerate(node.arguments):
            is_position = isinstance(node, Lookup) and argument is SYMBOLS["i"] and _has_rows(node.table, place, n)
            use |= NONE if is_position else uses[id(argument)]
        if node.arguments and use and _is_shifted(node, shift):
            use = NONE
        elif node.arguments and use == PAIR and not _is_linear(node, uses):
            return True
        uses[id(node)] = NONE if node.kind == "bool" else use
    return needs_lse and uses[id(formula)] == PAIR


def _has_rows(table: Table, axis: int, n: int | None) -> bool:
    """True if the axis of a table is for the n rows of a call, and not for the positions of a sequence."""
    return bool(table.axes and table.axes[axis] == "i") or n is None or table.shape[axis] == n


def _is_shifted(node: Expression, shift: float) -> bool:
    """True if the node is a sum that turns a row into a position, or a comparison that reads m, the number of keys."""
    if not isinstance(node, Apply) or len(node.arguments) != 2:
        return False
    if node.kind == "bool":
        return "m" in node.free_symbols
    if node.kind != "int" or node.operator not in ("add", "subtract"):
        return False
    for other, term in (node.arguments, node.arguments[::-1]):
        if isinstance(other, Constant):
            number = -other.value if node.operator == "subtract" else other.value
            if (term is SYMBOLS["i"] and number >= shift) or (term is SYMBOLS["j"] and -number >= shift):
                return True
        elif not {"i", "j"} & other.free_symbols and ("m" in other.free_symbols or other.tables):
            return True
    return False


def _is_linear(node: Expression, uses: dict[int, int]) -> bool:
    """True if a sum, product or quotient is linear in a number of rows and keys, with one coefficient for all keys."""
    if not isinstance(node, Apply) or node.operator not in LINEAR:
        return False
    if node.operator not in ("multiply", "divide"):
        return True
    others = [argument for argument in node.arguments if uses[id(argument)] == NONE]
    divides = node.operator == "divide" and uses[id(node.arguments[1])] != NONE
    return len(others) == 1 and not divides and not {"i", "j", "s"} & others[0].free_symbols


def _counts_from_the_end(formula: Expression, cache: KVCache, n: int) -> bool:
    """True if the formula uses m as the length of every sequence, and the sequences have different lengths."""
    return n > 1 and not cache._has_equal_lengths and {"i", "m"} <= formula.free_symbols


def _error(name: str, formula: Expression, cache: KVCache, n: int) -> FormulaError:
    argument = "" if cache.are_newest(n) else str(n)
    first = cache.positions(n if argument else None)[:, 0].tolist()
    where = f"position {first[0]}" if len(set(first)) == 1 else f"positions {first[:4]} of the sequences"
    where += "; -1 is no position" if min(first) < 0 else ""
    if name == "mask":
        cure = (
            f"mask=cache.causal({argument}); for other masks write p in place of i, as in "
            f"cache.causal({argument}) & (p - j < 256), with p = sightline.table(cache.positions({argument}))[b, i]"
        )
    else:
        cure = f"write p in place of i, with p = sightline.table(cache.positions({argument}))[b, i]"
    return FormulaError(
        f"the {name} {formula} takes i for the position of a query; on this KVCache row 0 of {n} is at {where}",
        "on a KVCache, formulas of the queries' positions in their sequences",
        cure,
    )
