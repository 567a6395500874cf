"""A check of formulas on a cache.

The row `i` of a query is not the query's position in its sequence if the cache has earlier positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import FormulaError
from ..formula import from_function
from ..formula.expression import SYMBOLS, Apply, Expression, is_compiling, walk

if TYPE_CHECKING:
    from .cache import KVCache

__all__ = ["check_row_positions", "compares_rows"]

COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
LINEAR = ("add", "subtract", "negative", "multiply", "divide")
ARGUMENTS = {"mask": "b h i j", "score": "s b h i j"}


def check_row_positions(cache: KVCache, n: int, mask: Any, score: Any, needs_lse: bool) -> None:
    """Raise FormulaError if a formula would take the rows of n queries for their positions, and they are not.

    The queries of a call are numbered from 0, so in `i >= j` the newest token after 100 others is at i = 0, and would
    see the first key alone.

    Parameters
    ----------
    cache : the cache that the call reads
    n : the number of queries
    mask, score : those of `attention`
    needs_lse : True if the result depends on lse, by sinks or statistics, and not on the weights alone
    """
    if is_compiling() or cache.rows_are_positions(n):
        return
    for name, given in (("mask", mask), ("score", score)):
        if given is None or hasattr(given, "dtype") or not (isinstance(given, Expression) or callable(given)):
            continue
        formula = from_function.to_formula(given, name, ARGUMENTS[name])
        if compares_rows(formula, needs_lse) or _counts_from_the_end(formula, cache, n):
            raise _error(name, formula, cache, n)


def compares_rows(formula: Expression, needs_lse: bool = False) -> bool:
    """True if the formula compares the symbols i and j, or uses i − j in any way but linearly.

    A score that is linear in i − j, such as that of `alibi`, has the same weights if i is shifted by a constant,
    because the shift adds the same number to all scores of a query. It has another lse: True if `needs_lse`.
    """
    pair = {id(SYMBOLS["i"]), id(SYMBOLS["j"])}
    differences: set[int] = set()  # nodes that are linear in i − j
    for node in walk(formula):
        arguments = {id(argument) for argument in node.arguments}
        if isinstance(node, Apply) and arguments == pair:
            if node.operator in COMPARISONS:
                return True
            differences |= {id(node)} if node.operator == "subtract" else set()
        elif arguments & differences:
            if not (isinstance(node, Apply) and node.operator in LINEAR and _is_linear(node, differences)):
                return True
            differences.add(id(node))
    return needs_lse and bool(differences)


def _is_linear(node: Apply, differences: set[int]) -> bool:
    """True if a sum, product or quotient is linear in i − j, and its coefficient is the same for all keys."""
    if node.operator not in ("multiply", "divide"):
        return True
    others = [argument for argument in node.arguments if id(argument) not in differences]
    divides = node.operator == "divide" and id(node.arguments[1]) in differences
    return len(others) == 1 and not divides and not {"i", "j", "s"} & others[0].free_symbols


def _counts_from_the_end(formula: Expression, cache: KVCache, n: int) -> bool:
    """True if the formula uses m as the length of every sequence, and the sequences have different lengths."""
    return n > 1 and not cache.has_equal_lengths and {"i", "m"} <= formula.free_symbols


def _error(name: str, formula: Expression, cache: KVCache, n: int) -> FormulaError:
    positions = cache.positions(None if n == cache.num_newest else n)
    first = positions[:, 0].tolist()
    where = f"position {first[0]}" if len(set(first)) == 1 else f"positions {first[:4]} of the sequences"
    argument = "" if n == cache.num_newest else str(n)
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
