"""Joined calls: one call for all elements of a mapped axis, as the batching rules of `jax.vmap` and `torch.vmap` need.

The mapped axis becomes a leading batch axis. In the formulas of one element, b counts the B batches of this element. In
the joined call, b counts the batches of all elements. So the joined formulas have b mod B in place of b. A mapped table
has a new first axis, and is read there at ⌊b / B⌋.

Sinks have one entry for each head and none for each batch. If sinks differ between elements, elements and batches
become heads: head (element · B + b) · H + h of the joined call is head h of batch b of an element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..formula.expression import SYMBOLS, Expression, Indices, Lookup, as_expression, intern
from ..formula.tables import Table
from ..statistics import Statistic
from .spec import Arrays, CallSpec


def join_spec(
    spec: CallSpec,
    old: Arrays,
    new: Sequence[Any],
    is_mapped: Sequence[bool],
    *,
    has_joined_heads: bool = False,
    change: Callable[[Statistic], Statistic] = lambda statistic: statistic,
) -> CallSpec:
    """Return the specification of the joined call.

    spec : the specification of the call of one element
    old : arrays with the shapes and dtypes of those of one element, each table an object of its own
    new : the arrays of the tables of the joined call; a mapped table has a new first axis
    is_mapped : for each table, True if it differs between elements
    has_joined_heads : True if elements and batches become heads
    change : function that maps a statistic of one element to the statistic that the joined call computes
    """
    problem = spec.problem(old)
    symbols, element = _element_symbols(problem.B, problem.H if has_joined_heads else None)
    place = {id(array): k for k, array in enumerate(old.tables)}
    tables: dict[int, Table] = {}

    def read(table: Table, indices: Indices) -> Expression:
        """Return the lookup in the joined call's table that replaces this lookup in a table of one element."""
        k = place[id(table.array)]
        if k not in tables:
            axes = table.axes
            if axes is not None:
                axes = tuple([None if axis in symbols else axis for axis in axes])
                axes = (None, *axes) if is_mapped[k] else axes
            tables[k] = Table(new[k], axes)
        return intern(Lookup(tables[k], (element, *indices) if is_mapped[k] else indices))

    def join(formula: Expression) -> Expression:
        return formula.rewrite(symbols, read)

    mask, score = (None if formula is None else join(formula) for formula in spec.formulas(old.tables))
    see = tuple([change(statistic).map_formulas(join) for statistic in problem.see])
    joined, found = CallSpec.of(replace(problem, mask=mask, score=score, see=see))
    if [id(table.array) for table in found] != list(map(id, new)):
        raise RuntimeError("the joined formulas read their tables in another order")
    return joined


def _element_symbols(batches: int, heads: int | None) -> tuple[dict[str, Expression], Expression]:
    """Return the symbols of one element and the number of the element, as formulas of the joined call.

    `heads` is the number of heads of one element if elements and batches become heads.
    """
    batches = max(batches, 1)
    if heads is None:
        b = SYMBOLS["b"]
        return {"b": _remainder(b, batches)}, b // batches
    h, heads = SYMBOLS["h"], max(heads, 1)
    return {"b": _remainder(h // heads, batches), "h": _remainder(h, heads)}, h // (heads * batches)


def _remainder(number: Expression, count: int) -> Expression:
    return as_expression(number % count if count > 1 else 0)
